"""Numbers and names as text on a page."""

import re
from collections.abc import Sequence
from difflib import SequenceMatcher

from llmcompress.report.page_inputs import ReportedOutput
from llmcompress.validate.evaluation import Evaluation


def figure(value: float) -> str:
    """A number with three significant digits, or more before the point."""
    if value == 0:
        return "0"
    if 1e-4 <= abs(value) < 1000:
        return f"{value:#.3g}".removesuffix(".")
    return f"{round(value):,}" if 1000 <= abs(value) < 1e6 else f"{value:.2e}"


def tick(value: float) -> str:
    """A number on an axis."""
    return f"{value:.3g}"


def size(count: float) -> str:
    """Bytes in powers of ten."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.3g} {unit}" if count < 1000 * factor else f"{count / factor:,.0f} {unit}"
    return f"{count:.0f} B"


def duration(seconds: float) -> str:
    """A readable time from seconds."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def marked_words(text: str, original: str | None) -> list[tuple[str, bool]]:
    """A text in pieces, each with whether its words are not those of the original at their place."""
    if original is None:
        return [(text, False)]
    words, others = (re.findall(r"\s*\S+|\s+", each) for each in (text, original))
    moves = SequenceMatcher(None, others, words, autojunk=False).get_opcodes()
    return [("".join(words[start:end]), kind != "equal") for kind, _, _, start, end in moves if end > start]


def label(output: ReportedOutput, found: Evaluation, outputs: Sequence[ReportedOutput]) -> str:
    """An output's name, with the text's name if the page has evaluations on several texts, and what was left out."""
    texts = {other.text.tokens_sha256 for each in outputs for other in each.evaluations}
    said = [output.name, *([found.text.name] if len(texts) > 1 else []), *filter(None, [found.figures.omitted])]
    return ", ".join(said)
