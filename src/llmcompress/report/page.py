"""One self-contained HTML page: data for tables and figures, and a template that escapes all data."""

import base64
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from llmcompress import __version__
from llmcompress.report import figures, tables
from llmcompress.report.cells import METRICS, Cells, Metric, cells_of
from llmcompress.report.page_inputs import ReportedOutput
from llmcompress.report.words import label

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
    drawn: dict[str, figures.Figure] = {}
    library = get_plotlyjs()
    script, style = ((_TEMPLATES / name).read_text(encoding="utf-8") for name in ("page.js", "page.css"))
    content = _content(outputs, drawn)
    return environment.get_template("page.html").render(
        **content,
        version=__version__,
        figures=Markup(figures.as_json(drawn)),
        library=Markup(library),
        script=Markup(script),
        style=Markup(style),
        policy=_policy((library, script)),
    )


def _policy(scripts: Sequence[str]) -> str:
    """A content security policy: these scripts and no others, nothing from any network."""
    hashes = " ".join(f"'sha256-{base64.b64encode(sha256(text.encode()).digest()).decode()}'" for text in scripts)
    return f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'"


def _content(outputs: Sequence[ReportedOutput], drawn: dict[str, figures.Figure]) -> dict[str, Any]:
    return {
        "outputs": [_about(output) for output in outputs],
        "summary": tables.summary(outputs),
        "against": _against(outputs, drawn),
        "along": _along(outputs, drawn),
        "maps": _maps(outputs, drawn),
        "spent": _spent(outputs, drawn),
        "sources": len({output.report.source.headers_sha256 for output in outputs}),
    }


def _about(output: ReportedOutput) -> dict[str, Any]:
    """The text of the page about one output."""
    return {
        "name": output.name,
        "facts": tables.facts(output),
        "ledger": tables.ledger(output.report),
        "recipe": yaml.safe_dump(output.report.recipe.model_dump(), sort_keys=False, allow_unicode=True),
    }


def _maps(outputs: Sequence[ReportedOutput], drawn: dict[str, figures.Figure]) -> list[Mapping[str, Any]]:
    """Draw the heat maps of each metric, outputs side by side; the titles and places of all maps."""
    cells = [cells_of(output.report.linears) for output in outputs]
    result: list[Mapping[str, Any]] = []
    for metric in METRICS:
        parts = []
        for number, (output, own) in enumerate(zip(outputs, cells, strict=True)):
            if own.knows(metric):
                place = f"{metric.key}-{number}"
                drawn[place] = figures.heat_map(own, metric, _within(cells, metric))
                title = output.name if len(outputs) > 1 else ""
                parts.append({"id": place, "title": title, "table": tables.heat_map(own, metric)})
        if parts:
            result.append({"metric": metric, "parts": parts})
    return result


def _within(cells: Sequence[Cells], metric: Metric) -> tuple[float, float]:
    """Least and largest value of a metric over all outputs, so that all maps share one scale of colours."""
    values = [value for own in cells for row in own.rows(metric) for value in row if value is not None]
    if metric.logarithmic:
        values = [value for value in values if value > 0] or values
    return min(values), max(values)


def _against(outputs: Sequence[ReportedOutput], drawn: dict[str, figures.Figure]) -> bool:
    """Draw size against KL if there is more than one point; returns whether the figure was drawn."""
    measured = [found for output in outputs for found in output.evaluations if found.figures.kl is not None]
    if len(measured) > 1:
        drawn["size-kl"] = figures.size_against_kl(outputs)
        return True
    return False


def _along(outputs: Sequence[ReportedOutput], drawn: dict[str, figures.Figure]) -> list[Mapping[str, Any]]:
    """Draw KL along the text, by window and by position; the titles and places of the figures."""
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
    for place, _, across_what, series in parts:
        drawn[place] = figures.lines(series, across_what, "KL divergence, nats")
    return [
        {"id": place, "title": title, "table": tables.series(across_what, series)}
        for place, title, across_what, series in parts
    ]


def _spent(outputs: Sequence[ReportedOutput], drawn: dict[str, figures.Figure]) -> list[Mapping[str, Any]]:
    """Draw time and memory by layer; the titles and places of the figures."""
    seconds, memory = [], []
    for output in outputs:
        layers = sorted(output.timed.layers.items()) if output.timed is not None else []
        if layers:
            across = [float(number) for number, _ in layers]
            seconds.append((output.name, across, [line.seconds for _, line in layers]))
            memory.append((output.name, across, [line.peak_memory_bytes / 1e6 for _, line in layers]))
    if not seconds:
        return []
    drawn["seconds"] = figures.lines(seconds, "layer", "seconds", bars=True)
    drawn["memory"] = figures.lines(memory, "layer", "peak memory so far, MB")
    return [
        {"id": "seconds", "title": "Time of each layer", "table": tables.series("layer", seconds)},
        {"id": "memory", "title": "Memory", "table": tables.series("layer", memory)},
    ]
