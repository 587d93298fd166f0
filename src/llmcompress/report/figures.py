"""Plots as JSON for plotly.js. Text and lines have the page's colours, so that they follow its light or dark theme."""

import json
from collections.abc import Mapping, Sequence
from html import escape
from math import floor, log10
from typing import Any

import plotly.graph_objects as go

from llmcompress.report.cells import Cells, Metric
from llmcompress.report.page_inputs import ReportedOutput
from llmcompress.report.words import figure, label, size, tick

COLOURS = ("#2f80ed", "#e8743b", "#19a979", "#945ecf", "#13a4b4", "#d9a514", "#ed4a7b", "#7f8c9a")
SYMBOLS = ("circle", "diamond", "square", "triangle-up", "cross", "x", "star", "pentagon")
SCALES = {
    "error": ("#f4efe3", "#f0c987", "#dc8440", "#a8432b", "#5c1a2b"),
    "bits": ("#eef1ea", "#a9cbe0", "#5b94c6", "#2b5b97", "#152f5c"),
    "zeros": ("#f1ecef", "#cdb6dc", "#9b79c0", "#66429a", "#371f63"),
}
BETTER, ALIKE, WORSE = (11, 122, 117), (230, 226, 216), (200, 80, 30)
_POINTS = 48  # at most, along the text

Figure = dict[str, Any]
Series = Sequence[tuple[str, Sequence[float], Sequence[float]]]
"""Name, x and y of each line."""


def heat_map(cells: Cells, metric: Metric, within: tuple[float, float]) -> Figure:
    """Layers across, linears down. within: least and largest value of all heat maps of this metric."""
    rows = cells.rows(metric)
    shown = [[_position(value, metric) for value in row] for row in rows]
    low, high = (_position(value, metric) for value in within)
    assert low is not None
    assert high is not None
    if metric.middle is not None:
        low, high = min(low, -0.01), max(high, 0.01)
    alike = high - low < 1e-9
    if alike:
        low, high = low - 1, high + 1
    trace = go.Heatmap(
        x=cells.layers,
        y=[escape(name, quote=False) for name in cells.linears],
        z=shown,
        zmin=low,
        zmax=high,
        colorscale=_rising(metric.colour) if metric.middle is None else _around(low, high),
        xgap=1,
        ygap=1,
        hoverinfo="text",
        hoverongaps=False,
        text=[
            [_hover(cells, metric, layer, name, value) for layer, value in zip(cells.layers, row, strict=True)]
            for name, row in zip(cells.linears, rows, strict=True)
        ],
        colorbar={
            "thickness": 10,
            "outlinewidth": 0,
            **({"tickvals": [(low + high) / 2], "ticktext": [tick(within[0])]} if alike else _ticks(low, high, metric)),
            "len": 1,
            "ypad": 0,
            "tickfont": {"size": 11},
        },
    )
    made = _figure([trace], x="layer", height=88 + 24 * len(cells.linears))
    made.update_xaxes(showgrid=False, **_by_layer(cells.layers))
    made.update_yaxes(autorange="reversed", showgrid=False, type="category", ticklabelstandoff=6)
    return _plain(made)


def size_against_kl(outputs: Sequence[ReportedOutput]) -> Figure:
    """A point for every evaluation, with the interval of its KL as a vertical bar."""
    traces = []
    sizes = [output.report.output_bytes / 1e6 for output in outputs]
    middle = 1e6 * (min(sizes) + max(sizes)) / 2
    for number, output in enumerate(outputs):
        for found in output.evaluations:
            figures = found.figures
            if figures.kl is None:
                continue
            low, high = figures.kl_ci or (figures.kl, figures.kl)
            name = escape(label(output, found, outputs), quote=False)
            traces.append(
                go.Scatter(
                    x=[output.report.output_bytes / 1e6],
                    y=[figures.kl],
                    error_y={
                        "type": "data",
                        "array": [max(high - figures.kl, 0)],
                        "arrayminus": [max(figures.kl - low, 0)],
                        "thickness": 1.5,
                        "width": 5,
                    },
                    mode="markers+text",
                    marker={
                        "size": 12,
                        "color": COLOURS[number % len(COLOURS)],
                        "symbol": SYMBOLS[number % len(SYMBOLS)],
                    },
                    text=[f"&nbsp;&nbsp;{name}&nbsp;&nbsp;"],
                    textposition="middle left" if output.report.output_bytes > middle else "middle right",
                    textfont={"size": 13},
                    cliponaxis=False,
                    hoverinfo="text",
                    hovertext=[f"{name}<br>{size(output.report.output_bytes)}<br>KL {figure(figures.kl)}"],
                    showlegend=False,
                )
            )
    made = _figure(traces, x="size of the weight files, MB", y="KL divergence, nats", height=400)
    room = 0.2 * (max(sizes) - min(sizes)) or 0.1 * max(sizes)
    made.update_xaxes(range=[min(sizes) - room, max(sizes) + room])
    values = [point for trace in traces for point in _reach(trace)]
    if min(values) > 0 and max(values) > 4 * min(values):
        made.update_yaxes(
            type="log", range=[log10(min(values)) - 0.2, log10(max(values)) + 0.25], dtick="D2", tickformat="~g"
        )
    else:
        made.update_yaxes(range=[0, 1.2 * max(values) or 1])
    return _plain(made)


