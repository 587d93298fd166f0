"""The general.* keys of a GGUF file: what a model is called, what it was made from, under which licence it stands."""

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

from llmcompress.formats.front_matter import HUB_ID, front_matter, hub_ids, names
from llmcompress.formats.gguf.keys import Key, f32, text, texts, u32
from llmcompress.formats.gguf.tensors import GGUFTensor

_SAMPLING = {"temperature": "temp", "top_p": "top_p", "min_p": "min_p", "repetition_penalty": "penalty_repeat"}


def general_keys(
    config: Mapping[str, Any],
    tensors: Sequence[GGUFTensor],
    name: str,
    readme: str = "",
    generation: Mapping[str, Any] | None = None,
    base_model: str | None = None,
    licence: str | None = None,
) -> list[Key]:
    """Keys that describe the model; what is not known is left out.

    name: what to call it where config.json has no hub id: `owner/model` or the name of a directory, of whose parts
    size, version and kind are guessed as llama.cpp's converter does. readme: README.md of the model, generation:
    generation_config.json. base_model, licence: what a user says in place of what the README says.
    """
    from gguf import Metadata

    said = config.get("_name_or_path")
    model = said if isinstance(said, str) and HUB_ID.fullmatch(said) else name
    total, label = _parameters(tensors)
    full, owner, basename, finetune, version, size = Metadata.get_model_id_components(model, total)
    matter = front_matter(readme, base_model, licence)
    found = {
        "type": "model",
        "name": Metadata.id_to_title(full or model),
        "version": version,
        "organization": None if owner is None else Metadata.id_to_title(owner),
        "finetune": finetune,
        "basename": basename,
        "quantized_by": "llmcompress",
        "size_label": size or label,
        "license": ",".join(names(matter.get("license"))),
        "license.name": "".join(names(matter.get("license_name"))[:1]),
        "license.link": "".join(names(matter.get("license_link"))[:1]),
    }
    keys = [text(f"general.{key}", value) for key, value in found.items() if value]
    keys += _base_models(matter, total)
    for key, given in (("tags", ("tags", "pipeline_tag")), ("languages", ("languages", "language"))):
        if values := [value for item in given for value in names(matter.get(item))]:
            keys.append(texts(f"general.{key}", values))
    return keys + list(_sampling(generation or {}))


def _parameters(tensors: Sequence[GGUFTensor]) -> tuple[int, str]:
    """Number of parameters, and how sizes are usually written: 135M, or 8x7B, the size being that with one expert."""
    from gguf import size_label

    stacks = [tensor for tensor in tensors if len(tensor.shape) == 3 and "_exps." in tensor.name]
    total = sum(prod(tensor.shape) for tensor in tensors)
    shared = total - sum(prod(tensor.shape) for tensor in stacks)
    experts = stacks[0].shape[0] if stacks else 0
    return total, size_label(total, shared, sum(prod(tensor.shape[1:]) for tensor in stacks), experts)


def _base_models(matter: Mapping[str, Any], total: int) -> list[Key]:
    """The models that a README says this one was made from."""
    from gguf import Metadata

    ids = hub_ids(matter.get("base_model"))
    keys = [u32("general.base_model.count", len(ids))] if ids else []
    for number, model in enumerate(ids):
        full, owner, _, _, version, _ = Metadata.get_model_id_components(model, total)
        prefix = f"general.base_model.{number}"
        keys.append(text(f"{prefix}.name", Metadata.id_to_title(full)))
        if version:
            keys.append(text(f"{prefix}.version", version))
        keys.append(text(f"{prefix}.organization", Metadata.id_to_title(owner)))
        keys.append(text(f"{prefix}.repo_url", f"https://huggingface.co/{model}"))
    return keys


def _sampling(generation: Mapping[str, Any]) -> Iterator[Key]:
    """How the model's makers sample from it."""
    top_k = generation.get("top_k")
    if isinstance(top_k, int) and not isinstance(top_k, bool) and 0 <= top_k < 1 << 31:
        yield Key("general.sampling.top_k", top_k, "i32")
    for key, name in _SAMPLING.items():
        value = generation.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e6:
            yield f32(f"general.sampling.{name}", value)
