"""`eval --long`: what becomes of a compressed model in text as long as it reads."""

from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmcompress.api.long_text import evaluated_long, refuse_unmeasured_long
from llmcompress.cli import console, watching
from llmcompress.cli.gates import Gates
from llmcompress.cli.log import log
from llmcompress.cli.stopping import Stop

if TYPE_CHECKING:
    from llmcompress.validate.request import Request

_COMPARED = ("original", "KL (nats)", "95% interval", "same token")
_WRITTEN = (
    ("repetition", "sequences of 4 tokens that came before", "{:.1%}"),
    ("looping", "texts that end in a loop", "{:.1%}"),
    ("written_tokens", "tokens written", "{:.1f}"),
)


def run(
    request: "Request",
    length: int | None,
    items: int,
    fail_if: Sequence[str],
    output: Path | None,
    overwrite: bool,
    gates: Gates,
    steps: watching.Steps,
    stop: Stop,
    as_json: bool,
) -> None:
    """Run both models in long text; show, save and judge the figures. output: the file to save to, if any.

    length: tokens of a window, None for as many as the model reads. items: needles at each depth of each length.
    """
    from llmcompress.validate.evaluate import parse_gate
    from llmcompress.validate.token_statistics import not_finite

    conditions = {text: parse_gate(text) for text in fail_if}
    gates.expect(f"--fail-if {text}" for text in conditions)
    refuse_unmeasured_long(conditions.values(), request.ref is not None)
    result = evaluated_long(request, length, items, steps.at, stop)
    figures = result.figures
    if output is not None and not_finite(figures) is None:
        result.save(output, overwrite=overwrite)
    log.event("figures", **figures)
    if as_json:
        console.print_json(result.document)
    else:
        _show_bands(request, result.document)
        _show_needles(result.document["needles"], request.ref is not None)
        _show_written(result.document["repetition"], request.ref is not None)
    gates.judge_figures(figures, conditions)


def _show_bands(request: "Request", found: Mapping[str, Any]) -> None:
    from llmcompress.validate.token_statistics import not_finite, shown

    compared = request.ref is not None
    rows = [(f"{band['first']} to {band['last']}", band) for band in found["bands"]] + [("all", found["figures"])]
    text, figures, context = found["text"], found["figures"], found["context"]
    reads = "" if context is None else f" of the {context} that the model reads"
    cached = f", keys and values {figures['kv_cache']}" if figures["kv_cache"] else ""
    said = "" if (broken := not_finite(figures)) is None else f"; {broken}"
    console.table(
        f"{request.model}: {text['windows']} windows of {text['length']} tokens{reads}, "
        f"{found['compute_dtype']}{cached}{said}",
        ("tokens before", "scored", "perplexity", *(_COMPARED if compared else ())),
        [
            (name, str(band["tokens"]), shown(band["perplexity"]), *(_divergence(band) if compared else ()))
            for name, band in rows
        ],
        right=tuple(range(1, 7 if compared else 3)),
    )
    if compared and isfinite(growth := figures["kl_growth"]):
        within = _interval(figures, "kl_growth")
        console.say(
            f"KL divergence of the far half of positions less that of the near half: {growth:.4g}"
            f"{f' ({within})' if within else ''}"
        )


def _divergence(band: Mapping[str, Any]) -> tuple[str, ...]:
    from llmcompress.validate.token_statistics import shown

    return shown(band["ref_perplexity"]), shown(band["kl"], 4), _interval(band, "kl"), f"{band['top1']:.1%}"


def _interval(figures: Mapping[str, Any], name: str, style: str = "{:.4g}") -> str:
    """An interval for people; nothing where there is none, as of one window."""
    low, high = figures.get(f"{name}_ci", (float("nan"), float("nan")))
    return f"{style.format(low)} ... {style.format(high)}" if isfinite(low + high) else ""


def _show_needles(found: Mapping[str, Any], compared: bool) -> None:
    rows = [
        *((f"at {depth} of the text", each) for depth, each in found["by_depth"].items()),
        *((f"in {length} tokens", each) for length, each in found["by_length"].items()),
        ("all", found["figures"]),
    ]
    more = ("original", "p", "written", "original", "p", "log-likelihood lost") if compared else ("written",)
    console.table(
        "facts that were found again: the likeliest of ten words, and what is written",
        ("planted", "facts", "likeliest", *more),
        [(name, str(each["items"]), *_needle_cells(each, compared)) for name, each in rows],
        right=tuple(range(1, 3 + len(more))),
    )


def _needle_cells(figures: Mapping[str, Any], compared: bool) -> tuple[str, ...]:
    shares = []
    for name in ("acc", "exact"):
        shares.append(f"{figures[name]:.1%}")
        if compared:
            shares += [f"{figures[f'ref_{name}']:.1%}", f"{figures[f'{name}_p']:.2g}"]
    lost = "loglikelihood_drop"
    within = _interval(figures, lost, "{:.3g}")
    return (*shares, *([f"{figures[lost]:.3g} ({within})"] if compared else ()))


def _show_written(found: Mapping[str, Any], compared: bool) -> None:
    console.table(
        f"up to {found['most']} tokens written greedily after each of {found['prompts']} prompts",
        ("", "model", *(("original", "more", "95% interval") if compared else ())),
        [
            (
                label,
                style.format(found[name]),
                *((style.format(found[f"ref_{name}"]), *_rise(found, f"{name}_rise")) if compared else ()),
            )
            for name, label, style in _WRITTEN
        ],
        right=tuple(range(1, 5 if compared else 2)),
    )


def _rise(found: Mapping[str, Any], name: str) -> tuple[str, str]:
    """How much more of something there is than with the original, where that is a figure, with its interval."""
    return (f"{found[name]:.1%}", _interval(found, name, "{:.1%}")) if name in found else ("", "")
