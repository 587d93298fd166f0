"""Headers and config.json of a model without some of its decoder layers; the other layers get new numbers.

Only headers are read: the tensors are those of the source under other names. Every layer is checked to be built as it
was.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from llmcompress.arch.spec import LAYER_COUNTS, further_layers
from llmcompress.engine.source.header_checks import PER_LAYER, numbered
from llmcompress.engine.source.open import config_of
from llmcompress.engine.source.quantised import in_own_type
from llmcompress.engine.source.tensor_names import Anatomy
from llmcompress.errors import PlanError
from llmcompress.formats.base import TensorSpec
from llmcompress.model.skeleton import UNUSABLE, first_line, plain, skeleton
from llmcompress.store.headers import ModelHeaders, Stored

_LISTS = ("layer", "block")  # in keys of config.json whose lists have an element for each layer
_INDICES = ("mlp_only_layers",)  # whose lists name layers by number
_BY_NUMBER = ("scale_attn_by_inverse_layer_idx",)  # what makes a layer's arithmetic depend on its number
_NAMES = ("layer_idx", "layer_id", "layer_number", "block_idx")  # attributes of modules that tell their layer's number


def kept_headers(anatomy: Anatomy, kept: Sequence[int], config: Mapping[str, Any]) -> tuple[ModelHeaders, list[str]]:
    """Headers of the model that has only the layers `kept`, in this order, codes decoded, in the model's own type; and
    the names that its tensors have in the source. config: what its config.json says."""
    places = {number: place for place, number in enumerate(kept)}
    further = range(anatomy.layers, anatomy.layers + further_layers(anatomy.headers.config))
    places |= {number: len(kept) + place for place, number in enumerate(further)}
    pattern = numbered(anatomy.prefix)
    tensors: dict[str, Stored] = {}
    names: list[str] = []
    for name, stored in in_own_type(anatomy.headers).tensors.items():
        found = pattern.match(name)
        if found is None:
            new = name
        elif int(found[1]) in places:
            new = f"{anatomy.prefix}.{places[int(found[1])]}.{name[found.end() :]}"
        else:
            continue
        tensors[new] = replace(stored, spec=TensorSpec(new, stored.spec.dtype, stored.spec.shape))
        names.append(name)
    return ModelHeaders(anatomy.headers.path, config, tensors, anatomy.headers.files), names


def kept_config(anatomy: Anatomy, kept: Sequence[int], trust_remote_code: bool = False) -> dict[str, Any]:
    """config.json of the model that has only the layers `kept`.

    PlanError if transformers would build one of them otherwise than it was, such as with another kind of attention.
    """
    config, count = anatomy.headers.config, anatomy.layers
    before = config_of(anatomy.headers, trust_remote_code)
    for key in _BY_NUMBER:
        if getattr(before, key, False):
            raise PlanError(f"{key} in config.json makes a layer depend on its number, so none can be dropped")
    changed = {**config, **_lists(plain(before), config, kept, count)}
    stated = [key for key in LAYER_COUNTS if key in config] or ["num_hidden_layers"]
    changed |= dict.fromkeys(stated, len(kept))
    changed |= _numbers(config, kept, count)
    try:
        after = type(before).from_dict(dict(changed))
    except UNUSABLE as error:
        why = f"a config.json of {len(kept)} layers would not be read: {first_line(error)}"
        raise PlanError(why, "the model says something of every layer that is not known here") from None
    _refuse_unlike(anatomy, before, after, kept, trust_remote_code)
    return changed


def _lists(resolved: Mapping[str, Any], config: Mapping[str, Any], kept: Sequence[int], count: int) -> dict[str, Any]:
    """Lists with an element for each layer. Lists that transformers makes by a rule are written out, since the rule
    may give something else for fewer layers."""
    found = {}
    for key, value in {**resolved, **config}.items():
        per_layer = key in PER_LAYER or (any(word in key for word in _LISTS) and key not in _INDICES)
        if not (isinstance(value, list) and len(value) == count and per_layer):
            continue
        if key in config or any(item != value[0] for item in value):
            found[key] = [value[number] for number in kept]
    return found


def _numbers(config: Mapping[str, Any], kept: Sequence[int], count: int) -> dict[str, Any]:
    """Keys of config.json that name layers by number."""
    found: dict[str, Any] = {}
    dense = {number for key in _INDICES for number in config.get(key) or ()}
    step = config.get("decoder_sparse_step")
    if isinstance(step, int) and step > 1:  # every so many layers there are experts: now said of each layer
        dense |= {number for number in range(count) if (number + 1) % step}
        found["decoder_sparse_step"] = 1
    for key in _INDICES:
        if key in config or dense:
            found[key] = [place for place, number in enumerate(kept) if number in dense]
    first = config.get("max_window_layers")  # of Qwen: so many layers look at everything
    if isinstance(first, int):
        found["max_window_layers"] = sum(number < first for number in kept)
    return found


def _refuse_unlike(anatomy: Anatomy, before: Any, after: Any, kept: Sequence[int], trust_remote_code: bool) -> None:
    """PlanError unless transformers builds every kept layer, and all outside the layers, as it was."""
    models = [skeleton(config, anatomy.spec, trust_remote_code) for config in (before, after)]
    was_outside, is_outside = (_outside(model, anatomy.spec.layers) for model in models)
    for name, shape in was_outside.items():
        if is_outside.get(name) != shape:
            raise PlanError(
                f"{name} of shape {list(shape)} holds something of every layer, so none can be dropped",
                "such a model stays as deep as it is",
            )
    old, new = (list(model.get_submodule(anatomy.spec.layers).children()) for model in models)
    for place, number in enumerate(kept):
        was, becomes = _traits(old[number]), _traits(new[place])
        for key in sorted(was.keys() | becomes.keys()):
            if was.get(key) != becomes.get(key):
                raise PlanError(
                    f"layer {number} would become another as layer {place}: {key} was {was.get(key)!r}, "
                    f"would be {becomes.get(key)!r}",
                    "this family builds its layers by their numbers; drop others",
                )


def _outside(model: nn.Module, layers: str) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters that are in none of the `layers`."""
    parameters = model.named_parameters()
    return {name: tuple(value.shape) for name, value in parameters if not name.startswith(f"{layers}.")}


def _traits(layer: nn.Module) -> dict[str, Any]:
    """Modules and parameters of a layer, and all plain attributes of them except the layer's number."""
    found: dict[str, Any] = {name: tuple(value.shape) for name, value in layer.named_parameters()}
    for path, module in layer.named_modules():
        found[path] = type(module).__name__
        for key, value in vars(module).items():
            if isinstance(value, bool | int | float | str | None) and key not in _NAMES:
                found[f"{path}.{key}".lstrip(".")] = value
    return found
