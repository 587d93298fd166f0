"""The plan: what a run will do, decided and checked from headers alone, before any tensor is read."""

import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from llmcompress.arch.spec import ArchSpec
from llmcompress.engine.plan.estimate import estimate
from llmcompress.engine.plan.gguf_plan import GgufModel, files_of, gguf_model
from llmcompress.engine.plan.importance import given_importance
from llmcompress.engine.plan.input_checks import check_ranges
from llmcompress.engine.plan.kv_scale_entries import scale_entries
from llmcompress.engine.plan.matrix_options import resolve, resolve_pruner
from llmcompress.engine.plan.matrix_plan import MatrixPlan
from llmcompress.engine.plan.modelfile import modelfile
from llmcompress.engine.plan.options import Options
from llmcompress.engine.plan.paths import check_disk, places
from llmcompress.engine.plan.plan import Plan
from llmcompress.engine.plan.repair import fitted
from llmcompress.engine.plan.requantise import file_matrices, file_model
from llmcompress.engine.plan.resources import choose_resources
from llmcompress.engine.plan.transform_headers import check_order, transformed_headers
from llmcompress.engine.source.gguf_input import GgufHeaders
from llmcompress.engine.source.matrices import Matrices, matrices_of
from llmcompress.engine.source.open import source_headers
from llmcompress.engine.source.quantised import DecodedHeaders, note_decoded
from llmcompress.engine.source.tensor_names import Anatomy, MatrixRef
from llmcompress.engine.targets.check import asked, engine_notes
from llmcompress.errors import PlanError, RecipeError
from llmcompress.formats.base import Entry, Format, TensorSpec
from llmcompress.formats.gguf.file import GgufFile
from llmcompress.grids.recode import holds_codes
from llmcompress.ledger import Ledger
from llmcompress.methods.base import Method
from llmcompress.methods.unrounded import Unrounded
from llmcompress.recipe import Recipe, formats
from llmcompress.registry import suggest
from llmcompress.store.headers import ModelHeaders, read_headers
from llmcompress.store.output import weights_nbytes


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
    format_ = format_of(recipe)
    headers = source_headers(model, ledger) if format_.name == "gguf" else read_headers(model)
    check_order(recipe)
    step = recipe.method
    out, work = places(recipe, model, options)
    if out.resolve() in {file.resolve() for file in headers.files}:
        raise PlanError(f"{out} is a part of the model itself", "choose another --output")
    headers, matrices, gguf = _content(headers, recipe, options, ledger)
    importance = given_importance(recipe, step, gguf, ledger)
    chosen = _chosen(step, format_, matrices, gguf, ledger)
    planned = _planned(headers, matrices, chosen, recipe, gguf, ledger)
    check_ranges(list(planned.values()))
    declared = {ref.module: ref.linear.conv1d for ref in matrices.refs}
    spec = matrices.spec
    entries = tuple(_entry(stored.spec, planned, declared, spec, ledger) for stored in headers.tensors.values())

    entries += scale_entries(recipe, headers, spec)
    refusal = format_.refuses(entries, headers.config)
    if refusal is not None:
        raise PlanError(*refusal)
    for note in engine_notes(format_.name, entries, headers.config):
        ledger.note("engine", format_.name, note)
    if isinstance(headers, DecodedHeaders):
        coded = {name for name, plan in planned.items() if holds_codes(plan.entry.grid)}
        note_decoded(headers, set() if recipe.transforms or recipe.pruner else coded, ledger)
    files: tuple[GgufFile, ...] = ()
    written = None
    if format_.name == "gguf" and gguf is not None:
        files = files_of(gguf, headers, out, recipe.output.shard_size, () if importance is None else importance.keys)
        tensors = tuple(placed.spec for file in files for placed in file.tensors)
        nbytes = sum(file.nbytes for file in files)
        written = _modelfile(gguf, headers, files, recipe, options, ledger)
    else:
        tensors = tuple(spec for entry in entries for spec in _layout(format_, entry))
        nbytes = weights_nbytes(tensors, recipe.output.shard_size)
    count = headers.config.get("num_hidden_layers") or _layer_count(matrices.refs)
    layers = tuple(tuple(plan for plan in planned.values() if plan.layer == number) for number in range(count))
    resources, cost = choose_resources(
        options, recipe.calibration.length, partial(estimate, headers, recipe, layers, nbytes)
    )
    check_disk(out, work, cost)
    return Plan(
        recipe=recipe,
        headers=headers,
        spec=spec,
        prefix=matrices.prefix,
        format=format_,
        out=out,
        work=work,
        resources=resources,
        options=options,
        layers=layers,
        entries=entries,
        tensors=tensors,
        files=files,
        modelfile=written,
        estimate=cost,
        importance=importance,
        ledger=ledger,
    )