def lines(series: Series, x: str, y: str, *, bars: bool = False) -> Figure:
    """A line for each series, or bars side by side; the axis counts layers if `x` names layers."""
    traces: list[Any] = []
    for number, (name, across, up) in enumerate(series):
        colour, named = COLOURS[number % len(COLOURS)], escape(name, quote=False)
        if bars:
            traces.append(go.Bar(x=across, y=up, name=named, marker={"color": colour}))
        else:
            mark = {"size": 6, "symbol": SYMBOLS[number % len(SYMBOLS)]}
            traces.append(
                go.Scatter(
                    x=across, y=up, name=named, mode="lines+markers", line={"color": colour, "width": 2}, marker=mark
                )
            )
        traces[-1].update(hoverinfo="x+y+name", showlegend=len(series) > 1)
    made = _figure(traces, x=x, y=y, height=320)
    if x == "layer":
        made.update_xaxes(_by_layer(sorted({place for _, across, _ in series for place in across})))
    values = [value for _, _, up in series for value in up]
    if not bars and values and min(values) > 0 and max(values) > 10 * min(values):
        made.update_yaxes(type="log", tickformat="~g", dtick="D2")
    else:
        made.update_yaxes(rangemode="tozero")
    return _plain(made)


def binned(values: Sequence[float]) -> tuple[list[float], list[float]]:
    """Middles of bins of neighbours, counted from 1, and the mean of each; at most _POINTS of them."""
    width = max(1, -(-len(values) // _POINTS))
    starts = range(0, len(values), width)
    parts = [values[start : start + width] for start in starts]
    middles = [start + (1 + len(part)) / 2 for start, part in zip(starts, parts, strict=True)]
    return middles, [float(f"{sum(part) / len(part):.6g}") for part in parts]


def as_json(figures: Mapping[str, Figure]) -> str:
    """Figures by the id of their place, as JSON that may stand in a page."""
    text = json.dumps(figures, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c")  # no text can close the HTML element that holds it


def _figure(traces: Sequence[Any], x: str, y: str = "", *, height: int) -> Any:
    made = go.Figure(list(traces))
    made.update_layout(
        template=None,
        height=height,
        margin={"l": 8, "r": 8, "t": 28, "b": 8},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"family": "system-ui, sans-serif", "size": 12, "color": "#6b7280"},
        legend={"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "font": {"size": 12}},
        hoverlabel={"font": {"family": "system-ui, sans-serif", "size": 12}, "namelength": -1},
        dragmode=False,
        bargap=0.25,
    )
    common = {"automargin": True, "gridcolor": "#8883", "zeroline": False, "ticks": "", "fixedrange": True}
    made.update_xaxes(title={"text": x, "standoff": 8}, **common)
    made.update_yaxes(title={"text": y, "standoff": 12}, **common)
    return made


def _plain(made: Any) -> Figure:
    found: Figure = json.loads(made.to_json(engine="json"))
    found["layout"].pop("template", None)
    return found


def _rising(name: str) -> list[tuple[float, str]]:
    colours = SCALES[name]
    return [(number / (len(colours) - 1), colour) for number, colour in enumerate(colours)]


def _around(low: float, high: float) -> list[tuple[float, str]]:
    """Colours around zero: equally strong at equal distances on either side."""
    reach, middle = max(-low, high), -low / (high - low)
    return [(0.0, _mixed(BETTER, -low / reach)), (middle, _mixed(ALIKE, 1.0)), (1.0, _mixed(WORSE, high / reach))]


def _mixed(colour: tuple[int, int, int], share: float) -> str:
    """A colour mixed with the neutral one."""
    parts = (round(share * own + (1 - share) * other) for own, other in zip(colour, ALIKE, strict=True))
    return f"rgb({','.join(map(str, parts))})"


def _by_layer(layers: Sequence[float]) -> dict[str, Any]:
    """An axis of layers: whole numbers, some of them named."""
    step = max(1, -(-len(layers) // 12))
    return {"tickmode": "linear", "tick0": min(layers), "dtick": step, "range": [min(layers) - 0.5, max(layers) + 0.5]}


def _position(value: float | None, metric: Metric) -> float | None:
    """The position of a value on the metric's scale of colours."""
    if value is None:
        return None
    return round(log10(max(value, 1e-12)), 6) if metric.logarithmic else value


def _ticks(low: float, high: float, metric: Metric) -> dict[str, Any]:
    """Positions on a scale of colours, and the values at these positions."""
    if not metric.logarithmic:
        return {"nticks": 5}
    powers = range(floor(low) - 1, floor(high) + 2)
    wanted = [power + log10(digit) for power in powers for digit in (1, 2, 5)]
    places = [place for place in wanted if low - 1e-9 <= place <= high + 1e-9]
    if len(places) > 6:
        places = [place for place in places if abs(place - round(place)) < 1e-9]
    return {"tickvals": places, "ticktext": [tick(10**place) for place in places]}


def _hover(cells: Cells, metric: Metric, layer: int, linear: str, value: float | None) -> str:
    if value is None:
        return ""
    count = cells.count(layer, linear)
    mean = f" (mean of {count})" if count > 1 else ""
    return f"layer {layer}, {escape(linear, quote=False)}<br>{metric.title.lower()}: {figure(value)}{mean}"


def _reach(trace: Any) -> list[float]:
    """The ends of a point's interval."""
    up, down = trace.error_y.array[0], trace.error_y.arrayminus[0]
    return [trace.y[0] + up, trace.y[0] - down if trace.y[0] > down else trace.y[0]]
