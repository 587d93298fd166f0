"""Static scales for cached keys and values: planned from headers, measured layer by layer, made when all is written."""

import re
from typing import TYPE_CHECKING, Any

from torch import Tensor

from llmcompress.arch.spec import ArchSpec
from llmcompress.errors import PlanError, RunError
from llmcompress.formats.base import Entry, TensorSpec
from llmcompress.formats.kv_cache import OPTION, PARTS
from llmcompress.grids.cache import scale_of
from llmcompress.recipe import Recipe
from llmcompress.store.checkpoint import DTYPES
from llmcompress.store.headers import ModelHeaders
from llmcompress.store.staging import Staging

if TYPE_CHECKING:
    from llmcompress.engine.forward import Forward
    from llmcompress.engine.plan import Plan

_KEYS = re.compile(r"(?:^|.*\.)(\d+)\.self_attn\.(?:k_proj|qkv_proj)\.weight")  # what loaders know attention by
_SIDES = {"k_scale": "key", "v_scale": "value"}


def scale_entries(recipe: Recipe, headers: ModelHeaders, spec: ArchSpec) -> tuple[Entry, ...]:
    """An entry for every scale a recipe asks for, in order of layers; PlanError where loaders would not find them."""
    if recipe.kv_cache is None:
        return ()
    found = {
        int(match[1]): (name.rpartition(".self_attn.")[0], stored.spec.dtype)
        for name, stored in headers.tensors.items()
        if (match := _KEYS.fullmatch(name))
    }
    if spec.observed or not found:
        raise PlanError(
            f"scales of cached keys and values have no known place in a {spec.name!r} model", "leave --kv-cache out"
        )
    return tuple(
        Entry(TensorSpec(f"{layer}.self_attn.{part}", dtype, (1,)), block=True, options={OPTION: recipe.kv_cache.code})
        for _, (layer, dtype) in sorted(found.items())
        for part in PARTS
    )


def measured(forward: "Forward", number: int) -> dict[str, float]:
    """The largest magnitudes of a layer's keys, after rotation, and values; RunError if they are not finite."""
    seen = forward.key_value_range()
    if seen.key is None or seen.value is None:
        raise RunError(f"layer {number} keeps no keys and values, so that they have no scale", "leave --kv-cache out")
    largest = {"key": float(seen.key.max()), "value": float(seen.value.max())}
    for side, value in largest.items():
        if not value < float("inf"):
            raise RunError(f"{side}s of layer {number} are not finite", "use --compute-dtype float32")
    return largest


def recorded(plan: "Plan", staged: Staging) -> dict[str, Any] | None:
    """What the report says: the code, and by layer the largest magnitudes that scales were made of."""
    if plan.recipe.kv_cache is None:
        return None
    layers = [staged.records(number)["kv_cache"] for number in range(len(plan.layers))]
    return {"code": plan.recipe.kv_cache.code, "largest": layers}


def scales(plan: "Plan", staged: Staging) -> dict[str, Tensor]:
    """Every scale by the name of its tensor."""
    found = recorded(plan, staged)
    if found is None or plan.recipe.kv_cache is None:
        return {}
    made = [entry.source for entry in plan.entries if OPTION in entry.options]
    return {
        spec.name: scale_of(
            found["largest"][place // len(PARTS)][_SIDES[spec.name.rpartition(".")[2]]],
            plan.recipe.kv_cache.code,
            DTYPES[spec.dtype],
        )
        for place, spec in enumerate(made)
    }