def _content(
    headers: ModelHeaders, recipe: Recipe, options: Options, ledger: Ledger
) -> tuple[ModelHeaders, Matrices, GgufModel | None]:
    """Headers and matrices of a model, transformed; what a GGUF file would hold, where types of it are asked for."""
    step = recipe.method
    measured = (step is not None and step.needs_calibration) or recipe.calibration.imatrix is not None
    if isinstance(headers, GgufHeaders):
        if step is None or recipe.transforms or recipe.pruner:
            raise PlanError(
                f"{recipe.steps[0].name} cannot be applied to a GGUF file", "give the original model's directory"
            )
        return headers, file_matrices(headers), file_model(headers, step, recipe.output, ledger, measured)
    matrices = matrices_of(headers, options.trust_remote_code, ledger)
    headers = transformed_headers(headers, recipe, _anatomy(headers, matrices), ledger)
    typed = step is not None and step.gguf is not None
    gguf = gguf_model(headers, step.gguf, recipe.output, measured, ledger) if typed else None  # type: ignore
    return headers, matrices, gguf


def _anatomy(headers: ModelHeaders, matrices: Matrices) -> Anatomy:
    return Anatomy(headers, matrices.spec, matrices.prefix, matrices.layers)


def _chosen(
    step: Method | None, format_: Format, matrices: Matrices, gguf: GgufModel | None, ledger: Ledger
) -> dict[str, Method | None]:
    """The options of every matrix, None where it stays as it is."""
    if step is not None:
        return resolve(step, matrices.widths, ledger, None if gguf is None else gguf.types)
    if format_.name != "dense":
        raise PlanError(
            f"format {format_.name} is for quantised models, and no step quantises", "use --format dense, or add a step"
        )
    return dict.fromkeys(matrices.widths)


def _planned(
    headers: ModelHeaders,
    matrices: Matrices,
    chosen: Mapping[str, Method | None],
    recipe: Recipe,
    gguf: GgufModel | None,
    ledger: Ledger,
) -> dict[str, MatrixPlan]:
    """The matrices that are changed, by on-disk module, in order of execution."""
    planned: dict[str, MatrixPlan] = {}
    step, pruner = recipe.method, recipe.pruner
    pruners = {} if pruner is None else resolve_pruner(pruner, matrices.widths)
    for ref in matrices.refs:
        module, conv1d = ref.module, ref.linear.conv1d
        stored = headers.tensors[f"{module}.weight"].spec
        method, pruning = chosen[module], pruners.get(module)
        if method is None and gguf is None and step is not None:
            ledger.note("unquantised", module, "skipped as asked")
        if method is None and pruning is not None:
            method = Unrounded(dtype=stored.dtype)
        if method is None:
            continue
        if gguf is not None and f"{module}.weight" in gguf.copied:
            continue
        entry = Entry(
            stored,
            grid=None if isinstance(method, Unrounded) else method.grid,
            inputs=method.inputs,
            transposed=conv1d,
            block=True,
            linear=True,
            permuted=method.permutes_groups,
            options=method.described(),
        )
        planned[module] = MatrixPlan(ref.layer, ref.expert, ref.path, module, ref.space, conv1d, entry, method, pruning)
    if not planned and gguf is None and (step is not None or pruner is not None):
        raise PlanError("nothing is left to quantise or to prune", "loosen the patterns of --set")
    return planned


def _modelfile(
    gguf: GgufModel,
    headers: ModelHeaders,
    files: Sequence[GgufFile],
    recipe: Recipe,
    options: Options,
    ledger: Ledger,
) -> str | None:
    if not recipe.output.modelfile or gguf.tokenizer is None:
        return None
    written, notes = modelfile(headers.path, files[0].name, gguf.tokenizer.add_bos, options.trust_remote_code)
    for note in notes:
        ledger.note("engine", "ollama", note)
    return written


def format_of(recipe: Recipe) -> Format:
    """The format of a recipe's output; RecipeError if there is none of its name."""
    known = formats()
    if recipe.output.format not in known:
        raise RecipeError(f"unknown format {recipe.output.format!r}", suggest(recipe.output.format, list(known)))
    return known[recipe.output.format]  # type: ignore[no-any-return]


def _layer_count(refs: list[MatrixRef]) -> int:
    return max(ref.layer for ref in refs) + 1


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
    if any(name.endswith(f".{arch.disk_path(path)}.weight") for path in (linear.path for linear in arch.never)):
        return "a router is never quantised"
    below = re.sub(r"^.*?\.\d+\.", "", name).removesuffix(".weight")
    return arch.left_out.get(below, "not a matrix that the architecture declares")


def _layout(format_: Format, entry: Entry) -> list[TensorSpec]:
    return format_.layout(entry) if entry.grid is not None else [entry.source]
