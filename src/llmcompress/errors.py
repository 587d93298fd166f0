"""Errors a user can cause or meet. Each carries one line saying what is wrong and, where there is one, the way out."""

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_REFUSED = 2
EXIT_GATE = 3
EXIT_STOPPED = 75


_LONGEST = 2000  # characters of a message, which may quote a file


def printable(text: str) -> str:
    """`text` with escape codes and broken characters, which files may hold, spelled out. Line breaks stay."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def one_line(text: str) -> str:
    """`text` as one printable line of bounded length."""
    line = " ".join(text.splitlines())
    if len(line) > _LONGEST:
        line = f"{line[: _LONGEST - 500]} ... {line[-400:]}"
    return printable(line)


class LlmcompressError(Exception):
    """Base of all errors shown to a user as `message` and `hint`, without a traceback.

    message: what is wrong and where, lower case, one sentence. hint: what to do about it.
    """

    exit_code = EXIT_FAILED
    rank: int | None = None  # of the process whose error this is, in a run of several processes

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = one_line(message)
        self.hint = None if hint is None else one_line(hint)

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\n  hint: {self.hint}"


class RecipeError(LlmcompressError):
    """The options or the recipe ask for something that does not exist or does not fit together."""

    exit_code = EXIT_REFUSED


class PlanError(LlmcompressError):
    """The request cannot be carried out on this model; nothing was computed."""

    exit_code = EXIT_REFUSED


class ExistsError(PlanError):
    """What is to be written exists already, and may not be replaced."""


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


class ElsewhereError(LlmcompressError):
    """Another process of the run has reported an error, so that this process ends without a message."""

    def __init__(self, exit_code: int) -> None:
        super().__init__("another process of this run has failed")
        self.exit_code = exit_code
