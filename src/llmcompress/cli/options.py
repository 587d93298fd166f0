"""Command-line options: the ones all runs share, and the ones made from the fields of a method."""

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

import typer
from pydantic.fields import FieldInfo

from llmcompress import __version__
from llmcompress.cli import console
from llmcompress.cli.gates import gated
from llmcompress.cli.log import log
from llmcompress.engine.process.ranks import leads
from llmcompress.errors import RecipeError
from llmcompress.grids.grid_type import grid_types
from llmcompress.methods.base import Method
from llmcompress.pruners.base import Pruner
from llmcompress.recipe import DEFAULT_FORMAT, Calibration
from llmcompress.transforms.base import Transform
from llmcompress.yamlfile import read_yaml

if TYPE_CHECKING:
    from llmcompress.engine.plan.run_options import Options

CALIBRATION, OUTPUT, ADVANCED, RUNNING = "Calibration", "Output", "Advanced", "Running"
FIRST = ("type", "bits", "group_size", "sparsity", "pattern", "alpha")
"""Fields of steps that help shows before all others; with them stand the options of runs without a panel."""

Model = Annotated[Path, typer.Argument(help="Model directory with config.json and safetensors.", show_default=False)]
Out = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        help="Directory to write. Default: beside the model, named after the recipe.",
    ),
]
Format = Annotated[str, typer.Option("--format", help="Checkpoint format; see `llmcompress list formats`.")]
FormatOverride = Annotated[
    str | None, typer.Option("--format", help="Another format than the recipe's.", rich_help_panel=OUTPUT)
]
ShardSize = Annotated[
    float | None,
    typer.Option(
        "--shard-size",
        help="Size of a weight file at most, in GB (10^9 bytes). Default: 5, and one file for gguf.",
        rich_help_panel=OUTPUT,
    ),
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace the output directory if it exists.", rich_help_panel=OUTPUT)
]
Source = Annotated[
    str,
    typer.Option(
        "--calibration",
        help="default (text shipped with llmcompress), self (sampled from the model), or a path: text file or folder, "
        ".jsonl, .parquet, datasets folder, token ids.",
    ),
]
OptionalSource = Annotated[
    str | None,
    typer.Option(
        "--calibration",
        help="Text to measure errors on: default (shipped with llmcompress), self, or a path. Default: none.",
        rich_help_panel=CALIBRATION,
    ),
]
Field = Annotated[
    str | None, typer.Option("--field", help="Text field of jsonl rows or a data set.", rich_help_panel=CALIBRATION)
]
Samples = Annotated[
    int, typer.Option("--samples", help="Windows of text; exactly as many are used.", rich_help_panel=CALIBRATION)
]
Length = Annotated[int, typer.Option("--length", help="Tokens per window.", rich_help_panel=CALIBRATION)]
Seed = Annotated[int, typer.Option("--seed", help="Which windows are drawn.", rich_help_panel=CALIBRATION)]


def _other(option: str, kind: Any, help_: str) -> tuple[Any, Any]:
    """An option for what a recipe says already, which holds where the option is not given."""
    made: Any = typer.Option(option, help=help_, rich_help_panel=CALIBRATION)
    return Annotated[kind, made], None


