"""`llmcompress fp8`: weights and inputs as floats of 8 bits, with what engines do best."""

from collections.abc import Callable
from typing import Annotated, Any, Literal

import typer

from llmcompress.cli import options as o
from llmcompress.cli.jobs import Job
from llmcompress.methods.rtn import Rtn
from llmcompress.recipe import Calibration, Output, Recipe, build

DOC = """Write weights as floats of 8 bits (E4M3), one scale per row, and have inputs rounded likewise.

The result is nearly lossless at half the size, and takes seconds, as nothing but fp8-tensor is calibrated. \
vLLM and SGLang multiply fp8 by fp8 from compute capability 8.9 on; older devices leave inputs in 16 bits."""

Activations = Annotated[
    Literal["fp8-token", "fp8-tensor", "none"],
    typer.Option(
        "--activations",
        help="Round inputs with a scale of each token's own, with one for all tokens (measured on text, somewhat "
        "faster and less exact), or not at all.",
    ),
]
_METHOD = o.method_options(Rtn)
_SHARED = ("activation_clip", "activation_percentile", "clip", "set")
OPTIONS: dict[str, tuple[Any, Any]] = {
    "model": (o.Model, ...),
    "activations": (Activations, "fp8-token"),
    **{name: _METHOD[name] for name in _SHARED},
    **o.RUN_OPTIONS,
    **o.MEANS,
}


def command(go: Callable[..., None]) -> Callable[..., None]:
    """The function of the command; `go` carries a job out."""

    def run(**values: Any) -> None:
        go(Job(recipe_of(values), values))

    return run


def recipe_of(values: dict[str, Any]) -> Recipe:
    """The recipe that the options of the command stand for."""
    step = {name: values[name] for name in ("activations", *_SHARED)} | {
        "type": "fp8",
        "bits": 8,
        "group_size": -1,
        "set": o.parse_set(values["set"]),
    }
    return Recipe(
        calibration=build(Calibration, o.calibration(values), "the calibration options"),
        steps=(build(Rtn, step, "fp8"),),
        output=build(Output, o.output(values), "the output options"),
    )
