"""The matrices that a plan changes, and one entry for every tensor of the source: what becomes of it."""

import re
from collections.abc import Iterable, Mapping

from llmcompress.arch.spec import ArchSpec, head_width
from llmcompress.engine.plan.head_matrix import FURTHER, outside_method
from llmcompress.engine.plan.matrix_options import resolve_pruner_options
from llmcompress.engine.plan.matrix_plan import MatrixPlan
from llmcompress.engine.source.further_layers import FurtherLayers
from llmcompress.engine.source.matrix_refs import Matrices
from llmcompress.errors import PlanError
from llmcompress.formats.base import Entry
from llmcompress.formats.kv_cache import OPTION, places
from llmcompress.grids.base import Spec
from llmcompress.grids.nvfp4 import Nvfp4Spec
from llmcompress.ledger import Ledger
from llmcompress.methods.base import Method
from llmcompress.methods.unrounded import Unrounded
from llmcompress.recipe import Recipe
from llmcompress.store.headers import ModelHeaders

_KEYS = re.compile(
    r"((?:^|.*\.)(\d+)\.self_attn\.(?:k_proj|qkv_proj))\.weight"
)  # the name by which loaders find attention
_AFTER_LAST = (
    "of a layer after the last, which predicts further tokens; --set 'PATTERN: {skip: false}' rounds such ones"
)


def planned_matrices(
    headers: ModelHeaders, matrices: Matrices, chosen: Mapping[str, Method | None], recipe: Recipe
) -> dict[str, MatrixPlan]:
    """The matrices that are changed, by on-disk module, in order of execution.

    chosen: the method of every module, None where nothing rounds the matrix. PlanError where matrices that read one
    input disagree on how that input is rounded, or on the options of a grid that has them share a factor.
    """
    widths = {module: width for module, width in matrices.widths.items() if module not in matrices.outside}
    pruners = {} if recipe.pruner is None else resolve_pruner_options(recipe.pruner, widths)
    planned: dict[str, MatrixPlan] = {}
    for ref in matrices.refs:
        stored = headers.tensors[f"{ref.module}.weight"].spec
        method, pruner, conv1d = chosen[ref.module], pruners.get(ref.module), ref.linear.conv1d
        outside = matrices.outside.get(ref.module)
        described = {} if method is None else method.described()
        if method is not None and outside is not None:
            method = outside_method(method, ref.module, outside)
        if method is None and pruner is not None:
            method = Unrounded(dtype=stored.dtype)
        if method is None:
            continue
        if pruner is not None and not isinstance(method, Unrounded) and method.grid.together > 1:
            raise PlanError(
                f"{method.grid.name} has no zero, and {pruner.name} leaves zeros in {ref.module}",
                "prune alone, or round to another type",
            )
        if pruner is not None and pruner.within is not None and pruner.pattern is not None and method.needs_peaks:
            raise PlanError(
                f"{ref.module} keeps outliers whole, which leaves no {pruner.pattern} to choose while it is rounded",
                "leave out joint, or the outliers",
            )
        entry = Entry(
            stored,
            grid=None if isinstance(method, Unrounded) else method.grid,
            inputs=method.inputs,
            transposed=conv1d,
            block=outside in (None, FURTHER),
            linear=True,
            embedding=ref.linear.path == matrices.spec.embed,
            further=outside == FURTHER,
            runtime=matrices.linears.get(ref.module, ref.linear.path if outside not in (None, FURTHER) else None),
            permuted=method.permutes_groups,
            options=described or method.described(),  # engines want one group of modules to say the same
        )
        planned[ref.module] = MatrixPlan(
            ref.layer,
            ref.expert,
            ref.path,
            ref.module,
            ref.space,
            conv1d,
            entry,
            method,
            pruner,
            inside=outside is None,
        )
    _check_input_scales(planned.values())
    _check_shared_factors(planned.values())
    return planned


def _check_input_scales(planned: Iterable[MatrixPlan]) -> None:
    """PlanError where matrices that read one input ask for different fixed scales: engines keep one scale per input."""
    first: dict[tuple[int, str], MatrixPlan] = {}
    for plan in planned:
        if plan.method.fixed_inputs:
            other = first.setdefault((plan.layer, plan.space), plan)
            if _input_options(other.method) != _input_options(plan.method):
                raise PlanError(
                    f"{other.module} and {plan.module} read one input, which can have one fixed scale only",
                    "give both the same --activations and --activation-clip",
                )


