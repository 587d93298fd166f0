"""GPTQ (Frantar et al., 2022, arXiv:2210.17323): round a column, make up for its error in the columns after it."""

from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, model_validator

from llmcompress.errors import RunError
from llmcompress.methods.base import Method, Shrinkage, Solved, Statistics

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from llmcompress.solve.damping import Factor
    from llmcompress.solve.prune import Pruned
    from llmcompress.solve.row_blocks import RowBlocks
    from llmcompress.solve.sparsegpt import MaskChoice
    from llmcompress.workers import Workers

_ALL = 1_000_000  # windows


class Gptq(Method):
    """Quantise each matrix so that its output on the calibration inputs changes least."""

    name: ClassVar[str] = "gptq"
    summary: ClassVar[str] = (
        "GPTQ: error feedback over the columns, with a clip search and descent on codes and scales."
    )
    undivided: ClassVar[frozenset[str]] = frozenset({"head_bits", "embedding_bits", "qep_samples"})

    percdamp: float = Field(0.01, gt=0, lt=1, description="added to the Hessian's diagonal, as a share of its mean")
    shrinkage: Shrinkage = None
    actorder: Literal["static", "group", "none"] = Field(
        "static",
        description="order of rounding: by input energy with groups as stored; the same with groups in that order "
        "(desc_act, needs g_idx); or as stored",
    )
    block_size: int = Field(128, ge=1, le=1 << 20, description="columns between two updates of the rest; speed only")
    qep_alpha: float = Field(
        0.5,
        ge=0,
        le=1,
        description="share of the error of earlier matrices to make up for (asymmetric calibration); 0: none, faster",
    )
    qep_samples: int = Field(
        16, ge=1, le=_ALL, description="windows of the calibration set on which that error is measured"
    )
    guided: bool = Field(
        False,
        description="go by what errors do to the prediction: tokens of the calibration text count by it (GuidedQuant), "
        "errors at an output are made up for at those after it (YAQA); a pass of gradients comes before the run",
    )
    recover: Literal["none", "block"] = Field(
        "none",
        description="block: once the codes of a layer are chosen, train its scales and the gains of its norms towards "
        "what the original layer gives, on all windows (Block-AP of EfficientQAT)",
    )
    head_bits: Literal[2, 3, 4, 5, 6, 8] | None = Field(
        None,
        description="round the output head too, after all layers, and with it the embedding where both are one; "
        "left out: it stays as it is",
    )
    embedding_bits: Literal[2, 3, 4, 5, 6, 8] | None = Field(
        None, description="round the embedding too, where it is not the head; left out: it stays as it is"
    )
    descent: int = Field(
        1, ge=0, le=1000, description="rounds of descent on codes, then scales, after the sweep; 0: plain GPTQ"
    )

    @model_validator(mode="after")
    def _windows_of_the_original(self) -> "Gptq":
        """ValueError for a number of windows beside layers that are trained on all of them."""
        if self.recovers and self.qep_samples != type(self).model_fields["qep_samples"].default:
            raise ValueError("recover: block runs every window through the original layers too: no qep_samples")
        return self

    @property
    def compensates(self) -> bool:
        return True

    @property
    def permutes_groups(self) -> bool:
        return self.actorder == "group"

    @property
    def original_samples(self) -> int:
        if self.recovers:
            return _ALL
        return self.qep_samples if self.qep_alpha > 0 else 0

    @property
    def recovers(self) -> bool:
        return self.recover == "block"

    @property
    def follows_gradients(self) -> bool:
        return self.guided

    def described(self) -> dict[str, Any]:
        return {
            "damp_percent": self.percdamp,
            "act_order": self.actorder != "none",
            "static_groups": self.actorder == "static",
            "true_sequential": True,
        }

    def factor(self, hessian: "Tensor", tokens: float, workers: "Workers", order: "Tensor") -> "Factor":
        """The factor of a mean Gram matrix [in, in] of so many tokens, whose columns are processed in `order` [in]."""
        from llmcompress.solve.shrinkage import trusted_factor

        return trusted_factor(hessian, self.percdamp, self.shrinkage, tokens, workers, order)

    def solve(
        self,
        weight: "Tensor",
        stats: Statistics,
        scale_dtype: "torch.dtype",
        blocks: "RowBlocks",
        pruned: "Pruned | MaskChoice | None" = None,
    ) -> Solved:
        import torch

        from llmcompress.grids.coded import Coded
        from llmcompress.grids.fitting import fit
        from llmcompress.solve.correct import Corrected, correction
        from llmcompress.solve.damping import damp, is_alone
        from llmcompress.solve.gptq import gptq_codes
        from llmcompress.solve.masked_target import MaskedTarget
        from llmcompress.solve.outliers import remaining, with_outliers
        from llmcompress.solve.output_feedback import solved_with_feedback
        from llmcompress.solve.prepared import Prepared, column_order
        from llmcompress.solve.prune import Pruned
        from llmcompress.solve.sparsegpt import MaskChoice

        gram = stats.gram
        if gram is None:
            raise RunError("gptq needs the statistics of its inputs")
        whole, drift, spec = gram.finish(), stats.drift, self.grid
        outliers, crowded = self.kept_channels(stats)
        rest = None if outliers is None else remaining(outliers, weight.shape[1])
        hessian = whole if rest is None else whole[rest][:, rest]
        if isinstance(pruned, MaskChoice):
            order = pruned.order(hessian.diagonal(), self.actorder != "none")
        else:
            order = column_order(hessian, self.actorder != "none", spec.together)

        def correct() -> torch.Tensor | None:
            if drift is None:
                return None
            return correction(weight, whole if drift.hessian is None else drift.hessian, drift.finish(), blocks.workers)

        def factorise() -> "Factor":
            return self.factor(hessian, gram.trusted, blocks.workers, order)

        moved, factor = blocks.workers.both(correct, factorise, apart=is_alone(hessian))
        loss = damp(gram.lent() if rest is None else hessian, factor.percdamp, factor.shrinkage)
        ready = Prepared(loss, order, factor)
        wanted, sparse = Corrected(weight, moved, self.qep_alpha), pruned
        aim: Corrected | torch.Tensor = wanted
        if rest is not None:
            aim, sparse = wanted[:][:, rest], pruned.columns(rest) if isinstance(pruned, Pruned) else pruned
        held = None
        if sparse is not None:
            aim = aim[:]
            held = MaskedTarget(aim, sparse, factor, order, ready.refiner.hessian, blocks)
        fitted = partial(
            fit,
            spec=spec,
            clip=self.clip,
            search=self.search,
            importance=ready.cost,
            gram=ready.refiner.hessian if self.clip == "output" else None,
            scale_dtype=scale_dtype,
            order=order if self.permutes_groups else None,
        )
        common = fitted((aim if held is None else held.ranged)[:]) if self.joins_rows else None

        def rows(part: slice | torch.Tensor, fed_back: torch.Tensor | None = None) -> Coded:
            goal = swept = ranged = aim[part] if fed_back is None else fed_back
            mask = None
            if held is not None:
                swept, ranged = held.rows(part) if fed_back is None else held.towards(part, fed_back)
                mask = held.mask(part)
            if common is None:
                grid = fitted(ranged)
            else:
                grid = common.rows(part) if fed_back is None else fitted(ranged, beside=common.rows(part))
            coded = gptq_codes(swept, grid, factor, order, self.block_size, mask, blocks.sweeper)
            kept = None if mask is None else mask.keep
            return ready.refiner.refine(goal, coded, scale_dtype, self.descent, kept, blocks.sweeper)

        # weights that go are chosen among all rows of a block, and outliers make up for errors by themselves
        if stats.outputs is None or isinstance(sparse, MaskChoice) or outliers is not None:
            coded = Coded.stacked(blocks.map(rows, aim))
        else:
            coded = solved_with_feedback(stats.outputs, aim, rows, blocks.workers)
        if outliers is not None:
            kept = pruned.keep if isinstance(pruned, Pruned) else None
            coded = with_outliers(coded, wanted[:], outliers, whole, kept)
        return Solved(coded, factor.percdamp, factor.shrinkage, factor.dead, crowded)


METHOD = Gptq
