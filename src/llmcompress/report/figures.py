"""The plots of a page: heat maps, size against divergence, lines along the text or the layers, bars of sizes."""

from collections.abc import Mapping, Sequence
from math import log10

from llmcompress.report.cells import Cells, Metric
from llmcompress.report.page_inputs import ReportedOutput
from llmcompress.report.plot import CHARACTER, SYMBOLS, WIDTH, Axis, Frame, Plot, Shape, Word, rectangle, shortened
from llmcompress.report.words import figure, label, size, tick
from llmcompress.significant import significant

COLOURS = ("#2f80ed", "#e8743b", "#19a979", "#945ecf", "#13a4b4", "#d9a514", "#ed4a7b", "#7f8c9a")
SCALES = {
    "error": ("#f4efe3", "#f0c987", "#dc8440", "#a8432b", "#5c1a2b"),
    "bits": ("#eef1ea", "#a9cbe0", "#5b94c6", "#2b5b97", "#152f5c"),
    "zeros": ("#f1ecef", "#cdb6dc", "#9b79c0", "#66429a", "#371f63"),
}
BETTER, ALIKE, WORSE = "#0b7a75", "#e6e2d8", "#c8501e"
_POINTS = 48  # at most, along the text
_LEFT, _RIGHT = 62, WIDTH - 10
_STEPS = 24  # of a scale of colours, as it is shown
_DECADE = 10  # a range so many times wider than its least value is shown by ratios

Series = Sequence[tuple[str, Sequence[float], Sequence[float]]]
"""Name, x and y of each line."""


