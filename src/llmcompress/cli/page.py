"""`report` and `schema`: what was done, for people to look at and for programs to check."""

from pathlib import Path
from typing import Annotated

import typer

from llmcompress.cli import console
from llmcompress.cli import options as flags
from llmcompress.errors import RecipeError
from llmcompress.registry import suggest

Outputs = Annotated[list[Path], typer.Argument(help="Directories or GGUF files llmcompress wrote.", show_default=False)]
Page = Annotated[Path, typer.Option("--output", "-o", help="Page to write (.html).")]
Evaluations = Annotated[
    list[Path] | None,
    typer.Option(
        "--evaluation",
        help="Result of `eval --output`, on text, with --tasks or --long; belongs to the output it is of. Repeatable.",
    ),
]
TimingsFiles = Annotated[
    list[Path] | None,
    typer.Option("--timings", help="File that a run with --timings wrote; may hold several runs. Repeatable."),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the page if it exists.")]


def register(app: typer.Typer) -> None:
    app.command("report", rich_help_panel="Look")(report)
    app.command("schema", rich_help_panel="Look")(schema)


def report(
    outputs: Outputs,
    page: Page = Path("report.html"),
    evaluation: Evaluations = None,
    timings: TimingsFiles = None,
    overwrite: Overwrite = False,
    json_: flags.Json = False,
) -> None:
    """Write one HTML page about outputs, side by side: needs no network and nothing beside it.

    A verdict, size by part, what was done to every matrix, perplexity, KL divergence along the text, the ledger, time
    and memory; of depth, width and lora what was removed or added, with the figures of each layer.
    """
    from llmcompress.report.page import render
    from llmcompress.report.page_inputs import read_outputs
    from llmcompress.report.structure import is_structural, read_structural, render_structural
    from llmcompress.store.files import refuse_existing
    from llmcompress.store.unfinished import write_whole

    refuse_existing(page, overwrite)
    if any(is_structural(path) for path in outputs):
        if timings:
            raise RecipeError("depth, width and lora write no timings", "leave --timings out")
        changed = read_structural(outputs, evaluation or [])
        names, text = [output.name for output in changed], render_structural(changed)
    else:
        found = read_outputs(outputs, evaluation or [], timings or [])
        names, text = [output.name for output in found], render(found)
    write_whole(page, text.encode(), overwrite)
    if json_:
        console.print_json({"output": str(page), "outputs": names})
    else:
        about = names[0] if len(names) == 1 else f"{len(names)} outputs"
        console.say(f"{page}: about {about}, {console.size(page.stat().st_size)}")


def schema(
    what: Annotated[str, typer.Argument(help="report, evaluation, tasks, long or timings.", show_default=False)],
) -> None:
    """Print the JSON schema of report.json, of an evaluation (on text, tasks, or --long), or of a line of timings."""
    from llmcompress.report.schemas import SCHEMAS, schema_text

    if what not in SCHEMAS:
        raise RecipeError(f"there is no schema of {what!r}", suggest(what, list(SCHEMAS)))
    typer.echo(schema_text(what), nl=False)
