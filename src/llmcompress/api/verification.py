"""Proof that an output is what it claims to be: what `verify` does."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llmcompress.errors import GateError, PlanError

if TYPE_CHECKING:
    from llmcompress.validate.findings import Check


@dataclass(frozen=True)
class VerificationResult:
    """The checks of an output, in the order in which they were made."""

    output: Path
    checks: tuple[Check, ...]

    @property
    def failed(self) -> list[Check]:
        """The checks that failed, but for warnings."""
        return [check for check in self.checks if not check.ok and not check.warning]

    @property
    def ok(self) -> bool:
        """Whether no check failed."""
        return not self.failed

    def fail_if_damaged(self) -> None:
        """GateError that names the first check that failed, if one did.

        >>> llmcompress.verify("model-w4").fail_if_damaged()
        """
        for check in self.failed:
            raise GateError(f"{self.output}: {check.name}: {check.detail}")


def verify(
    output: str | Path, source: str | Path | None = None, adapter: str | Path | None = None
) -> VerificationResult:
    """Read a directory or GGUF file again, with a reader that shares no code with the writer, and check it.

    It is to be complete, finite, on its grids and true to its report; and near to its `source`, if that is given, into
    which `adapter` was merged.
    Damage raises nothing: it is a check that failed. PlanError for what is not there, and an adapter without a source.

        >>> verification = llmcompress.verify("model-w4", source="model")
        >>> verification.ok, len(verification.checks)
        (True, 11)
    """
    from llmcompress.validate.gguf_file import gguf_in
    from llmcompress.validate.gguf_verify import verify_gguf
    from llmcompress.validate.verify import verify as verify_directory

    place, original = Path(output), None if source is None else Path(source)
    merged = None if adapter is None else Path(adapter)
    if merged is not None and original is None:
        raise PlanError("an adapter is merged into the source, and none is given", "give --source, or no --adapter")
    for given in (place, original, merged):
        if given is not None and not given.exists():
            raise PlanError(f"{given} does not exist")
    file = gguf_in(place)
    checks = verify_directory(place, original, merged) if file is None else verify_gguf(file, original, merged)
    return VerificationResult(place, tuple(checks))
