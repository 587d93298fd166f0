"""The plan: what a run will do, decided and checked from headers alone, before any tensor is read."""

import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from llmcompress.arch import find
from llmcompress.arch.spec import ArchSpec, Linear
from llmcompress.engine.estimate import Estimate, Means, estimate
from llmcompress.engine.fits import check_names, check_numbers, check_shapes, numbered
from llmcompress.engine.gguf import files_of, gguf_model
from llmcompress.engine.means import choose_means
from llmcompress.engine.settings import resolve
from llmcompress.engine.targets.check import asked, engine_notes
from llmcompress.engine.targets.repair import fitted
from llmcompress.errors import CheckpointError, PlanError, RecipeError
from llmcompress.formats.base import Entry, Format, TensorSpec
from llmcompress.formats.gguf.file import GgufFile
from llmcompress.ledger import Ledger
from llmcompress.methods.base import Method
from llmcompress.recipe import Recipe, formats
from llmcompress.registry import suggest
from llmcompress.store.headers import ModelHeaders, read_headers
from llmcompress.store.output import refuse_unwritable, weights_nbytes
from llmcompress.store.output_file import output_of

FLOAT_TYPES = ("F32", "F16", "BF16")

_Found = tuple[str, int, int | None, str, str, Linear]


@dataclass(frozen=True)
class MatrixPlan:
    """One matrix to be quantised. path: module path below the layer; module: on-disk name; space: what it reads."""

    layer: int
    expert: int | None
    path: str
    module: str
    space: str
    conv1d: bool
    entry: Entry
    method: Method


@dataclass(frozen=True)
class Options:
    """Choices of a run that do not belong into a recipe: places and means."""

    out: Path | None = None
    work: Path | None = None
    device: str = "auto"
    compute_dtype: str = "auto"
    batch: int | None = None
    threads: int | None = None
    overwrite: bool = False
    keep_work: bool = False
    trust_remote_code: bool = False
    target: str | None = None
    tp: int = 1
    repair: bool = False
    max_memory: int | None = None


