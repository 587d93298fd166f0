"""Choosing the factors by which a layer's channels are scaled, before any of its matrices is rounded."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from llmcompress.arch.scaling_site import Site
from llmcompress.arch.spec import rotated_share
from llmcompress.engine.plan.matrix_plan import MatrixPlan
from llmcompress.engine.plan.plan import Plan
from llmcompress.engine.process.process_memory import return_freed_memory
from llmcompress.engine.process.progress import Progress
from llmcompress.engine.run.block_loss import BlockLoss
from llmcompress.engine.run.collect import by_window
from llmcompress.engine.run.forward import Forward
from llmcompress.engine.run.kv_ranges import largest_magnitudes
from llmcompress.engine.run.overflow import refuse_overflow
from llmcompress.engine.run.starved_experts import STARVED
from llmcompress.engine.source.folding import factors_as_stored, scaling_folds
from llmcompress.errors import RunError
from llmcompress.ledger import Ledger
from llmcompress.model.streamed_model import StreamedModel
from llmcompress.significant import significant
from llmcompress.solve.smooth_attention import Rotary, smoothing
from llmcompress.stats.inputs import Inputs, InputStatistics
from llmcompress.stats.panels import complete
from llmcompress.store.folds import FoldedCheckpoint
from llmcompress.transforms.base import Reader, Scalable, Scaling, Transform
from llmcompress.transforms.smoothattention import SmoothAttention
from llmcompress.workers import Workers


@dataclass(frozen=True)
class SiteFactors:
    """Factors of a layer's sites, in order: by number and space; with their records and notes for the report."""

    factors: dict[str, Tensor] = field(default_factory=dict)
    records: list[dict[str, Any]] = field(default_factory=list)
    ledger: Ledger = field(default_factory=Ledger)


