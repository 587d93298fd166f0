"""Depth pruning: which decoder layers a model can best do without, and the model without them."""

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
from llmcompress.engine.structure.derived_model import Derived, calibration_facts, card
from llmcompress.engine.structure.layer_removal import Removal
from llmcompress.engine.structure.renumber import kept_config, kept_headers
from llmcompress.engine.structure.source_model import Subject, entering, open_subject
from llmcompress.errors import PlanError
from llmcompress.recipe import Calibration
from llmcompress.store.checkpoint import Checkpoint
from llmcompress.store.headers import read_headers
from llmcompress.store.output import OutputDirectory

Watch = Callable[[int, int], None]


@dataclass(frozen=True)
class Asked:
    """drop: how many layers. by: the score. keep_first, keep_last: layers that stay. contiguous: only neighbours go."""

    drop: int
    by: Literal["similarity", "kl"] = "similarity"
    keep_first: int = 2
    keep_last: int = 1
    contiguous: bool = False

    @property
    def greedy(self) -> bool:
        """Whether one layer goes after the other, those left being measured anew each time."""
        return self.by == "kl" and not self.contiguous

    @property
    def span(self) -> int:
        """Layers that are judged together."""
        return self.drop if self.contiguous else 1

    def starts(self, layers: int) -> range:
        """Places among `layers` where what goes may begin."""
        return range(self.keep_first, layers - self.keep_last - self.span + 1)


@dataclass(frozen=True)
class DepthPlan:
    """What a run will do. layer_passes: how often text runs through one layer. scratch_bytes: of hidden states.

    memory_bytes: an estimate.
    """

    subject: Subject
    asked: Asked
    layers: int
    layer_passes: int
    scratch_bytes: int
    memory_bytes: int

    @property
    def passes(self) -> float:
        """In passes through the whole model, beside the head's for every model that is compared."""
        return self.layer_passes / self.layers


def plan_depth(model: Path, asked: Asked, text: Calibration, options: Options | None = None) -> DepthPlan:
    """Check a request from headers. Raises LlmcompressError."""
    subject = open_subject(read_headers(model), text, options or Options(), f"depth{asked.drop}")
    layers = subject.matrices.layers
    free = max(0, layers - asked.keep_first - asked.keep_last)
    if not 1 <= asked.drop <= free:
        raise PlanError(
            f"--drop {asked.drop} of {layers} layers, of which the first {asked.keep_first} and the last "
            f"{asked.keep_last} are kept",
            f"drop {free} at most" if free else "keep fewer",
        )
    rounds = _rounds(asked, layers)
    if asked.by == "kl":
        passed = sum(count + sum(count - start - asked.span for start in asked.starts(count)) for count in rounds)
        streams = 4 + len(asked.starts(layers))
    else:
        passed, streams = layers, asked.span + 2
    scratch = streams * text.samples * text.length * hidden_width(subject.headers) * subject.resources.item_bytes
    check_room((subject.out, subject.headers.nbytes), (subject.out.parent, scratch))
    kept_config(
        subject.anatomy, range(layers - asked.drop), subject.options.trust_remote_code
    )  # whether it can be said
    memory = partial(depth_memory, subject.sizes, compared=asked.by == "kl")
    subject = subject.within(memory)
    return DepthPlan(subject, asked, layers, passed, scratch, memory(subject.resources).peak("host"))


def prune_depth(plan: DepthPlan, watch: Watch = lambda done, of: None) -> dict[str, Any]:
    """Choose the layers, write the model without them, and return its report."""
    subject, asked = plan.subject, plan.asked
    tokens = subject.tokens()
    removed, scores = _choose(plan, tokens, watch)
    kept = [number for number in range(plan.layers) if number not in removed]
    config = kept_config(subject.anatomy, kept, subject.options.trust_remote_code)
    headers = kept_headers(subject.anatomy, kept, config)
    derived = Derived(config, [stored.spec for stored in headers.tensors.values()])
    checkpoint = Checkpoint(headers)
    calibration = calibration_facts(tokens)
    records = {
        "depth": {
            "by": asked.by,
            "contiguous": asked.contiguous,
            "keep_first": asked.keep_first,
            "keep_last": asked.keep_last,
            "layers": plan.layers,
            "removed": removed,
            "scores": scores,
        }
    }
    with OutputDirectory(subject.out, overwrite=subject.options.overwrite) as out:
        hashes = derived.write(subject, out, ((name, checkpoint.read_finite(name)) for name in checkpoint.names()))
        report = derived.report(subject, calibration, hashes, records)
        out.write_json("report.json", report)
        out.write_text("README.md", card(subject, calibration, "depth pruning", _figures(plan, removed, derived)))
        out.commit()
    return report


def _rounds(asked: Asked, layers: int) -> list[int]:
    """How many layers there are each time that scores are measured."""
    return [layers - number for number in range(asked.drop)] if asked.greedy else [layers]


def _choose(plan: DepthPlan, tokens: Tensor, watch: Watch) -> tuple[list[int], list[dict[str, Any]]]:
    """The layers that go, by number, and every score: of each round, by the first layer that would have gone."""
    asked, subject = plan.asked, plan.subject
    rounds = _rounds(asked, plan.layers)
    done = iter(range(1, sum(rounds) + 1))
    with subject.working() as (folder, workers):
        model = subject.model()
        hidden = entering(model, tokens, subject.resources.batch, folder / "embedded.bin")
        removal = Removal(
            model, hidden, subject.resources.batch, folder, workers, lambda: watch(next(done), sum(rounds))
        )
        if asked.by == "kl":
            return _by_divergence(removal, asked, plan.layers)
        found = dict(enumerate(removal.similarities(asked.span)))
    starts = sorted(asked.starts(plan.layers), key=lambda start: (-found[start], start))
    gone = _stretch(starts[0], asked.drop) if asked.contiguous else sorted(starts[: asked.drop])
    return gone, [{"measure": "cosine", "scores": _named(found), "removed": gone}]


def _by_divergence(removal: Removal, asked: Asked, layers: int) -> tuple[list[int], list[dict[str, Any]]]:
    """One by one, each time the layer without which the model is nearest to the original: neighbours are no sum."""
    left, gone, records = list(range(layers)), list[int](), []
    reference = None
    while len(gone) < asked.drop:
        costs, reference = removal.divergences(left, asked.starts(len(left)), asked.span, reference)
        best = min(costs, key=lambda place: (costs[place], place))
        lost = left[best : best + asked.span]
        named = _named({left[place]: cost for place, cost in costs.items()})
        records.append({"measure": "kl", "scores": named, "removed": lost})
        gone += lost
        left = [number for number in left if number not in lost]
    return sorted(gone), records


def _stretch(start: int, count: int) -> list[int]:
    return list(range(start, start + count))


def _named(scores: Mapping[int, float]) -> dict[str, float]:
    return {str(number): float(f"{value:.6g}") for number, value in scores.items()}


def _figures(plan: DepthPlan, removed: Sequence[int], derived: Derived) -> dict[str, str]:
    return {
        "layers": f"{plan.layers - len(removed)} of {plan.layers}",
        "layers of the original that are gone": ", ".join(map(str, removed)),
        "chosen by": "KL divergence of the logits" if plan.asked.by == "kl" else "similarity of input and output",
        "bytes of weights": f"{derived.nbytes:,}",
        "share of the source": f"{derived.nbytes / plan.subject.headers.nbytes:.1%}",
    }