def _check_shared_factors(planned: Iterable[MatrixPlan]) -> None:
    """PlanError where engines fuse matrices on a grid whose factor they share, and other options would part them."""
    first: dict[tuple[str, str, Spec], MatrixPlan] = {}
    for plan in planned:
        if plan.entry.grid is not None and plan.entry.grid.joins_matrices:
            other = first.setdefault((plan.module.rpartition(".")[0], plan.space, plan.entry.grid), plan)
            if other.settings != plan.settings:
                raise PlanError(
                    f"{other.module} and {plan.module} share the factor of {plan.grid.name}, as engines fuse them, and "
                    "have other options",
                    "give both the same options with --set",
                )


def _input_options(method: Method) -> tuple[object, ...]:
    return method.activations, method.activation_clip, method.activation_percentile


def source_entries(
    headers: ModelHeaders, matrices: Matrices, planned: Mapping[str, MatrixPlan], ledger: Ledger
) -> tuple[Entry, ...]:
    """An entry for every tensor of the source; the ledger names each matrix of a layer that no declaration knows."""
    spec = matrices.spec
    further = FurtherLayers(matrices.anatomy(headers))
    conv1d = {ref.module: ref.linear.conv1d for ref in matrices.refs}
    layers = f".{(matrices.prefix or spec.layers).rpartition('.')[2]}."
    whole = f".{matrices.prefix}." if headers.wrapper is not None else layers  # towers have layers too
    entries = []
    for name, stored in headers.tensors.items():
        module = name.removesuffix(".weight")
        if name.endswith(".weight") and module in planned:
            entries.append(planned[module].entry)
            continue
        block, after = whole in f".{name}", name in further
        matrix = len(stored.spec.shape) >= 2 and block
        if matrix and module not in conv1d:
            ledger.note("unquantised", name, _AFTER_LAST if after else _why_left(name, spec))
        runtime = matrices.linears.get(module)
        linear = matrix or runtime is not None
        entries.append(
            Entry(
                stored.spec,
                transposed=conv1d.get(module, False),
                block=block,
                linear=linear,
                further=after,
                runtime=runtime,
            )
        )
    if headers.wrapper is not None:
        _note_beside(headers, matrices, ledger)
    return tuple(entries)


def _note_beside(headers: ModelHeaders, matrices: Matrices, ledger: Ledger) -> None:
    """Note how much of a multimodal model is not its language model."""
    assert headers.wrapper is not None
    inside = f"{matrices.prefix.rpartition('.')[0]}.", f"{matrices.spec.disk_path(matrices.spec.head)}."
    others = sum(not name.startswith(inside) for name in headers.tensors)
    text = headers.config["model_type"]
    ledger.note(
        "multimodal",
        str(headers.wrapper["model_type"]),
        f"its language model ({text}) is compressed, {others} other tensors are copied as they are",
    )


def _why_left(name: str, spec: ArchSpec) -> str:
    """Why a matrix inside a layer is copied unchanged."""
    if any(name.endswith(f".{spec.disk_path(linear.path)}.weight") for linear in spec.never):
        return "a router is never quantised"
    below = re.sub(r"^.*?\.\d+\.", "", name)
    whys = (
        why
        for path, why in spec.left_out.items()  # of modules, or of parameters such as those that hold all experts
        if below in (f"{spec.disk_path(path)}.weight", spec.disk_parameter(path))
    )
    return next(whys, "not a matrix that the architecture declares")


def kv_scale_entries(recipe: Recipe, format_name: str, headers: ModelHeaders, spec: ArchSpec) -> tuple[Entry, ...]:
    """An entry for every static scale of cached keys and values that a recipe asks for, in order of layers.

    PlanError where loaders would not find the scales.
    """
    if recipe.kv_cache is None:
        return ()
    found = {
        int(match[2]): places(format_name, match[1], stored.spec.dtype)
        for name, stored in headers.tensors.items()
        if (match := _KEYS.fullmatch(name))
    }
    if spec.observed or not found:
        raise PlanError(
            f"scales of cached keys and values have no known place in a {spec.name!r} model", "leave --kv-cache out"
        )
    width, block = head_width(headers.config), Nvfp4Spec.group_size
    if recipe.kv_cache.code == "nvfp4" and (width is None or width % block):
        raise PlanError(
            f"keys and values in nvfp4 have blocks of {block}, and a head of this model "
            f"{width or 'an unknown number of'} channels",
            "use --kv-cache fp8",
        )
    return tuple(
        Entry(place, block=True, options={OPTION: recipe.kv_cache.code})
        for _, scales in sorted(found.items())
        for place in scales
    )
