"""The transforms of a recipe, folded into the checkpoint that the run reads."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from llmcompress.engine.source.folding import rotation_folds, scaling_folds
from llmcompress.engine.source.open import open_checkpoint
from llmcompress.engine.train.places import norm_offsets
from llmcompress.store.checkpoint import Checkpoint
from llmcompress.store.folds import FoldedCheckpoint, Scaled
from llmcompress.store.staging import Staging
from llmcompress.transforms.rotate import Rotate

if TYPE_CHECKING:
    from llmcompress.engine.plan.plan import Plan


def open_transformed(plan: "Plan") -> Checkpoint:
    """The checkpoint that the run reads: the source with those transforms folded in that need no calibration."""
    base = open_checkpoint(plan.headers)
    if not plan.recipe.transforms and not plan.recovers:
        return base
    anatomy = plan.anatomy
    head, embedding = anatomy.outer(anatomy.spec.head), anatomy.outer(anatomy.spec.embed)
    shared = head is not None and embedding is not None and plan.headers.tensors[head].end == 0
    exact = frozenset(matrix.entry.source.name for matrix in plan.matrices)
    checkpoint = FoldedCheckpoint(base, exact, {str(head): str(embedding)} if shared else {})
    for step in plan.recipe.transforms:
        if isinstance(step, Rotate):
            checkpoint.fold(rotation_folds(anatomy, step, checkpoint))
    return checkpoint


def fold_section(plan: "Plan", checkpoint: Checkpoint, number: int, staged: Staging) -> None:
    """Fold into the checkpoint what a finished section has for its layer: factors of sites, then those of gains."""
    if isinstance(checkpoint, FoldedCheckpoint) and number < len(plan.layers):
        sites = {site.space: site for site in (*plan.anatomy.sites(number), plan.anatomy.scores(number)) if site}
        for key, factors in sorted(staged.read_factors(number).items()):  # each rounds anew, as in the run
            checkpoint.fold(scaling_folds(plan.anatomy, number, sites[key.partition("/")[2]].parts, factors))
        fold_gains(plan, checkpoint, number, staged.read_gains(number))


def fold_gains(plan: "Plan", checkpoint: FoldedCheckpoint, layer: int, gains: Mapping[str, Tensor]) -> None:
    """Fold factors of gains into the norms of a layer. gains: by on-disk name of the weight, [channels]."""
    offsets = {plan.anatomy.tensor(layer, path): offset for path, offset in norm_offsets(plan.spec).items()}
    checkpoint.fold({name: [Scaled(factor, offset=offsets.get(name, 0.0))] for name, factor in gains.items()})