OTHER_TEXT: dict[str, tuple[Any, Any]] = {
    "calibration": _other("--calibration", str | None, "Another text than the recipe's."),
    "field": (Field, None),
    "samples": _other("--samples", int | None, "Another number of windows than the recipe's."),
    "length": _other("--length", int | None, "Other windows than the recipe's, in tokens."),
    "seed": _other("--seed", int | None, "Other windows than the recipe draws."),
}
"""What `run` and `sweep` take in place of what a recipe says of its text."""
Target = Annotated[
    str | None,
    typer.Option(
        "--target",
        help="Refuse what this runtime would not load; see `llmcompress list targets`.",
    ),
]
TensorParallel = Annotated[
    int,
    typer.Option(
        "--tp", min=1, max=1 << 16, help="Devices over which the target splits every matrix.", rich_help_panel=OUTPUT
    ),
]
GpuArchitecture = Annotated[
    str | None,
    typer.Option(
        "--gpu",
        help="The target's GPU, such as sm_90.",
        rich_help_panel=OUTPUT,
    ),
]
Repair = Annotated[
    bool,
    typer.Option(
        "--repair", help="Change the recipe so that the target loads the result, and say how.", rich_help_panel=OUTPUT
    ),
]
Device = Annotated[
    Literal["auto", "cpu", "cuda"], typer.Option("--device", help="Where layers run.", rich_help_panel=RUNNING)
]
ComputeDtype = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"],
    typer.Option(
        "--compute-dtype",
        help="Type layers run in; auto: bfloat16 where the processor is fast at it.",
        rich_help_panel=RUNNING,
    ),
]
Batch = Annotated[
    int | None,
    typer.Option(
        "--batch",
        min=1,
        max=1_000_000,
        help="Windows run through a layer at once. Default: 1024 tokens.",
        rich_help_panel=RUNNING,
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        "--threads",
        min=1,
        max=1024,
        help="Threads to compute with. Results do not depend on it.",
        rich_help_panel=RUNNING,
    ),
]
MaxMemory = Annotated[
    float | None,
    typer.Option(
        "--max-memory",
        min=0,
        max=1e9,
        help="Resident memory not to exceed, in GB (10^9 bytes): fewer threads and smaller batches, or a refusal.",
        rich_help_panel=RUNNING,
    ),
]
MaxGpuMemory = Annotated[
    float | None,
    typer.Option(
        "--max-gpu-memory",
        min=0,
        max=1e9,
        help="GPU memory of tensors not to exceed, in GB (10^9 bytes): smaller batches, or a refusal.",
        rich_help_panel=RUNNING,
    ),
]
Work = Annotated[
    Path | None, typer.Option("--work", help="Work directory. Default: OUTPUT.work.", rich_help_panel=RUNNING)
]
Stats = Annotated[
    Path | None,
    typer.Option(
        "--stats",
        help="Directory of statistics: those of another run of this model on this text are gone by instead of running "
        "it again, else this run's are kept there.",
        rich_help_panel=RUNNING,
    ),
]
Adapter = Annotated[
    Path | None,
    typer.Option(
        "--adapter",
        help="A LoRA adapter of the model, as PEFT saves it, which is merged into the weights while they are read.",
        rich_help_panel=ADVANCED,
    ),
]
KeepWork = Annotated[
    bool, typer.Option("--keep-work", help="Keep the work directory, for `export`.", rich_help_panel=RUNNING)
]
Restart = Annotated[
    bool,
    typer.Option(
        "--restart",
        help="Throw away what an earlier start has left in the work directory.",
        rich_help_panel=RUNNING,
    ),
]
Deadline = Annotated[
    float | None,
    typer.Option(
        "--deadline",
        min=0,
        max=1e9,
        help="Stop after so many seconds and one layer at least, at a safe point, exit code 75.",
        rich_help_panel=RUNNING,
    ),
]
Timings = Annotated[
    Path | None,
    typer.Option(
        "--timings",
        help="Append time and memory of each layer to this file, as lines of JSON, for `report`.",
        rich_help_panel=RUNNING,
    ),
]
Strict = Annotated[
    list[str] | None,
    typer.Option(
        "--strict",
        help="Exit with 3 if the ledger has entries of this kind, or 'any'. Repeatable.",
        rich_help_panel=RUNNING,
    ),
]
RefCache = Annotated[
    Path | None,
    typer.Option(
        "--ref-cache",
        help="Folder in which what the original's layers give for a text is kept: they run once for all models.",
    ),
]
Trust = Annotated[
    bool,
    typer.Option("--trust-remote-code", help="Run Python code that the checkpoint brings.", rich_help_panel=RUNNING),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the plan and stop.", rich_help_panel=RUNNING)]
PrintRecipe = Annotated[
    bool, typer.Option("--print-recipe", help="Print the recipe as YAML and stop.", rich_help_panel=RUNNING)
]


def _alone(context: typer.Context, wanted: bool) -> bool:
    if wanted:
        context.with_resource(console.json_alone())
    return wanted


def _logged(context: typer.Context, kind: str) -> str:
    if kind == "json":
        log.open()
        log.event("started", command=context.info_name, version=__version__)
    return kind


Json = Annotated[
    bool,
    typer.Option(
        "--json",
        help="One JSON document on stdout, nothing else there.",
        callback=_alone,
        rich_help_panel=RUNNING,
    ),
]
Junit = Annotated[
    Path | None,
    typer.Option(
        "--junit",
        help="Write what came of the run and of its gates to this file, as JUnit XML for CI systems.",
        rich_help_panel=RUNNING,
    ),
]
LogFormat = Annotated[
    Literal["text", "json"],
    typer.Option(
        "--log-format",
        help="What stderr gets: lines for people, or events as JSON, one a line.",
        envvar="LLMCOMPRESS_LOG_FORMAT",
        is_eager=True,
        callback=_logged,
        rich_help_panel=RUNNING,
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress.", rich_help_panel=RUNNING)]

KvCache = Annotated[
    Literal["fp8", "int8", "nvfp4"] | None,
    typer.Option(
        "--kv-cache",
        help="Measure scales for cached keys and values.",
        rich_help_panel=OUTPUT,
    ),
]

BaseModel = Annotated[
    str | None,
    typer.Option(
        "--base-model",
        metavar="OWNER/NAME",
        help="The model's name on a hub, for the model card. Default: what the source's files say.",
        rich_help_panel=OUTPUT,
    ),
]
License = Annotated[
    str | None,
    typer.Option(
        "--license",
        metavar="ID",
        help="Licence as hubs name it, for the model card. Default: what the source's README.md says.",
        rich_help_panel=OUTPUT,
    ),
]

RUN_OPTIONS: dict[str, tuple[Any, Any]] = {
    "out": (Out, None),
    "format_": (Format, DEFAULT_FORMAT),
    "shard_size": (ShardSize, None),
    "base_model": (BaseModel, None),
    "license": (License, None),
    "overwrite": (Overwrite, False),
    "kv_cache": (KvCache, None),
    "calibration": (Source, Calibration().source),
    "field": (Field, None),
    "samples": (Samples, Calibration().samples),
    "length": (Length, Calibration().length),
    "seed": (Seed, Calibration().seed),
}
RESOURCE_OPTIONS: dict[str, tuple[Any, Any]] = {
    "adapter": (Adapter, None),
    "target": (Target, None),
    "tp": (TensorParallel, 1),
    "gpu": (GpuArchitecture, None),
    "repair": (Repair, False),
    "device": (Device, "auto"),
    "compute_dtype": (ComputeDtype, "auto"),
    "batch": (Batch, None),
    "threads": (Threads, None),
    "max_memory": (MaxMemory, None),
    "max_gpu_memory": (MaxGpuMemory, None),
    "stats": (Stats, None),
    "work": (Work, None),
    "keep_work": (KeepWork, False),
    "restart": (Restart, False),
    "deadline": (Deadline, None),
    "timings": (Timings, None),
    "strict": (Strict, None),
    "trust_remote_code": (Trust, False),
    "dry_run": (DryRun, False),
    "print_recipe": (PrintRecipe, False),
    "json_": (Json, False),
    "junit": (Junit, None),
    "log_format": (LogFormat, "text"),
    "quiet": (Quiet, False),
}


def taken(*names: str) -> dict[str, tuple[Any, Any]]:
    """Some of the options of runs, for a command that is none."""
    both = {**RUN_OPTIONS, **RESOURCE_OPTIONS}
    return {name: both[name] for name in names}


def field_options(step: type[Method] | type[Pruner] | type[Transform]) -> dict[str, tuple[Any, Any]]:
    """Options from the fields of a step: name to (annotation, default)."""
    return fields_as_options(step.model_fields)


def fields_as_options(fields: Mapping[str, FieldInfo]) -> dict[str, tuple[Any, Any]]:
    """Options from fields: name to (annotation, default); those of a grid stand under its name in help."""
    owner = {name: grid for grid in grid_types().values() if grid.options for name in grid.options.model_fields}
    return {
        name: _option(name, field, owner[name].name if name in owner else None if name in FIRST else ADVANCED)
        for name, field in fields.items()
        if name not in owner or owner[name].chosen
    }


def _option(name: str, field: FieldInfo, panel: str | None) -> tuple[Any, Any]:
    flag = f"--{name.replace('_', '-')}"
    help_ = (field.description or "")[:1].upper() + (field.description or "")[1:] + "."
    annotation, flags, metavar, default = field.annotation, flag, None, field.default
    if name == "set":
        annotation, default, metavar, help_ = list[str] | None, None, "PATTERN: {OPTION: VALUE}", f"{help_} Repeatable."
    elif annotation is bool:
        flags = f"{flag}/{f'--a{name}' if name == 'sym' else f'--no-{flag[2:]}'}"
    elif name == "type":
        metavar = "<grid>"
    elif get_origin(annotation) is Literal and isinstance(get_args(annotation)[0], int):
        # not said is not the default, which depends on the type
        annotation, default = int | None, None
        help_ = f"{help_} One of {', '.join(map(str, get_args(field.annotation)))}."
    made = typer.Option(flags, help=help_, metavar=metavar, rich_help_panel=panel)
    return Annotated[annotation, made], default


_PANELS = (None, CALIBRATION, OUTPUT)


def _place(annotation: Any) -> int:
    """Where help shows the panel of an option: what is usually asked for, others, what runs need."""
    panel = annotation.__metadata__[0].rich_help_panel
    return _PANELS.index(panel) if panel in _PANELS else 9 if panel == RUNNING else 8 if panel == ADVANCED else 7


def command(
    function: Callable[..., None], options: dict[str, tuple[Any, Any]], name: str, doc: str
) -> Callable[..., None]:
    """`function(**values)` with a signature made of options, as Typer reads it, and its `gates` among the values."""

    def run(**values: Any) -> None:
        with gated(name, values["junit"] if leads() else None) as gates:
            function(**values, gates=gates)

    parameters = [
        inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        for key, (annotation, default) in sorted(options.items(), key=lambda item: _place(item[1][0]))
    ]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {key: annotation for key, (annotation, _) in options.items()}
    run.__name__, run.__doc__ = name, doc
    return run


def gigabytes(option: str, value: float | None) -> int | None:
    """A size in GB in bytes."""
    if value is None:
        return None
    if not 0 <= value <= 1e9:  # not for nan either
        raise RecipeError(f"{option} {value} is not a size in GB", f"write for example {option} 5")
    return int(value * 1e9)


_NO_SETTINGS = {"model", "out", "overwrite", "gates", *RESOURCE_OPTIONS}  # of a recipe


def recipe_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of options that a recipe is made from, as functions of Python take them."""
    settings = {name.rstrip("_"): value for name, value in values.items() if name not in _NO_SETTINGS}
    if settings.get("format", "") is None:
        del settings["format"]
    if "shard_size" in settings:
        settings["shard_size"] = gigabytes("--shard-size", settings["shard_size"])
    if "set" in settings:
        settings["set"] = parse_set(settings["set"])
    return settings


def changed_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """What is asked for in place of what a recipe says of its text and output, as functions of Python take it."""
    given = {name.rstrip("_"): values.get(name) for name in ("format_", "base_model", "license", *OTHER_TEXT)}
    return {name: value for name, value in given.items() if value is not None}


def run_options(values: Mapping[str, Any]) -> "Options":
    """Paths and limits of a run, from the values of those options that a command has."""
    from llmcompress.engine.plan.run_options import Options

    given = {name: values[name] for name in Options.__dataclass_fields__ if name in values}
    for name in ("max_memory", "max_gpu_memory"):
        given[name] = gigabytes(f"--{name.replace('_', '-')}", values.get(name))
    return Options(**given)


def parse_set(values: list[str] | None) -> dict[str, dict[str, Any]]:
    """`--set` values to patterns and their options: each one is a line of YAML."""
    result: dict[str, dict[str, Any]] = {}
    for value in values or []:
        try:
            data = read_yaml(value)
        except ValueError:
            data = None
        if not isinstance(data, dict) or not all(isinstance(k, str) and isinstance(v, dict) for k, v in data.items()):
            raise RecipeError(
                f"--set {value!r} is not a pattern with options", "write for example --set 'mlp.down_proj: {bits: 8}'"
            )
        for pattern, options in data.items():  # what is said again comes last, beside what was said before
            result[pattern] = {**result.pop(pattern, {}), **options}
    return result
