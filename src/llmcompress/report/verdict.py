"""What a page says first: how small an output is, and how faithful."""

from collections.abc import Sequence

from llmcompress.report.page_inputs import ReportedOutput
from llmcompress.report.words import figure, size


def verdicts(outputs: Sequence[ReportedOutput]) -> list[str]:
    """A sentence for each output."""
    return [_verdict(output, len(outputs) > 1) for output in outputs]


def _verdict(output: ReportedOutput, named: bool) -> str:
    report = output.report
    share = report.output_bytes / max(report.source.bytes, 1)
    begin = f"{output.name} has" if named else "It has"
    sized = f"{begin} {share:.0%} of the original's size ({size(report.output_bytes)})"
    whole = [found.figures for found in output.evaluations if found.figures.omitted is None]
    known = [figures for figures in whole if figures.top1 is not None]
    answers = [found.figures for found in output.answers if found.asked.omitted is None]
    if not known and answers and (original := answers[-1].ref_acc) is not None:
        right = answers[-1]
        return f"{sized} and answers {right.acc:.1%} of {right.items} items right, the original {original:.1%}."
    if not known:
        return f"{sized}; how faithful it is was not measured."
    figures = known[-1]
    said = f"{sized} and names the same most likely next token {figures.top1:.0%} of the time"
    if figures.kl is not None and figures.kl_ci is not None:
        low, high = (figure(end) for end in figures.kl_ci)
        said += f"; KL divergence {figure(figures.kl)} nats (95%: {low} to {high})"
    if figures.perplexity_ratio is not None:
        more = figures.perplexity_ratio - 1
        said += f", perplexity {abs(more):.1%} {'higher' if more > 0 else 'lower'}"
    return f"{said}."
