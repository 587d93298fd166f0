"""Statistics of the inputs of a layer's matrices, gathered by running the layer as far as it is needed."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from llmcompress.engine.progress import Progress
from llmcompress.model.build import StreamedModel
from llmcompress.stats.gram import Gram
from llmcompress.store.staging import Hidden

if TYPE_CHECKING:
    from llmcompress.engine.plan import MatrixPlan


class _Enough(Exception):  # noqa: N818 (control flow, not an error)
    """Raised when every wanted input of a batch has been seen; the rest of the layer need not run."""


def collect(
    model: StreamedModel,
    layer: nn.Module,
    number: int,
    hidden: Hidden,
    wanted: "Mapping[str, MatrixPlan]",
    batch: int,
    progress: Progress,
) -> dict[str, Gram]:
    """Gram matrix of each space in `wanted` (space to one matrix that reads it) over all calibration tokens.

    A batch stops right before the last matrix to run, so a stage early in the layer costs a fraction of a forward.
    Experts run in order of their numbers and may be skipped, so nothing stops early among them.
    """
    grams: dict[str, Gram] = {}
    handles = []
    last = None if any(plan.expert is not None for plan in wanted.values()) else list(wanted)[-1]
    for space, plan in wanted.items():
        gram = Gram(plan.entry.in_features, model.device)
        grams[space] = gram

        def see(_: nn.Module, args: tuple[Tensor, ...], gram: Gram = gram, stop: bool = space == last) -> None:
            gram.update(args[0])
            if stop:
                raise _Enough

        handles.append(layer.get_submodule(plan.path).register_forward_pre_hook(see))
    try:
        for states in hidden.batches(batch):
            with suppress(_Enough):
                model.call(number, layer, states.to(model.device))
            progress.tokens(states.shape[0] * states.shape[1])
    finally:
        for handle in handles:
            handle.remove()
    return grams


class ExpertInputs:
    """What enters a block of experts, whatever the routing: the Gram of all tokens, and an even sample of them."""

    def __init__(self, block: nn.Module, width: int, device: torch.device, limit: int = 2048) -> None:
        self.gram = Gram(width, device)
        self._parts: list[Tensor] = []
        self._limit = limit
        self._handle = block.register_forward_pre_hook(self._see)

    def _see(self, _: nn.Module, args: tuple[Tensor, ...]) -> None:
        self.gram.update(args[0])
        rows = args[0].reshape(-1, args[0].shape[-1])
        self._parts.append(rows[:: max(1, rows.shape[0] // 64)].clone())

    def close(self) -> None:
        self._handle.remove()

    def sample(self) -> Tensor:
        """At most `limit` tokens [tokens, hidden], evenly spread."""
        rows = torch.cat(self._parts)
        return rows[:: max(1, -(-rows.shape[0] // self._limit))]


def stages_of(plans: "Sequence[MatrixPlan]") -> "list[list[MatrixPlan]]":
    """Matrices of a layer that are solved on statistics of one pass, in order of execution.

    Those that read one space stand together; all experts' inputs come from one pass, then all their hidden states.
    """
    stages: dict[str, list[MatrixPlan]] = {}
    for plan in plans:
        key = plan.space if plan.expert is None else plan.space.rpartition(".")[0]
        stages.setdefault(key, []).append(plan)
    return list(stages.values())
