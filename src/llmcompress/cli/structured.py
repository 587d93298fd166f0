"""`depth` and `width`: models that lose layers, or channels of their feed-forward, and stay plain models."""

from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from llmcompress.cli import console
from llmcompress.cli import options as o

if TYPE_CHECKING:
    from llmcompress.engine.plan import Options
    from llmcompress.recipe import Calibration

_FEW_WINDOWS = 8  # enough to tell layers apart, where every layer costs passes of its own

Drop = Annotated[int, typer.Option("--drop", min=1, help="Layers to drop.", show_default=False)]
By = Annotated[
    Literal["similarity", "kl"],
    typer.Option(
        "--by",
        help="similarity: those that change their input least, in one pass (ShortGPT). kl: one by one, the layer "
        "without which the logits move least; costs about half as many passes as there are layers for each layer "
        "dropped.",
    ),
]
KeepFirst = Annotated[int, typer.Option("--keep-first", min=0, help="First layers that always stay.")]
KeepLast = Annotated[int, typer.Option("--keep-last", min=0, help="Last layers that always stay.")]
Contiguous = Annotated[bool, typer.Option("--contiguous", help="Drop layers that follow one another, judged together.")]

DepthSamples = Annotated[
    int | None,
    typer.Option(
        "--samples",
        min=1,
        help=f"Windows of text. Default: 128, and {_FEW_WINDOWS} by kl.",
        rich_help_panel=o.CALIBRATION,
    ),
]
Ffn = Annotated[int | None, typer.Option("--ffn", min=1, help="Channels that stay, such as 1024.")]
Ratio = Annotated[float | None, typer.Option("--ratio", help="Share of the channels that goes, such as 0.25.")]
MultipleOf = Annotated[
    int,
    typer.Option(
        "--multiple-of",
        min=1,
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
Repair = Annotated[bool, typer.Option("--repair/--no-repair", help="Fit what reads the channels to those that stay.")]


def register(app: typer.Typer) -> None:
    app.command("depth", rich_help_panel="Compress")(depth)
    app.command("width", rich_help_panel="Compress")(width)


def depth(
    model: o.Model,
    drop: Drop,
    out: o.Out = None,
    by: By = "similarity",
    keep_first: KeepFirst = 2,
    keep_last: KeepLast = 1,
    contiguous: Contiguous = False,
    overwrite: o.Overwrite = False,
    calibration: o.Source = "default",
    field: o.Field = None,
    samples: DepthSamples = None,
    length: o.Length = 512,
    seed: o.Seed = 0,
    device: o.Device = "auto",
    compute_dtype: o.ComputeDtype = "auto",
    batch: o.Batch = None,
    threads: o.Threads = None,
    trust_remote_code: o.Trust = False,
    dry_run: o.DryRun = False,
    json_: o.Json = False,
    quiet: o.Quiet = False,
) -> None:
    """Drop whole decoder layers: those that the model misses least.

    The result is a plain model with fewer layers, which anything loads that loads the original, and which every other
    command takes. Dropping hurts more than rounding: expect to fine-tune afterwards.
    """
    from llmcompress.engine.depth import Asked, plan_depth, prune_depth

    samples = samples or (_FEW_WINDOWS if by == "kl" else 128)
    asked = Asked(drop, by, keep_first, keep_last, contiguous)
    plan = plan_depth(model, asked, text_of(locals()), options_of(locals()))
    facts = {
        "output": str(plan.subject.out),
        "layers": plan.layers,
        "drop": drop,
        "by": by,
        "passes": round(plan.passes, 1),
        "scratch_bytes": plan.scratch_bytes,
    }
    if dry_run:
        tell(facts, json_)
        return
    _without_bars()
    with console.Steps("layers", quiet or json_) as steps:
        report = prune_depth(plan, steps.at)
    gone = ", ".join(map(str, report["depth"]["removed"]))
    finish(report, str(plan.subject.out), f"{plan.layers - drop} of {plan.layers} layers, without {gone}", json_, quiet)


def width(
    model: o.Model,
    ffn: Ffn = None,
    ratio: Ratio = None,
    out: o.Out = None,
    multiple_of: MultipleOf = 64,
    by: Score = "energy",
    repair: Repair = True,
    overwrite: o.Overwrite = False,
    calibration: o.Source = "default",
    field: o.Field = None,
    samples: o.Samples = 128,
    length: o.Length = 512,
    seed: o.Seed = 0,
    device: o.Device = "auto",
    compute_dtype: o.ComputeDtype = "auto",
    batch: o.Batch = None,
    threads: o.Threads = None,
    trust_remote_code: o.Trust = False,
    dry_run: o.DryRun = False,
    json_: o.Json = False,
    quiet: o.Quiet = False,
) -> None:
    """Make the feed-forward of every layer narrower: channels go, and what reads them makes up for it.

    A channel is a row of gate and up and a column of down. Those that add least to the outputs go, and down_proj is
    fitted by least squares to what is left, on text that has passed the pruned layers before. The result is a plain
    model with another intermediate_size.
    """
    from llmcompress.engine.width import Asked, plan_width, prune_width

    asked = Asked(ffn, ratio, multiple_of, by, repair)
    plan = plan_width(model, asked, text_of(locals()), options_of(locals()))
    facts = {
        "output": str(plan.subject.out),
        "channels": plan.before,
        "left": plan.width,
        "output_bytes": plan.derived.nbytes,
        "passes": 1,
    }
    if dry_run:
        tell(facts, json_)
        return
    _without_bars()
    with console.Steps("layers", quiet or json_) as steps:
        report = prune_width(plan, steps.at)
    finish(report, str(plan.subject.out), f"{plan.width} of {plan.before} channels", json_, quiet)


def text_of(values: dict[str, Any]) -> "Calibration":
    """What the calibration options say."""
    from llmcompress.recipe import Calibration, build

    text: Calibration = build(Calibration, o.calibration(values), "the calibration options")
    return text


def options_of(values: dict[str, Any]) -> "Options":
    """Places and means, from the values of those options that a command has."""
    from llmcompress.engine.plan import Options

    return Options(**{name: values[name] for name in Options.__dataclass_fields__ if name in values})


def tell(facts: dict[str, Any], as_json: bool) -> None:
    """A plan, printed."""
    if as_json:
        console.print_json(facts)
        return
    shown = {key: console.size(value) if key.endswith("_bytes") else str(value) for key, value in facts.items()}
    console.table(None, ("", ""), [(key.removesuffix("_bytes").replace("_", " "), text) for key, text in shown.items()])


def finish(report: dict[str, Any], output: str, what: str, as_json: bool, quiet: bool) -> None:
    """A report, printed."""
    if as_json:
        console.print_json({**report, "output": output})
        return
    if not quiet:
        console.ledger(report["ledger"])
    console.say(f"{output}: {what}, {console.size(report['output_bytes'])}")


def _without_bars() -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()
