"""`report` and `schema`: what was done, for people to look at and for programs to check."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from llmcompress.api.presets import PRESETS
from llmcompress.cli import console
from llmcompress.cli import options as flags
from llmcompress.errors import RecipeError
from llmcompress.recipe import methods, pruners
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
    and memory; of depth, width, lora and draft what was removed or added, with the figures of each layer.
    """
    from llmcompress.report.page import render
    from llmcompress.report.page_inputs import read_outputs
    from llmcompress.report.structure import is_structural, read_structural, render_structural
    from llmcompress.store.files import refuse_existing
    from llmcompress.store.unfinished import write_whole

    refuse_existing(page, overwrite)
    if any(is_structural(path) for path in outputs):
        if timings:
            raise RecipeError("depth, width, lora and draft write no timings", "leave --timings out")
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
    what: Annotated[
        list[str],
        typer.Argument(
            metavar="WHAT",
            help="report (report.json), evaluation, tasks, long, timings, or a command: what it prints with --json. "
            "page: what `report` prints.",
            show_default=False,
        ),
    ],
) -> None:
    """Print the JSON schema of a file, or of what a command prints with --json.

    Files are report.json, what `eval --output` saves on text, tasks or long text, and each line of timings.
    """
    from llmcompress.report.schemas import SCHEMAS, schema_text
    from llmcompress.report.schemas.printed import PRINTED

    name = schema_name(what)
    if name not in (*SCHEMAS, *PRINTED):
        raise RecipeError(f"there is no schema of {name!r}", suggest(name, [*SCHEMAS, *PRINTED]))
    typer.echo(schema_text(name), nl=False)


def schema_name(words: Sequence[str]) -> str:
    """The schema of a file or command: one for all commands that compress, and one for all their plans."""
    compressing = {*methods(), *pruners(), *PRESETS, "gguf", "run"}
    if words[0] == "plan" and set(words[1:]) <= compressing:
        return "plan"
    return "run" if len(words) == 1 and words[0] in compressing else " ".join(words)
