"""Whether weights that a GGUF file stores in three levels have no more than three levels."""

from llmcompress.engine.plan.gguf_plan import TensorTypes
from llmcompress.engine.source.open import open_checkpoint
from llmcompress.formats.gguf.tensors import pieces
from llmcompress.grids.ternary import SPECS, fitted
from llmcompress.ledger import Ledger
from llmcompress.store.headers import ModelHeaders
from llmcompress.workers import SERIAL

_ROWS = 64  # of a tensor that are looked at
_ALLOWED = 0.05  # relative error; weights of a bell curve have 0.43


def note_not_ternary(headers: ModelHeaders, types: TensorTypes, ledger: Ledger) -> None:
    """Note what rounding to three levels loses, by rows of the first, the middle and the last tensor that gets them."""
    found = [
        placed.tensor
        for placed in types.tensors
        if placed.type.name in SPECS and types.copied.isdisjoint(placed.tensor.sources)
    ]
    if not found:
        return
    read, lost = open_checkpoint(headers).read, {}
    for tensor in (found[0], found[len(found) // 2], found[-1]):
        values = next(iter(pieces(tensor, read))).rows(0, _ROWS)
        rounded = fitted(values, SPECS["TQ2_0"], SERIAL).decode()
        lost[tensor.name] = float((rounded - values).norm() / values.norm().clamp_min(1e-30))
    name = max(lost, key=lambda name: lost[name])
    if lost[name] > _ALLOWED:
        ledger.note(
            "ternary",
            f"{len(found)} tensors",
            f"types of three levels are for weights that are ternary: {name} is off by {lost[name]:.0%} when it is "
            "rounded, take IQ1_M or IQ2_XXS",
        )
