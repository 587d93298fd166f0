"""The `llmcompress` command. Commands import what they need when they run, so that help is instant."""

import os
import sys

import typer

from llmcompress import __version__
from llmcompress.cli import console
from llmcompress.engine.ranks import refuse_several, says
from llmcompress.errors import EXIT_FAILED, EXIT_REFUSED, LlmcompressError, RunError

SHARED: set[str] = set()  # commands that several processes may share, as torchrun starts them

app = typer.Typer(
    name="llmcompress",
    help="Make large language models small, offline.\n\n"
    "Exit codes: 0 done, 1 failed, 2 refused, 3 a gate failed, 75 stopped, run again.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"llmcompress {__version__}")
        raise typer.Exit


@app.callback()
def options(
    context: typer.Context,
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version and stop."
    ),
) -> None:
    os.umask(os.umask(0o077) | 0o002)  # what libraries write is not for everybody to change either
    os.environ["HF_HUB_OFFLINE"] = "1"  # nothing here ever needs a network
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if context.invoked_subcommand not in SHARED:
        refuse_several(str(context.invoked_subcommand))


def main() -> None:
    """Entry point: run the command, turn errors into one line and an exit code."""
    from llmcompress.cli import commands

    if not app.registered_commands:
        SHARED.update(commands.register(app))
    try:
        app()
    except LlmcompressError as error:
        if says(error):
            console.fail(error)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        console.say("interrupted; finished layers are kept, the same command goes on")
        sys.exit(130)
    except MemoryError:
        console.say("error: out of memory; try a smaller --batch")
        sys.exit(EXIT_FAILED)
    except BrokenPipeError:
        sys.exit(EXIT_REFUSED)
    except Exception as error:
        # the system's own words, such as a full disk, where nothing nearer knew what was being written
        if not isinstance(error, OSError) and type(error).__name__ != "SafetensorError":
            raise
        console.fail(RunError(str(error), "finished layers are kept; the same command goes on"))
        sys.exit(EXIT_FAILED)
