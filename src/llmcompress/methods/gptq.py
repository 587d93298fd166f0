"""GPTQ (Frantar et al., 2022, arXiv:2210.17323): round a column, make up for its error in the columns after it."""

from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from llmcompress.errors import RunError
from llmcompress.grids.base import BlockSpec
from llmcompress.methods.base import SOLVED_ROWS, Method, Solved, Statistics

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Gptq(Method):
    """Quantise each matrix so that its output on the calibration inputs changes least."""

    name: ClassVar[str] = "gptq"
    summary: ClassVar[str] = (
        "GPTQ: error feedback over the columns, with a clip search and descent on codes and scales."
    )

    percdamp: float = Field(0.01, gt=0, lt=1, description="added to the Hessian's diagonal, as a share of its mean")
    actorder: Literal["static", "group", "none"] = Field(
        "static",
        description="order of rounding: by input energy with groups as stored; the same with groups in that order "
        "(desc_act, needs g_idx); or as stored",
    )
    block_size: int = Field(128, ge=1, description="columns between two updates of the rest; speed only")
    qep_alpha: float = Field(
        0.5,
        ge=0,
        le=1,
        description="share of the error of earlier matrices to make up for (asymmetric calibration); 0: none, faster",
    )
    qep_samples: int = Field(16, ge=1, description="windows of the calibration set on which that error is measured")
    descent: int = Field(1, ge=0, description="rounds of re-fitting scales and codes after the sweep; 0: plain GPTQ")

    @property
    def permutes_groups(self) -> bool:
        return self.actorder == "group"

    @property
    def original_samples(self) -> int:
        return self.qep_samples if self.qep_alpha > 0 else 0

    def described(self) -> dict[str, Any]:
        return {
            "damp_percent": self.percdamp,
            "act_order": self.actorder != "none",
            "static_groups": self.actorder == "static",
            "true_sequential": True,
        }

    def solve(self, weight: "Tensor", stats: Statistics, scale_dtype: "torch.dtype") -> Solved:
        import torch

        from llmcompress.grids.coded import Coded, Grid
        from llmcompress.grids.encoders import encode
        from llmcompress.grids.fitting import fit
        from llmcompress.parallel import both, together
        from llmcompress.solve.correct import corrected
        from llmcompress.solve.damping import damped, inverse_factor
        from llmcompress.solve.gptq import gptq_codes
        from llmcompress.solve.refine import Refiner

        if stats.gram is None:
            raise RunError("gptq needs the statistics of its inputs")
        hessian, drift = stats.gram.finish(), stats.drift
        energy = hessian.diagonal()
        order = torch.arange(weight.shape[1], device=weight.device)
        if self.actorder != "none":
            order = torch.argsort(energy, descending=True, stable=True)  # stable: ties must not depend on the machine

        def target() -> torch.Tensor:
            if drift is None:
                return weight
            seen = hessian if drift.hessian is None else drift.hessian
            return corrected(weight, seen, drift.finish(), self.qep_alpha)

        aim, factor = both(target, partial(inverse_factor, hessian[order][:, order], self.percdamp))
        # what a rounding error in a column costs once the columns after it have made up for it: the loss is the sum of
        # the squared residuals times this, so it is what a scale should be fitted by
        cost = torch.empty_like(energy)
        cost[order] = factor.pivots**-2
        refiner = Refiner(damped(hessian, factor.percdamp), order)

        def fitted(part: torch.Tensor) -> Grid:
            spec = self.grid
            if isinstance(spec, BlockSpec):
                return encode(part, spec, self.search, cost).grid
            groups = order if self.permutes_groups else None
            gram = refiner.hessian if self.clip == "output" else None
            return fit(part, spec, clip=self.clip, importance=cost, gram=gram, scale_dtype=scale_dtype, order=groups)

        def rows(part: torch.Tensor) -> Coded:
            coded = gptq_codes(part, fitted(part), factor, order, self.block_size)
            return refiner.refine(part, coded, scale_dtype, self.descent)

        parts = together(partial(rows, part) for part in torch.split(aim, SOLVED_ROWS))
        return Solved(Coded.stacked(parts), factor.percdamp, factor.dead)


METHOD = Gptq
