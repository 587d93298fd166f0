"""Commands made from presets: recipes that need a name and few options, such as `llmcompress nf4`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import typer

from llmcompress.cli import options as o
from llmcompress.cli.jobs import Job
from llmcompress.methods.base import Method
from llmcompress.recipe import DEFAULT_FORMAT, Calibration, Output, Recipe, build, methods
from llmcompress.transforms.awq import AwqScale
from llmcompress.transforms.base import Transform
from llmcompress.transforms.rotate import Rotate
from llmcompress.transforms.smoothquant import SmoothQuant

FP8 = """Write weights as floats of 8 bits (E4M3), one scale per row, and have inputs rounded likewise.

The result is nearly lossless at half the size, and takes seconds, as nothing but fp8-tensor is calibrated. \
vLLM and SGLang multiply fp8 by fp8 from compute capability 8.9 on; older devices leave inputs in 16 bits."""

NF4 = """Write a 4-bit checkpoint (NF4) that transformers loads with bitsandbytes.

Without --calibration weights are rounded with nothing but themselves, in seconds. \
With it, errors are measured on text and made up for (gptq on the same values): the same size, and closer to the \
original."""

INT8 = """Write an 8-bit checkpoint (LLM.int8()) that transformers loads with bitsandbytes.

bitsandbytes rounds inputs as well, and computes in 16 bits the input channels that it sees large values in. \
--outliers chooses such channels on text beforehand and keeps their weights in 16 bits too, in a format that only \
llmcompress reads."""

AWQ = """Scale channels up that see large inputs, then round weights: AWQ.

Scales are searched for the least error of the outputs, and folded into norms and matrices, so the result needs no \
more than any other checkpoint. Ranges of groups are then searched likewise."""

SMOOTHQUANT = """Share outliers out between inputs and weights, then round both to 8 bits: SmoothQuant, W8A8.

Without --alpha the strength is searched for every norm, and between up_proj and down_proj, v_proj and o_proj."""

ROTATE = """Turn hidden states and values by random Hadamard matrices, folded into the weights; nothing is rounded.

