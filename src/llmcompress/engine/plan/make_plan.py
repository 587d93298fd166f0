"""The plan: what a run will do, decided and checked from headers alone, before any tensor is read."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from llmcompress.engine.plan.entries import kv_scale_entries, planned_matrices, source_entries
from llmcompress.engine.plan.estimate import estimate
from llmcompress.engine.plan.head_matrix import with_outside_options
from llmcompress.engine.plan.matrix_plan import MatrixPlan, followed, runs_text
from llmcompress.engine.plan.output_kinds import Contents, SafetensorsOutput, output_kind
from llmcompress.engine.plan.paths import check_disk, output_and_work
from llmcompress.engine.plan.plan import Plan
from llmcompress.engine.plan.repair import repaired_plan
from llmcompress.engine.plan.resources import choose_resources
from llmcompress.engine.plan.run_memory import memory_of_run
from llmcompress.engine.plan.run_options import Options
from llmcompress.engine.plan.transform_headers import check_order
from llmcompress.engine.source.header_checks import check_length
from llmcompress.engine.targets.verdicts import engine_notes, requested_target
from llmcompress.engine.train.training import LEAST
from llmcompress.errors import PlanError
from llmcompress.formats.base import Entry, Format
from llmcompress.formats.gguf.tensors import Factors
from llmcompress.ledger import Ledger
from llmcompress.methods.base import Method
from llmcompress.methods.unrounded import Unrounded
from llmcompress.recipe import Recipe, format_named
from llmcompress.store.side_files import side_files


def make_plan(recipe: Recipe, model: Path, options: Options | None = None) -> Plan:
    """Check everything that can be checked without reading a tensor, and decide the rest. Raises LlmcompressError."""
    options = options or Options()
    target = requested_target(options.target, options.machine, options.repair)
    if target is None:
        return _plan_for_any_target(recipe, model, options)
    return repaired_plan(
        lambda recipe: _plan_for_any_target(recipe, model, options), recipe, target, options.machine, options.repair
    )


def _plan_for_any_target(recipe: Recipe, model: Path, options: Options) -> Plan:
    """The plan of a recipe as it is, whether or not some runtime loads the result."""
    ledger, format_ = Ledger(), format_of(recipe)
    kind = output_kind(recipe, format_, options, ledger)
    source = kind.open(model)
    check_order(recipe)
    if options.adapter is not None and recipe.calibration.source == "self":
        raise PlanError("text is sampled from a model alone, without an adapter", "give a text as --calibration")
    out, work = output_and_work(recipe, model, options, kind.method_suffix)
    if out.resolve() in {file.resolve() for file in source.files}:
        raise PlanError(f"{out} is a part of the model itself", "choose another --output")
    if kind.name == SafetensorsOutput.name:
        side_files(model)  # refuses what could not be copied
    contents = kind.contents(source)
    headers, spec = contents.headers, contents.matrices.spec
    importance = contents.grids.importance(recipe, ledger)
    planned = _planned(recipe, format_, contents, ledger)
    entries = source_entries(headers, contents.matrices, planned, ledger) + kv_scale_entries(
        recipe, format_.name, headers, spec
    )
    _check_format(format_, entries, headers.config, ledger)
    layout = kind.layout(contents, entries, out, importance)
    layers = _by_layer(planned, contents)
    head = tuple(plan for plan in planned.values() if not plan.inside)
    guided = [plan for plan in planned.values() if plan.follows_gradients and plan.inside]
    if len(guided) > (count := len(followed(recipe, guided))):
        why = "transformed, pruned meanwhile, multiplied, beside outliers or experts"
        ledger.note("guided", f"{len(guided) - count} of {len(guided)} matrices", why)
    if runs_text(recipe, planned.values()):
        check_length(headers, recipe.calibration.length)
    if recipe.calibration.samples < LEAST and any(plan.recovers for plan in planned.values()):
        raise PlanError(
            f"--samples {recipe.calibration.samples} leaves too few windows to hold some back",
            f"use {LEAST} or more, or no --recover",
        )
    run_with = partial(memory_of_run, headers, recipe, (*layers, head))
    by_outliers = recipe.pruner is not None and recipe.pruner.allocation != "uniform"  # which looks at whole layers
    alone = not recipe.scales_channels and not by_outliers
    experts = alone and any(plan.expert is not None for plan in planned.values())
    resources = choose_resources(options, recipe.calibration, lambda resources: run_with(resources).model(), experts)
    if resources.experts_on_demand:
        ledger.note("experts_on_demand", str(resources.batch), "windows run at once, which read all experts of a layer")
    cost = estimate(run_with(resources), layout.nbytes, layout.bits_per_weight(entries))
    check_disk(out, work, cost)
    return Plan(
        recipe=recipe,
        headers=headers,
        spec=spec,
        prefix=contents.matrices.prefix,
        format=format_,
        output_kind=kind.name,
        out=out,
        work=work,
        resources=resources,
        options=options,
        layers=layers,
        head=head,
        entries=entries,
        tensors=layout.tensors,
        files=layout.files,
        modelfile=layout.modelfile,
        estimate=cost,
        importance=importance,
        ledger=ledger.entries,
    )


def _planned(recipe: Recipe, format_: Format, contents: Contents, ledger: Ledger) -> dict[str, MatrixPlan]:
    """The matrices that are changed, by on-disk module; PlanError where steps leave every matrix as it is."""
    step, widths = recipe.method, contents.matrices.widths
    if step is None and format_.name != "dense":
        raise PlanError(
            f"format {format_.name} is for quantised models, and no step quantises", "use --format dense, or add a step"
        )
    methods: Mapping[str, Method | None] = dict.fromkeys(widths)
    if step is not None:
        methods = contents.grids.methods(
            with_outside_options(step, contents.matrices, contents.headers), widths, ledger
        )
    planned = planned_matrices(contents.headers, contents.matrices, methods, recipe)
    if not planned and not contents.grids.may_be_empty and (step is not None or recipe.pruner is not None):
        raise PlanError("nothing is left to quantise or to prune", "loosen the patterns of --set")
    factors = {} if contents.gguf is None else contents.gguf.types.factors
    return {module: _multiplied(plan, factors.get(plan.entry.source.name, ())) for module, plan in planned.items()}


def _multiplied(plan: MatrixPlan, factors: Factors) -> MatrixPlan:
    """The plan of a matrix whose rows are multiplied by factors; a product that is not rounded stays in float32."""
    if factors and isinstance(plan.method, Unrounded):
        return replace(plan, factors=factors, method=Unrounded(dtype="F32"))
    return replace(plan, factors=factors)


def _check_format(format_: Format, entries: Sequence[Entry], config: Mapping[str, Any], ledger: Ledger) -> None:
    """PlanError for what the format cannot hold; the ledger says which runtimes read the format and not this model."""
    refusal = format_.refuses(entries, config)
    if refusal is not None:
        raise PlanError(*refusal)
    for note in engine_notes(format_.name, entries, config):
        ledger.note("engine", format_.name, note)


def _by_layer(planned: Mapping[str, MatrixPlan], contents: Contents) -> tuple[tuple[MatrixPlan, ...], ...]:
    """The matrices of every layer that the config counts, or else of every layer that has a declared matrix."""
    count = contents.headers.config.get("num_hidden_layers")
    count = count or contents.matrices.layers or max(ref.layer for ref in contents.matrices.refs) + 1
    return tuple(tuple(plan for plan in planned.values() if plan.layer == number) for number in range(count))


def format_of(recipe: Recipe) -> Format:
    """The format of a recipe's output; RecipeError if there is none of its name."""
    return format_named(recipe.output.format)  # type: ignore[no-any-return]
