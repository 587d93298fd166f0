"""From the tensors of a Hugging Face checkpoint to those of a GGUF file: names, order, and what is done to each."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from math import prod
from typing import TYPE_CHECKING, Any

from llmcompress.arch.spec import further_layers
from llmcompress.errors import CheckpointError
from llmcompress.formats.gguf.family import Family, find
from llmcompress.formats.gguf.hyper import Hyper
from llmcompress.formats.gguf.mixture import visiting_order
from llmcompress.formats.gguf.shapes import check, expected
from llmcompress.formats.gguf.tensors import Factors, GGUFTensor, Rows, Strips, stretch

if TYPE_CHECKING:
    from gguf import TensorNameMap

Source = tuple[str, Sequence[int]]
"""A tensor of a checkpoint: on-disk name and shape."""

# what old checkpoints hold besides weights: masks, and tables that are computed
_SKIPPED = (".attention.bias", ".attention.masked_bias", ".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
_EXPERT = re.compile(r"(?P<layer>.*)\.experts\.(?P<number>\d{1,9})\.(?P<leaf>\w+)\.(?P<kind>weight|bias)")
_NUMBERED = re.compile(r".*\.(?P<leaf>\w+)\.(shard_)?(?P<number>\d{1,9})\.weight")
_FUSED = re.compile(r"(?P<layer>.*)\.\w+\.experts\.(?P<leaf>gate_up_proj|down_proj)(\.weight)?")
_HEAD = "output.weight"
_NAMED = ("blk.", "output", "rope_", "altup_", "per_layer_")
# parameters that are neither weight nor bias, and names that stand for them in the gguf package's maps
_RENAMES = {
    ".e_score_correction_bias": ".e_score_correction.bias",
    ".expert_bias": ".expert_bias.bias",
    ".dt_bias": ".dt_proj.bias",
    ".correct_output_scale": ".correct_output_scale.weight",
    ".sinks": ".sinks.weight",
}
_BOTH = ("gate_proj", "up_proj")
_LEAVES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def gguf_tensors(
    config: Mapping[str, Any], source: Sequence[Source], vocabulary: int | None = None
) -> list[GGUFTensor]:
    """The tensors of a GGUF file in the order of llama-quantize: what stands outside of layers, then layer by layer.

    vocabulary: tokens of the tokenizer; Gemma 3's embedding is cut to them. CheckpointError for an unknown family, for
    a tensor that has no name in GGUF, or if names or shapes are not those of the config; PlanError for a model that
    llama.cpp would compute otherwise.
    """
    family = find(config)
    hyper, rope = family.read(config)
    if hyper.layers > len(source):
        raise CheckpointError(f"config.json speaks of {hyper.layers} layers, there are {len(source)} tensors")
    known = _name_map(family.named or family.arch, hyper.layers)
    found: dict[str, GGUFTensor] = {}
    for path, tensor in _whole(family, hyper, source).items():
        name = _name(path, family, known)
        if name is None:
            raise CheckpointError(
                f"tensor {tensor.sources[0]} has no name in GGUF files of {family.name} models",
                "the config does not fit the weights",
            )
        if name in found:
            both = f"{found[name].sources[0]} and {tensor.sources[0]}"
            raise CheckpointError(f"tensors {both} would both become {name}")
        found[name] = _finished(replace(tensor, name=name), path, family, hyper)
    _set_head(found, family, config)
    found = {name: replace(tensor, factors=_factors(name, family, hyper)) for name, tensor in found.items()}
    found |= {f"{role}.weight": _lengthened(found, role, key, hyper) for role, key in family.lengthened.items()}
    found |= {tensor.name: tensor for tensor in _blank(family, hyper) if tensor.name not in found}
    check(list(found.values()), family, hyper)
    if family.cut_vocabulary and vocabulary is not None and vocabulary < hyper.vocabulary:
        found |= {
            name: _cut(found[name], vocabulary) for name in ("token_embd.weight", "output.weight") if name in found
        }
    for name, values in family.values(hyper, rope).items():
        found[name] = GGUFTensor(name, (len(values),), values=values)
    return sorted(found.values(), key=lambda tensor: visiting_order(tensor.name))


def _blank(family: Family, hyper: Hyper) -> Iterator[GGUFTensor]:
    """What llama.cpp asks for and does not use, for where the checkpoint lacks it."""
    unused = {layer: family.unused(hyper, layer) for layer in range(hyper.layers)}
    if any(unused.values()):
        shapes, _ = expected(family, hyper)
        names = (f"blk.{layer}.{role}.weight" for layer, roles in unused.items() for role in roles)
        yield from (GGUFTensor(name, shapes[name], blank=True) for name in names)


def _factors(name: str, family: Family, hyper: Hyper) -> Factors:
    return family.factors(_role(name), hyper) if name.endswith(".weight") else ()


def _role(name: str) -> str:
    """The role of a tensor by its name in GGUF."""
    role = name.split(".", 2)[2] if name.startswith("blk.") else name
    return role.removesuffix(".weight").removesuffix(".bias")


def _name(path: str, family: Family, known: "TensorNameMap") -> str | None:
    """The GGUF name of a path; those of experts and of parts are names already."""
    if path.startswith(_NAMED):
        return path
    if _is_head(path, family):
        return f"output.{path.rpartition('.')[2]}"
    end = next((end for end in _RENAMES if path.endswith(end)), "")
    path = path.removesuffix(end) + _RENAMES.get(end, "")
    for known_as in (path, path.removeprefix(family.base)):
        name: str | None = known.get_name(known_as, try_suffixes=(".weight", ".bias"))
        if name is not None:
            return name
    return None


@cache
def _name_map(arch: str, layers: int) -> "TensorNameMap":
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    number = next(number for number, name in MODEL_ARCH_NAMES.items() if name == arch)
    return get_tensor_name_map(number, layers)


def _whole(family: Family, hyper: Hyper, source: Sequence[Source]) -> dict[str, GGUFTensor]:
    """Tensors, yet without names in GGUF, by path in transformers' model; the experts of a layer as one."""
    found: dict[str, GGUFTensor] = {}
    stacks: dict[str, dict[int, Source]] = {}
    for name, extents in source:
        path, shape = _path(name, family), tuple(extents)
        if (
            path.endswith((*_SKIPPED, *family.listed.values(), *family.lists.values()))
            or any(part in path for part in family.skipped)
            or _is_after(path, hyper)
        ):
            continue
        if (parts := family.parts(path, shape, hyper)) is not None:
            place = f"blk.{layer_of(path)}." if layer_of(path) else ""
            found |= {f"{place}{part.name}": replace(part, sources=(name,)) for part in parts}
        elif expert := _EXPERT.fullmatch(path):
            together, number = _expert_place(expert, family, hyper)
            stacks.setdefault(together, {})[number] = (name, shape)
        elif (fused := _FUSED.fullmatch(path)) and len(shape) == 3:
            found |= _split(fused, name, shape)
        elif (numbered := _NUMBERED.fullmatch(path)) and numbered["leaf"] in family.stacked:
            stacks.setdefault(f"{family.stacked[numbered['leaf']]}.weight", {})[int(numbered["number"])] = (name, shape)
        elif path in found:
            raise CheckpointError(f"tensors {found[path].sources[0]} and {name} are the same one")
        else:
            found[path] = GGUFTensor("", shape, (name,))
    return found | {path: _stacked(path, parts, family, hyper) for path, parts in stacks.items()}


