"""Width pruning: drop channels of the feed-forward, and fit the matrix that read them to those left by least squares.

Layers are solved one after the other, each on the outputs of the pruned layers before it, and are written as they are
solved.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from llmcompress.engine.plan.pass_memory import width_memory
from llmcompress.engine.plan.paths import check_room
from llmcompress.engine.plan.run_options import Options
from llmcompress.engine.process.process_memory import return_freed_memory
from llmcompress.engine.run.forward import Forward, Recording, Stream
from llmcompress.engine.run.overflow import refuse_overflow
from llmcompress.engine.source.further_layers import FurtherLayers
from llmcompress.engine.source.header_checks import hidden_width, numbered
from llmcompress.engine.structure.derived_model import DerivedModel, calibration_facts, card
from llmcompress.engine.structure.feed_forward import FeedForward, feed_forward, narrowed_config
from llmcompress.engine.structure.source_model import OpenModel, embedded_windows, open_model
from llmcompress.errors import PlanError
from llmcompress.formats.base import TensorSpec
from llmcompress.model.streamed_model import StreamedModel
from llmcompress.recipe import Calibration
from llmcompress.significant import significant
from llmcompress.solve.narrowing import least_missed, narrowing_loss, refitted, strongest
from llmcompress.stats.gram import Gram
from llmcompress.store.folder import Folder
from llmcompress.store.headers import read_headers
from llmcompress.store.output import OutputDirectory
from llmcompress.store.windows import Windows, write_windows
from llmcompress.workers import Workers

CHANNELS = "channels.npz"
_PERCDAMP = 0.01

Watch = Callable[[int, int], None]


@dataclass(frozen=True)
class WidthRequest:
    """What the user asks for. ffn: channels to keep; or ratio: the share of channels to drop. by: the score.

    multiple_of: a number that divides the new width. repair: whether the reading matrix is fitted to what is left.
    """

    ffn: int | None = None
    ratio: float | None = None
    multiple_of: int = 64
    by: Literal["energy", "cost"] = "energy"
    repair: bool = True

    def width(self, before: int) -> int:
        """How many of `before` channels stay; PlanError if the request cannot be met."""
        if (self.ffn is None) == (self.ratio is None):
            raise PlanError("say how wide the feed-forward shall be", "give either --ffn or --ratio")
        if self.ratio is not None and not 0 < self.ratio < 1:
            raise PlanError(f"--ratio {self.ratio:g} is not a share between 0 and 1", "write for example --ratio 0.25")
        if self.ratio is not None:
            return max(1, round(before * (1 - self.ratio) / self.multiple_of)) * self.multiple_of
        assert self.ffn is not None
        if self.ffn % self.multiple_of:
            nearest = max(1, round(self.ffn / self.multiple_of)) * self.multiple_of
            raise PlanError(
                f"--ffn {self.ffn} is not a multiple of {self.multiple_of}, as kernels want it",
                f"use {nearest}, or another --multiple-of",
            )
        return self.ffn


@dataclass(frozen=True)
class WidthPlan:
    """What a run will do. before, width: channels of every feed-forward, of the source and of the output.

    memory_bytes: an estimate.
    """

    opened: OpenModel
    request: WidthRequest
    layers: tuple[FeedForward, ...]
    width: int
    memory_bytes: int
    derived: DerivedModel = field(repr=False)

    @property
    def before(self) -> int:
        return self.layers[0].width


def plan_width(model: Path, request: WidthRequest, text: Calibration, options: Options | None = None) -> WidthPlan:
    """Check a request from headers. Raises LlmcompressError."""
    opened = open_model(read_headers(model), text, options or Options(), "width")
    anatomy = opened.anatomy
    if (name := FurtherLayers(anatomy).first()) is not None:
        raise PlanError(
            f"{name} is of a layer after the last, which would keep the width that config.json says of all layers",
            "remove these layers, and the number that config.json says of them, first",
        )
    layers = tuple(feed_forward(anatomy, number) for number in range(anatomy.layers))
    before = layers[0].width
    width = request.width(before)
    if not 0 < width < before:
        raise PlanError(f"{width} channels are not fewer than the {before} of the feed-forward", "ask for fewer")
    derived = DerivedModel(narrowed_config(opened.headers.config, before, width), _specs(opened, layers, width))
    tokens = text.samples * text.length * opened.resources.item_bytes
    check_room((opened.out, derived.nbytes), (opened.out.parent, tokens * (4 * hidden_width(opened.headers) + before)))
    memory = partial(width_memory, opened.sizes, inner=before, width=width, inverse=request.by == "cost")
    opened = opened.within_memory(memory)
    return WidthPlan(opened, request, layers, width, memory(opened.resources).peak("host"), derived)


def prune_width(plan: WidthPlan, watch: Watch = lambda done, of: None) -> dict[str, Any]:
    """Choose the channels of every layer, write the model with those alone, and return its report."""
    opened, request = plan.opened, plan.request
    output = OutputDirectory(opened.out, overwrite=opened.options.overwrite)
    with output as out, opened.scratch_folder(out) as (folder, workers):
        tokens = opened.tokens()
        calibration = calibration_facts(tokens)
        work = _Narrowing(plan, watch, workers)
        hashes = plan.derived.write(opened, out, work.tensors(tokens, folder))
        records = {
            "width": {
                "before": plan.before,
                "after": plan.width,
                "by": request.by,
                "repair": request.repair,
                "layers": work.records,
            }
        }
        out.write_arrays(CHANNELS, {str(number): kept.numpy() for number, kept in enumerate(work.kept)})
        report = plan.derived.report(opened, calibration, hashes, records)
        out.write_text("README.md", card(opened, calibration, "width pruning", _figures(plan, work.records)))
        report = out.write_report(report)
        out.commit()
    return report


class _Narrowing:
    """Makes the tensors of a narrower model while text runs through it. kept: channels that stay, of each layer."""

    def __init__(self, plan: WidthPlan, watch: Watch, workers: Workers) -> None:
        self.plan, self.watch, self.workers = plan, watch, workers
        self.checkpoint = plan.opened.checkpoint
        self.kept: list[Tensor] = []
        self.records: list[dict[str, Any]] = []

    def tensors(self, tokens: Tensor, folder: Folder) -> Iterator[tuple[str, Tensor]]:
        """Every tensor in the planned order: first those outside of the layers, then layer by layer."""
        opened, model = self.plan.opened, self.plan.opened.model()
        hidden = embedded_windows(model, tokens, opened.resources.batch, folder / "0.bin")
        pattern, solved = numbered(opened.anatomy.prefix), -1
        weight = torch.empty(0)
        for spec in self.plan.derived.specs:
            found = pattern.match(spec.name)
            if found is None:
                yield spec.name, self.checkpoint.read_finite(spec.name)
                continue
            number = int(found[1])
            if number != solved:
                weight, hidden = self._solve(model, number, hidden, folder)
                solved = number
                self.watch(number + 1, len(self.plan.layers))
            part = self.plan.layers[number]
            if spec.name == part.weight:
                yield spec.name, weight
                continue
            tensor = self.checkpoint.read_finite(spec.name)
            yield spec.name, part.cut(spec.name, tensor, self.kept[number]) if spec.name in part.writers else tensor

    def _solve(self, model: StreamedModel, number: int, hidden: Windows, folder: Folder) -> tuple[Tensor, Windows]:
        """The new reading matrix of a layer as it is stored, and the hidden states that then leave the layer."""
        opened, part = self.plan.opened, self.plan.layers[number]
        batch = opened.resources.batch
        with model.layer(number) as layer:
            stream, spaces = Stream("pruned", layer, hidden), {part.space: part.reader}
            forward = Forward(model, number, stream, batch, self.workers, Recording(folder, spaces))
            gram = Gram(part.width, self.workers, model.device)
            for seen in forward.inputs(spaces):
                gram.update(seen[part.space])
            refuse_overflow(part.weight, [gram], model.dtype)
            if gram.dropped:
                opened.ledger.note("nonfinite_inputs", part.weight, f"{gram.dropped} tokens left out of its statistics")
            return_freed_memory()
            kept, stored = self._choose(number, gram.finish())
            _install(layer.get_submodule(part.reader), part, kept, stored)
            if number + 1 < len(self.plan.layers):
                hidden = write_windows(forward.outputs(), folder / f"{(number + 1) % 2}.bin", model.dtype)
        return_freed_memory()
        return stored, hidden

    def _choose(self, number: int, hessian: Tensor) -> tuple[Tensor, Tensor]:
        """The channels that stay, and the matrix that reads them, as it is stored."""
        part, request = self.plan.layers[number], self.plan.request
        source = self.checkpoint.read_finite(part.weight)
        weight = (source.T if part.conv1d else source).to(hessian.device, torch.float32)
        if request.by == "energy":
            kept = strongest(weight, hessian, self.plan.width)
        else:
            kept = least_missed(weight, hessian, self.plan.width, _PERCDAMP)
        plain = weight[:, kept]
        after = refitted(weight, hessian, kept, _PERCDAMP) if request.repair else plain
        after = after.to(source.dtype)
        record = {
            "layer": number,
            "cut": significant(narrowing_loss(weight, hessian, kept, plain)),
            "loss": significant(narrowing_loss(weight, hessian, kept, after.to(torch.float32))),
        }
        self.records.append(record)
        self.kept.append(kept.cpu())
        return kept, (after.T if part.conv1d else after).contiguous().cpu()


def _install(module: nn.Module, part: FeedForward, kept: Tensor, stored: Tensor) -> None:
    """Put the stored matrix into the layer; dropped channels get zeros, so that recorded inputs still fit."""
    weight: Any = module.weight
    weight.data.zero_()
    weight.data.index_copy_(0 if part.conv1d else 1, kept, stored.to(weight.device, weight.dtype))


def _specs(opened: OpenModel, layers: tuple[FeedForward, ...], width: int) -> list[TensorSpec]:
    """Specs of all tensors, in the order in which the pass makes them: outside of the layers first, then by layer."""
    pattern = numbered(opened.anatomy.prefix)
    placed = []
    for order, stored in enumerate(opened.headers.tensors.values()):
        found = pattern.match(stored.spec.name)
        number = -1 if found is None else int(found[1])
        placed.append((number, order, stored.spec if number < 0 else layers[number].spec(stored.spec, width)))
    return [spec for _, _, spec in sorted(placed, key=lambda item: item[:2])]


def _figures(plan: WidthPlan, records: list[dict[str, Any]]) -> dict[str, str]:
    nbytes = plan.derived.nbytes
    return {
        "channels of the feed-forward": f"{plan.width} of {plan.before}",
        "mean loss of a layer": f"{np.mean([item['loss'] for item in records]):.4f}",
        "the same without repair": f"{np.mean([item['cut'] for item in records]):.4f}",
        "bytes of weights": f"{nbytes:,}",
        "share of the source": f"{nbytes / plan.opened.headers.nbytes:.1%}",
    }
