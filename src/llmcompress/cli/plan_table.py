"""A plan, printed."""

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from llmcompress.cli import console
from llmcompress.formats.kv_cache import OPTION
from llmcompress.ledger import as_json

if TYPE_CHECKING:
    from llmcompress.engine.plan.plan import Plan
    from llmcompress.formats.base import Entry
    from llmcompress.methods.base import Method
    from llmcompress.pruners.base import Pruner

_TOLD = 0.01  # the least share of a decoder that is worth a name


def show_plans(plans: Sequence["Plan"], as_json: bool) -> None:
    """Print what runs would do, for people or as one JSON document: of several plans, a list."""
    if as_json:
        facts = [_facts(plan) for plan in plans]
        console.print_json(facts[0] if len(facts) == 1 else facts)
        return
    for plan in plans:
        _show(plan)


def _loaded(plan: "Plan") -> dict[str, str | list[str]]:
    from llmcompress.engine.targets.verdicts import verdicts

    return verdicts(plan.format.name, plan.entries, plan.headers.config, plan.options.machine)


def _facts(plan: "Plan") -> dict[str, Any]:
    from llmcompress.engine.plan.decoder_share import decoder_share

    cost = plan.estimate
    return {
        "output": str(plan.out),
        "format": plan.format.name,
        "architecture": plan.spec.name,
        "recipe": plan.recipe.as_data(),
        "compute_dtype": plan.dtype,
        "output_bytes": cost.output_bytes,
        "work_bytes": cost.work_bytes,
        "memory_bytes": cost.memory_bytes,
        "gpu_memory_bytes": cost.gpu_bytes,
        "batch": plan.batch,
        "passes": cost.passes,
        **cost.bits(),
        "decoder_share": round(decoder_share(plan).changed, 4),
        "matrices": [
            {
                "name": name,
                "shape": [e.out_features, e.in_features],
                "grid": e.grid.name if e.grid else None,
                "inputs": e.inputs.name if e.inputs else None,
                "method": m.name if e.grid or p is None else p.name,  # the step whose values are stored
                "pruner": None if p is None else p.name,
                "sparsity": None if p is None else p.share,
                "pattern": None if p is None else p.pattern,
            }
            for name, e, m, p in _rows(plan)
        ],
        "tensors": [{"name": t.name, "dtype": t.dtype, "shape": list(t.shape)} for t in plan.tensors],
        "targets": _loaded(plan),
        "ledger": as_json(plan.ledger),
    }


def _show(plan: "Plan") -> None:
    from llmcompress.engine.targets.verdicts import labels

    cost, options = plan.estimate, plan.options
    if plan.files:
        _tensor_table(plan)
    else:
        _matrix_table(plan)
    console.table(
        None,
        ("", ""),
        [
            (
                "model",
                f"{plan.headers.path} ({plan.spec.name}, {len(plan.layers)} layers, {console.size(cost.source_bytes)})",
            ),
            ("output", f"{plan.out} ({plan.format.name})"),
            ("decoder", _decoder(plan)),
            ("loads in", ", ".join(labels(_loaded(plan), options.machine, options.target)) or "nothing known"),
            *_unchanged(plan),
            ("weight files", f"{cost.output_bytes:,} bytes exactly{console.bits(cost.bits_per_quantised_weight)}"),
            ("peak memory", f"about {console.size(cost.memory_bytes)}"),
            *(
                [("GPU memory", f"about {console.size(cost.gpu_bytes)}, {_windows(plan)} at once")]
                if cost.gpu_bytes
                else []
            ),
            ("disk while running", f"about {console.size(cost.work_bytes)} in {plan.work}"),
            ("forward passes", f"{cost.passes} at most, layers in {plan.dtype}"),
        ],
    )
    console.ledger(as_json(plan.ledger))


def _decoder(plan: "Plan") -> str:
    from llmcompress.engine.plan.decoder_share import decoder_share

    share = decoder_share(plan)
    left = [f"{name} {part:.1%}" for name, part in share.left if part >= _TOLD]
    return f"{share.changed:.1%} of its weights change" + (f"; as they are: {', '.join(left)}" if left else "")


def _windows(plan: "Plan") -> str:
    return "1 window" if plan.batch == 1 else f"{plan.batch} windows"


def _rows(plan: "Plan") -> list[tuple[str, "Entry", "Method", "Pruner | None"]]:
    return [(matrix.module, matrix.entry, matrix.method, matrix.pruner) for matrix in plan.matrices]


def _did(method: "Method", pruner: "Pruner | None", grid: bool) -> str:
    """The steps of a matrix, as a table says them."""
    pruned = [] if pruner is None else [f"{pruner.name} {pruner.label}"]
    return ", ".join([*pruned, *([method.name] if grid else [])])


def _matrix_table(plan: "Plan") -> None:
    rounded = any(entry.inputs is not None for entry in plan.entries)
    console.table(
        None,
        ("matrix", "out x in", "method", "grid", *["inputs"] * rounded, "bits/weight", "bytes"),
        [
            (
                name,
                f"{e.out_features} x {e.in_features}",
                _did(m, p, e.grid is not None),
                e.grid.name if e.grid else "",
                *[e.inputs.name if e.inputs else ""] * rounded,
                f"{e.grid.bits_per_weight(e.in_features):.3f}" if e.grid else "",
                f"{sum(t.nbytes for t in plan.format.layout(e)):,}",
            )
            for name, e, m, p in _rows(plan)
        ],
        right=(1, 4 + rounded, 5 + rounded),
    )


def _tensor_table(plan: "Plan") -> None:
    methods = {e.source.name: _did(m, p, e.grid is not None) for _, e, m, p in _rows(plan)}
    console.table(
        None,
        ("tensor", "shape", "method", "type", "bits/weight", "bytes"),
        [
            (
                placed.tensor.name,
                " x ".join(map(str, placed.tensor.shape)),
                next((methods[name] for name in placed.tensor.sources if name in methods), ""),
                placed.type.name,
                f"{8 * placed.nbytes / prod(placed.tensor.shape):.3f}",
                f"{placed.nbytes:,}",
            )
            for file in plan.files
            for placed in file.tensors
        ],
        right=(1, 4, 5),
    )


def _unchanged(plan: "Plan") -> list[tuple[str, str]]:
    if plan.files:
        return [("files", ", ".join(file.name for file in plan.files))] if len(plan.files) > 1 else []
    changed = {entry.source.name for _, entry, _, _ in _rows(plan)}
    copied = [e for e in plan.entries if e.source.name not in changed and OPTION not in e.options]
    unchanged = f"{len(copied)} tensors, {console.size(sum(entry.source.nbytes for entry in copied))}"
    return [*_cached(plan), ("unchanged", unchanged)]


def _cached(plan: "Plan") -> list[tuple[str, str]]:
    if plan.recipe.kv_cache is None:
        return []
    scales = [entry.source for entry in plan.entries if OPTION in entry.options]
    size = sum(spec.nbytes for spec in scales)
    return [("keys and values", f"cached as {plan.recipe.kv_cache.code}, {len(scales)} scales, {size} bytes")]
