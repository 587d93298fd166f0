"""Tables as rows of text: the values of the plots, for print and for readers who cannot see plots."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from llmcompress.engine.write.report_schema import LedgerEntry, Linear, Report
from llmcompress.report.cells import Cells, Metric
from llmcompress.report.figures import Series
from llmcompress.report.page_inputs import ReportedOutput
from llmcompress.report.words import duration, figure, size
from llmcompress.validate.evaluation import Evaluation, TokenFigures
from llmcompress.validate.long_evaluation import RepetitionFigures
from llmcompress.validate.task_evaluation import AskedTasks, TaskFigures

_SUBJECTS = 3  # subjects named for each kind in the ledger
_WORST = 8  # matrices named for their errors


@dataclass(frozen=True)
class Table:
    """heads: of the columns; rows: each begins with the row's head."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Value:
    """A figure as text and, below the figure, lines with its interval or a note."""

    text: str
    below: Sequence[str] = ()


@dataclass(frozen=True)
class Summary:
    """heads: outputs; groups: a title, and rows of a head with a value for each output."""

    heads: Sequence[str]
    groups: Sequence[tuple[str, Sequence[tuple[str, Sequence[Value]]]]]


_FIGURES = (
    ("kl", "KL divergence, nats"),
    ("kl_p99", "KL, 99th percentile"),
    ("perplexity", "Perplexity"),
    ("top1", "Same most likely token"),
)
_WRITTEN: dict[str, Callable[[float], str]] = {"top1": "{:.1%}".format, "perplexity": "{:.2f}".format}


def _bits(count: float | None) -> str:
    return "" if count is None else f"{count:.3f}"


def summary(outputs: Sequence[ReportedOutput]) -> Summary:
    """The outputs side by side."""
    made: list[tuple[str, list[Value]]] = [
        ("Format", [Value(output.report.format) for output in outputs]),
        ("Method", [Value(_method(output.report)) for output in outputs]),
        ("Size", [Value(size(output.report.output_bytes), [_share(output.report)]) for output in outputs]),
        ("Bits per weight", [Value(f"{output.report.bits_per_weight:.3f}") for output in outputs]),
        ("Bits per quantised weight", [Value(_bits(output.report.bits_per_quantised_weight)) for output in outputs]),
    ]
    groups: list[tuple[str, list[tuple[str, list[Value]]]]] = [("", made)]
    texts = {
        (found.text.tokens_sha256, found.figures.omitted): found for output in outputs for found in output.evaluations
    }
    for known, text in texts.items():
        each = [_of_text(output, *known) for output in outputs]
        rows = [
            (title, [_measured(None if found is None else found.figures, key) for found in each])
            for key, title in _FIGURES
            if any(found is not None and getattr(found.figures, key) is not None for found in each)
        ]
        groups.append((_text(text), rows))
    groups += _groups_of_tasks(outputs)
    groups += _groups_of_long(outputs)
    if any(output.timed is not None for output in outputs):
        timed = [output.timed for output in outputs]
        spent = [
            ("Time", [Value("") if found is None else Value(duration(found.seconds)) for found in timed]),
            ("Peak memory", [Value("") if found is None else Value(size(found.peak)) for found in timed]),
        ]
        groups.append(("The run", spent))
    return Summary([output.name for output in outputs], groups)


def _groups_of_tasks(outputs: Sequence[ReportedOutput]) -> list[tuple[str, list[tuple[str, list[Value]]]]]:
    """For each set of items that outputs were asked, the shares that each output answers right."""
    sets = {_set_of(found.asked): found.asked for output in outputs for found in output.answers}
    groups = []
    for known, asked in sets.items():
        each = [next((one for one in output.answers[::-1] if _set_of(one.asked) == known), None) for output in outputs]
        names = dict.fromkeys(name for found in each if found is not None for name in found.tasks)
        rows = [
            (name, [_answers(None if found is None else found.tasks.get(name)) for found in each]) for name in names
        ]
        if len(names) > 1:
            rows.append(("All tasks", [_answers(None if found is None else found.figures) for found in each]))
        groups.append((_asked(asked), rows))
    return groups


