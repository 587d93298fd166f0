"""Entries for static scales of cached keys and values, planned from headers."""

import re

from llmcompress.arch.spec import ArchSpec
from llmcompress.errors import PlanError
from llmcompress.formats.base import Entry, TensorSpec
from llmcompress.formats.kv_cache import OPTION, PARTS
from llmcompress.recipe import Recipe
from llmcompress.store.headers import ModelHeaders

_KEYS = re.compile(r"(?:^|.*\.)(\d+)\.self_attn\.(?:k_proj|qkv_proj)\.weight")  # what loaders know attention by


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
