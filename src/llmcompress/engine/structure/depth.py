"""Depth pruning: finding the decoder layers that a model can best do without, and writing the model without them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from llmcompress.engine.plan.pass_memory import depth_memory
from llmcompress.engine.plan.paths import check_room
from llmcompress.engine.plan.run_options import Options
from llmcompress.engine.source.header_checks import hidden_width
from llmcompress.engine.structure.derived_model import DerivedModel, calibration_facts, card
from llmcompress.engine.structure.layer_removal import Removal
from llmcompress.engine.structure.renumber import kept_config, kept_headers
from llmcompress.engine.structure.source_model import OpenModel, embedded_windows, open_model
from llmcompress.errors import PlanError
from llmcompress.recipe import Calibration
from llmcompress.store.checkpoint import Checkpoint
from llmcompress.store.headers import read_headers
from llmcompress.store.output import OutputDirectory

Watch = Callable[[int, int], None]


@dataclass(frozen=True)
class DepthRequest:
    """drop: how many layers. by: the score. keep_first, keep_last: layers that stay. contiguous: only neighbours go."""

    drop: int
    by: Literal["similarity", "kl"] = "similarity"
    keep_first: int = 2
    keep_last: int = 1
    contiguous: bool = False

    @property
    def greedy(self) -> bool:
        """Whether layers are dropped one by one, and the scores of the others measured anew each time."""
        return self.by == "kl" and not self.contiguous

    @property
    def span(self) -> int:
        """Layers that are judged together."""
        return self.drop if self.contiguous else 1

    def starts(self, layers: int) -> range:
        """The positions among so many layers at which the dropped layers may begin."""
        return range(self.keep_first, layers - self.keep_last - self.span + 1)


@dataclass(frozen=True)
class DepthPlan:
    """What a run will do. layer_passes: how often text runs through one layer. scratch_bytes: of hidden states.

    memory_bytes: an estimate.
    """

    opened: OpenModel
    request: DepthRequest
    layers: int
    layer_passes: int
    scratch_bytes: int
    memory_bytes: int

    @property
    def passes(self) -> float:
        """Passes of the text through the whole model, without those of the head for every model that is compared."""
        return self.layer_passes / self.layers


def plan_depth(model: Path, request: DepthRequest, text: Calibration, options: Options | None = None) -> DepthPlan:
    """Check a request from headers. Raises LlmcompressError."""
    opened = open_model(read_headers(model), text, options or Options(), f"depth{request.drop}")
    layers = opened.matrices.layers
    free = max(0, layers - request.keep_first - request.keep_last)
    if not 1 <= request.drop <= free:
        raise PlanError(
            f"--drop {request.drop} of {layers} layers, of which the first {request.keep_first} and the last "
            f"{request.keep_last} are kept",
            f"drop {free} at most" if free else "keep fewer",
        )
    rounds = _rounds(request, layers)
    if request.by == "kl":
        passed = sum(count + sum(count - start - request.span for start in request.starts(count)) for count in rounds)
        streams = 4 + len(request.starts(layers))
    else:
        passed, streams = layers, request.span + 2
    scratch = streams * text.samples * text.length * hidden_width(opened.headers) * opened.resources.item_bytes
    check_room((opened.out, opened.headers.nbytes), (opened.out.parent, scratch))
    kept_config(
        opened.anatomy, range(layers - request.drop), opened.options.trust_remote_code
    )  # whether it can be said
    memory = partial(depth_memory, opened.sizes, compared=request.by == "kl")
    opened = opened.within_memory(memory)
    return DepthPlan(opened, request, layers, passed, scratch, memory(opened.resources).peak("host"))


def prune_depth(plan: DepthPlan, watch: Watch = lambda done, of: None) -> dict[str, Any]:
    """Choose the layers, write the model without them, and return its report."""
    opened, request = plan.opened, plan.request
    with OutputDirectory(opened.out, overwrite=opened.options.overwrite) as out:
        tokens = opened.tokens()
        removed, scores = _choose(plan, tokens, out, watch)
        kept = [number for number in range(plan.layers) if number not in removed]
        config = kept_config(opened.anatomy, kept, opened.options.trust_remote_code)
        headers = kept_headers(opened.anatomy, kept, config)
        derived = DerivedModel(config, [stored.spec for stored in headers.tensors.values()])
        checkpoint = Checkpoint(headers)
        calibration = calibration_facts(tokens)
        records = {
            "depth": {
                "by": request.by,
                "contiguous": request.contiguous,
                "keep_first": request.keep_first,
                "keep_last": request.keep_last,
                "layers": plan.layers,
                "removed": removed,
                "scores": scores,
            }
        }
        hashes = derived.write(opened, out, ((name, checkpoint.read_finite(name)) for name in checkpoint.names()))
        report = derived.report(opened, calibration, hashes, records)
        out.write_text("README.md", card(opened, calibration, "depth pruning", _figures(plan, removed, derived)))
        report = out.write_report(report)
        out.commit()
    return report


def _rounds(request: DepthRequest, layers: int) -> list[int]:
    """How many layers the model has each time that scores are measured."""
    return [layers - number for number in range(request.drop)] if request.greedy else [layers]


def _choose(
    plan: DepthPlan, tokens: Tensor, out: OutputDirectory, watch: Watch
) -> tuple[list[int], list[dict[str, Any]]]:
    """The numbers of the layers to drop, and the scores of each round by the first layer that would be dropped."""
    request, opened = plan.request, plan.opened
    rounds = _rounds(request, plan.layers)
    done = iter(range(1, sum(rounds) + 1))
    with opened.scratch_folder(out) as (folder, workers):
        model = opened.model()
        hidden = embedded_windows(model, tokens, opened.resources.batch, folder / "embedded.bin")
        removal = Removal(
            model, hidden, opened.resources.batch, folder, workers, lambda: watch(next(done), sum(rounds))
        )
        if request.by == "kl":
            return _by_divergence(removal, request, plan.layers)
        found = dict(enumerate(removal.similarities(request.span)))
    starts = sorted(request.starts(plan.layers), key=lambda start: (-found[start], start))
    gone = _stretch(starts[0], request.drop) if request.contiguous else sorted(starts[: request.drop])
    return gone, [{"measure": "cosine", "scores": _named(found), "removed": gone}]


def _by_divergence(removal: Removal, request: DepthRequest, layers: int) -> tuple[list[int], list[dict[str, Any]]]:
    """Drop layer after layer, each time the one without which the model stays nearest to the original.

    Scores are measured anew each time, since the divergences of two layers do not add up.
    """
    left, gone, records = list(range(layers)), list[int](), []
    reference = None
    while len(gone) < request.drop:
        costs, reference = removal.divergences(left, request.starts(len(left)), request.span, reference)
        best = min(costs, key=lambda place: (costs[place], place))
        lost = left[best : best + request.span]
        named = _named({left[place]: cost for place, cost in costs.items()})
        records.append({"measure": "kl", "scores": named, "removed": lost})
        gone += lost
        left = [number for number in left if number not in lost]
    return sorted(gone), records


def _stretch(start: int, count: int) -> list[int]:
    return list(range(start, start + count))


def _named(scores: Mapping[int, float]) -> dict[str, float]:
    return {str(number): float(f"{value:.6g}") for number, value in scores.items()}


def _figures(plan: DepthPlan, removed: Sequence[int], derived: DerivedModel) -> dict[str, str]:
    return {
        "layers": f"{plan.layers - len(removed)} of {plan.layers}",
        "layers of the original that are gone": ", ".join(map(str, removed)),
        "chosen by": "KL divergence of the logits" if plan.request.by == "kl" else "similarity of input and output",
        "bytes of weights": f"{derived.nbytes:,}",
        "share of the source": f"{derived.nbytes / plan.opened.headers.nbytes:.1%}",
    }