def _is_after(path: str, hyper: Hyper) -> bool:
    """Whether a path lies in a layer after the last, which predicts further tokens; llama.cpp does without."""
    number, more = layer_of(path), further_layers(hyper.config)
    return number != "" and hyper.layers <= int(number) < hyper.layers + more


def _path(name: str, family: Family) -> str:
    """The path in transformers' model of an on-disk name, which may lack the base model's prefix."""
    return name if name.startswith(family.base) or _is_head(name, family) else f"{family.base}{name}"


def _is_head(path: str, family: Family) -> bool:
    """Whether a path is of the output matrix or its bias, as the family or transformers' models call it."""
    return path.rpartition(".")[0] in (family.head, "lm_head")


def _experts_path(layer: str, leaf: str, kind: str = "weight") -> str:
    """The GGUF name of the matrices, or biases, of all experts of a layer."""
    return f"blk.{layer_of(layer)}.ffn_{leaf.removesuffix('_proj')}_exps.{kind}"


def _expert_place(expert: re.Match[str], family: Family, hyper: Hyper) -> tuple[str, int]:
    """The GGUF name of what a tensor of one expert is a part of, and the number of the part."""
    leaf, number = _LEAVES.get(expert["leaf"], expert["leaf"]), int(expert["number"])
    if leaf in _BOTH and "ffn_gate_up_exps" in family.roles(hyper, int(layer_of(expert["layer"]))):
        return _experts_path(expert["layer"], "gate_up_proj", expert["kind"]), 2 * number + _BOTH.index(leaf)
    return _experts_path(expert["layer"], leaf, expert["kind"]), number


def layer_of(path: str) -> str:
    """The number of the layer that a path lies in."""
    return next((part for part in path.split(".") if part.isdecimal()), "")


