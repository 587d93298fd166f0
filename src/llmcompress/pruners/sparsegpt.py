"""SparseGPT (Frantar and Alistarh, 2023, arXiv:2301.00774): drop a weight, make up for it in the columns after it."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field, model_validator

from llmcompress.errors import RunError
from llmcompress.methods.base import Shrinkage, Statistics
from llmcompress.pruners.base import Pruner

if TYPE_CHECKING:
    from torch import Tensor

    from llmcompress.solve.damping import Factor
    from llmcompress.solve.prune import Pruned
    from llmcompress.solve.sparsegpt import MaskChoice
    from llmcompress.workers import Workers


class SparseGpt(Pruner):
    """Choose weights whose loss can best be made up for by those that stay, and move these accordingly."""

    name: ClassVar[str] = "sparsegpt"
    summary: ClassVar[str] = "SparseGPT: drop weights and make up for them in those that are kept; as costly as GPTQ."
    undivided: ClassVar[frozenset[str]] = Pruner.undivided | {"qep_samples"}

    refit: int = Field(
        10, ge=0, le=1000, description="steps of conjugate gradients that refine the kept weights; 0: plain SparseGPT"
    )
    block_size: int = Field(
        128,
        ge=16,
        le=1 << 20,
        multiple_of=16,
        description="columns of which a share goes, chosen when all columns before them are decided",
    )
    joint: bool = Field(
        False, description="choose while weights are rounded, in the sweep of the step gptq that comes after"
    )
    shrinkage: Shrinkage = None
    qep_alpha: float = Field(
        0.5, ge=0, le=1, description="share of the error of earlier matrices to make up for; 0: none, faster"
    )
    qep_samples: int = Field(
        16, ge=1, le=1_000_000, description="windows of the calibration set on which that error is measured"
    )

    @model_validator(mode="after")
    def _as_the_step_that_rounds(self) -> "SparseGpt":
        """ValueError for options of what is left to another step."""
        others = self.changed("refit", "percdamp", "shrinkage", "qep_alpha", "qep_samples") if self.joint else []
        if others:
            raise ValueError(
                f"with joint the step that rounds makes up for what goes, by its own options: no {others[0]}"
            )
        return self

    @property
    def choice(self) -> "MaskChoice":
        """The choice of masks, as options of the solver."""
        from llmcompress.solve.sparsegpt import MaskChoice

        return MaskChoice(self.share, self.runs, self.block_size)

    @property
    def within(self) -> "MaskChoice | None":
        return self.choice if self.joint else None

    @property
    def needs_gram(self) -> bool:
        return True

    @property
    def inverts(self) -> bool:
        return True

    @property
    def original_samples(self) -> int:
        return self.qep_samples if self.qep_alpha > 0 and not self.joint else 0

    def prune(self, weights: "Sequence[Tensor]", stats: Statistics, workers: "Workers") -> "list[Pruned]":
        import torch

        from llmcompress.solve.correct import corrected
        from llmcompress.solve.damping import damped, is_alone
        from llmcompress.solve.masked import refitted
        from llmcompress.solve.prune import Pruned
        from llmcompress.solve.row_blocks import SOLVED_ROWS
        from llmcompress.solve.shrinkage import trusted_factor
        from llmcompress.solve.sparsegpt import sparse_weights

        if stats.gram is None:
            raise RunError(f"{self.name} needs the statistics of its inputs")
        hessian, drift, choice = stats.gram.finish(), stats.drift, self.choice
        order = choice.order(hessian.diagonal())
        tokens, weight = stats.gram.trusted, torch.cat(list(weights))

        def aim() -> "Tensor":
            if drift is None:
                return weight
            seen = hessian if drift.hessian is None else drift.hessian
            return corrected(weight, seen, drift.finish(), self.qep_alpha, workers)

        def factorise() -> "Factor":
            return trusted_factor(hessian, self.percdamp, self.shrinkage, tokens, workers, order)

        whole, factor = workers.both(aim, factorise, apart=is_alone(hessian))
        loss = damped(hessian, factor.percdamp, factor.shrinkage)

        def rows(wanted: "Tensor") -> "Tensor":
            found = sparse_weights(wanted, factor, order, choice.mask(factor.pivots, len(wanted)))
            return refitted(found, wanted, found != 0, loss, self.refit) if self.refit else found

        wanted = torch.split(whole, [len(weight) for weight in weights])
        pieces = [part for weight in wanted for part in torch.split(weight, SOLVED_ROWS)]
        done = iter(workers.distribute(partial(rows, piece) for piece in pieces))
        found = [torch.cat([next(done) for _ in torch.split(weight, SOLVED_ROWS)]) for weight in wanted]
        return [Pruned(weight, weight != 0, factor.percdamp) for weight in found]


PRUNER = SparseGpt
