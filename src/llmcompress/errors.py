"""Errors a user can cause or meet. Each carries one line saying what is wrong and, where there is one, the way out."""

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_REFUSED = 2
EXIT_GATE = 3
EXIT_STOPPED = 75


class LlmcompressError(Exception):
    """Base of all errors shown to a user as `message` and `hint`, without a traceback.

    message: what is wrong and where, lower case, one sentence. hint: what to do about it.
    """

    exit_code = EXIT_FAILED

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\n  hint: {self.hint}"


class RecipeError(LlmcompressError):
    """The options or the recipe ask for something that does not exist or does not fit together."""

    exit_code = EXIT_REFUSED


class PlanError(LlmcompressError):
    """The request cannot be carried out on this model; nothing was computed."""

    exit_code = EXIT_REFUSED


class CheckpointError(LlmcompressError):
    """A model directory is missing something, damaged, or not safe to read."""

    exit_code = EXIT_REFUSED


class CalibrationError(LlmcompressError):
    """The calibration data cannot give what was asked of it."""

    exit_code = EXIT_REFUSED


class RunError(LlmcompressError):
    """A run failed after work had begun; what was finished stays in the work directory."""

    exit_code = EXIT_FAILED


class GateError(LlmcompressError):
    """A quality gate (`--strict`, `--fail-if`, `verify`) was not met."""

    exit_code = EXIT_GATE


class StoppedError(LlmcompressError):
    """The run stopped at a safe point as asked; the same command goes on from there."""

    exit_code = EXIT_STOPPED