def _set_of(asked: AskedTasks) -> tuple[str, bool, str | None]:
    """What tells apart what was asked, and how."""
    return asked.items_sha256, asked.chat, asked.omitted


def _groups_of_long(outputs: Sequence[ReportedOutput]) -> list[tuple[str, list[tuple[str, list[Value]]]]]:
    """For each long text, divergence by position, the facts that are found again, and repetition."""
    texts = {found.text.tokens_sha256: found for output in outputs for found in output.long}
    groups = []
    for digest, text in texts.items():
        each = [
            next((one for one in output.long[::-1] if one.text.tokens_sha256 == digest), None) for output in outputs
        ]
        key, title = ("perplexity", "Perplexity") if text.reference is None else ("kl", "KL")
        rows = [
            (
                f"{title}, {band.first} to {band.last} tokens before",
                [_measured(None if found is None else found.bands[number], key) for found in each],
            )
            for number, band in enumerate(text.bands)
        ]
        needles = [None if found is None else found.needles.figures for found in each]
        written = [None if found is None else found.repetition for found in each]
        rows += [
            ("Planted facts that it writes", [_beside(found, "exact", "drop", "facts") for found in needles]),
            ("Sequences of 4 tokens repeated", [_beside(found, "repetition", "rise", "prompts") for found in written]),
            ("Texts that end in a loop", [_beside(found, "looping", "rise", "prompts") for found in written]),
        ]
        groups.append((f"In long text: {text.text.windows} windows of {text.text.length} tokens, 95% intervals", rows))
    return groups


def _answers(figures: TaskFigures | None) -> Value:
    """The share of items answered right."""
    return _beside(figures, "acc", "drop", "items")


def _beside(figures: TaskFigures | RepetitionFigures | None, name: str, change: str, of: str) -> Value:
    """A share; below it the interval, the original's share, and what is lost (drop) or more (rise) than there.

    of: what it is a share of.
    """
    if figures is None:
        return Value("")
    found = figures.model_dump()
    low, high = found[f"{name}_ci"]
    below = [f"{low:.1%} – {high:.1%}, {found.get('items', found.get('prompts'))} {of}"]
    if found[f"ref_{name}"] is not None:
        low, high = found[f"{name}_{change}_ci"]
        said = {"drop": "lost", "rise": "more"}[change]
        below += [
            f"original {found[f'ref_{name}']:.1%}",
            f"{said} {found[f'{name}_{change}']:.1%} ({low:.1%} – {high:.1%})",
        ]
    return Value(f"{found[name]:.1%}", below)


def _asked(asked: AskedTasks) -> str:
    name = "the shipped tasks" if asked.name == "default" else asked.name
    how = [f"{asked.shots} examples before each item"] * (asked.shots > 0) + ["in a chat"] * asked.chat
    how += [] if asked.omitted is None else [asked.omitted]
    return ", ".join([f"Right answers to {name}", *how, "95% intervals"])


def heat_map(cells: Cells, metric: Metric) -> Table:
    """Layers down, linears across."""
    rows = []
    for layer in cells.layers:
        values = (cells.value(metric, layer, linear) for linear in cells.linears)
        rows.append([str(layer), *("" if value is None else figure(value) for value in values)])
    return Table(["layer", *cells.linears], rows)


def series(across: str, lines: Series) -> Table:
    """The points of lines, one line a column."""
    places = sorted({x for _, xs, _ in lines for x in xs})
    found = [dict(zip(xs, ys, strict=True)) for _, xs, ys in lines]
    rows = [[f"{x:g}", *(figure(line[x]) if x in line else "" for line in found)] for x in places]
    return Table([across, *(name for name, _, _ in lines)], rows)


