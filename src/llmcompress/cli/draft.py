"""`draft`: a head that drafts tokens for a model, or the model's own first layers, trained towards it."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from llmcompress.api.settings import (
    DRAFT_RATE,
    DRAFT_STEPS,
    DRAFT_VOCABULARY,
    WRITTEN,
    DraftKind,
    refuse_other_kind,
    text_of,
)
from llmcompress.api.structure import ALL_KEPT
from llmcompress.cli import options as flags
from llmcompress.cli import watching
from llmcompress.cli.recover import Steps, fallen
from llmcompress.cli.structured import COMMON, carry_out

Kind = Annotated[
    DraftKind,
    typer.Option(
        "--kind",
        help="eagle3: a head that reads hidden states of the model. medusa: blocks that read the last one alone. "
        "prune: the model's first layers, as a model.",
    ),
]
Layers = Annotated[
    int | None,
    typer.Option("--layers", min=1, max=1_000_000, help="Layers of --kind prune: the first ones.", show_default=False),
]
Vocabulary = Annotated[
    int | None,
    typer.Option(
        "--vocab",
        min=1,
        max=1 << 24,
        help=f"Tokens that a head can draft: the most frequent ones of the text. Default: {DRAFT_VOCABULARY}.",
    ),
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
Rate = Annotated[
    float | None,
    typer.Option(
        "--rate",
        min=1e-6,
        max=0.1,
        help=f"Highest rate of Adam. Default: {DRAFT_RATE}, and that of `recover` with --kind prune.",
    ),
]

DOC = """Train what drafts tokens for a model, compressed or not: a head, or the model's own first layers.

A head of EAGLE-3 reads three hidden states of the model as it is served, and shares its embedding; blocks of Medusa \
read the last one alone. Both are written as vLLM reads them. With --kind prune the draft is a model: the first \
--layers with the norm and the head, decoded, as `depth` cuts and `recover` trains. All learn the model's predictions \
on the calibration text and on text that the model writes itself. Nothing is written unless the loss on windows held \
back falls. `eval --draft` decodes with it."""
OPTIONS: dict[str, tuple[Any, Any]] = {
    "model": (flags.Model, ...),
    "kind": (Kind, "eagle3"),
    "layers": (Layers, None),
    "steps": (Steps, DRAFT_STEPS),
    "vocab": (Vocabulary, None),
    "written": (Written, WRITTEN),
    "rate": (Rate, None),
    **flags.taken("out", "overwrite", "work", "restart"),
    **COMMON,
}


def register(app: typer.Typer) -> None:
    app.command("draft", rich_help_panel="Compress")(flags.command(draft, OPTIONS, "draft", DOC))


def draft(**values: Any) -> None:
    """Plan, train, write, tell."""
    refuse_other_kind(values["kind"], values["layers"], values["vocab"])
    (_pruned if values["kind"] == "prune" else _head)(values)


def _head(values: dict[str, Any]) -> None:
    with watching.reading(values["quiet"] or values["json_"]):
        from llmcompress.engine.draft.draft_plan import DraftRequest, plan_draft
        from llmcompress.engine.draft.head_training import train_draft

        vocabulary, rate = values["vocab"] or DRAFT_VOCABULARY, values["rate"] or DRAFT_RATE
        request = DraftRequest(values["kind"], values["steps"], vocabulary, values["written"], rate)
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

    onward = _decoding(plan.opened.out, values)
    carry_out(plan.opened, facts, values, partial(train_draft, plan), summary, onward, ALL_KEPT)


def _pruned(values: dict[str, Any]) -> None:
    with watching.reading(values["quiet"] or values["json_"]):
        from llmcompress.engine.draft.pruned import PrunedDraftRequest, plan_pruned_draft, train_pruned_draft

        request = PrunedDraftRequest(*(values[name] for name in ("layers", "steps", "written", "rate")))
        plan = plan_pruned_draft(values["model"], request, text_of(values), flags.run_options(values))
    facts = {
        "output": str(plan.opened.out),
        "layers": request.layers,
        "steps": request.steps,
        "rate": plan.recovery.rate,
        "share_of_weights": round(plan.share, 4),
        "output_bytes": plan.nbytes,
        "passes": round(plan.recovery.passes, 1),
        "scratch_bytes": plan.scratch_bytes,
        "memory_bytes": plan.memory_bytes,
    }

    def summary(report: Mapping[str, Any]) -> str:
        return f"{plan.share:.1%} of the model's weights, {fallen(report)}"

    onward = _decoding(plan.opened.out, values)
    carry_out(plan.opened, facts, values, partial(train_pruned_draft, plan), summary, onward, ALL_KEPT)


def _decoding(out: Path, values: dict[str, Any]) -> Sequence[object]:
    """The command that decodes with a draft."""
    return "eval", "--draft", out, "--ref", values["model"], "--generate", "Once upon a time"
