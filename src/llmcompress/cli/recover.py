"""`recover`: scales and gains of a compressed model, or what pruning left, trained towards the original."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from llmcompress.api.settings import STEPS, text_of
from llmcompress.api.structure import ALL_KEPT
from llmcompress.cli import options as flags
from llmcompress.cli import watching
from llmcompress.cli.structured import COMMON, carry_out

Compressed = Annotated[
    Path, typer.Argument(help="What is recovered: a directory or GGUF file llmcompress wrote.", show_default=False)
]
Reference = Annotated[Path, typer.Option("--ref", help="The model it was made from.", show_default=False)]
Out = Annotated[
    Path | None,
    typer.Option(
        "--output", "-o", help="What to write, as what is recovered. Default: beside it.", rich_help_panel=flags.OUTPUT
    ),
]
Steps = Annotated[int, typer.Option("--steps", min=1, max=1_000_000, help="Steps of training, of 4 windows each.")]
Rate = Annotated[
    float | None,
    typer.Option(
        "--rate",
        min=1e-6,
        max=0.1,
        help="Share by which a step changes a scale at most. Default: a hundredth of the mean error.",
    ),
]

TrainedWeights = Annotated[
    Literal["full", "low-rank"],
    typer.Option(
        "--weights",
        help="How weights of a pruned, narrower or shallower model are trained: by a change of low rank, or each for "
        "itself (20 bytes of memory each, and worth it with many --steps).",
    ),
]

DOC = """Train a compressed model's scales, or the weights that pruning left, and its gains, towards the original.

Codes, zeros, format and size stay, so that whatever loads the model loads the result. One in 16 windows of text \
is held back, and nothing is written unless the divergence on those falls."""
OPTIONS: dict[str, tuple[Any, Any]] = {
    "compressed": (Compressed, ...),
    "ref": (Reference, ...),
    "steps": (Steps, STEPS),
    "rate": (Rate, None),
    "weights": (TrainedWeights, "low-rank"),
    "out": (Out, None),
    **flags.taken("overwrite", "work", "restart"),
    **COMMON,
}


def register(app: typer.Typer) -> None:
    app.command("recover", rich_help_panel="Compress")(flags.command(recover, OPTIONS, "recover", DOC))


def recover(**values: Any) -> None:
    """Plan, train, write, tell."""
    with watching.reading(values["quiet"] or values["json_"]):
        from llmcompress.engine.recover import recovery
        from llmcompress.engine.recover.recover_plan import RecoverRequest, plan_recover

        request = RecoverRequest(values["steps"], values["rate"], values["weights"])
        plan = plan_recover(values["compressed"], values["ref"], request, text_of(values), flags.run_options(values))
    facts = {
        "output": str(plan.opened.out),
        "steps": request.steps,
        "rate": plan.rate,
        "output_bytes": plan.nbytes,
        "passes": round(plan.passes, 1),
        "scratch_bytes": plan.scratch_bytes,
        "memory_bytes": plan.memory_bytes,
    }

    onward = ("eval", plan.opened.out, "--ref", values["ref"])
    carry_out(plan.opened, facts, values, partial(recovery.recover, plan), fallen, onward, ALL_KEPT)


def fallen(report: Mapping[str, Any]) -> str:
    """What training did to the divergence on text held back, in short."""
    held = report["recovery"]["held_back"]
    falls = (f"{item['kl_before']:.4g} -> {item['kl']:.4g} ({name})" for name, item in held.items())
    return f"KL on text held back {', '.join(falls)}"
