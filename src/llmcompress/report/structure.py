"""Pages about smaller models, adapters and draft heads: what was removed or added, with figures."""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from llmcompress import __version__
from llmcompress.errors import CheckpointError
from llmcompress.report.page_inputs import AnyEvaluation, evaluations_by_report, read_document
from llmcompress.report.schemas.structural import (
    Depth,
    DepthReport,
    Draft,
    DraftReport,
    Lora,
    LoraReport,
    Width,
    WidthReport,
)
from llmcompress.report.tables import Table, decisions
from llmcompress.report.words import figure, size
from llmcompress.store.headers import read_json
from llmcompress.validate.evaluation import report_beside
from llmcompress.validate.long_evaluation import LongEvaluation
from llmcompress.validate.task_evaluation import TaskEvaluation

_TEMPLATES = Path(__file__).parent / "templates"
_HINT = "run again, or use the llmcompress that wrote it"


AnyReport = DepthReport | WidthReport | LoraReport | DraftReport
_REPORTS: dict[str, type[AnyReport]] = {
    "depth": DepthReport,
    "width": WidthReport,
    "lora": LoraReport,
    "draft": DraftReport,
}


@dataclass(frozen=True)
class Structural:
    """The content of a page about one output. figures: titles with their tables."""

    name: str
    facts: Sequence[tuple[str, str]]
    figures: Sequence[tuple[str, Table]]
    ledger: Table


def is_structural(path: Path) -> bool:
    """Whether an output is of depth, width, lora or draft."""
    file = report_beside(path)
    return path.is_dir() and file.is_file() and not read_json(file).keys().isdisjoint(_REPORTS)


def read_structural(paths: Sequence[Path], evaluations: Sequence[Path]) -> list[Structural]:
    """Outputs with their evaluations; CheckpointError for an output that is unreadable or of another kind."""
    other = next((path for path in paths if not is_structural(path)), None)
    if other is not None:
        raise CheckpointError(
            f"{other} has other figures than outputs of depth, width, lora and draft",
            "give them apart, for a page of each",
        )
    files = [report_beside(path) for path in paths]
    digests = [sha256(file.read_bytes()).hexdigest() for file in files]
    known = evaluations_by_report(evaluations, set(digests))
    reports = [_read(file) for file in files]
    return [
        _about(path.resolve().name, report, known.get(digest, []))
        for path, report, digest in zip(paths, reports, digests, strict=True)
    ]


def render_structural(outputs: Sequence[Structural]) -> str:
    """The page: tables alone, without scripts. The same outputs give the same bytes."""
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    style = Markup((_TEMPLATES / "page.css").read_text(encoding="utf-8"))
    return environment.get_template("structure.html").render(outputs=outputs, version=__version__, style=style)


def _read(file: Path) -> AnyReport:
    kind = next(kind for kind in _REPORTS if kind in read_json(file))
    return read_document(file, _REPORTS[kind], _HINT)


