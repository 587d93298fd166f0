"""Drafts that are the first layers of a model with its norm and head: cut as `depth` cuts, trained as `recover` trains.

The cut lies in the claimed output until the draft is written, and is made again, to the same bytes, by each start.
"""

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from llmcompress.engine.draft.draft_plan import refuse_text
from llmcompress.engine.plan.paths import check_room
from llmcompress.engine.plan.run_options import Options
from llmcompress.engine.recover.recover_plan import RecoverPlan, RecoverRequest, planned_recovery
from llmcompress.engine.recover.recovery import recover_into
from llmcompress.engine.source.quantised import decoded_headers
from llmcompress.engine.structure.depth import DepthPlan, DepthRequest, planned_depth, prune_depth
from llmcompress.engine.structure.renumber import kept_config, kept_headers
from llmcompress.engine.structure.source_model import OpenModel, open_model
from llmcompress.errors import PlanError
from llmcompress.ledger import Ledger
from llmcompress.recipe import Calibration
from llmcompress.store.headers import read_headers
from llmcompress.store.output import OutputDirectory
from llmcompress.store.weight_files import weights_nbytes

Watch = Callable[[int, int], None]


class PrunedDraftRequest(NamedTuple):
    """What a user asks for. layers: the first ones, which stay. steps: of training.

    written: windows that the model writes itself, beside the calibration text. rate: the highest, None for that of
    `recover`.
    """

    layers: int
    steps: int
    written: int
    rate: float | None = None


@dataclass(frozen=True)
class PrunedDraftPlan:
    """What a run will do. depth: the cut, of the target. recovery: of what the cut will be, towards the target."""

    depth: DepthPlan
    recovery: RecoverPlan

    @property
    def opened(self) -> OpenModel:
        return self.recovery.opened

    @property
    def nbytes(self) -> int:
        """Exact bytes of the weight files and their index."""
        return weights_nbytes([stored.spec for stored in self.opened.headers.tensors.values()])

    @property
    def share(self) -> float:
        """Weights of the draft as a share of the target's."""
        own, whole = (
            sum(prod(stored.spec.shape) for stored in headers.tensors.values())
            for headers in (self.opened.headers, self.recovery.original)
        )
        return own / whole

    @property
    def scratch_bytes(self) -> int:
        """What training keeps, and the cut."""
        return self.recovery.scratch_bytes + self.nbytes

    @property
    def memory_bytes(self) -> int:
        return max(self.depth.memory_bytes, self.recovery.memory_bytes)


def plan_pruned_draft(
    model: Path, request: PrunedDraftRequest, text: Calibration, options: Options | None = None
) -> PrunedDraftPlan:
    """Check from headers that a model can be cut to its first layers and trained. Raises LlmcompressError."""
    refuse_text(model, text, request.written)
    target = open_model(decoded_headers(read_headers(model)), text, options or Options(), "draft")
    layers, kept = target.matrices.layers, range(request.layers)
    if not 1 <= request.layers < layers:
        raise PlanError(
            f"{model} has {layers} layers, and a draft cannot be the first {request.layers} of them",
            f"use --layers {layers - 1} or less" if layers > 1 else "a model of one layer has no draft",
        )
    depth = planned_depth(target, DepthRequest(layers - request.layers, keep_first=request.layers, keep_last=0))
    headers, _ = kept_headers(target.anatomy, kept, kept_config(target.anatomy, kept, target.options.trust_remote_code))
    refs = [ref for ref in target.matrices.refs if ref.layer in kept]
    matrices = replace(target.matrices, refs=refs, layers=request.layers)
    opened = replace(target, headers=headers, matrices=matrices, ledger=Ledger())
    report = {"depth": {"removed": list(range(request.layers, layers))}, "linears": []}  # all that is known before
    asked = RecoverRequest(request.steps, request.rate, written=request.written)
    plan = PrunedDraftPlan(depth, planned_recovery(opened, target.headers, target.matrices, report, asked))
    check_room((opened.out, 2 * plan.nbytes))  # the cut as well
    return plan


def train_pruned_draft(plan: PrunedDraftPlan, watch: Watch = lambda done, of: None) -> dict[str, Any]:
    """Cut the model, train the cut, write it and return its report.

    RunError if the divergence on text held back did not fall: then nothing is written.
    """
    opened, target = plan.opened, plan.depth.opened
    with OutputDirectory(opened.out, overwrite=opened.options.overwrite) as out, closing(out.scratch()) as scratch:
        cut = scratch.path / "cut"
        report = prune_depth(replace(plan.depth, opened=replace(target, out=cut)))
        made = replace(opened, headers=read_headers(cut))
        return recover_into(replace(plan.recovery, opened=made, report=report), out, watch)
