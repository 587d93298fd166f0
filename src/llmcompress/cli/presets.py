"""`llmcompress nf4` and `llmcompress int8`: recipes for bitsandbytes, calibrated or not."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from llmcompress.cli import options as o
from llmcompress.cli.jobs import Job
from llmcompress.methods.base import Method
from llmcompress.recipe import Calibration, Output, Recipe, build, methods

NF4 = """Write a 4-bit checkpoint (NF4) that transformers loads with bitsandbytes.

Without --calibration weights are rounded with nothing but themselves, in seconds. \
With it, errors are measured on text and made up for (gptq on the same values): the same size, and closer to the \
original."""

INT8 = """Write an 8-bit checkpoint (LLM.int8()) that transformers loads with bitsandbytes.

bitsandbytes rounds inputs as well, and computes in 16 bits the input channels that it sees large values in. \
--outliers chooses such channels on text beforehand and keeps their weights in 16 bits too, in a format that only \
llmcompress reads."""

Source = Annotated[
    str | None,
    typer.Option(
        "--calibration",
        help="Text to measure errors on: default (shipped with llmcompress), self, or a path. Default: none.",
        rich_help_panel=o.CALIBRATION,
    ),
]
Format = Annotated[
    str | None,
    typer.Option("--format", help="Checkpoint format; see `llmcompress list formats`.", rich_help_panel=o.OUTPUT),
]


@dataclass(frozen=True)
class Preset:
    """A command that fixes some options of a method, and offers others by the names of its fields."""

    name: str
    fixed: Mapping[str, Any]
    offered: tuple[str, ...]
    doc: str

    @property
    def options(self) -> dict[str, tuple[Any, Any]]:
        """Options of the command: name to (annotation, default)."""
        fields = o.method_options(Method)
        return {
            "model": (o.Model, ...),
            **{name: fields[name] for name in (*self.offered, "set")},
            **o.RUN_OPTIONS,
            "format_": (Format, None),
            "calibration": (Source, None),
            **o.MEANS,
        }


PRESETS = (
    Preset("nf4", {"type": "nf4"}, ("double_quant", "clip"), NF4),
    Preset("int8", {"type": "int8", "bits": 8}, ("outliers", "outlier_threshold", "outlier_count", "clip"), INT8),
)


def command(preset: Preset, go: Callable[..., None]) -> Callable[..., None]:
    """The function of a preset's command; `go` carries its job out."""

    def run(**values: Any) -> None:
        go(Job(_recipe(preset, values), values))

    return run


def _recipe(preset: Preset, values: dict[str, Any]) -> Recipe:
    method = methods()["rtn" if values["calibration"] is None else "gptq"]
    options = {**preset.fixed, **{name: values[name] for name in preset.offered}, "set": o.parse_set(values["set"])}
    calibration = {key: values[key] for key in ("samples", "length", "seed")}
    if values["calibration"] is not None:
        calibration["source"] = values["calibration"]
    if values["field"] is not None:
        calibration["options"] = {"field": values["field"]}
    sidecar = values.get("outliers", "none") != "none"
    output = {
        "format": values["format_"] or ("int8-outliers" if sidecar else "bitsandbytes"),
        "shard_size": o.gigabytes("--shard-size", values["shard_size"]),
    }
    return Recipe(
        calibration=build(Calibration, calibration, "the calibration options"),
        steps=(build(method, options, method.name),),
        output=build(Output, output, "the output options"),
    )
