"""Every command, as Typer knows them, with arguments that make each of them work: new commands are found here."""

from collections.abc import Iterator
from pathlib import Path

from llmcompress.cli.app import parser


def all_commands() -> dict[tuple[str, ...], set[str]]:
    """Every command by the words that call it, with its options (`--json`, `--output`, ...)."""
    return dict(_below((), parser()))


def _below(words: tuple[str, ...], command) -> Iterator[tuple[tuple[str, ...], set[str]]]:
    if hasattr(command, "commands"):
        for name, item in command.commands.items():
            yield from _below((*words, name), item)
    else:
        yield words, {option for parameter in command.params for option in parameter.opts}


def with_option(option: str) -> list[tuple[str, ...]]:
    """The commands that have an option."""
    return [words for words, options in all_commands().items() if option in options]


def runs() -> list[tuple[str, ...]]:
    """The commands that carry one run out: they can be stopped and keep a work directory."""
    return [words for words, options in all_commands().items() if "--keep-work" in options and words[0] != "plan"]


RECIPE = "calibration: {samples: 2, length: 16}\nsteps:\n  - {method: gptq, bits: 4, group_size: 64}\n"
_BESIDE = {"gguf": ["--type", "Q4_0", "--calibration", "default"], "fp8": ["--activations", "fp8-tensor"]}


def arguments(words: tuple[str, ...], model: Path, folder: Path) -> list[object]:
    """A run, or the plan of one: the command line, which writes `folder`/out."""
    options, name = all_commands()[words], words[-1]
    given: list[object] = [*words]
    if name == "run":
        recipe = folder / "recipe.yaml"
        recipe.write_text(RECIPE)
        given.append(recipe)
    given += [model, "-o", folder / "out", *_BESIDE.get(name, [])]
    given += ["--sparsity", 0.5] if "--sparsity" in options else []
    given += ["--samples", 2, "--length", 16] if "--samples" in options else []
    given += ["--calibration", "default"] if name in ("nf4", "int8") else []
    return given