def heat_map(cells: Cells, metric: Metric, within: tuple[float, float]) -> Plot:
    """Layers across, linears down. within: least and largest value of all heat maps of this metric."""
    left = min(max(len(name) for name in cells.linears) * CHARACTER + 8, 0.42 * WIDTH)
    across, down = (_RIGHT - left) / len(cells.layers), 22
    bottom = 6 + down * len(cells.linears)
    shapes, words = [], []
    for row, name in enumerate(cells.linears):
        words.append(Word(left - 6, 6 + down * (row + 0.5) + 4, shortened(name, left - 8), "end", axis="y"))
        for column, layer in enumerate(cells.layers):
            value = cells.value(metric, layer, name)
            if value is not None:
                count = cells.count(layer, name)
                said = f"layer {layer}, {name}: {figure(value)}" + (f" (mean of {count})" if count > 1 else "")
                place = rectangle(left + across * column, 6 + down * row, across * 0.94, down - 1)
                shapes.append(Shape(place, _colour(value, metric, within), said))
    step = max(1, -(-len(cells.layers) // 12))
    for column in range(0, len(cells.layers), step):
        words.append(Word(left + across * (column + 0.47), bottom + 14, str(cells.layers[column]), axis="x"))
    words.append(Word((left + _RIGHT) / 2, bottom + 30, "layer"))
    scale = Axis(*_widened(within, metric), left, _RIGHT, metric.logarithmic, most=4)
    wide = (_RIGHT - left) / _STEPS
    for number in range(_STEPS):
        share = (number + 0.5) / _STEPS
        colour = _colour(scale.value(share), metric, within)
        shapes.append(Shape(rectangle(left + wide * number, bottom + 42, wide + 0.3, 8), colour))
    words += [Word(scale.at(value), bottom + 64, tick(value), axis="scale") for value in scale.ticks]
    return Plot(bottom + 70, shapes, words)


def size_against_kl(outputs: Sequence[ReportedOutput]) -> Plot:
    """A point for every evaluation, with the interval of its KL as a vertical bar."""
    points = [
        (number, output, found, found.figures.kl, found.figures.kl_ci or [found.figures.kl, found.figures.kl])
        for number, output in enumerate(outputs)
        for found in output.evaluations
        if found.figures.kl is not None
    ]
    sizes = [output.report.output_bytes / 1e6 for _, output, _, _, _ in points]
    room = 0.2 * (max(sizes) - min(sizes)) or 0.1 * max(sizes) or 1
    across = Axis(min(sizes) - room, max(sizes) + room, _LEFT, _RIGHT)
    frame = Frame(across, _upwards([end for *_, kl, ends in points for end in (kl, *ends)], 300))
    shapes, words = [], frame.words("size of the weight files, MB", "KL divergence, nats")
    for number, output, found, kl, (low, high) in points:
        x, colour = across.at(output.report.output_bytes / 1e6), COLOURS[number % len(COLOURS)]
        if high > low:
            top, bottom = frame.y.at(high), frame.y.at(max(low, frame.y.low))
            shapes.append(Shape(f"M{x} {top}V{bottom}M{x - 4} {top}h8M{x - 4} {bottom}h8", colour, line=True))
        name = label(output, found, outputs)
        said = f"{name}: {size(output.report.output_bytes)}, KL {figure(kl)} ({figure(low)} to {figure(high)})"
        shapes.append(Shape(SYMBOLS[number % len(SYMBOLS)], colour, said, at=(x, frame.y.at(kl))))
        left = x > (_LEFT + _RIGHT) / 2
        shown = shortened(name, (x - _LEFT if left else _RIGHT - x) - 12)
        words.append(Word(x - 10 if left else x + 10, frame.y.at(kl) + 4, shown, "end" if left else "start"))
    return Plot(frame.y.begin + 40, shapes, words, frame.grid)


def lines(series: Series, x: str, y: str, *, bars: bool = False) -> Plot:
    """A line for each series, or bars side by side. x, y: what the axes count."""
    places = sorted({place for _, across, _ in series for place in across})
    beside = 0.5 if bars or len(places) == 1 else 0.0
    across = Axis(places[0] - beside, places[-1] + beside, _LEFT, _RIGHT)
    values = [value for _, _, up in series for value in up]
    upwards = Axis(0, 1.1 * max(values) or 1, 240, 8) if bars else _upwards(values, 240)
    frame = Frame(across, upwards)
    wide = 0.75 * (_RIGHT - _LEFT) / (places[-1] - places[0] + 2 * beside) / len(series)
    shapes = []
    for number, (name, xs, ys) in enumerate(series):
        colour, symbol = COLOURS[number % len(COLOURS)], SYMBOLS[number % len(SYMBOLS)]
        places_of = [(across.at(place), frame.y.at(value)) for place, value in zip(xs, ys, strict=True)]
        if not bars:
            shapes.append(Shape("M" + "L".join(f"{place} {top}" for place, top in places_of), colour, line=True))
        for place, value, (at, top) in zip(xs, ys, places_of, strict=True):
            said = f"{name}, {place:g}: {figure(value)}"
            if bars:
                begin = at + wide * (number - len(series) / 2)
                shapes.append(Shape(rectangle(begin, top, wide, frame.y.begin - top), colour, said))
            else:
                shapes.append(Shape(symbol, colour, said, at=(at, top)))
    legend = [
        (name, COLOURS[number % len(COLOURS)], SYMBOLS[2 if bars else number % len(SYMBOLS)])
        for number, (name, _, _) in enumerate(series)
        if len(series) > 1
    ]
    whole = [value for value in across.ticks if value == int(value)]
    return Plot(frame.y.begin + 40, shapes, frame.words(x, y, whole), frame.grid, legend)


def parts(outputs: Sequence[tuple[str, Mapping[str, int]]]) -> Plot:
    """The bytes of each part of a model as a bar for every output, one scale for all. outputs: names and parts."""
    across = Axis(0, max(sum(sizes.values()) for _, sizes in outputs) / 1e6, 8, _RIGHT)
    names = list(dict.fromkeys(name for _, sizes in outputs for name in sizes))
    shapes, words = [], []
    for row, (output, sizes) in enumerate(outputs):
        top, begin = 18 + 48 * row, 0.0
        words.append(Word(8, top - 4, shortened(output, _RIGHT), "start", axis="y"))
        for name, nbytes in sizes.items():
            left, right = across.at(begin), across.at(begin + nbytes / 1e6)
            said = f"{output}, {name}: {size(nbytes)}, {nbytes / sum(sizes.values()):.0%}"
            shapes.append(Shape(rectangle(left, top, right - left, 20), COLOURS[names.index(name)], said))
            begin += nbytes / 1e6
    bottom = 48 * len(outputs)
    words += [Word(across.at(value), bottom + 12, tick(value), axis="x") for value in across.ticks]
    words.append(Word(WIDTH / 2, bottom + 30, "MB"))
    return Plot(bottom + 36, shapes, words, legend=[(name, COLOURS[names.index(name)], SYMBOLS[2]) for name in names])


def binned(values: Sequence[float]) -> tuple[list[float], list[float]]:
    """Middles of bins of neighbours, counted from 1, and the mean of each; at most _POINTS of them."""
    width = max(1, -(-len(values) // _POINTS))
    starts = range(0, len(values), width)
    parts = [values[start : start + width] for start in starts]
    middles = [start + (1 + len(part)) / 2 for start, part in zip(starts, parts, strict=True)]
    return middles, [significant(sum(part) / len(part)) for part in parts]


def _upwards(values: Sequence[float], bottom: float) -> Axis:
    """An axis from the bottom of a plot to its top that holds values, by ratios where they are far apart."""
    low, high = min(values), max(values)
    if low > 0 and high > _DECADE * low:
        return Axis(low / 1.3, high * 1.3, bottom, 8, logarithmic=True)
    return Axis(min(low, 0), 1.1 * high or 1, bottom, 8)


def _widened(within: tuple[float, float], metric: Metric) -> tuple[float, float]:
    """The ends of a scale of colours, which holds the metric's middle and is longer than nothing."""
    low, high = within
    if metric.logarithmic:
        low, high = max(low, 1e-12), max(high, 1e-12)
    if metric.middle is not None:
        low, high = min(low, metric.middle * 0.98), max(high, metric.middle * 1.02)
    return (low, high) if high > low else (low * 0.99, high * 1.01 or 1.0)


def _colour(value: float, metric: Metric, within: tuple[float, float]) -> str:
    """The colour of a value: along the metric's scale, or by its distance to the middle on either side."""
    ends = low, high = _widened(within, metric)
    value = min(max(value, low), high)
    if metric.logarithmic:
        low, high, value = (log10(number) for number in (*ends, value))
    if metric.middle is None:
        stops = SCALES[metric.colour]
        place = (value - low) / (high - low) * (len(stops) - 1)
        number = min(int(place), len(stops) - 2)
        return _mixed(stops[number + 1], stops[number], place - number)
    distance = value - log10(metric.middle)
    return _mixed(WORSE if distance > 0 else BETTER, ALIKE, abs(distance) / max(high, -low))


def _mixed(colour: str, other: str, share: float) -> str:
    """A share of one colour and the rest of another."""
    both = ([int(text[at : at + 2], 16) for at in (1, 3, 5)] for text in (colour, other))
    return "#" + "".join(f"{round(share * one + (1 - share) * two):02x}" for one, two in zip(*both, strict=True))
