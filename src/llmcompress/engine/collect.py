"""Statistics of the inputs of a layer's matrices, gathered by running the layer as far as it is needed."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import repeat
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from llmcompress.engine.progress import Progress
from llmcompress.methods.base import Statistics
from llmcompress.model.build import StreamedModel
from llmcompress.stats.drift import Drift
from llmcompress.stats.gram import Gram
from llmcompress.store.staging import Hidden

if TYPE_CHECKING:
    from llmcompress.engine.plan import MatrixPlan


class _Enough(Exception):  # noqa: N818 (control flow, not an error)
    """Raised when every wanted input of a batch has been seen; the rest of the layer need not run."""


@dataclass(frozen=True)
class Stream:
    """A layer, and the hidden states that enter it: in the model as compressed so far, or as it was."""

    layer: nn.Module
    hidden: Hidden


def collect(
    model: StreamedModel,
    number: int,
    compressed: Stream,
    original: Stream | None,
    wanted: "Mapping[str, MatrixPlan]",
    batch: int,
    progress: Progress,
) -> dict[str, Statistics]:
    """Statistics of each space in `wanted` (space to one matrix that reads it) over all calibration tokens.

    A batch stops right before the last matrix to run, so a stage early in the layer costs a fraction of a forward.
    Experts run in order of their numbers and may be skipped, so nothing stops early among them; nor do they have a
    drift, since the two models may send a token to different experts.
    """
    routed = any(plan.expert is not None for plan in wanted.values())
    paired = None if routed else original
    grams = {space: Gram(plan.entry.in_features, model.device) for space, plan in wanted.items()}
    drifts = {space: Drift(gram.size, model.device) for space, gram in grams.items()} if paired is not None else {}
    seen: dict[str, Tensor] = {}
    with ExitStack() as stack:
        if paired is not None:
            _watch(stack, paired.layer, wanted, seen.__setitem__, stop=True)

        def take(space: str, x: Tensor) -> None:
            grams[space].update(x)
            if space in drifts:
                drifts[space].update(seen.pop(space), x)

        _watch(stack, compressed.layer, wanted, take, stop=not routed)
        others = paired.hidden.batches(batch) if paired is not None else repeat(None)
        for states, before in zip(compressed.hidden.batches(batch), others, strict=False):
            if paired is not None and before is not None:
                with suppress(_Enough):
                    model.call(number, paired.layer, before.to(model.device))
            with suppress(_Enough):
                model.call(number, compressed.layer, states.to(model.device))
            progress.tokens(states.shape[0] * states.shape[1])
    return {space: Statistics(gram, drifts.get(space)) for space, gram in grams.items()}


def _watch(
    stack: ExitStack,
    layer: nn.Module,
    wanted: "Mapping[str, MatrixPlan]",
    take: Callable[[str, Tensor], None],
    stop: bool,
) -> None:
    """Hand each wanted input to `take`; with `stop`, end the forward at the last of them."""
    last = list(wanted)[-1]
    for space, plan in wanted.items():

        def see(_: nn.Module, args: tuple[Tensor, ...], space: str = space) -> None:
            take(space, args[0])
            if stop and space == last:
                raise _Enough

        stack.callback(layer.get_submodule(plan.path).register_forward_pre_hook(see).remove)


class ExpertInputs:
    """What enters a block of experts, whatever the routing: the Gram of all tokens, and an even sample of them."""

    def __init__(self, block: nn.Module, device: torch.device, limit: int = 2048) -> None:
        first: Any = next(iter(block.children()))
        self.gram = Gram(first.gate_proj.in_features, device)
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
