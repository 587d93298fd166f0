"""`depth` and `width`: models that lose layers, or channels of their feed-forward, and stay plain models."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from llmcompress.api.settings import FEW_WINDOWS, depth_text, text_of
from llmcompress.api.structure import NOTHING_KEPT, restructured
from llmcompress.cli import console, watching
from llmcompress.cli import options as flags
from llmcompress.cli.log import log
from llmcompress.cli.stopping import Stop
from llmcompress.recipe import Calibration

if TYPE_CHECKING:
    from llmcompress.engine.structure.source_model import OpenModel

Drop = Annotated[int, typer.Option("--drop", min=1, max=1_000_000, help="Layers to drop.", show_default=False)]
By = Annotated[
    Literal["similarity", "kl"],
    typer.Option(
        "--by",
        help="similarity: those that change their input least, in one pass (ShortGPT). kl: one by one, the layer "
        "without which the logits move least; costs about half as many passes as there are layers for each layer "
        "dropped.",
    ),
]
KeepFirst = Annotated[int, typer.Option("--keep-first", min=0, max=1_000_000, help="First layers that always stay.")]
KeepLast = Annotated[int, typer.Option("--keep-last", min=0, max=1_000_000, help="Last layers that always stay.")]
Contiguous = Annotated[bool, typer.Option("--contiguous", help="Drop layers that follow one another, judged together.")]

DepthSamples = Annotated[
    int | None,
    typer.Option(
        "--samples",
        min=1,
        max=1_000_000,
        help=f"Windows of text. Default: {Calibration().samples}, and {FEW_WINDOWS} by kl.",
        rich_help_panel=flags.CALIBRATION,
    ),
]
Ffn = Annotated[int | None, typer.Option("--ffn", min=1, max=1 << 24, help="Channels that stay, such as 1024.")]
Ratio = Annotated[
    float | None, typer.Option("--ratio", min=0, max=1, help="Share of the channels that goes, such as 0.25.")
]
MultipleOf = Annotated[
    int,
    typer.Option(
        "--multiple-of",
        min=1,
        max=1 << 20,
        help="Of which the width is a multiple: 256 for K-quants of GGUF, 64 or 128 for kernels.",
    ),
]
Score = Annotated[
    Literal["energy", "cost"],
    typer.Option(
        "--by",
        help="energy: those go that add least to the outputs. cost: those that the others make up for best.",
    ),
]
Refit = Annotated[bool, typer.Option("--repair/--no-repair", help="Fit what reads the channels to those that stay.")]


_TEXT = flags.taken("calibration", "field", "samples", "length", "seed")
_MEANS = flags.taken(
    "device", "compute_dtype", "batch", "threads", "max_memory", "deadline", "trust_remote_code", "dry_run",
    "json_", "junit", "log_format", "quiet",
)  # fmt: skip
COMMON = {**_TEXT, **_MEANS}
"""Options of every command that changes a model's structure, or adds to it."""

DEPTH = """Drop whole decoder layers: those that the model misses least.

The result is a plain model with fewer layers, which anything loads that loads the original, and which every other \
command takes. Dropping hurts more than rounding: expect to fine-tune afterwards."""
DEPTH_OPTIONS: dict[str, tuple[Any, Any]] = {
    "model": (flags.Model, ...),
    "drop": (Drop, ...),
    "by": (By, "similarity"),
    "keep_first": (KeepFirst, 2),
    "keep_last": (KeepLast, 1),
    "contiguous": (Contiguous, False),
    **flags.taken("out", "overwrite"),
    **COMMON,
    "samples": (DepthSamples, None),
}

WIDTH = """Make the feed-forward of every layer narrower: channels go, and what reads them makes up for it.

A channel is a row of gate and up and a column of down. Those that add least to the outputs go, and down_proj is \
fitted by least squares to what is left, on text that has passed the pruned layers before. The result is a plain \
model with another intermediate_size."""
WIDTH_OPTIONS: dict[str, tuple[Any, Any]] = {
    "model": (flags.Model, ...),
    "ffn": (Ffn, None),
    "ratio": (Ratio, None),
    "multiple_of": (MultipleOf, 64),
    "by": (Score, "energy"),
    "refit": (Refit, True),
    **flags.taken("out", "overwrite"),
    **COMMON,
}


