"""`stats`: statistics that runs kept with --stats."""

from pathlib import Path
from typing import Annotated, Any

import typer

from llmcompress.cli import console
from llmcompress.cli import options as flags
from llmcompress.errors import PlanError

Store = Annotated[Path, typer.Argument(help="Directory that runs were given as --stats.", show_default=False)]


def register(app: typer.Typer) -> None:
    stats = typer.Typer(no_args_is_help=True, help="Look at statistics that runs kept with --stats, and remove them.")
    stats.command("list")(list_)
    stats.command("prune")(prune)
    app.add_typer(stats, name="stats", rich_help_panel="Look")


def list_(store: Store, json_: flags.Json = False) -> None:
    """List kept statistics: of what model and text, gathered during what, and how large."""
    from llmcompress.store.statistics import all_statistics

    facts: list[dict[str, Any]] = [
        {
            "key": kept.key,
            "steps": kept.steps,
            "transforms": [step["method"] for step in kept.about["transforms"]],
            "tokens_sha256": kept.about["tokens"],
            "layers": kept.about["layers"],
            "complete": kept.complete,
            "bytes": kept.nbytes,
        }
        for kept in all_statistics(_existing(store))
    ]
    if json_:
        console.print_json(facts)
        return
    console.table(
        None,
        ("key", "gathered during", "tokens", "layers", "size"),
        [
            (
                fact["key"],
                ", ".join([*fact["transforms"], *fact["steps"]]),
                fact["tokens_sha256"][:12],
                f"{fact['layers']}" if fact["complete"] else "not all",
                console.size(fact["bytes"]),
            )
            for fact in facts
        ],
        right=(3, 4),
    )


def prune(
    store: Store,
    keys: Annotated[list[str] | None, typer.Argument(metavar="[KEY]...", help="Those to remove.")] = None,
    incomplete: Annotated[
        bool, typer.Option("--incomplete", help="Remove those of runs that did not come to their end.")
    ] = False,
    all_: Annotated[bool, typer.Option("--all", help="Remove every one.")] = False,
    json_: flags.Json = False,
) -> None:
    """Remove kept statistics."""
    from llmcompress.store.statistics import all_statistics

    found = all_statistics(_existing(store))
    unknown = sorted(set(keys or ()) - {kept.key for kept in found})
    if unknown:
        raise PlanError(f"{store} has no statistics {unknown[0]}", "see `llmcompress stats list`")
    if not (keys or incomplete or all_):
        raise PlanError("nothing is said to be removed", "name keys, or use --incomplete or --all")
    gone = [kept for kept in found if all_ or kept.key in (keys or ()) or (incomplete and not kept.complete)]
    size = sum(kept.nbytes for kept in gone)
    for kept in gone:
        kept.remove()
    if json_:
        console.print_json({"removed": [kept.key for kept in gone], "bytes": size})
    else:
        console.say(f"removed {len(gone)}, {console.size(size)}")


def _existing(store: Path) -> Path:
    if not store.is_dir():
        raise PlanError(f"{store} is not a directory", "give the one that runs were given as --stats")
    return store
