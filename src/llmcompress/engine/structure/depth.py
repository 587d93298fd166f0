"""Depth pruning: finding the decoder layers that a model can best do without, and writing the model without them.

Codes of a quantised model are decoded, and written in the type that the model has.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from llmcompress.engine.plan.pass_memory import depth_memory
from llmcompress.engine.plan.paths import check_room
from llmcompress.engine.plan.run_options import Options
from llmcompress.engine.source.header_checks import hidden_width
from llmcompress.engine.source.open import round_as_stored
from llmcompress.engine.source.quantised import DecodedHeaders, decoded_headers, in_own_type, note_decoded
from llmcompress.engine.structure.derived_model import DerivedModel, calibration_facts, card
from llmcompress.engine.structure.layer_removal import Removal
from llmcompress.engine.structure.renumber import kept_config, kept_headers
from llmcompress.engine.structure.source_model import OpenModel, embedded_windows, open_model
from llmcompress.errors import PlanError
from llmcompress.formats.base import TensorSpec
from llmcompress.recipe import Calibration
from llmcompress.significant import significant
from llmcompress.store.checkpoint import DTYPES
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
    """What a run will do. layer_passes: how often text runs through one layer, 0 where all that may go goes.

    scratch_bytes: of hidden states. memory_bytes: an estimate.
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
    headers = decoded_headers(read_headers(model))
    return planned_depth(open_model(headers, text, options or Options(), f"depth{request.drop}"), request)


def planned_depth(opened: OpenModel, request: DepthRequest) -> DepthPlan:
    """The same of a model that is open. Raises LlmcompressError."""
    layers, headers = opened.matrices.layers, opened.headers
    free = max(0, layers - request.keep_first - request.keep_last)
    most = min(free, layers - 1)  # a model of no layers is none
    if not 1 <= request.drop <= most:
        raise PlanError(
            f"--drop {request.drop} of {layers} layers, of which the first {request.keep_first} and the last "
            f"{request.keep_last} are kept",
            f"drop {most} at most" if most else "keep fewer",
        )
    rounds = _rounds(request, layers)
    if request.drop == free:
        passed, streams = 0, 0
    elif request.by == "kl":
        passed = sum(count + sum(count - start - request.span for start in request.starts(count)) for count in rounds)
        streams = 4 + len(request.starts(layers))
    else:
        passed, streams = layers, request.span + 2
    scratch = streams * opened.text.samples * opened.text.length * hidden_width(headers) * opened.resources.item_bytes
    written = sum(stored.spec.nbytes for stored in in_own_type(headers).tensors.values())
    check_room((opened.out, written), (opened.out.parent, scratch))
    kept_config(
        opened.anatomy, range(layers - request.drop), opened.options.trust_remote_code
    )  # whether it can be said
    if isinstance(headers, DecodedHeaders):
        opened.ledger.note("requantised", f"{len(headers.packed)} matrices", f"{headers.format.name}, decoded")
        note_decoded(headers, headers.packed, opened.ledger)
    compared = request.by == "kl" if passed else None
    memory = partial(depth_memory, opened.sizes, compared=compared, decoded=isinstance(headers, DecodedHeaders))
    opened = opened.within_memory(memory)
    return DepthPlan(opened, request, layers, passed, scratch, memory(opened.resources).peak("host"))


def prune_depth(plan: DepthPlan, watch: Watch = lambda done, of: None) -> dict[str, Any]:
    """Choose the layers, write the model without them, and return its report."""
    opened, request = plan.opened, plan.request
    with OutputDirectory(opened.out, overwrite=opened.options.overwrite) as out:
        removed, scores, calibration = _choose(plan, out, watch)
        kept = [number for number in range(plan.layers) if number not in removed]
        config = kept_config(opened.anatomy, kept, opened.options.trust_remote_code)
        headers, names = kept_headers(opened.anatomy, kept, config)
        derived = DerivedModel(config, [stored.spec for stored in headers.tensors.values()])
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
        hashes = derived.write(opened, out, _tensors(opened, derived.specs, names))
        report = derived.report(opened, calibration, hashes, records)
        out.write_text("README.md", card(opened, calibration, "depth pruning", _figures(plan, removed, derived)))
        report = out.write_report(report)
        out.commit()
    return report


def _tensors(opened: OpenModel, specs: Sequence[TensorSpec], names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
    """The tensors that stay, in the types of `specs`. names: those that they have in the source."""
    checkpoint = opened.checkpoint
    for spec, name in zip(specs, names, strict=True):
        yield spec.name, checkpoint.read_finite(name).to(DTYPES[spec.dtype])


def _rounds(request: DepthRequest, layers: int) -> list[int]:
    """How many layers the model has each time that scores are measured."""
    return [layers - number for number in range(request.drop)] if request.greedy else [layers]


def _choose(
    plan: DepthPlan, out: OutputDirectory, watch: Watch
) -> tuple[list[int], list[dict[str, Any]], dict[str, Any] | None]:
    """The numbers of the layers to drop; the scores of each round by the first layer that would be dropped; and what a
    report says of the text, None where nothing is left to choose."""
    request, opened = plan.request, plan.opened
    if not plan.layer_passes:
        return _stretch(request.keep_first, request.drop), [], None
    tokens = opened.tokens()
    calibration = calibration_facts(tokens)
    rounds = _rounds(request, plan.layers)
    done = iter(range(1, sum(rounds) + 1))
    with opened.scratch_folder(out) as (folder, workers):
        model = opened.model()
        round_as_stored(model, opened.checkpoint)
        hidden = embedded_windows(model, tokens, opened.resources.batch, folder / "embedded.bin")
        removal = Removal(
            model, hidden, opened.resources.batch, folder, workers, lambda: watch(next(done), sum(rounds))
        )
        if request.by == "kl":
            return *_by_divergence(removal, request, plan.layers), calibration
        found = dict(enumerate(removal.similarities(request.span)))
    starts = sorted(request.starts(plan.layers), key=lambda start: (-found[start], start))
    gone = _stretch(starts[0], request.drop) if request.contiguous else sorted(starts[: request.drop])
    return gone, [{"measure": "cosine", "scores": _named(found), "removed": gone}], calibration


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
    return {str(number): significant(value) for number, value in scores.items()}


def _figures(plan: DepthPlan, removed: Sequence[int], derived: DerivedModel) -> dict[str, str]:
    by = "KL divergence of the logits" if plan.request.by == "kl" else "similarity of input and output"
    return {
        "layers": f"{plan.layers - len(removed)} of {plan.layers}",
        "layers of the original that are gone": ", ".join(map(str, removed)),
        "chosen by": by if plan.layer_passes else "nothing: no others might go",
        "bytes of weights": f"{derived.nbytes:,}",
        "share of the source": f"{derived.nbytes / plan.opened.headers.nbytes:.1%}",
    }
