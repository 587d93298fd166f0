"""Whether the tensors of a GGUF file are those llama.cpp asks for, of the sizes that config.json gives."""

from collections.abc import Sequence

from llmcompress.errors import CheckpointError
from llmcompress.formats.gguf.family import Family, Shape
from llmcompress.formats.gguf.hyper import Hyper
from llmcompress.formats.gguf.tensors import GGUFTensor

_HINT = "the config does not fit the weights"
_SHARED = ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "shared_intermediate_size")
_SHARED_COUNTS = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")


def check(tensors: Sequence[GGUFTensor], family: Family, hyper: Hyper) -> None:
    """CheckpointError for a tensor that is missing, that llama.cpp does not know, or of another shape than stated."""
    needed, optional = expected(family, hyper)
    known = needed | optional
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


def expected(family: Family, hyper: Hyper) -> tuple[dict[str, Shape], dict[str, Shape]]:
    """Name and shape of every tensor that must be there, and of those that may be."""
    shapes = _outer_shapes(family, hyper)
    needed = {tensor_name(role): shape for role, shape in shapes.items()}
    needed |= {f"{role}.bias": shape[:1] for role, shape in shapes.items() if role in family.biased}
    optional: dict[str, Shape] = {"output.weight": (hyper.vocabulary, hyper.hidden)} if family.untied else {}
    for layer in range(hyper.layers):
        shapes = {**_layer_shapes(family, hyper), **family.shapes(hyper, layer)}
        for role in family.roles(hyper, layer):
            shape = shapes[role]
            name = role if role in family.bare else tensor_name(role)
            needed[f"blk.{layer}.{name}"] = shape
            if role in (*family.biased, *family.biases):
                (needed if role in family.biased else optional)[f"blk.{layer}.{role}.bias"] = shape[:-1] or shape
    return needed, optional


def tensor_name(role: str) -> str:
    """The name of a tensor by its role: that of a weight, if the role does not say otherwise."""
    return role if role.endswith((".bias", ".scale")) or role in ("ssm_a", "ssm_d", "exp_probs_b") else f"{role}.weight"


def shared_width(hyper: Hyper) -> int:
    """Width of the shared experts of a layer, seen as one."""
    for key in _SHARED:
        if hyper.config.get(key) is not None:
            return int(hyper.config[key])
    return hyper.expert_inner * next((int(hyper.config[key]) for key in _SHARED_COUNTS if hyper.config.get(key)), 1)


def _outer_shapes(family: Family, hyper: Hyper) -> dict[str, Shape]:
    table = (hyper.vocabulary, hyper.hidden)
    found: dict[str, Shape] = {"token_embd": table}
    if not family.unnormed:
        found["output_norm"] = (hyper.hidden,)
    if family.head_needed:
        found["output"] = table
    outer = family.outer(hyper) if callable(family.outer) else family.outer
    more = {"position_embd": (hyper.context, hyper.hidden), "token_embd_norm": (hyper.hidden,)}
    more |= family.shapes(hyper, -1) if callable(family.outer) else {}
    return found | {role: more[role] for role in outer}


def _layer_shapes(family: Family, hyper: Hyper) -> dict[str, Shape]:
    hidden, inner, one = hyper.hidden, hyper.inner, hyper.head_dim
    queries, pairs, shared = hyper.heads * one, hyper.heads_kv * one, shared_width(hyper)
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
        "exp_probs_b.bias": (hyper.experts,),
        "ffn_gate_shexp": (shared, hidden),
        "ffn_up_shexp": (shared, hidden),
        "ffn_down_shexp": (hidden, shared),
    }
