"""The ledger: every decision that the tool took without being told to, so that nothing happens in silence."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass

KINDS = {
    "group_size": "another group size than the default was chosen",
    "unquantised": "a matrix stays in its source type",
    "damping": "more damping than asked was needed to factorise a Gram matrix",
    "unrepaired": "a matrix that an adapter leaves as it is",
    "untrained": "a matrix or a layer whose scales recovery leaves as they are",
    "dead_inputs": "input channels that were never active during calibration",
    "nonfinite_inputs": "calibration tokens dropped because an activation was not finite",
    "experts_on_demand": "the experts of a layer do not fit into memory together and are read for every product",
    "starved_expert": "an expert saw too few tokens and its Gram matrix was shrunk towards the layer's",
    "guided": "errors of a matrix are not made up for in its later outputs",
    "outliers": "more input channels reach the threshold than keep 16 bits",
    "importance": "the importance of some inputs is not known, or was raised so that no column is left to chance",
    "budget": "types of tensors were chosen by measured loss, to keep within a size",
    "sparsity": "weights that were pruned are not exactly zero in the type they are stored in",
    "statistics": "statistics of another run were gone by, without the errors of this one",
    "rotation": "what a rotation had to make do with, or adds to the file",
    "ternary": "weights of more than three levels are rounded to types of three",
    "requantised": "codes of a quantised source were decoded and rounded anew, or their scales rounded",
    "kv_cache": "scales of cached keys and values in the source were left out",
    "adapter": "an adapter was merged into the weights",
    "multimodal": "of a multimodal model the language model is compressed, and all else copied",
    "text_only": "of a multimodal model the text part alone is written",
    "unscaled": "no place was proven where the inputs of a matrix can be scaled",
    "architecture": "the architecture has no declaration and was observed",
    "engine": "some engine does not load what will be written",
    "output": "the output of a plan exists already",
    "target": "what was changed for the target to load the result, or what its user should know",
}


@dataclass(frozen=True)
class LedgerEntry:
    """One decision. kind: a key of KINDS. subject: what the decision concerns. why: one sentence."""

    kind: str
    subject: str
    why: str


class Ledger:
    """Decisions in the order in which they were taken; the same decision is kept once."""

    def __init__(self, entries: Iterable[LedgerEntry] = ()) -> None:
        self._entries = dict.fromkeys(entries)  # a dict keeps the order

    @property
    def entries(self) -> tuple[LedgerEntry, ...]:
        return tuple(self._entries)

    def note(self, kind: str, subject: str, why: str) -> None:
        if kind not in KINDS:
            raise KeyError(f"ledger kind {kind!r} is not declared")
        self._entries.setdefault(LedgerEntry(kind, subject, why))

    def extend(self, entries: Iterable[LedgerEntry]) -> None:
        for entry in entries:
            self.note(entry.kind, entry.subject, entry.why)

    def as_json(self) -> list[dict[str, str]]:
        return as_json(self._entries)


def as_json(entries: Iterable[LedgerEntry]) -> list[dict[str, str]]:
    """Entries as reports and JSON documents hold them."""
    return [asdict(entry) for entry in entries]