class Scaler:
    """Runs the windows through a layer once, asks every scaling step for its factors, and folds them."""

    def __init__(
        self, plan: Plan, checkpoint: FoldedCheckpoint, model: StreamedModel, progress: Progress, workers: Workers
    ) -> None:
        self.plan, self.checkpoint, self.model, self.progress = plan, checkpoint, model, progress
        self.workers = workers
        self.steps = [step for step in plan.recipe.transforms if isinstance(step, Scaling | SmoothAttention)]

    def layer(self, number: int, layer: nn.Module, forward: Forward) -> SiteFactors:
        """Choose the factors, fold them into the checkpoint, and load the changed tensors into `layer`."""
        sites = [
            site
            for site in self.plan.anatomy.sites(number)
            if any(isinstance(step, Scaling) and step.wants(site.norm) for step in self.steps)
        ]
        known = self._inputs(sites, layer, forward) if sites else {}
        return_freed_memory()  # what the windows took, before matrices are tried
        found = SiteFactors()
        matrices = {matrix.path: matrix for matrix in self.plan.layers[number]}
        for step in self.steps:
            if isinstance(step, SmoothAttention):
                self._smooth(number, step, forward, found)
                self.model.refill(number, layer)
                continue
            blocks = None
            if step.measures_blocks:
                blocks = BlockLoss(self.model, number, forward.stream, sites, self.workers)
            for site in sites:
                if step.wants(site.norm) and site.space in known:
                    self._scale(number, site, step, known, matrices, blocks, found)
                    return_freed_memory()
            self.model.refill(number, layer)
        for site in sites:
            if site.space not in known:
                name = self.plan.anatomy.tensor(number, site.writer.path) or site.writer.path
                found.ledger.note("starved_expert", name, "left unscaled: too few tokens came to it")
        return found

    def _scale(
        self,
        number: int,
        site: Site,
        step: Scaling,
        known: dict[str, Inputs],
        matrices: dict[str, MatrixPlan],
        blocks: BlockLoss | None,
        found: SiteFactors,
    ) -> None:
        index = None if site.spread is None else torch.from_numpy(site.spread).to(known[site.space].mean.device)
        readers = {part.path: self._reader(number, part.path, matrices) for part in site.readers}
        measured = None if blocks is None or not site.norm else partial(blocks, site, readers)
        view = Scalable(
            known[site.space],
            tuple(readers.values()),
            site.channels,
            compensated=self.plan.recipe.method is not None and self.plan.recipe.method.compensates,
            spread=index,
            measured=measured,
        )
        chosen = self.workers.all_gather(step.factors(view, self.workers).cpu())[0]  # other ranks might choose others
        factors = factors_as_stored(self.plan.anatomy, number, site, chosen, self.checkpoint)
        seen = view.spread_out(factors.to(known[site.space].mean))
        known[site.space] = known[site.space].divided(seen)
        self._fold(number, site, step, factors, found)

    def _smooth(self, number: int, step: SmoothAttention, forward: Forward, found: SiteFactors) -> None:
        """Scale keys down and queries up, by how large the keys of the layer are now."""
        site = self.plan.anatomy.scores(number)
        seen = forward.key_value_range_now()
        peaks = seen.key
        if site is None or peaks is None:
            raise RunError(f"layer {number} keeps no keys", "leave smoothattention out")
        largest_magnitudes(seen, number)  # refuses what is not finite
        scores, config = self.plan.spec.scores, self.plan.headers.config
        rotary: Rotary = "half" if scores is not None and scores.rotary else "none"
        rotated = int(peaks.shape[1] * rotated_share(config))
        factors = smoothing(
            peaks.cpu(), rotary, rotated=rotated, alpha=step.alpha, shared=site.channels == peaks.shape[1]
        )
        real = factors_as_stored(self.plan.anatomy, number, site, factors.reshape(-1)[: site.channels], self.checkpoint)
        self._fold(number, site, step, real, found)

    def _fold(self, number: int, site: Site, step: Transform, factors: Tensor, found: SiteFactors) -> None:
        self.checkpoint.fold(scaling_folds(self.plan.anatomy, number, site.parts, factors))
        found.factors[f"{len(found.factors):03d}/{site.space}"] = factors
        found.records.append(
            {
                "layer": number,
                "space": site.space,
                "transform": step.name,
                "smallest": significant(factors.min().item(), 4),
                "largest": significant(factors.max().item(), 4),
            }
        )

    def _reader(self, number: int, path: str, matrices: dict[str, MatrixPlan]) -> Reader:
        name = self.plan.anatomy.tensor(number, path)
        assert name is not None  # a site has no readers that are not there
        weight = self.checkpoint.read_finite(name).to(self.model.device, torch.float32)
        weight = weight.T.contiguous() if self.plan.anatomy.transposed(path) else weight
        return Reader(weight, matrices[path].entry.grid if path in matrices else None)

    def _inputs(self, sites: list[Site], layer: nn.Module, forward: Forward) -> dict[str, Inputs]:
        """Statistics of the input of every site, by space; experts that too few tokens came to are absent."""
        tokens = self.plan.recipe.calibration.samples * self.plan.recipe.calibration.length
        sums = {
            site.space: InputStatistics(
                site.width, tokens, self.workers, self.model.device, part=self.workers.part(turn)
            )
            for turn, site in enumerate(sites)
        }
        paths = {site.space: _probe(site, layer) for site in sites}
        routed = {site.space for site in sites if site.space.rpartition(".")[2].isdigit()}
        for seen, _ in forward.summaries_and_outputs(paths, Tensor.clone):
            for space, statistics in sums.items():
                if space in seen:
                    statistics.update(seen[space] if space in routed else by_window(seen[space], forward.length))
            self.progress.tokens(max((x.numel() // x.shape[-1] for x in seen.values()), default=0))
        complete([statistics.gram for statistics in sums.values()], self.workers)
        found = {}
        for space, statistics in sums.items():
            refuse_overflow(
                f"{paths[space]} of layer {forward.number}", [statistics.gram], self.model.dtype, space in routed
            )
            if space not in routed or statistics.gram.tokens >= STARVED * statistics.gram.size:
                found[space] = statistics.finish()
        return found


def _probe(site: Site, layer: nn.Module) -> str:
    """Path of a module that every token of the site's space enters."""
    modules = dict(layer.named_modules())
    return next(part.path for part in site.readers if part.path in modules)
