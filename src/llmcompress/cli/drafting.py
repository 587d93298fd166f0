"""`eval --draft`: what a compressed model is worth as the draft of its original."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmcompress.cli import console
from llmcompress.cli.gates import Gates
from llmcompress.cli.log import log
from llmcompress.errors import RecipeError

if TYPE_CHECKING:
    from llmcompress.validate.request import Request

_ROWS = (
    ("accepted_per_step", "tokens accepted per step", "accepted_per_step_expected"),
    ("acceptance", "share of judged tokens accepted", "acceptance_expected"),
)


def run(
    request: "Request",
    prompt: str | None,
    tokens: int,
    guesses: int,
    fail_if: Sequence[str],
    output: Path | None,
    gates: Gates,
    as_json: bool,
) -> None:
    """Draft, count, show and judge. RecipeError for what does not go with a draft."""
    from llmcompress.validate.drafting import FIGURES, speculative_figures
    from llmcompress.validate.evaluate import parse_gate, refuse_other_figures

    if request.ref is None or prompt is None:
        missing = "--ref, the original that it drafts for" if request.ref is None else "--generate, a prompt"
        raise RecipeError(f"--draft needs {missing}", "write `eval --draft MODEL --ref ORIGINAL --generate PROMPT`")
    if output is not None:
        raise RecipeError("--draft has no result for --output, which is for `report`", "use --json")
    conditions = {text: parse_gate(text) for text in fail_if}
    gates.expect(f"--fail-if {text}" for text in conditions)
    refuse_other_figures(conditions.values(), FIGURES)
    found = speculative_figures(request, prompt, tokens, guesses, console.say)
    log.event("figures", **{name: found[name] for name in FIGURES})
    if as_json:
        console.print_json(found)
    else:
        _show(request, found)
    gates.judge_figures(found, conditions)


def _show(request: "Request", found: dict[str, Any]) -> None:
    from llmcompress.validate.token_statistics import shown

    console.table(
        f"{request.model} drafts {found['draft_tokens']} tokens at a time for {request.ref}: {found['new_tokens']} "
        f"tokens in {found['steps']} steps",
        ("", "measured", "+-", "by total variation"),
        [
            (label, shown(found[name], 4), shown(found[f"{name}_se"], 2), shown(found[expected], 4))
            for name, label, expected in _ROWS
        ],
        right=(1, 2, 3),
    )
    foretold = found["tokens_per_step_expected"]
    console.table(
        "tokens per step by total variation, with so many drafted",
        tuple(foretold),
        [tuple(shown(value, 3) for value in foretold.values())],
        right=tuple(range(len(foretold))),
    )
    speed = found["speed"]
    console.table(
        None,
        ("tokens per second", ""),
        [("with the draft", f"{speed['drafted']:.1f}"), ("alone", f"{speed['alone']:.1f}")],
        right=(1,),
    )
    console.table("what was written", ("",), [(found["generated"],)])
