"""Presets: recipes that need a name and few options, such as `nf4`. Each is a command, and a `method` of `compress`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic.fields import FieldInfo

from llmcompress.api.settings import recipe_with, text_of
from llmcompress.methods.base import Method
from llmcompress.recipe import DEFAULT_FORMAT, Recipe, Step, build, methods
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


def _option(annotation: Any, default: object, description: str) -> FieldInfo:
    return FieldInfo(annotation=annotation, default=default, description=description)


_SYM = _option(bool, False, "symmetric grid: every zero point is the middle code")
_OUTPUT_CLIP = (
    "range of a group: searched for the least error of the outputs, for least squared error of the weights, or to "
    "cover every weight"
)
_WEIGHT_CLIP = _option(
    Literal["search", "minmax"],
    "search",
    "range of a row or block: searched for least squared error, or to cover every weight",
)
_BLOCK_CLIP = _option(
    Literal["search", "minmax"] | None,
    None,
    "range of a block: searched for least squared error (what is done with a calibration text), or to cover every "
    "weight (without one)",
)


@dataclass(frozen=True)
class Preset:
    """A recipe by name: transforms and a method with some of their options fixed, and others offered.

    transforms: steps before the method. method: its name; None: nothing is rounded. calibrated: the method in its place
    where a calibration text is given; None: the same method, on the default text if it needs any. fixed: options that
    are not to be chosen. offered: names of options that are, as the fields of the method declare them; those of
    transforms all are. own: options that are declared otherwise than by the method. textless: values of options that
    are not given, where no calibration text is. format: of the output. beside: formats in its place, by the option that
    asks for them when it is not "none".

    An option that several steps or the calibration know by one name goes to all of them.
    """

    name: str
    doc: str
    method: str | None = "rtn"
    calibrated: str | None = None
    transforms: tuple[type[Transform], ...] = ()
    fixed: Mapping[str, Any] = field(default_factory=dict)
    offered: tuple[str, ...] = ()
    own: Mapping[str, FieldInfo] = field(default_factory=dict)
    textless: Mapping[str, Any] = field(default_factory=dict)
    format: str = DEFAULT_FORMAT
    beside: Mapping[str, str] = field(default_factory=dict)

    @property
    def fields(self) -> dict[str, FieldInfo]:
        """The options of its steps by name."""
        offered = (*self.offered, "set") if self.method is not None else ()
        found = {name: option for step in self.transforms for name, option in step.model_fields.items()}
        return {**found, **{name: Method.model_fields[name] for name in offered}, **self.own}

    def recipe(self, settings: Mapping[str, Any]) -> Recipe:
        """The recipe that values of the options stand for."""
        beside = (format_ for option, format_ in self.beside.items() if settings.get(option, "none") != "none")
        return recipe_with(text_of(settings), self.steps(settings), next(beside, self.format), settings)

    def steps(self, settings: Mapping[str, Any]) -> tuple[Step, ...]:
        """The steps that values of the options stand for."""
        made: list[Step] = [
            build(step, {name: settings[name] for name in step.model_fields if name in settings}, step.name)
            for step in self.transforms
        ]
        if self.method is not None:
            text = settings.get("calibration") is not None
            method = methods()[self.calibrated if text and self.calibrated is not None else self.method]
            own = {name: option.default for name, option in self.own.items() if option.default is not None}
            names = (*self.offered, *self.own, "set")
            given = {name: settings[name] for name in names if settings.get(name) is not None}
            made.append(build(method, {**self.fixed, **own, **({} if text else self.textless), **given}, self.name))
        return tuple(made)


_ALL = (
    Preset(
        "awq",
        AWQ,
        transforms=(AwqScale,),
        offered=("bits", "group_size"),
        own={"sym": _SYM, "clip": _option(Literal["output", "search", "minmax"], "output", _OUTPUT_CLIP)},
    ),
    Preset(
        "smoothquant",
        SMOOTHQUANT,
        transforms=(SmoothQuant,),
        fixed={"bits": 8, "group_size": -1},
        offered=("activation_clip", "activation_percentile"),
        own={
            "activations": _option(
                Literal["int8-token", "int8-tensor"],
                "int8-token",
                "round inputs with a scale of each token's own, or with one for all tokens (faster, and less exact)",
            ),
            "clip": _option(Literal["output", "search", "minmax"], "search", _OUTPUT_CLIP),
            "per_tensor": _option(bool, False, "one scale for a whole matrix instead of one per row"),
        },
    ),
    Preset("rotate", ROTATE, method=None, transforms=(Rotate,), format="dense"),
    Preset(
        "fp8",
        FP8,
        fixed={"type": "fp8", "bits": 8, "group_size": -1},
        offered=("activation_clip", "activation_percentile"),
        own={
            "activations": _option(
                Literal["fp8-token", "fp8-tensor", "none"],
                "fp8-token",
                "round inputs with a scale of each token's own, with one for all tokens (measured on text, somewhat "
                "faster and less exact), or not at all",
            ),
            "clip": _WEIGHT_CLIP,
        },
    ),
    Preset(
        "nf4",
        NF4,
        calibrated="gptq",
        fixed={"type": "nf4"},
        offered=("double_quant",),
        own={"clip": _BLOCK_CLIP},
        textless={"clip": "minmax"},
        format="bitsandbytes",
    ),
    Preset(
        "int8",
        INT8,
        calibrated="gptq",
        fixed={"type": "int8", "bits": 8},
        offered=("outliers", "outlier_threshold", "outlier_count"),
        own={"clip": _WEIGHT_CLIP},
        format="bitsandbytes",
        beside={"outliers": "int8-outliers"},
    ),
)
PRESETS = {preset.name: preset for preset in _ALL}
