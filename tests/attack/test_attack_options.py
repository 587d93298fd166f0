"""Every option of every command with values that nobody should give it."""

import random
import shutil

import pytest
from attempts import CODES, Attempt

from llmcompress.cli.app import parser
from rounds import thinned

pytestmark = pytest.mark.slow

HOSTILE = [
    "", " ", "-1", "0", "nan", "inf", "-inf", "1e999", "9" * 40, "0.5", "4.5", "1e-300", "true", "null", "../..", "/",
    "/dev/null", "x" * 5000, "a\nb", "\x1b[2J", "é漢😀", "{}", "[", "*", "%s", "a,b", "3:", "$HOME", "--", "\udcff",
    "1000000", "99999999",
]  # fmt: skip
_SHORT = {"--samples": "2", "--length": "16", "--windows": "1", "--max-windows": "1", "--steps": "2"}
_NEEDED = {
    ("export",): ["--format", "dense"],
    ("eval",): ["--ref", "{model}"],
    ("gguf",): ["--type", "Q4_0"],
    ("fp8",): ["--activations", "fp8-tensor"],
    ("kernels", "bench"): ["--gpu", "sm_90"],
}


def commands():
    """Every command: its words, and its parameters as Typer knows them."""
    waiting = [((), parser())]
    while waiting:
        words, command = waiting.pop()
        if hasattr(command, "commands"):
            waiting += [((*words, name), item) for name, item in sorted(command.commands.items())]
        else:
            yield words, command.params


@pytest.fixture(scope="module")
def stage(tiny_model_dir, tmp_path_factory, servers):
    """What arguments of commands name: three layers of the tiny model, and what the commands make of it."""
    folder = tmp_path_factory.mktemp("stage")
    made = {name: folder / name for name in ("model", "out", "work", "imatrix.gguf", "recipe.yaml", "wide")}
    shutil.copytree(tiny_model_dir, made["wide"])

    def run(*words):
        ended = servers.run(Attempt("stage", words), folder / "place")
        assert ended.code == 0, ended.err

    (folder / "place").mkdir()
    run("depth", made["wide"], "-o", made["model"], "--drop", "1", "--samples", "2", "--length", "16")
    made["recipe.yaml"].write_text("calibration: {samples: 2, length: 16}\nsteps: [{method: rtn, bits: 4}]\n")
    run("rtn", made["model"], "-o", made["out"], "--bits", "4", "--work", made["work"], "--keep-work")
    run("imatrix", made["model"], "-o", made["imatrix.gguf"], "--samples", "2", "--length", "16")
    return {name: str(path) for name, path in made.items()}


def words_of(words, parameters, stage):
    """A command line that works, without the option under attack."""
    named = {
        "model": "model", "checkpoint": "out", "out": "out", "work": "work", "files": "imatrix.gguf", "outputs": "out",
        "original": "model", "compressed": "out", "recipe": "recipe.yaml",
    }  # fmt: skip
    options = {option for parameter in parameters for option in parameter.opts}
    line = [
        *words,
        *(stage[named[item.name]] for item in parameters if item.name in named and item.opts[0][0] != "-"),
    ]
    line += ["-o", "made"] if "--output" in options and words[0] != "plan" else []
    for option, value in _SHORT.items():
        line += [option, value] if option in options else []
    line += [word.format(**stage) for word in _NEEDED.get(words[-1:] if words[0] == "plan" else words, [])]
    return line + (["--sparsity", "0.5"] if "--sparsity" in options else [])


def attempts(stage):
    draw = random.Random(0)
    for words, parameters in commands():
        base = words_of(words, parameters, stage)
        for parameter in parameters:
            if parameter.param_type_name != "option" or parameter.is_flag or parameter.opts[-1] == "--help":
                continue
            option, value = parameter.opts[0], draw.choice(HOSTILE)
            yield Attempt(
                f"{' '.join(words)} {option} {value[:20]!r}",
                [*base, option, value],
                left=["made", "made.work", value, value.strip("/").partition("/")[0]],
                codes=CODES | ({75} if option == "--deadline" else set()),
                seconds=30,
            )


def test_options(attack, stage):
    attack("options", thinned(list(attempts(stage)), 3))  # commands share most options