@dataclass(frozen=True)
class Plan:
    """A run, resolved. layers: matrices of each decoder layer in order of execution; entries: every source tensor.

    tensors: those that are written, in order. files: what they are written into, where that is GGUF.
    """

    recipe: Recipe
    headers: ModelHeaders
    spec: ArchSpec
    format: Format
    out: Path
    work: Path
    means: Means
    options: Options
    layers: tuple[tuple[MatrixPlan, ...], ...]
    entries: tuple[Entry, ...]
    tensors: tuple[TensorSpec, ...]
    files: tuple[GgufFile, ...]
    estimate: Estimate
    ledger: Ledger = field(default_factory=Ledger)

    @property
    def step(self) -> Method:
        return self.recipe.steps[0]

    @property
    def original_samples(self) -> int:
        """Windows that also run through the model as it was: whole batches."""
        asked = max((matrix.method.original_samples for layer in self.layers for matrix in layer), default=0)
        return min(-(-asked // self.batch) * self.batch, self.recipe.calibration.samples)

    @property
    def dtype(self) -> str:
        """The type layers run in."""
        return self.means.dtype

    @property
    def batch(self) -> int:
        """Windows run through a layer at once."""
        return self.means.batch

    @property
    def identity(self) -> dict[str, Any]:
        """What a work directory must agree on to go on with a run."""
        return {
            "recipe": {key: value for key, value in self.recipe.as_data().items() if key != "output"},
            "model": self.headers.contents,
            "compute_dtype": self.dtype,
            "batch": self.batch,
        }


def make_plan(recipe: Recipe, model: Path, options: Options | None = None) -> Plan:
    """Check everything that can be checked without reading a tensor, and decide the rest. Raises LlmcompressError."""
    options = options or Options()
    target = asked(options.target, options.tp, options.repair)
    if target is None:
        return _draft(recipe, model, options)
    return fitted(lambda recipe: _draft(recipe, model, options), recipe, target, options.tp, options.repair)


def _draft(recipe: Recipe, model: Path, options: Options) -> Plan:
    """A plan, whoever will load its result."""
    ledger = Ledger()
    headers = read_headers(model)
    format_ = _format(recipe)
    step = _single_step(recipe)
    _check_source(headers, options)
    check_numbers(headers)
    out, work = _places(recipe, step, model, options)
    spec = _spec(headers, options, ledger)
    matrices = _matrices(headers, spec)
    widths = {name: _shape(headers, name, linear.conv1d)[1] for name, _, _, _, _, linear in matrices}
    check_shapes(headers, spec, matrices)
    gguf = None if step.gguf is None else gguf_model(headers, step.gguf, recipe.output, step.needs_calibration, ledger)
    chosen = resolve(step, widths, ledger, None if gguf is None else gguf.types)

    planned: dict[str, MatrixPlan] = {}
    for module, layer, expert, path, space, linear in matrices:
        method = chosen[module]
        if method is None:
            if gguf is None:
                ledger.note("unquantised", module, "skipped as asked")
            continue
        entry = Entry(
            headers.tensors[f"{module}.weight"].spec,
            grid=method.grid,
            transposed=linear.conv1d,
            block=True,
            linear=True,
            permuted=method.permutes_groups,
            options=method.described(),
        )
        planned[module] = MatrixPlan(layer, expert, path, module, space, linear.conv1d, entry, method)
    if not planned and gguf is None:
        raise PlanError("nothing is left to quantise", "loosen the patterns of --set")
    declared = {module: linear.conv1d for module, _, _, _, _, linear in matrices}
    entries = tuple(_entry(stored.spec, planned, declared, spec, ledger) for stored in headers.tensors.values())

    refusal = format_.refuses(entries, headers.config)
    if refusal is not None:
        raise PlanError(*refusal)
    for note in engine_notes(format_.name, entries, headers.config):
        ledger.note("engine", format_.name, note)
    files: tuple[GgufFile, ...] = ()
    if format_.name == "gguf" and gguf is not None:
        files = files_of(gguf, headers, out, recipe.output.shard_size)
        tensors = tuple(placed.spec for file in files for placed in file.tensors)
        nbytes = sum(file.nbytes for file in files)
    else:
        tensors = tuple(spec for entry in entries for spec in _layout(format_, entry))
        nbytes = weights_nbytes(tensors, recipe.output.shard_size)
    count = headers.config.get("num_hidden_layers") or _layer_count(matrices)
    layers = tuple(tuple(plan for plan in planned.values() if plan.layer == number) for number in range(count))
    means, cost = choose_means(options, recipe.calibration.length, partial(estimate, headers, recipe, layers, nbytes))
    _check_disk(out, work, cost)
    return Plan(
        recipe=recipe,
        headers=headers,
        spec=spec,
        format=format_,
        out=out,
        work=work,
        means=means,
        options=options,
        layers=layers,
        entries=entries,
        tensors=tensors,
        files=files,
        estimate=cost,
        ledger=ledger,
    )


def _format(recipe: Recipe) -> Format:
    known = formats()
    if recipe.output.format not in known:
        raise RecipeError(f"unknown format {recipe.output.format!r}", suggest(recipe.output.format, list(known)))
    return known[recipe.output.format]  # type: ignore[no-any-return]


def _single_step(recipe: Recipe) -> Method:
    if len(recipe.steps) != 1:
        names = ", ".join(step.name for step in recipe.steps)
        raise PlanError(
            f"a recipe holds one quantising step, this one has {len(recipe.steps)}: {names}", "use set: for exceptions"
        )
    return recipe.steps[0]


def _check_source(headers: ModelHeaders, options: Options) -> None:
    if "quantization_config" in headers.config:
        method = headers.config["quantization_config"]
        name = method.get("quant_method", "unknown") if isinstance(method, Mapping) else "unknown"
        raise CheckpointError(f"{headers.path} is already quantised ({name})", "start from the original model")
    if "auto_map" in headers.config and not options.trust_remote_code:
        raise CheckpointError(
            f"{headers.path} brings its own code (auto_map in config.json)", "pass --trust-remote-code if you trust it"
        )
    if "model_type" not in headers.config:
        raise CheckpointError(
            f"{headers.path / 'config.json'} has no model_type", "give a directory as transformers saves it"
        )


def _places(recipe: Recipe, step: Method, model: Path, options: Options) -> tuple[Path, Path]:
    beside = model if model.name not in ("", "..") else model.resolve()  # `.` has no name
    out = options.out or beside.with_name(f"{model.resolve().name}-{_called(recipe, step)}")
    output_of(out, recipe.output.format, options.overwrite)  # refuses what it could not create or replace
    work = options.work or out.with_name(f"{out.name}.work")
    refuse_unwritable(work)
    if model.resolve().is_relative_to(out.resolve()):
        raise PlanError(f"{out} is the model itself, or holds it", "choose another --output")
    if work.resolve().is_relative_to(out.resolve()):
        raise PlanError(f"--work {work} is in the output directory", "choose another --work")
    return out, work


def _called(recipe: Recipe, step: Method) -> str:
    """What the default output is called after the model."""
    if step.gguf is not None:
        return f"{step.gguf.type}.gguf" if recipe.output.format == "gguf" else f"{step.name}-{step.gguf.type}"
    group = "" if step.group_size is None else "row" if step.group_size < 0 else f"g{step.group_size}"
    return f"{step.name}-w{step.bits}{group}"


def _spec(headers: ModelHeaders, options: Options, ledger: Ledger) -> ArchSpec:
    model_type = str(headers.config["model_type"])
    spec: ArchSpec | None = find(model_type)
    if spec is not None:
        return spec
    from llmcompress.model.observe import observe
    from llmcompress.model.skeleton import load_config

    observed = observe(load_config(headers.path, options.trust_remote_code), options.trust_remote_code)
    ledger.note("architecture", model_type, "no declaration: the order of its matrices was observed in a dry run")
    return observed


def _matrices(headers: ModelHeaders, spec: ArchSpec) -> list[_Found]:
    """(on-disk module, layer, expert, path, space, declaration) of every declared matrix, in order of execution."""
    experts = spec.expert_count(headers.config)
    prefix, count = _layer_prefix(headers, spec)
    check_names(headers, spec, prefix, count)
    found: list[_Found] = []
    for layer in range(count):
        before = len(found)
        for linear in spec.linears:
            for expert, path, space in spec.expand(linear, experts):
                module = f"{prefix}.{layer}.{spec.disk_path(path)}"
                if f"{module}.weight" in headers.tensors:
                    found.append((module, layer, expert, path, space, linear))
                elif spec.experts is None and not spec.observed:
                    raise CheckpointError(
                        f"tensor {module}.weight is missing from {headers.place}", "the config does not fit the weights"
                    )
        if len(found) == before:
            raise CheckpointError(f"{headers.place} has no matrices of layer {layer} ({prefix}.{layer})")
    return found


def _layer_prefix(headers: ModelHeaders, spec: ArchSpec) -> tuple[str, int]:
    """The layers' on-disk prefix (some checkpoints lack the base model's) and their number."""
    short = spec.layers.partition(".")[2]
    for prefix in (spec.layers, short):
        pattern = numbered(prefix)
        numbers = {int(found[1]) for name in headers.tensors if prefix and (found := pattern.match(name))}
        if numbers:
            if max(numbers) >= len(headers.tensors):
                raise CheckpointError(f"{headers.place} has no matrices of most layers below {prefix}.{max(numbers)}")
            return prefix, max(numbers) + 1
    raise CheckpointError(f"{headers.place} has no tensors under {spec.layers}", "the config does not fit the weights")


def _layer_count(matrices: list[_Found]) -> int:
    return max(layer for _, layer, *_ in matrices) + 1


def _shape(headers: ModelHeaders, module: str, conv1d: bool) -> tuple[int, int]:
    spec = headers.tensors[f"{module}.weight"].spec
    if len(spec.shape) != 2 or spec.dtype not in FLOAT_TYPES:
        raise CheckpointError(f"tensor {spec.name} is {spec.dtype} {list(spec.shape)}, not a floating-point matrix")
    if 0 in spec.shape:
        raise CheckpointError(f"tensor {spec.name} is {list(spec.shape)}, which holds nothing")
    rows, columns = spec.shape
    return (columns, rows) if conv1d else (rows, columns)


def _entry(
    spec: TensorSpec, planned: Mapping[str, MatrixPlan], declared: Mapping[str, bool], arch: ArchSpec, ledger: Ledger
) -> Entry:
    module = spec.name.removesuffix(".weight")
    if spec.name.endswith(".weight") and module in planned:
        return planned[module].entry
    block = f".{arch.layers.rpartition('.')[2]}." in f".{spec.name}"
    matrix = len(spec.shape) >= 2 and block
    if matrix and module not in declared:
        ledger.note("unquantised", spec.name, _why_left(spec.name, arch))
    return Entry(spec, transposed=declared.get(module, False), block=block, linear=matrix)


def _why_left(name: str, arch: ArchSpec) -> str:
    """Why a matrix inside a layer is copied unchanged."""
    if any(name.endswith(f".{arch.disk_path(path)}.weight") for path in arch.never):
        return "a router is never quantised"
    below = re.sub(r"^.*?\.\d+\.", "", name).removesuffix(".weight")
    return arch.left_out.get(below, "not a matrix that the architecture declares")


def _layout(format_: Format, entry: Entry) -> list[TensorSpec]:
    return format_.layout(entry) if entry.grid is not None else [entry.source]


def _check_disk(out: Path, work: Path, cost: Estimate) -> None:
    for place, need in ((out, cost.output_bytes), (work, cost.work_bytes)):
        parent = next(folder for folder in (place, *place.resolve().parents) if folder.exists())
        free = shutil.disk_usage(parent).free
        if free < need:
            raise PlanError(
                f"{parent} has {free / 1e9:.2f} GB free, {need / 1e9:.2f} GB are needed for {place.name}",
                "free some space, or use --output or --work elsewhere",
            )
