"""Whether the tensors of a GGUF file are those llama.cpp asks for, of the sizes that config.json gives."""

from collections.abc import Sequence

from llmcompress.errors import CheckpointError
from llmcompress.formats.gguf.family import Family
from llmcompress.formats.gguf.hyper import Hyper
from llmcompress.formats.gguf.tensors import GGUFTensor

_HINT = "the config does not fit the weights"
Shape = tuple[int, ...]


def check(tensors: Sequence[GGUFTensor], family: Family, hyper: Hyper) -> None:
    """CheckpointError for a tensor that is missing, that llama.cpp does not know, or of another shape than stated."""
    needed = _needed(family, hyper)
    known = needed | _optional(family, hyper)
    for tensor in tensors:
        if not tensor.sources:
            continue
        name = tensor.sources[0]
        if tensor.name not in known:
            raise CheckpointError(
                f"tensor {name} has no place in a {family.name} model of {hyper.layers} layers as llama.cpp knows it",
                _HINT,
            )
        if tensor.shape != known[tensor.name]:
            raise CheckpointError(
                f"tensor {name} becomes {list(tensor.shape)}, config.json asks for {list(known[tensor.name])}", _HINT
            )
    found = {tensor.name for tensor in tensors}
    for missing in (name for name in needed if name not in found):
        raise CheckpointError(f"no tensor of the checkpoint becomes {missing}", "fetch the weights again")


def _needed(family: Family, hyper: Hyper) -> dict[str, Shape]:
    """Name and shape of every tensor that must be there."""
    shapes = _layer_shapes(family, hyper)
    found = {f"{role}.weight": shape for role, shape in _outer_shapes(family, hyper).items()}
    if family.biased:
        found["output_norm.bias"] = (hyper.hidden,)
    for layer in range(hyper.layers):
        found |= {f"blk.{layer}.{role}.weight": shapes[role] for role in family.layer}
        if family.biased:
            found |= {f"blk.{layer}.{role}.bias": shapes[role][:1] for role in family.layer}
    return found


def _optional(family: Family, hyper: Hyper) -> dict[str, Shape]:
    shapes = _layer_shapes(family, hyper)
    found = {f"blk.{layer}.{role}.bias": shapes[role][:1] for layer in range(hyper.layers) for role in family.biases}
    return found | ({"output.weight": (hyper.vocabulary, hyper.hidden)} if family.untied else {})


def _outer_shapes(family: Family, hyper: Hyper) -> dict[str, Shape]:
    table = (hyper.vocabulary, hyper.hidden)
    found: dict[str, Shape] = {"token_embd": table, "output_norm": (hyper.hidden,)}
    if not family.rotary:
        found["position_embd"] = (hyper.context, hyper.hidden)
    return found | ({"output": table} if family.head_needed else {})


def _layer_shapes(family: Family, hyper: Hyper) -> dict[str, Shape]:
    hidden, inner, one = hyper.hidden, hyper.inner, hyper.head_dim
    queries, pairs = hyper.heads * one, hyper.heads_kv * one
    up, down = (hyper.experts, hyper.expert_inner, hidden), (hyper.experts, hidden, hyper.expert_inner)
    return {
        **dict.fromkeys(("attn_norm", "ffn_norm", "post_attention_norm", "post_ffw_norm"), (hidden,)),
        "attn_q": (queries, hidden),
        "attn_k": (pairs, hidden),
        "attn_v": (pairs, hidden),
        "attn_qkv": (queries + 2 * pairs, hidden),
        "attn_output": (hidden, queries),
        "attn_q_norm": (queries if family.norm_heads else one,),
        "attn_k_norm": (pairs if family.norm_heads else one,),
        "ffn_gate": (inner, hidden),
        "ffn_up": (2 * inner if family.fused_gate else inner, hidden),
        "ffn_down": (hidden, inner),
        "ffn_gate_inp": (hyper.experts, hidden),
        "ffn_gate_exps": up,
        "ffn_up_exps": up,
        "ffn_down_exps": down,
    }
