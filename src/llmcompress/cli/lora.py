"""`lora`: what compression took from a model, given back as far as a low rank can."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from llmcompress.cli import console
from llmcompress.cli import options as o
from llmcompress.cli.structured import finish, options_of, tell, text_of

Original = Annotated[Path, typer.Argument(help="The model before compression.", show_default=False)]
Compressed = Annotated[
    Path, typer.Argument(help="What became of it: a directory llmcompress wrote.", show_default=False)
]
Out = Annotated[
    Path | None,
    typer.Option(
        "--output", "-o", help="Directory to write. Default: beside the compressed model.", rich_help_panel=o.OUTPUT
    ),
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace the adapter that is there.", rich_help_panel=o.OUTPUT)
]
Rank = Annotated[int, typer.Option("--rank", min=1, help="Rank of the correction of every matrix.")]
By = Annotated[
    Literal["outputs", "weights"],
    typer.Option(
        "--by", help="What is brought nearest to the original: outputs on text (EoRA), or weights (SVD, without text)."
    ),
]


def register(app: typer.Typer) -> None:
    app.command("lora", rich_help_panel="Compress")(lora)


def lora(
    original: Original,
    compressed: Compressed,
    out: Out = None,
    rank: Rank = 32,
    by: By = "outputs",
    overwrite: Overwrite = False,
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
    """Write a LoRA adapter that gives a compressed model back what low rank can of what it lost.

    PEFT and engines that serve LoRA load it upon the compressed model; `eval --adapter` measures both together. It pays
    at 2 or 3 bits or with weights pruned: compare with spending its bits on the grid.
    """
    from transformers.utils import logging

    from llmcompress.engine.adapter_plan import plan_lora
    from llmcompress.engine.low_rank import repair

    plan = plan_lora(original, compressed, rank, by, text_of(locals()), options_of(locals()))
    facts = {
        "output": str(plan.subject.out),
        "matrices": len(plan.targets),
        "rank": rank,
        "by": by,
        "bits_per_weight_added": round(plan.added_bits, 4),
        "output_bytes": plan.nbytes,
        "passes": 1 if by == "outputs" else 0,
    }
    if dry_run:
        tell(facts, json_)
        return
    logging.disable_progress_bar()
    with console.Steps("layers", quiet or json_) as steps:
        report = repair(plan, steps.at)
    made = report["lora"]
    what = f"{len(made['matrices'])} matrices, {made['bits_per_weight_added']:.2f} bits per weight more"
    finish(report, str(plan.subject.out), what, json_, quiet)
