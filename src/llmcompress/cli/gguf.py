"""`llmcompress gguf`: a recipe from a file type of GGUF, calibrated or not."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from llmcompress.api.fitting import budget_or_divergence, fitted_types, type_recipe
from llmcompress.api.recipes import GGUF, method_recipe
from llmcompress.api.settings import TEXT_SETTINGS
from llmcompress.cli import budget, watching
from llmcompress.cli import options as flags
from llmcompress.cli.jobs import Execution, Job
from llmcompress.cli.running import start
from llmcompress.cli.stopping import Stop
from llmcompress.engine.process.ranks import refuse_several
from llmcompress.errors import RecipeError
from llmcompress.recipe import Calibration
from llmcompress.store.output_file import is_single, output_of

TYPES = "Types"
DOC = """Write a GGUF file for llama.cpp from safetensors or from another one, in any of its types from IQ1_S to Q8_0.

Without --calibration weights are rounded with nothing but themselves, in seconds. \
With it, errors are measured on text and made up for (gptq on the type's own grid): \
the same size, and much closer to the original. \
--bpw, --size or --kl chooses types tensor by tensor by what each would lose, and gets closer still. \
--imatrix rounds by how much each input matters, as llama-quantize does: between the two."""

Model = Annotated[
    Path,
    typer.Argument(help="Model directory, original or quantised by llmcompress, or a GGUF file.", show_default=False),
]
Type = Annotated[
    list[str] | None,
    typer.Option(
        "--type",
        help="File type such as Q4_K_M; see `llmcompress list types`. Repeatable: a file of each.",
        rich_help_panel=TYPES,
    ),
]
TensorTypes = Annotated[
    list[str] | None,
    typer.Option(
        "--tensor-type",
        metavar="PATTERN=TYPE",
        help="Another type for tensors by GGUF name, such as ffn_down=Q6_K. Repeatable.",
        rich_help_panel=TYPES,
    ),
]
OutputType = Annotated[
    str | None, typer.Option("--output-type", help="Type of the output matrix.", rich_help_panel=TYPES)
]
EmbeddingType = Annotated[
    str | None, typer.Option("--embedding-type", help="Type of the token embedding.", rich_help_panel=TYPES)
]
Pure = Annotated[bool, typer.Option("--pure", help="The type's default everywhere.", rich_help_panel=TYPES)]
Search = Annotated[
    Literal["compat", "fast", "best"] | None,
    typer.Option(
        "--search",
        help="How scales are found: llama-quantize's to the bit, as good and faster, or refined jointly. "
        "Default: best with --calibration or --imatrix, else fast.",
        rich_help_panel=TYPES,
    ),
]
Requantize = Annotated[
    bool,
    typer.Option(
        "--allow-requantize",
        help="Round anew what is quantised already in a GGUF file, which adds both errors.",
        rich_help_panel=TYPES,
    ),
]
Imatrix = Annotated[
    Path | None,
    typer.Option(
        "--imatrix",
        help="Importance matrix of this model, by `llmcompress imatrix` or llama-imatrix, to round by.",
        rich_help_panel=flags.CALIBRATION,
    ),
]
Guided = Annotated[
    bool,
    typer.Option(
        "--guided",
        help="With --calibration: go by what errors do to the prediction. Takes several times longer.",
        rich_help_panel=flags.CALIBRATION,
    ),
]
Recovered = Annotated[
    Literal["none", "block"],
    typer.Option(
        "--recover",
        help="With --calibration, block: train scales and gains towards what the original's layers give.",
        rich_help_panel=flags.CALIBRATION,
    ),
]
Pre = Annotated[
    str | None,
    typer.Option(
        "--pre", help="llama.cpp's name of the pre-tokenizer, where it is not recognised.", rich_help_panel=flags.OUTPUT
    ),
]
Modelfile = Annotated[
    bool,
    typer.Option("--modelfile", help="Write a Modelfile for Ollama beside the file.", rich_help_panel=flags.OUTPUT),
]
File = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        help="File to write, or a directory if not called .gguf. Default: beside the model, named after the type.",
        rich_help_panel=flags.OUTPUT,
    ),
]
SplitSize = Annotated[
    float | None,
    typer.Option(
        "--split-max-size", help="Split into files of so many GB (10^9 bytes) at most.", rich_help_panel=flags.OUTPUT
    ),
]

_OF_RECIPE = (
    *("type_", "pure", "output_type", "embedding_type", "allow_requantize", "search", "imatrix", "pre", "modelfile"),
    *("guided", "recover", "base_model", "license"),
    *TEXT_SETTINGS,
)
_SIZES = {"--type": "type_", "--bpw": "bpw", "--size": "size", "--kl": "kl"}
OPTIONS: dict[str, tuple[Any, Any]] = {
    "model": (Model, ...),
    "type_": (Type, None),
    **budget.options("all tensors together, in place of a type; types are chosen by measured loss", kept="losses"),
    "kl": (budget.Kl, None),
    "tensor_type": (TensorTypes, None),
    "output_type": (OutputType, None),
    "embedding_type": (EmbeddingType, None),
    "pure": (Pure, False),
    "search": (Search, None),
    "allow_requantize": (Requantize, False),
    "out": (File, None),
    "split_max_size": (SplitSize, None),
    "pre": (Pre, None),
    "modelfile": (Modelfile, False),
    **flags.taken("overwrite", "base_model", "license"),
    "calibration": (flags.OptionalSource, None),
    "guided": (Guided, False),
    "recover": (Recovered, "none"),
    "imatrix": (Imatrix, None),
    **{name: flags.RUN_OPTIONS[name] for name in ("field", "samples", "length", "seed")},
    **{
        name: option for name, option in flags.RESOURCE_OPTIONS.items() if name not in ("target", "tp", "gpu", "repair")
    },
}


