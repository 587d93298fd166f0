"""`lora`: what compression took from a model, given back as far as a low rank can."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from llmcompress.api.settings import text_of
from llmcompress.cli import options as flags
from llmcompress.cli import watching
from llmcompress.cli.structured import COMMON, carry_out

Original = Annotated[Path, typer.Argument(help="The model before compression.", show_default=False)]
Compressed = Annotated[
    Path, typer.Argument(help="What became of it: a directory llmcompress wrote.", show_default=False)
]
Out = Annotated[
    Path | None,
    typer.Option(
        "--output", "-o", help="Directory to write. Default: beside the compressed model.", rich_help_panel=flags.OUTPUT
    ),
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace the adapter that is there.", rich_help_panel=flags.OUTPUT)
]
Rank = Annotated[int, typer.Option("--rank", min=1, max=1 << 20, help="Rank of the correction of every matrix.")]
By = Annotated[
    Literal["outputs", "weights"],
    typer.Option(
        "--by", help="What is brought nearest to the original: outputs on text (EoRA), or weights (SVD, without text)."
    ),
]


DOC = """Write a LoRA adapter that gives a compressed model back what low rank can of what it lost.

PEFT and engines that serve LoRA load it upon the compressed model; `eval --adapter` measures both together. It pays \
at 2 or 3 bits or with weights pruned: compare with spending its bits on the grid."""
OPTIONS: dict[str, tuple[Any, Any]] = {
    "original": (Original, ...),
    "compressed": (Compressed, ...),
    "rank": (Rank, 32),
    "by": (By, "outputs"),
    "out": (Out, None),
    "overwrite": (Overwrite, False),
    **COMMON,
}


def register(app: typer.Typer) -> None:
    app.command("lora", rich_help_panel="Compress")(flags.command(lora, OPTIONS, "lora", DOC))


def lora(**values: Any) -> None:
    """Plan, solve, write, tell."""
    with watching.reading(values["quiet"] or values["json_"]):
        from llmcompress.engine.structure.lora import repair
        from llmcompress.engine.structure.lora_plan import plan_lora

        rank, by = values["rank"], values["by"]
        plan = plan_lora(values["original"], values["compressed"], rank, by, text_of(values), flags.run_options(values))
    facts = {
        "output": str(plan.opened.out),
        "matrices": len(plan.targets),
        "rank": rank,
        "by": by,
        "bits_per_weight_added": round(plan.added_bits, 4),
        "output_bytes": plan.nbytes,
        "passes": 1 if by == "outputs" else 0,
        "memory_bytes": plan.memory_bytes,
    }

    def summary(report: Mapping[str, Any]) -> str:
        made = report["lora"]
        return f"{len(made['matrices'])} matrices, {made['bits_per_weight_added']:.2f} bits per weight more"

    onward = ("eval", values["compressed"], "--ref", values["original"], "--adapter", plan.opened.out)
    carry_out(plan.opened, facts, values, partial(repair, plan), summary, onward)