def register(app: typer.Typer) -> None:
    for name, work, options, doc in (
        ("depth", depth, DEPTH_OPTIONS, DEPTH),
        ("width", width, WIDTH_OPTIONS, WIDTH),
    ):
        app.command(name, rich_help_panel="Compress")(flags.command(work, options, name, doc))


def depth(**values: Any) -> None:
    """Plan, choose layers, write, tell."""
    with watching.reading(values["quiet"] or values["json_"]):
        from llmcompress.engine.structure.depth import DepthRequest, plan_depth, prune_depth

        by, drop = values["by"], values["drop"]
        request = DepthRequest(drop, by, values["keep_first"], values["keep_last"], values["contiguous"])
        plan = plan_depth(values["model"], request, depth_text(by, values), flags.run_options(values))
    facts = {
        "output": str(plan.opened.out),
        "layers": plan.layers,
        "drop": drop,
        "by": by,
        "passes": round(plan.passes, 1),
        "scratch_bytes": plan.scratch_bytes,
        "memory_bytes": plan.memory_bytes,
    }

    def summary(report: Mapping[str, Any]) -> str:
        gone = ", ".join(map(str, report["depth"]["removed"]))
        return f"{plan.layers - drop} of {plan.layers} layers, without {gone}"

    carry_out(plan.opened, facts, values, partial(prune_depth, plan), summary, _compared(plan.opened.out, values))


def width(**values: Any) -> None:
    """Plan, choose channels, write, tell."""
    with watching.reading(values["quiet"] or values["json_"]):
        from llmcompress.engine.structure.width import WidthRequest, plan_width, prune_width

        request = WidthRequest(*(values[name] for name in ("ffn", "ratio", "multiple_of", "by", "refit")))
        plan = plan_width(values["model"], request, text_of(values), flags.run_options(values))
    facts = {
        "output": str(plan.opened.out),
        "channels": plan.before,
        "left": plan.width,
        "output_bytes": plan.derived.nbytes,
        "passes": 1,
        "memory_bytes": plan.memory_bytes,
    }
    summary = f"{plan.width} of {plan.before} channels"
    carry_out(
        plan.opened, facts, values, partial(prune_width, plan), lambda _: summary, _compared(plan.opened.out, values)
    )


def _compared(out: Path, values: dict[str, Any]) -> Sequence[object]:
    """The command that compares an output with its original."""
    return "eval", out, "--ref", values["model"]


def carry_out(
    opened: "OpenModel",
    facts: dict[str, Any],
    values: dict[str, Any],
    work: Callable[[Callable[[int, int], None]], dict[str, Any]],
    summary: Callable[[Mapping[str, Any]], str],
    onward: Sequence[object],
    kept: str = NOTHING_KEPT,
) -> None:
    """Tell the plan's `facts` and stop there, or do the `work` and tell of its report, in short by `summary`.

    onward: the command that may be wanted next. kept: what a later start finds of work that was stopped.
    """
    if values["dry_run"]:
        if facts["passes"]:
            opened.refuse_text()
        _show(facts, values["json_"])
        return
    quiet = values["quiet"] or (values["json_"] and not log.active)
    tell_plan(facts, quiet)
    with watching.Steps("layers", quiet) as steps:
        result = restructured(Path(facts["output"]), work, steps.at, Stop(values["deadline"]), kept)
    if not quiet:
        console.ledger(result.report["ledger"])
    if values["json_"]:
        console.print_json(result.as_data())
    if log.active:
        spent = {"seconds": result.seconds, "peak_memory_bytes": result.peak_memory_bytes}
        log.event("written", output=facts["output"], bytes=result.nbytes, **spent)
    elif not values["json_"]:
        console.say(f"{facts['output']}: {summary(result.report)}, {console.size(result.nbytes)}")
        if not quiet:
            console.next_step(*onward)


def tell_plan(facts: dict[str, Any], quiet: bool) -> None:
    """What is about to be done, for programs; people are told what memory it takes."""
    log.event("planned", **facts)
    if not (quiet or log.active):
        console.say(f"needs about {console.size(facts['memory_bytes'])} of memory")


def _show(facts: dict[str, Any], as_json: bool) -> None:
    """A plan, printed."""
    if as_json:
        console.print_json(facts)
        return
    shown = {key: console.size(value) if key.endswith("_bytes") else str(value) for key, value in facts.items()}
    console.table(None, ("", ""), [(key.removesuffix("_bytes").replace("_", " "), text) for key, text in shown.items()])