def command(dry: bool) -> Callable[..., None]:
    """The function of the command: a file of each type, or the one of a budget. dry: plan it and stop."""

    def run(**values: Any) -> None:
        _refuse_contradiction(values)
        execution = Execution.of(values)
        if values["type_"]:
            start(*_typed(values), execution=execution, dry=dry)
        else:
            with watching.reading(execution.quiet or execution.json):
                out = values["out"] or _named(values)
            computes = not (dry or execution.dry_run or execution.print_recipe)
            with ExitStack() as stack:
                output = output_of(out, GGUF, values["overwrite"] or not computes)
                begin = partial(stack.enter_context, output) if computes else None
                job, stop = _budgeted({**values, "out": out}, begin)
                start(job, execution=execution, dry=dry, stop=stop, output=output if computes else None)

    return run


def _typed(values: dict[str, Any]) -> list[Job]:
    """A job for each type; with several, their names are appended to places that are given."""
    kinds = list(dict.fromkeys(values["type_"]))
    jobs = []
    for kind in kinds:
        places = {} if len(kinds) == 1 else {name: _appended(values[name], kind) for name in ("out", "work")}
        given = {**values, "type_": kind, **places}
        jobs.append(Job(method_recipe(GGUF, _settings(given)), values["model"], flags.run_options(given)))
    return jobs


def _settings(values: dict[str, Any]) -> dict[str, Any]:
    """The values of options that the recipe is made from."""
    settings = {name.rstrip("_"): values[name] for name in _OF_RECIPE}
    settings["tensor_type"] = _patterns(values["tensor_type"])
    settings["shard_size"] = flags.gigabytes("--split-max-size", values["split_max_size"])
    return settings


def _appended(place: Path | None, kind: str) -> Path | None:
    if place is None:
        return None
    stem, suffix = (place.stem, place.suffix) if is_single(place) else (place.name, "")
    return place.with_name(f"{stem}-{kind}{suffix}")


def _refuse_contradiction(values: dict[str, Any]) -> None:
    """RecipeError unless exactly one thing says how large the result is."""
    given = [option for option, name in _SIZES.items() if values[name] not in (None, [])]
    if len(given) != 1 and ("--kl" not in given or "--type" in given):
        which = f"{' and '.join(given)} both say" if given else "nothing says"
        raise RecipeError(f"{which} how large the result is to be", "give one of --type, --bpw, --size and --kl")
    if given == ["--type"] and values["losses"] is not None:
        raise RecipeError("--losses is of use with --bpw, --size or --kl only", "leave it out")
    if given == ["--type"] and values["calibration"] is None:
        _refuse_text(values)
    if given != ["--type"] and values["pure"]:
        raise RecipeError(
            f"--pure asks for one type everywhere, {given[0]} for the best of each", "leave one of them out"
        )


def _refuse_text(values: dict[str, Any]) -> None:
    """RecipeError for options of a calibration text where there is none."""
    usual = {name: field.default for name, field in Calibration.model_fields.items()}
    for name in ("samples", "length", "seed", "field", "stats"):
        if values[name] != usual.get(name):
            raise RecipeError(f"--{name} is about a calibration text, and there is none", "add --calibration")


def _named(values: dict[str, Any]) -> Path:
    """The default output: beside the model, named after the budget."""
    from llmcompress.engine.plan.paths import path_beside

    return path_beside(values["model"], f"{budget.label(values)}.gguf")


def _budgeted(values: dict[str, Any], begin: Callable[[], object] | None) -> tuple[Job, Stop]:
    """The job of a budget, for which types are chosen first by what they lose on text, and its deadline.

    begin: called once the budget is known to be possible; None for a plan, beside which the output may exist.
    """
    refuse_several("choosing types by a size")
    with watching.reading(values["quiet"] or values["json_"]):
        wanted = budget_or_divergence(values["size"], values["bpw"], values["kl"])
        recipe, options = type_recipe(_settings(values)), flags.run_options(values)
    stop = Stop(values["deadline"])
    with watching.Steps("measuring", values["quiet"] or values["json_"]) as steps:
        # the deadline does not stop measuring, of which nothing would be kept: a later start would get no further
        found = fitted_types(
            recipe,
            values["model"],
            wanted,
            values["losses"],
            replace(options, overwrite=options.overwrite or begin is None),
            steps.at,
            lambda done: stop(0),
            begin or (lambda: None),
            values["kl"],
        )
    return Job(found.recipe, values["model"], options, found.ledger), stop


def _patterns(values: list[str] | None) -> dict[str, str]:
    found = {}
    for value in values or []:
        pattern, equals, kind = value.rpartition("=")
        if not (pattern and equals and kind):
            raise RecipeError(
                f"--tensor-type {value!r} is not a pattern with a type", "write for example --tensor-type ffn_down=Q6_K"
            )
        found[pattern] = kind
    return found