def _stacked(path: str, parts: Mapping[int, Source], family: Family, hyper: Hyper) -> GGUFTensor:
    """The matrices of all experts of a layer, or those that a family numbers outside of layers, as one tensor.

    Where the family has a table in place of a stack, they lie one below the other.
    """
    name, shape = next(iter(parts.values()))
    ways = 1
    if path.startswith("blk."):
        kind, count = "experts", hyper.experts
        ways = 2 if len(parts) == 2 * count else 1  # gate and up of an expert, one below the other
        whole = (count, ways * shape[0], *shape[1:])
    else:
        kind, wanted = "matrices", family.shapes(hyper, -1).get(_role(path), (0,))
        table = len(wanted) == len(shape)
        count = wanted[0] // max(1, shape[0]) if table else wanted[0]
        whole = (count * shape[0], *shape[1:]) if table else (count, *shape)
    if sorted(parts) != list(range(ways * count)):
        raise CheckpointError(
            f"{len(parts)} {kind} are like {name}, config.json speaks of {count}",
            "the config does not fit the weights",
        )
    for other, extents in parts.values():
        if extents != shape:
            raise CheckpointError(f"tensors {name} and {other} of {kind} have different shapes")
    return GGUFTensor("", whole, tuple(parts[at][0] for at in sorted(parts)))


def _split(fused: re.Match[str], name: str, shape: tuple[int, ...]) -> dict[str, GGUFTensor]:
    """The experts of a layer that are one tensor on disk, gate and up one below the other."""
    if fused["leaf"] == "down_proj":
        return {_experts_path(fused["layer"], "down_proj"): GGUFTensor("", shape, (name,))}
    both, half = shape[1], shape[1] // 2
    return {
        _experts_path(fused["layer"], leaf): GGUFTensor(
            "", (shape[0], half, shape[2]), (name,), rows=stretch(first, half, both)
        )
        for leaf, first in (("gate_proj", 0), ("up_proj", half))
    }


def _finished(tensor: GGUFTensor, path: str, family: Family, hyper: Hyper) -> GGUFTensor:
    """What the family does to a tensor: Conv1D, order of rows, norms."""
    module, _, kind = path.rpartition(".")
    role = _role(tensor.name)
    if kind == "weight" and module.rpartition(".")[2] in family.transposed:
        tensor = replace(tensor, shape=tensor.shape[::-1], transposed=True)
    if path.endswith("norm.weight") and role != "ssm_norm":
        tensor = replace(tensor, offset=family.norm_offset)
    if len(tensor.shape) == 3 and tensor.shape[1] == 1 and "conv" in role:
        tensor = replace(tensor, shape=(tensor.shape[0], tensor.shape[2]))
    if role in family.forms:
        tensor = replace(tensor, form=family.forms[role])
    if role == "exp_probs_b":
        tensor = replace(tensor, shape=(prod(tensor.shape),))
    if role in family.reshaped:
        shape = family.shapes(hyper, int(layer_of(tensor.name)))[role]
        tensor = replace(tensor, shape=shape) if prod(shape) == prod(tensor.shape) else tensor
    if (inputs := family.inputs(role, hyper)) is not None:
        tensor = replace(tensor, inputs=inputs)
    rows = None if tensor.rows else family.rows(role, hyper)
    return tensor if rows is None else _with_rows(tensor, rows)


def _with_rows(tensor: GGUFTensor, rows: Rows | Strips) -> GGUFTensor:
    if tensor.shape[0] != len(rows):
        raise CheckpointError(
            f"tensor {tensor.sources[0]} is {list(tensor.shape)}, config.json asks for {len(rows)} rows",
            "the config does not fit the weights",
        )
    return replace(tensor, rows=rows)


def _set_head(found: dict[str, GGUFTensor], family: Family, config: Mapping[str, Any]) -> None:
    """Leave the head out where it is the embedding, unless llama.cpp asks for it all the same."""
    embedding, head = found.get("token_embd.weight"), found.get(_HEAD)
    stated = config.get("tie_word_embeddings")
    tied = stated if isinstance(stated, bool) else family.tied or head is None
    if tied and embedding is None and head is not None:  # some store what is tied as the head
        embedding = found["token_embd.weight"] = replace(head, name="token_embd.weight")
    if tied and embedding is not None:
        found.pop(_HEAD, None)
        if family.head_needed:
            found[_HEAD] = replace(embedding, name=_HEAD)
    elif head is None:
        raise CheckpointError(f"no tensor {family.head}.weight, and config.json does not tie it to the embedding")


def _cut(tensor: GGUFTensor, rows: int) -> GGUFTensor:
    return replace(tensor, shape=(rows, tensor.shape[1]), rows=stretch(0, rows, tensor.shape[0]))


def _lengthened(found: Mapping[str, GGUFTensor], role: str, key: str, hyper: Hyper) -> GGUFTensor:
    """A table of as many rows as a key of config.json says, with its first row for tokens beyond them."""
    name, stored = f"{role}.weight", hyper.config.get(key)
    if name not in found:
        raise CheckpointError(f"no tensor of the checkpoint becomes {name}", "fetch the weights again")
    tensor = found[name]
    if tensor.shape[0] != stored or stored >= hyper.vocabulary:
        return tensor
    rows = Strips(((0, stored, 0, 1), (0, 1, 0, hyper.vocabulary - stored)))
    return replace(tensor, shape=(hyper.vocabulary, *tensor.shape[1:]), rows=rows)
