"""What a run has written, as a value."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

from llmcompress.errors import GateError, RecipeError
from llmcompress.ledger import KINDS, LedgerEntry
from llmcompress.registry import suggest


@dataclass(frozen=True)
class Result:
    """What a run has written.

    output: the directory, or the GGUF file (the first one of several). report: the content of its report.json. seconds:
    the time that the run took. peak_memory_bytes: the most memory that this process has held at once so far.
    """

    output: Path
    report: Mapping[str, Any] = field(repr=False)
    seconds: float
    peak_memory_bytes: int

    @property
    def nbytes(self) -> int:
        """Bytes of all weight files."""
        return int(self.report["output_bytes"])

    @property
    def bits_per_weight(self) -> float | None:
        """Stored bits for each weight of all tensors; None of models that lost parts and of adapters."""
        bits = self.report.get("bits_per_weight")
        return None if bits is None else float(bits)

    @property
    def bits_per_quantised_weight(self) -> float | None:
        """Stored bits for each quantised weight, scales included; None where the run quantised nothing."""
        bits = self.report.get("bits_per_quantised_weight")
        return None if bits is None else float(bits)

    @property
    def ledger(self) -> tuple[LedgerEntry, ...]:
        """Every decision that the run took without being told to."""
        return tuple(LedgerEntry(**entry) for entry in self.report["ledger"])

    def as_data(self) -> dict[str, Any]:
        """The report with output, time and memory, as `--json` prints it."""
        spent = {"seconds": self.seconds, "peak_memory_bytes": self.peak_memory_bytes}
        return {**self.report, "output": str(self.output), **spent}

    def fail_if_noted(self, *kinds: str) -> None:
        """GateError if the ledger has entries of one of these kinds; "any" stands for all. As `--strict` does.

        RecipeError for a kind that there is not.

            >>> result.fail_if_noted("unquantised", "damping")
        """
        refuse_unknown_kinds(kinds)
        for kind in kinds:
            broken = noted(self.ledger, kind)
            if broken:
                raise noted_error(broken, f"the output was written to {self.output}; see its report.json")


def noted(entries: Iterable[LedgerEntry], kind: str) -> list[LedgerEntry]:
    """The entries of a kind, or all of them for "any"."""
    return [entry for entry in entries if kind in ("any", entry.kind)]


def refuse_unknown_kinds(kinds: tuple[str, ...] | list[str]) -> None:
    """RecipeError for a kind that the ledger does not know."""
    for kind in kinds:
        if kind not in (*KINDS, "any"):
            raise RecipeError(f"--strict {kind!r} is not a kind of ledger entry", suggest(kind, [*KINDS, "any"]))


def noted_error(broken: list[LedgerEntry], hint: str) -> GateError:
    """The error for entries that a gate does not allow."""
    first = broken[0]
    message = f"{len(broken)} ledger entries, first {first.kind}: {first.subject}: {first.why}"
    return GateError(f"--strict: {message}", hint)


def timed(output: Path, work: Callable[[], Mapping[str, Any]]) -> Result:
    """The result of work that returns the report of `output`."""
    from llmcompress.engine.process.process_memory import peak_memory

    begun = perf_counter()
    report = work()
    return Result(output, report, round(perf_counter() - begun, 2), peak_memory())