The result is a model of the same function without outlier channels. To round it in the same run, write a recipe with \
the step rotate before one such as gptq."""

Sym = Annotated[bool, typer.Option("--sym/--asym", help="Symmetric grid: every zero point is the middle code.")]
OutputClip = Annotated[
    Literal["output", "search", "minmax"],
    typer.Option(
        "--clip",
        help="Range of a group: searched for the least error of the outputs, for least squared error of the weights, "
        "or to cover every weight.",
    ),
]
PerTensor = Annotated[
    bool, typer.Option("--per-tensor/--no-per-tensor", help="One scale for a whole matrix instead of one per row.")
]
Inputs = Annotated[
    Literal["int8-token", "int8-tensor"],
    typer.Option(
        "--activations",
        help="Round inputs with a scale of each token's own, or with one for all tokens (faster, and less exact).",
    ),
]
Activations = Annotated[
    Literal["fp8-token", "fp8-tensor", "none"],
    typer.Option(
        "--activations",
        help="Round inputs with a scale of each token's own, with one for all tokens (measured on text, somewhat "
        "faster and less exact), or not at all.",
    ),
]
Clip = Annotated[
    Literal["search", "minmax"],
    typer.Option("--clip", help="Range of a row or block: searched for least squared error, or to cover every weight."),
]
Format = Annotated[
    str | None,
    typer.Option("--format", help="Checkpoint format; see `llmcompress list formats`.", rich_help_panel=o.OUTPUT),
]


@dataclass(frozen=True)
class Preset:
    """A command: transforms and a method with some of their options fixed, and others offered.

    transforms: steps before the method. method: its name; None: nothing is rounded. calibrated: the method in its place
    where --calibration is given; None: the same, on the usual text if on any. fixed: options that are not to be chosen.
    offered: names of options that are, as the fields of the method declare them; those of transforms all are. own:
    offered ones that are declared otherwise, as (annotation, default). format: of the output. beside: formats in its
    place, by the option that asks for them by not being none.

    An option that several steps or the calibration know by one name goes to all of them.
    """

    name: str
    doc: str
    method: str | None = "rtn"
    calibrated: str | None = None
    transforms: tuple[type[Transform], ...] = ()
    fixed: Mapping[str, Any] = field(default_factory=dict)
    offered: tuple[str, ...] = ()
    own: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    format: str = DEFAULT_FORMAT
    beside: Mapping[str, str] = field(default_factory=dict)

    @property
    def options(self) -> dict[str, tuple[Any, Any]]:
        """Options of the command: name to (annotation, default)."""
        fields = o.field_options(Method)
        offered = (*self.offered, "set") if self.method is not None else ()
        options: dict[str, tuple[Any, Any]] = {"model": (o.Model, ...)}
        for step in self.transforms:
            options |= o.field_options(step)
        options |= {name: fields[name] for name in offered} | dict(self.own) | o.RUN_OPTIONS
        options["format_"] = (Format, None) if self.beside else (o.Format, self.format)
        if self.calibrated is not None:
            options["calibration"] = (o.OptionalSource, None)
        return options | o.MEANS

    def recipe(self, values: Mapping[str, Any]) -> Recipe:
        """The recipe that values of the options stand for."""
        beside = (format_ for option, format_ in self.beside.items() if values[option] != "none")
        format_ = values["format_"] or next(beside, self.format)
        return Recipe(
            calibration=build(Calibration, o.calibration(values), "the calibration options"),
            steps=(*(self._transform(step, values) for step in self.transforms), *self._method(values)),
            output=build(Output, o.output({**values, "format_": format_}), "the output options"),
            kv_cache=o.kv_cache(values),
        )

    def _transform(self, step: type[Transform], values: Mapping[str, Any]) -> Transform:
        options = {name: values[name] for name in step.model_fields}
        return build(step, options, step.name)  # type: ignore[no-any-return]

    def _method(self, values: Mapping[str, Any]) -> tuple[Method, ...]:
        if self.method is None:
            return ()
        measured = self.calibrated is not None and values["calibration"] is not None
        method = methods()[str(self.calibrated) if measured else self.method]
        options = {name: values[name] for name in (*self.offered, *self.own)}
        return (build(method, {**self.fixed, **options, "set": o.parse_set(values["set"])}, self.name),)


PRESETS = (
    Preset(
        "awq",
        AWQ,
        transforms=(AwqScale,),
        offered=("bits", "group_size"),
        own={"sym": (Sym, False), "clip": (OutputClip, "output")},
    ),
    Preset(
        "smoothquant",
        SMOOTHQUANT,
        transforms=(SmoothQuant,),
        fixed={"bits": 8, "group_size": -1},
        offered=("activation_clip", "activation_percentile"),
        own={
            "activations": (Inputs, "int8-token"),
            "clip": (OutputClip, "search"),
            "per_tensor": (PerTensor, False),
        },
    ),
    Preset("rotate", ROTATE, method=None, transforms=(Rotate,), format="dense"),
    Preset(
        "fp8",
        FP8,
        fixed={"type": "fp8", "bits": 8, "group_size": -1},
        offered=("activation_clip", "activation_percentile"),
        own={"activations": (Activations, "fp8-token"), "clip": (Clip, "search")},
    ),
    Preset(
        "nf4",
        NF4,
        calibrated="gptq",
        fixed={"type": "nf4"},
        offered=("double_quant",),
        own={"clip": (Clip, "search")},
        format="bitsandbytes",
    ),
    Preset(
        "int8",
        INT8,
        calibrated="gptq",
        fixed={"type": "int8", "bits": 8},
        offered=("outliers", "outlier_threshold", "outlier_count"),
        own={"clip": (Clip, "search")},
        format="bitsandbytes",
        beside={"outliers": "int8-outliers"},
    ),
)


def command(preset: Preset, go: Callable[..., None]) -> Callable[..., None]:
    """The function of a preset's command; `go` carries its job out."""

    def run(**values: Any) -> None:
        go(Job(preset.recipe(values), values))

    return run
