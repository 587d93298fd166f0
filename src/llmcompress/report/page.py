"""One self-contained HTML page without scripts: tables and plots, and a template that escapes all data."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from llmcompress import __version__
from llmcompress.report import figures, tables
from llmcompress.report.cells import METRICS, Metric, cells_of
from llmcompress.report.page_inputs import ReportedOutput
from llmcompress.report.plot import Plot
from llmcompress.report.verdict import verdicts
from llmcompress.report.words import figure, label, marked_words

_TEMPLATES = Path(__file__).parent / "templates"


def render(outputs: Sequence[ReportedOutput]) -> str:
    """The page about some outputs. The same outputs give the same bytes."""
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    style = Markup((_TEMPLATES / "page.css").read_text(encoding="utf-8"))
    return environment.get_template("page.html").render(**_content(outputs), version=__version__, style=style)


def _content(outputs: Sequence[ReportedOutput]) -> dict[str, Any]:
    return {
        "outputs": [_about(output) for output in outputs],
        "verdicts": verdicts(outputs),
        "summary": tables.summary(outputs),
        "against": _against(outputs),
        "parts": _parts(outputs),
        "along": _along(outputs),
        "maps": _maps(outputs),
        "spent": _spent(outputs),
        "written": _written(outputs),
        "sources": len({output.report.source.headers_sha256 for output in outputs}),
    }


def _about(output: ReportedOutput) -> dict[str, Any]:
    """The text of the page about one output."""
    return {
        "name": output.name,
        "facts": tables.facts(output),
        "worst": tables.worst(output.report.linears),
        "ledger": tables.ledger(output.report),
        "recipe": yaml.safe_dump(output.report.recipe.model_dump(), sort_keys=False, allow_unicode=True),
    }


def _maps(outputs: Sequence[ReportedOutput]) -> list[Mapping[str, Any]]:
    """The heat maps of each metric, outputs side by side; a metric that is the same everywhere is said in words."""
    cells = [cells_of(output.report.linears) for output in outputs]
    result: list[Mapping[str, Any]] = []
    for metric in METRICS:
        known = [(number, own) for number, own in enumerate(cells) if own.knows(metric)]
        if not known:
            continue
        values = [value for own in cells for row in own.rows(metric) for value in row if value is not None]
        if min(values) == max(values):
            result.append({"metric": metric, "same": figure(values[0]), "parts": []})
            continue
        within = _within(values, metric)
        parts = [
            {
                "id": f"{metric.key}-{number}",
                "title": outputs[number].name if len(outputs) > 1 else "",
                "plot": figures.heat_map(own, metric, within),
                "table": tables.heat_map(own, metric),
            }
            for number, own in known
        ]
        result.append({"metric": metric, "same": None, "parts": parts})
    return result


def _within(values: Sequence[float], metric: Metric) -> tuple[float, float]:
    """Least and largest of a metric's values in all outputs, so that all maps share one scale of colours."""
    if metric.logarithmic:
        values = [value for value in values if value > 0] or values
    return min(values), max(values)


def _against(outputs: Sequence[ReportedOutput]) -> Plot | None:
    """Size against KL, if there is more than one point."""
    measured = [found for output in outputs for found in output.evaluations if found.figures.kl is not None]
    return figures.size_against_kl(outputs) if len(measured) > 1 else None


def _parts(outputs: Sequence[ReportedOutput]) -> Mapping[str, Any] | None:
    """The bytes of each part of the models, of those whose weights are there."""
    known = [(output.name, output.parts) for output in outputs if output.parts]
    return {"plot": figures.parts(known), "table": tables.parts(known)} if known else None


def _along(outputs: Sequence[ReportedOutput]) -> list[Mapping[str, Any]]:
    """KL along the text, by window and by position."""
    windows, positions = [], []
    for output in outputs:
        for found in output.evaluations:
            if found.by_window.kl is None or found.by_position.kl is None:
                continue
            name = label(output, found, outputs)
            across, up = figures.binned(found.by_position.kl)
            positions.append((name, [middle + 1 for middle in across], up))  # the first token is not scored
            windows.append((name, [float(n) for n in range(1, len(found.by_window.kl) + 1)], found.by_window.kl))
    if not windows:
        return []
    parts = (
        ("kl-windows", "By window", "window of the text", windows),
        ("kl-positions", "By position", "token of a window", positions),
    )
    return [
        {
            "id": place,
            "title": title,
            "plot": figures.lines(series, across, "KL divergence, nats"),
            "table": tables.series(across, series),
        }
        for place, title, across, series in parts
    ]


def _written(outputs: Sequence[ReportedOutput]) -> list[Mapping[str, Any]]:
    """What outputs and their original write after each prompt, words of an output that the original has not marked."""
    prompts: dict[tuple[str, str | None], list[tuple[str, list[tuple[str, bool]]]]] = {}
    for output in outputs:
        for written in (found.written for found in output.evaluations if found.written is not None):
            words = marked_words(written.model, written.reference)
            prompts.setdefault((written.prompt, written.reference), []).append((output.name, words))
    return [
        {"prompt": prompt, "original": original, "continuations": continuations}
        for (prompt, original), continuations in prompts.items()
    ]


def _spent(outputs: Sequence[ReportedOutput]) -> list[Mapping[str, Any]]:
    """Time and memory by layer."""
    seconds, memory = [], []
    for output in outputs:
        layers = sorted(output.timed.layers.items()) if output.timed is not None else []
        if layers:
            across = [float(number) for number, _ in layers]
            seconds.append((output.name, across, [line.seconds for _, line in layers]))
            memory.append((output.name, across, [line.peak_memory_bytes / 1e6 for _, line in layers]))
    if not seconds:
        return []
    return [
        {
            "id": "seconds",
            "title": "Time of each layer",
            "plot": figures.lines(seconds, "layer", "seconds", bars=True),
            "table": tables.series("layer", seconds),
        },
        {
            "id": "memory",
            "title": "Memory",
            "plot": figures.lines(memory, "layer", "peak memory so far, MB"),
            "table": tables.series("layer", memory),
        },
    ]