def _about(name: str, report: AnyReport, evaluations: Sequence[AnyEvaluation]) -> Structural:
    facts: list[tuple[str, str]] = []
    figures: list[tuple[str, Table]] = []
    if isinstance(report, DepthReport):
        facts.append(("Layers", f"{report.depth.layers - len(report.depth.removed)} of {report.depth.layers}"))
        facts.append(("Removed", ", ".join(map(str, report.depth.removed))))
        figures += _of_depth(report.depth)
    if isinstance(report, WidthReport):
        facts.append(("Channels of the feed-forward", f"{report.width.after} of {report.width.before}"))
        facts.append(("Chosen by", report.width.by))
        facts.append(("What reads them", "fitted to those that stay" if report.width.repair else "as it was"))
        figures.append(("Error of the feed-forward's output, as a share of its energy", _of_width(report.width)))
    if isinstance(report, DepthReport | WidthReport) and (trained := report.recovery) is not None:
        falls = (f"{figure(item.kl_before)} to {figure(item.kl)} ({name})" for name, item in trained.held_back.items())
        facts.append(("Trained afterwards", f"{trained.best_step} steps, KL on text held back {', '.join(falls)}"))
    if isinstance(report, LoraReport):
        facts.append(("Rank", f"{report.lora.rank}, {report.lora.bits_per_weight_added:.3f} bits per weight more"))
        facts.append(("Made least", f"the error of {report.lora.by}"))
        figures.append(("Error of each matrix, as a share of its energy", _of_lora(report.lora)))
    if isinstance(report, DraftReport):
        made = report.draft
        facts.append(("Weights", f"{made.share_of_weights:.1%} of the model that it drafts for"))
        facts.append(("Can draft", f"{made.vocabulary:,} tokens"))
        facts.append(
            ("Trained", f"{made.steps} steps of {made.windows_at_once} windows, the best was {made.best_step}")
        )
        figures.append(("On text held back", _of_draft(made)))
    facts.append(("Size", f"{size(report.output_bytes)}; source {size(report.source.bytes)}"))
    for found in evaluations:
        if isinstance(found, TaskEvaluation):
            facts.append(("Right answers", _right(found)))
            continue
        if isinstance(found, LongEvaluation):
            facts.append(("In long text", _far(found)))
            continue
        text = f"on {found.text.name}, {found.text.windows} windows of {found.text.length} tokens"
        kl = [] if found.figures.kl is None else [f"KL divergence {figure(found.figures.kl)} nats"]
        facts.append(("Evaluated", ", ".join([*kl, f"perplexity {found.figures.perplexity:.2f}", text])))
    if report.calibration is not None:
        said = report.calibration
        facts.append(("Calibration", f"{said.samples} windows of {said.length} tokens, {said.sha256[:16]}"))
    facts.append(("Layers ran in", report.compute_dtype))
    facts.append(("Written by", f"llmcompress {report.llmcompress}"))
    return Structural(name, facts, figures, decisions(report.ledger))


def _right(found: TaskEvaluation) -> str:
    """The shares of items answered right, of all tasks and of each."""
    figures = found.figures
    original = "" if figures.ref_acc is None else f", original {figures.ref_acc:.1%}"
    each = ", ".join(f"{name} {of_task.acc:.1%}" for name, of_task in found.tasks.items())
    omitted = "" if found.asked.omitted is None else f", {found.asked.omitted}"
    return f"{figures.acc:.1%} of {figures.items}{original} ({each}){omitted}"


def _far(found: LongEvaluation) -> str:
    """The divergence at the end of long windows, the facts that are found again, and repetition."""
    last, needles, written = found.bands[-1], found.needles.figures, found.repetition
    kl = "" if last.kl is None else f"KL divergence {figure(last.kl)} nats after {last.first} to {last.last} tokens, "
    shares = (
        ("of planted facts written", needles.exact, needles.ref_exact),
        ("of sequences of 4 tokens repeated", written.repetition, written.ref_repetition),
    )
    said = [f"{share:.1%} {what}" + ("" if ref is None else f" (original {ref:.1%})") for what, share, ref in shares]
    return kl + ", ".join(said)


def _of_depth(depth: Depth) -> list[tuple[str, Table]]:
    """The scores of every round, by the first layer that would be removed."""
    what = {"cosine": "Similarity of what enters and leaves", "kl": "KL divergence without the layer, nats"}
    found = []
    for number, each in enumerate(depth.scores, 1):
        rows = [[layer, figure(score), "removed" if int(layer) in each.removed else ""]
                for layer, score in each.scores.items()]  # fmt: skip
        title = what[each.measure] + (f", round {number}" if len(depth.scores) > 1 else "")
        found.append((title, Table(["layer", "score", ""], rows)))
    return found


def _of_width(width: Width) -> Table:
    rows = [[str(each.layer), figure(each.cut), figure(each.loss)] for each in width.layers]
    return Table(["layer", "channels taken out", "as written"], rows)


def _of_draft(draft: Draft) -> Table:
    """What is foretold of text held back, by total variation."""
    depths = max((len(held.acceptance) for held in draft.held_back.values()), default=0)
    heads = ["text", "loss before", "loss", *(f"token {depth} accepted" for depth in range(1, depths + 1)), "per step"]
    rows = [
        [
            name,
            figure(held.loss_before),
            figure(held.loss),
            *(f"{share:.1%}" for share in held.acceptance),
            f"{held.accepted_per_step:.2f}",
        ]
        for name, held in draft.held_back.items()
    ]
    return Table(heads, rows)


def _of_lora(lora: Lora) -> Table:
    rows = [[each.name, " x ".join(map(str, each.shape)), figure(each.before), figure(each.after)]
            for each in lora.matrices]  # fmt: skip
    return Table(["matrix", "out x in", "compressed", "with the adapter"], rows)
