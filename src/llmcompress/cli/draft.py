"""`draft`: a head that drafts tokens for a model, trained on the model's own hidden states."""

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any

import typer

from llmcompress.api.settings import DRAFT_RATE, DRAFT_STEPS, DRAFT_VOCABULARY, WRITTEN, text_of
from llmcompress.api.structure import ALL_KEPT
from llmcompress.cli import options as flags
from llmcompress.cli import watching
from llmcompress.cli.recover import Steps
from llmcompress.cli.structured import COMMON, carry_out

Vocabulary = Annotated[
    int,
    typer.Option("--vocab", min=1, max=1 << 24, help="Tokens that can be drafted: the most frequent ones of the text."),
]
Written = Annotated[
    int,
    typer.Option(
        "--written",
        min=0,
        max=1_000_000,
        help="Further windows, which the model writes itself; all of it is in memory meanwhile.",
        rich_help_panel=flags.CALIBRATION,
    ),
]
Rate = Annotated[float, typer.Option("--rate", min=1e-6, max=0.1, help="Highest rate of Adam.")]

DOC = """Train a head that drafts tokens for a model, compressed or not: EAGLE-3, as vLLM and SGLang load it.

The head reads three hidden states of the model as it is served, shares its embedding, and learns its predictions on \
the calibration text and on text that the model writes itself. Nothing is written unless its loss on windows held back \
falls. `eval --draft` decodes with it."""
OPTIONS: dict[str, tuple[Any, Any]] = {
    "model": (flags.Model, ...),
    "steps": (Steps, DRAFT_STEPS),
    "vocab": (Vocabulary, DRAFT_VOCABULARY),
    "written": (Written, WRITTEN),
    "rate": (Rate, DRAFT_RATE),
    **flags.taken("out", "overwrite", "work", "restart"),
    **COMMON,
}


def register(app: typer.Typer) -> None:
    app.command("draft", rich_help_panel="Compress")(flags.command(draft, OPTIONS, "draft", DOC))


def draft(**values: Any) -> None:
    """Plan, train, write, tell."""
    with watching.reading(values["quiet"] or values["json_"]):
        from llmcompress.engine.draft.draft_plan import DraftRequest, plan_draft
        from llmcompress.engine.draft.head_training import train_draft

        request = DraftRequest(values["steps"], values["vocab"], values["written"], values["rate"])
        plan = plan_draft(values["model"], request, text_of(values), flags.run_options(values))
    facts = {
        "output": str(plan.opened.out),
        "steps": request.steps,
        "vocabulary": plan.shape.vocabulary,
        "states": list(plan.shape.states),
        "share_of_weights": round(plan.share, 4),
        "output_bytes": plan.nbytes,
        "passes": 1,
        "scratch_bytes": plan.scratch_bytes,
        "memory_bytes": plan.memory_bytes,
    }

    def summary(report: Mapping[str, Any]) -> str:
        held = report["draft"]["held_back"]
        found = (f"{item['accepted_per_step']:.2f} of 4 ({name})" for name, item in held.items())
        return f"{plan.share:.1%} of the model's weights, accepted on text held back {', '.join(found)}"

    onward = ("eval", "--draft", plan.opened.out, "--ref", values["model"], "--generate", "Once upon a time")
    carry_out(plan.opened, facts, values, partial(train_draft, plan), summary, onward, ALL_KEPT)
