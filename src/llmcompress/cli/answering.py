"""`eval --tasks`: how many items of tasks a compressed model answers as well as its original."""

from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmcompress.api.answers import Questions, answered, read_questions, refuse_unmeasured_shares
from llmcompress.cli import console, watching
from llmcompress.cli.gates import Gates
from llmcompress.cli.log import log
from llmcompress.cli.stopping import Stop

if TYPE_CHECKING:
    from llmcompress.validate.request import Request


def run(
    request: "Request",
    questions: Questions,
    fail_if: Sequence[str],
    output: Path | None,
    overwrite: bool,
    card: Path | None,
    gates: Gates,
    steps: watching.Steps,
    stop: Stop,
    as_json: bool,
) -> None:
    """Have the items of --tasks answered; show, save and judge the figures. output: the file to save to, if any.

    card: the model card that gets the figures, if any.
    """
    from llmcompress.store.unfinished import write_whole
    from llmcompress.validate.card_figures import card_with_figures
    from llmcompress.validate.evaluate import parse_gate
    from llmcompress.validate.token_statistics import not_finite

    conditions = {text: parse_gate(text) for text in fail_if}
    gates.expect(f"--fail-if {text}" for text in conditions)
    tasks = read_questions(request, questions)
    by_characters = all(item.lengths is not None for task in tasks for item in task.items)
    refuse_unmeasured_shares(conditions.values(), request.ref is not None, by_characters)
    result = answered(request, questions, tasks, steps.at, stop)
    if output is not None and not_finite(result.figures) is None:
        result.save(output, overwrite=overwrite)
    if card is not None and not_finite(result.figures) is None:
        write_whole(card, card_with_figures(card, result.document).encode(), overwrite=True)
    log.event("figures", **result.figures)
    asked = result.document["asked"]
    omitted = {name: asked[name] for name in ("omitted",) if name in asked}
    found = {**result.figures, **omitted, "tasks": result.tasks}
    if as_json:
        console.print_json(found)
    else:
        _show(request, found)
    gates.judge_figures(result.figures, conditions)


def _show(request: "Request", found: Mapping[str, Any]) -> None:
    omitted = f", {found['omitted']}" if "omitted" in found else ""
    alone = request.omission is not None and request.ref == request.model
    rows = [*found["tasks"].items(), *([("all", found)] if len(found["tasks"]) > 1 else [])]
    compared = ("whole cache" if alone else "original", "lost", "95% interval", "p") if request.ref is not None else ()
    console.table(
        f"{request.model}: share of items answered right{omitted}",
        ("task", "items", "right", "by characters", *compared),
        [_row(name, figures, bool(compared)) for name, figures in rows],
        right=tuple(range(1, 4 + len(compared))),
    )
    if compared and isfinite(found["acc_drop"]):
        console.say(_verdict(found, "with its whole cache" if alone else "the original"))


def _row(name: str, figures: Mapping[str, Any], compared: bool) -> tuple[str, ...]:
    """A line of the table; nothing where a figure is not defined."""

    def percent(key: str) -> str:
        return f"{figures[key]:.1%}" if key in figures else ""

    row = (name, str(figures["items"]), percent("acc"), percent("acc_norm"))
    if not compared:
        return row
    low, high = figures["acc_drop_ci"]
    return (*row, percent("ref_acc"), percent("acc_drop"), f"{low:.1%} ... {high:.1%}", f"{figures['acc_p']:.2g}")


def _verdict(found: Mapping[str, Any], reference: str) -> str:
    """What the figures say, in words: whether the items suffice to tell the model from its reference."""
    drop, worse = found["acc_drop"], found["acc_drop_ci"][1]
    said = (
        f"{abs(drop):.1%} {'fewer' if drop > 0 else 'more'} items right than {reference}"
        if drop
        else f"as many items right as {reference}"
    )
    if found["acc_p"] < 0.05:
        return f"{said}, which is more than chance (p = {found['acc_p']:.2g})"
    return f"{said}; {found['items']} items leave room for {max(worse, 0):.1%} fewer, at 95%"
