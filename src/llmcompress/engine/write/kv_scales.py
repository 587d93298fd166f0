"""Static scales of cached keys and values, computed from the measured magnitudes when the output is written."""

from typing import TYPE_CHECKING, Any

from torch import Tensor

from llmcompress.formats.kv_cache import OPTION, PARTS
from llmcompress.grids.cache import scale_of
from llmcompress.store.checkpoint import DTYPES
from llmcompress.store.staging import Staging

if TYPE_CHECKING:
    from llmcompress.engine.plan.plan import Plan


_SIDES = {"k_scale": "key", "v_scale": "value"}


def kv_scale_record(plan: "Plan", staged: Staging) -> dict[str, Any] | None:
    """The part of the report on cached keys and values: the code, and the largest measured magnitudes of each layer."""
    if plan.recipe.kv_cache is None:
        return None
    layers = [staged.records(number)["kv_cache"] for number in range(len(plan.layers))]
    return {"code": plan.recipe.kv_cache.code, "largest": layers}


def kv_scale_tensors(plan: "Plan", staged: Staging) -> dict[str, Tensor]:
    """Every static scale, by the name of its tensor."""
    found = kv_scale_record(plan, staged)
    if found is None or plan.recipe.kv_cache is None:
        return {}
    made = [entry.source for entry in plan.entries if OPTION in entry.options]
    return {
        spec.name: scale_of(
            found["largest"][place // len(PARTS)][_SIDES[spec.name.rpartition(".")[2]]],
            plan.recipe.kv_cache.code,
            DTYPES[spec.dtype],
        ).reshape(spec.shape)
        for place, spec in enumerate(made)
    }
