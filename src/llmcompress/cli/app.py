"""The `llmcompress` command. Commands import what they need when they run, so that help is instant."""

import os
import re
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from io import TextIOWrapper
from itertools import pairwise
from typing import Any

import typer
from typer.main import get_command

from llmcompress import __version__
from llmcompress.cli import console
from llmcompress.cli.log import log
from llmcompress.cli.suggestions import instead
from llmcompress.engine.process.ranks import refuse_several, says
from llmcompress.errors import EXIT_OK, LlmcompressError, PlanError, RecipeError, RunError

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
_USAGE = typer.BadParameter.__mro__[2]  # the base of all that is wrong with a command line
_INTERRUPTED = 130
_TRACEBACK = "LLMCOMPRESS_TRACEBACK"


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
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # torch: large tensors in large pages
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if context.invoked_subcommand not in SHARED:
        refuse_several(str(context.invoked_subcommand))


def main() -> None:
    """Entry point: run the command, turn errors into one line and an exit code."""
    _open_streams()
    parser()
    try:
        code = _run()
    finally:
        with suppress(OSError, ValueError):
            log.close()
    sys.exit(_flushed(code))


@cache
def parser() -> Any:
    """What reads command lines, with every command registered; making it takes longer than a short command does."""
    from llmcompress.cli import commands

    SHARED.update(commands.register(app))
    return get_command(app)


def _open_streams() -> None:
    """Put nothing in the place of streams that are closed: else a file would get their number, and what they print.

    Letters that stdout's encoding lacks are escaped, as Python does on stderr.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free
    if sys.stdout is None:
        _silence_stdout()
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _run() -> int:
    """The exit code of the command."""
    try:
        _refuse_empty(sys.argv[1:])
        _refuse_no_place()
        code = parser()(standalone_mode=False)
    except LlmcompressError as error:
        return _failed(error)
    except KeyboardInterrupt:
        code = _INTERRUPTED
    except MemoryError:
        return _failed(RunError("out of memory", "try a smaller --batch"))
    except BrokenPipeError:
        _silence_stdout()
        return _failed(RunError("what reads this command's output has gone"))
    except Exception as error:
        return _unforeseen(error)
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # of libraries in Rust; others end the process on purpose
            raise
        return _unforeseen(error)
    if code == _INTERRUPTED:  # Typer's own answer to Ctrl-C
        return _failed(_InterruptError("interrupted", "finished layers are kept; the same command goes on"))
    if not code:
        log.event("done", exit_code=EXIT_OK)
    return code if isinstance(code, int) else EXIT_OK


def _refuse_empty(words: Sequence[str]) -> None:
    """RecipeError for a value without a character, which would be the current directory where a path is wanted."""
    for before, word in pairwise(["the command line", *words]):
        if not word or (word.startswith("--") and word.endswith("=")):
            where = word.rstrip("=") or before
            raise RecipeError(f"an empty value follows {where}", "is a variable of the shell not set?")


def _flushed(code: int) -> int:
    """The exit code, once what was printed has gone out: a result that nobody got is a failure."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError) as error:
        _silence_stdout()
        if code == EXIT_OK:
            return _failed(RunError(f"the output of this command cannot be written: {error}"))
    return code


def _refuse_no_place() -> None:
    """PlanError where the current directory is gone: libraries would end the process."""
    try:
        os.getcwd()  # noqa: PTH109
    except OSError as error:
        raise PlanError(
            f"the current directory cannot be used: {error.strerror}", "change to one that is there"
        ) from None


def _silence_stdout() -> None:
    """Without this Python complains of a stdout that is gone as it ends."""
    sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123


def _unforeseen(error: BaseException) -> int:
    """The exit code of an error that no part of this program has put into words."""
    if os.environ.get(_TRACEBACK) == "1":
        traceback.print_exception(error)
    if isinstance(error, _USAGE):
        return _misused(error)
    if type(error).__name__ == "OutOfMemoryError":  # torch's, for the memory of a GPU
        hint = "finished layers are kept for the same --batch; else try a smaller one, --max-gpu-memory or --device cpu"
        return _failed(RunError(f"out of GPU memory ({str(error).partition('. ')[0]})", hint))
    if isinstance(error, OSError) or type(error).__name__ == "SafetensorError":
        # the system's own words, such as a full disk, where nothing nearer knew what was being written
        return _failed(RunError(str(error), "finished layers are kept; the same command goes on"))
    what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return _failed(RunError(what, f"this is a bug in llmcompress; please report it, with what {_TRACEBACK}=1 shows"))


def _misused(error: BaseException) -> int:
    """The exit code of a command line that cannot be understood."""
    context = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError":  # the help is printed already
        return RecipeError.exit_code
    message = error.format_message()  # type: ignore[attr-defined]
    if hint := instead(message):
        message = re.split(r" Did you mean| \(Possible", message)[0]  # names that look alike, and do something else
    hint = hint or (None if context is None else f"see `{context.command_path} --help`")
    return _failed(RecipeError(f"{message[:1].lower()}{message[1:].rstrip('.')}", hint))


def _has_option(words: list[str], option: str, value: str) -> bool:
    return f"{option}={value}" in words or (option, value) in pairwise(words)


def _failed(error: LlmcompressError) -> int:
    if not log.active and _has_option(sys.argv, "--log-format", "json"):  # which was not read for what came before it
        log.open()
    if says(error):
        with suppress(OSError, ValueError):  # nobody hears it where stderr is gone
            console.fail(error)
    return error.exit_code


class _InterruptError(LlmcompressError):
    """Ctrl-C."""

    exit_code = _INTERRUPTED
