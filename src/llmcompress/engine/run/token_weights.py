"""How much each calibration token counts where the error of a matrix is judged: by what an error there does to the end.

GuidedQuant (arXiv:2505.07004, section 3): to second order, the divergence that an error in a matrix's output at a token
causes is the error squared, times the squared gradient of the log-likelihood there. Here each token has one weight, a
power of the mean of those squares over the outputs of all matrices that read one input, so that these still share one
Gram matrix.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from llmcompress.engine.plan.plan import Plan
from llmcompress.engine.process.progress import Progress
from llmcompress.engine.run.gradient_pass import RECORDED, FinishedLayers, fisher_information
from llmcompress.engine.run.opened_model import opened_model
from llmcompress.errors import RunError, StoppedError
from llmcompress.stats.fisher import Fisher
from llmcompress.store.checkpoint import Checkpoint
from llmcompress.store.staging import Staging
from llmcompress.workers import Workers

POWER = 0.5
"""Of the mean squares. With 1 a few tokens outweigh all others, and what is fitted to them serves no other text."""


def token_weights(
    plan: Plan,
    checkpoint: Checkpoint,
    tokens: Tensor,
    staged: Staging,
    progress: Progress,
    stop: Callable[[], bool],
    workers: Workers,
) -> Callable[[int], Mapping[str, Tensor]]:
    """By number of a section, the weights [samples * length] of `tokens` [samples, length] for each space, of mean 1.

    Spaces are absent that have no weights: all of a run that asks for none, those of experts, whose tokens come in the
    order in which they are sent there, and those whose matrices do not run once for every token. Rank 0 runs the
    gradients of the source's own predictions back, and keeps what it finds in the work directory. StoppedError when
    `stop` says so between two layers; the next start goes on there.
    """
    if not plan.weighs_tokens:
        return lambda number: {}

    def measure() -> None:
        finished = _FinishedWeights(plan, staged, tokens.shape)
        if not all(map(finished.has, range(len(plan.layers)))):
            model = opened_model(checkpoint, plan.spec, plan.dtype, plan.options, tiled_attention=False)
            steps = 2 * len(plan.layers) + 1

            def watch(done: int) -> None:
                progress.gradients(done, steps)
                if done < steps and stop():
                    raise StoppedError(
                        f"stopped at a safe point, {done} of {steps} steps of the gradients done",
                        f"run the same command again to go on; finished work is in {plan.work}",
                    )

            paths = [list(weighed_paths(plan, number)) for number in range(len(plan.layers))]
            fisher_information(
                model,
                tokens,
                paths,
                plan.recipe.calibration.seed,
                staged.folder,
                workers.without_ranks(),
                watch,
                lambda number, _: finished.gathering(number),
                finished,
                outside=False,
            )
        for name in staged.folder.names():
            if name.startswith(RECORDED):
                (staged.folder / name).unlink()

    workers.broadcast(measure)
    return lambda number: staged.read_weights(number) if number < len(plan.layers) else {}


def weighed_paths(plan: Plan, number: int) -> dict[str, str]:
    """The space of each matrix of a layer, by its path, for matrices by whose gradients tokens are weighed."""
    return {
        matrix.path: matrix.space for matrix in plan.layers[number] if matrix.weighs_tokens and matrix.expert is None
    }


class _FinishedWeights(FinishedLayers):
    """The layers whose weights are in the work directory."""

    def __init__(self, plan: Plan, staged: Staging, shape: Sequence[int]) -> None:
        """shape: of the tokens [samples, length]."""
        self.plan, self.staged, self.shape = plan, staged, shape
        self._gathering: dict[int, SpaceGradients] = {}

    def gathering(self, number: int) -> "SpaceGradients":
        self._gathering[number] = SpaceGradients(weighed_paths(self.plan, number), self.shape)
        return self._gathering[number]

    def seed(self, name: str) -> int:
        return self.staged.seed(name)

    def has(self, layer: int) -> bool:
        return self.staged.has_weights(layer)

    def add(self, layer: int) -> None:
        self.staged.write_weights(layer, self._gathering.pop(layer).weights())


class SpaceGradients:
    """Squared gradients of every token, added up over the outputs of the matrices of a layer that read one space.

    A `FisherSum` of which nothing is left but the weights. spaces: by path of a matrix. shape: of the tokens.
    """

    def __init__(self, spaces: Mapping[str, str], shape: Sequence[int]) -> None:
        self._spaces, self._shape = spaces, tuple(shape)
        self._sums = {space: torch.zeros(self._shape) for space in spaces.values()}

    def part(self, x: Tensor, gradient: Tensor) -> Tensor:
        """Sums of squares [tokens] of a window's gradients [..., out]."""
        return gradient.reshape(-1, gradient.shape[-1]).to(torch.float32).square().sum(dim=-1).cpu()

    def add(self, path: str, part: Tensor, window: int) -> None:
        space = self._spaces[path]
        if part.numel() != self._shape[1]:
            self._sums.pop(space, None)
        elif space in self._sums:
            self._sums[space][window] += part

    def finish(self) -> dict[str, Fisher]:
        return {}

    def weights(self) -> dict[str, Tensor]:
        """The weights [samples * length] of each space, of mean 1. RunError for gradients that are not finite."""
        found = {}
        for space, sums in self._sums.items():
            powers = sums.flatten().to(torch.float64) ** POWER
            mean = float(powers.mean())
            if not torch.isfinite(powers).all():
                raise RunError(f"the gradients of {space} are not finite", "look at its weights, and at config.json")
            if mean > 0:  # else no output of these matrices matters, and all tokens count alike
                found[space] = (powers / mean).to(torch.float32)
        return found
