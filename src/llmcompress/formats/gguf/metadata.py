"""The keys of a GGUF file: what the model is, its hyperparameters, how it is quantised. The tokenizer has its own."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from llmcompress.arch.spec import further_layers
from llmcompress.errors import CheckpointError
from llmcompress.formats.gguf.family import Family, find
from llmcompress.formats.gguf.general import general_keys
from llmcompress.formats.gguf.hyper import Hyper
from llmcompress.formats.gguf.keys import Key, f32, f32s, u32, u64s
from llmcompress.formats.gguf.names import layer_of
from llmcompress.formats.gguf.rope import Rope, scaling_keys
from llmcompress.formats.gguf.rules import Facts
from llmcompress.formats.gguf.tensors import GGUFTensor, Read
from llmcompress.formats.gguf.types import FileType


def metadata(
    config: Mapping[str, Any],
    tensors: Sequence[GGUFTensor],
    kind: FileType,
    name: str,
    readme: str = "",
    generation: Mapping[str, Any] | None = None,
    base_model: str | None = None,
    licence: str | None = None,
) -> list[Key]:
    """All keys but general.architecture and those of the tokenizer, in a fixed order.

    config: config.json. tensors: from `names.gguf_tensors`, which has checked the config against the weights. kind: of
    the file. name: `owner/model` or the name of the model's directory. readme: text of its README.md. generation: its
    generation_config.json. base_model, licence: what a user says in place of what the README says. CheckpointError for
    what config.json lacks.
    """
    from gguf import GGML_QUANT_VERSION

    family = find(config)
    hyper, rope = family.read(config)
    own = family.own_keys(hyper, rope)
    said = {key.name for key in own}
    return [
        *general_keys(config, tensors, name, readme, generation, base_model, licence),
        *(key for key in _hyperparameters(family, hyper, rope, vocabulary_rows(tensors)) if key.name not in said),
        *own,
        u32("general.file_type", kind.id),
        u32("general.quantization_version", GGML_QUANT_VERSION),
    ]


def listed_keys(config: Mapping[str, Any], names: Iterable[str], read: Read) -> list[Key]:
    """The keys that list a number of each layer, or all of a tensor, which are tensors of the checkpoint.

    names: of its tensors. CheckpointError where a layer has no such number, or several, or a list is below zero.
    """
    family, names = find(config), list(names)
    listed = listed_names(family, names)
    hyper, _ = family.read(config)
    found = []
    for key, by_layer in listed.items():
        if sorted(by_layer) != list(range(hyper.layers)):
            raise CheckpointError(
                f"tensors {family.listed[key]} are in {len(by_layer)} layers, config.json speaks of {hyper.layers}",
                "fetch the weights again",
            )
        numbers = [read(by_layer[layer]).flatten().tolist() for layer in range(hyper.layers)]
        if any(len(values) != 1 for values in numbers):
            raise CheckpointError(f"tensors {family.listed[key]} are not one number each", "fetch the weights again")
        found.append(f32s(key, [value for (value,) in numbers]))
    for key, end in family.lists.items():
        for name in (name for name in names if name.endswith(end)):
            values = read(name).flatten().tolist()
            if not all(isinstance(value, int) and value >= 0 for value in values):
                raise CheckpointError(f"tensor {name} does not hold whole numbers", "fetch the weights again")
            found.append(u64s(key, values))
    return found


def listed_names(family: Family, names: Iterable[str]) -> dict[str, dict[int, str]]:
    """On-disk names of the numbers that keys list, by key and layer."""
    every = list(names)
    return {
        key: {int(layer_of(name)): name for name in every if name.endswith(end) and layer_of(name)}
        for key, end in family.listed.items()
    }


def architecture(config: Mapping[str, Any]) -> str:
    """GGUF's name of the architecture, which a gguf.GGUFWriter asks for; CheckpointError if it is not known."""
    return find(config).arch


def facts(config: Mapping[str, Any], importance: bool) -> Facts:
    """What a mixture has to know of a model. importance: whether the importance of inputs is known."""
    family = find(config)
    hyper, _ = family.read(config)
    return Facts(family.arch, hyper.layers, hyper.heads, hyper.heads_kv, hyper.experts, importance)


def notes(config: Mapping[str, Any]) -> list[str]:
    """What llama.cpp computes otherwise than transformers, as sentences for the ledger."""
    family = find(config)
    hyper, rope = family.read(config)
    found = _window_notes(family, hyper)
    if rope.kind == "yarn" and rope.scaling.get("truncate") is False:
        found.append("llama.cpp rounds the range of yarn's frequencies to whole numbers, which this model does not")
    if family.skipped or further_layers(hyper.config):
        found.append("layers after the last, which predict further tokens, are left out")
    return found


def _window_notes(family: Family, hyper: Hyper) -> list[str]:
    window = hyper.config.get("sliding_window")
    used = hyper.config.get("use_sliding_window") is not False
    if family.windowed or not used or not isinstance(window, int) or window >= hyper.context:
        return []
    return [f"llama.cpp looks back beyond the sliding window of {window} tokens in {family.name} models"]


def _hyperparameters(family: Family, hyper: Hyper, rope: Rope, vocabulary: int) -> list[Key]:
    """The keys that every family has under the same name."""
    a = family.arch
    rms = "layer_norm_rms_epsilon" if family.rms else "layer_norm_epsilon"
    keys = [
        u32(f"{a}.block_count", hyper.layers),
        u32(f"{a}.context_length", hyper.context),
        u32(f"{a}.embedding_length", hyper.hidden),
        u32(f"{a}.feed_forward_length", hyper.inner),
        u32(f"{a}.attention.head_count", hyper.heads),
    ]
    if family.attention:
        keys += [
            u32(f"{a}.attention.head_count_kv", hyper.heads_kv),
            u32(f"{a}.attention.key_length", hyper.head_dim),
            u32(f"{a}.attention.value_length", hyper.head_dim),
        ]
    keys += [f32(f"{a}.attention.{rms}", hyper.epsilon), u32(f"{a}.vocab_size", vocabulary)]
    if family.rotary:
        keys += [f32(f"{a}.rope.freq_base", rope.theta), *scaling_keys(a, rope)]
    if hyper.experts:
        keys += [u32(f"{a}.expert_count", hyper.experts), u32(f"{a}.expert_used_count", hyper.experts_used)]
    return keys


def vocabulary_rows(tensors: Sequence[GGUFTensor]) -> int:
    """Rows of the embedding."""
    return next(tensor.shape[0] for tensor in tensors if tensor.name == "token_embd.weight")