def worst(linears: Sequence[Linear]) -> Table:
    """The matrices of the largest error of outputs, or of weights where no output was measured."""
    measured = [(linear.loss, linear) for linear in linears if linear.loss is not None]
    heads = ["matrix", "grid", "error of outputs", "error of weights", "against plain rounding"]
    found = measured or [(linear.relative_error, linear) for linear in linears if linear.grid is not None]
    rows = [
        [
            linear.name,
            linear.grid or "not rounded",
            "" if linear.loss is None else f"{linear.loss:.2%}",
            f"{linear.relative_error:.2%}",
            "" if linear.rtn_ratio is None else figure(linear.rtn_ratio),
        ]
        for _, linear in sorted(found, key=lambda each: -each[0])[:_WORST]
    ]
    return Table(heads, rows)


def ledger(report: Report) -> Table:
    """Decisions of a run."""
    return decisions(report.ledger)


def decisions(entries: Sequence[LedgerEntry]) -> Table:
    """Entries of a ledger by kind and reason, with the names of their subjects."""
    grouped: dict[tuple[str, str], list[str]] = {}
    for entry in entries:
        grouped.setdefault((entry.kind, entry.why), []).append(entry.subject)
    rows = []
    for (kind, why), subjects in grouped.items():
        more = len(subjects) - _SUBJECTS
        named = ", ".join(subjects[:_SUBJECTS]) + (f" and {more} more" if more > 0 else "")
        rows.append([kind.replace("_", " "), named, why])
    return Table(["kind", "what", "why"], rows)


def parts(outputs: Sequence[tuple[str, Mapping[str, int]]]) -> Table:
    """The bytes of each part of a model, one output a column, with its share of the output."""
    rows = []
    for part in dict.fromkeys(name for _, sizes in outputs for name in sizes):
        found = [f"{size(own[part])}, {own[part] / sum(own.values()):.0%}" if part in own else "" for _, own in outputs]
        rows.append([part, *found])
    return Table(["part", *(name for name, _ in outputs)], rows)


def facts(output: ReportedOutput) -> list[tuple[str, str]]:
    """The facts of a run in a few lines."""
    report = output.report
    grids = Counter(linear.grid or "not rounded" for linear in report.linears)
    found = [("Matrices", ", ".join(f"{count} {grid}" for grid, count in grids.items()) or "none")]
    if report.calibration is not None:
        text = report.calibration
        found.append(("Calibration", f"{text.samples} windows of {text.length} tokens, {text.sha256[:16]}"))
    if report.imatrix is not None:
        found.append(("Importance matrix", f"{report.imatrix.file}, {report.imatrix.sha256[:16]}"))
    if report.kv_cache is not None:
        found.append(("Cached keys and values", f"scales for {report.kv_cache.code}"))
    found.append(("Layers ran in", report.compute_dtype))
    found.append(("Written by", f"llmcompress {report.llmcompress}"))
    found.append(("Source", f"{size(report.source.bytes)}, {report.source.headers_sha256[:16]}"))
    found.append(("Report", output.sha256[:16]))
    return found


def _method(report: Report) -> str:
    return " + ".join(step.method for step in report.recipe.steps)


def _share(report: Report) -> str:
    return f"{report.output_bytes / max(report.source.bytes, 1):.0%} of the source"


def _of_text(output: ReportedOutput, digest: str, omitted: str | None) -> Evaluation | None:
    """The last evaluation of an output on a text, with something left out or nothing."""
    found = [
        each for each in output.evaluations if (each.text.tokens_sha256, each.figures.omitted) == (digest, omitted)
    ]
    return found[-1] if found else None


def _measured(found: TokenFigures | None, key: str) -> Value:
    value = None if found is None else getattr(found, key)
    if found is None or value is None:
        return Value("")
    write = _WRITTEN.get(key, figure)
    below = []
    interval = getattr(found, f"{key}_ci")
    if interval is not None:
        below.append(f"{write(interval[0])} – {write(interval[1])}")
    if key == "perplexity" and found.ref_perplexity is not None:
        below.append(f"original {write(found.ref_perplexity)}")
    return Value(write(value), below)


def _text(found: Evaluation) -> str:
    name = "the shipped text" if found.text.name == "default" else found.text.name
    omitted = "" if found.figures.omitted is None else f", {found.figures.omitted}"
    return f"On {name}: {found.text.windows} windows of {found.text.length} tokens{omitted}, 95% intervals"
