"""How devices share a model: what is accepted lies whole on each of them, by listing the elements that each holds."""

from hypothesis import given, settings
from hypothesis import strategies as st

from llmcompress.engine.targets.base import targets
from llmcompress.engine.targets.machine import Machine
from llmcompress.engine.targets.verdicts import violations
from llmcompress.formats.base import Entry, TensorSpec
from llmcompress.grids.base import PER_ROW
from llmcompress.grids.integer import IntegerSpec


def whole_on_devices(target, tp, heads, kv, head, hidden, inter, bits, group, symmetric):
    """Whether every device gets whole heads, whole groups, whole words and whole tiles; by listing what it holds."""
    if heads % tp or inter % tp:
        return False
    if kv >= tp and kv % tp:
        return False
    if kv < tp and tp % kv:
        return False
    for device in range(tp):
        queries = [h for h in range(heads) if h * tp // heads == device]
        keys = [h for h in range(kv) if (h * tp // kv == device if kv >= tp else device * kv // tp == h)]
        hidden_of_mlp = [i for i in range(inter) if i * tp // inter == device]
        linears = [  # (rows of each part, columns held)
            ([len(queries) * head, len(keys) * head, len(keys) * head], list(range(hidden))),
            ([hidden], [h * head + i for h in queries for i in range(head)]),
            ([len(hidden_of_mlp)] * 2, list(range(hidden))),
            ([hidden], hidden_of_mlp),
        ]
        for parts, columns in linears:
            if group != PER_ROW:
                held: dict[int, int] = {}
                for column in columns:
                    held[column // group] = held.get(column // group, 0) + 1
                if any(count != group for count in held.values()):
                    return False
            if target == "sglang" and (sum(parts) % 64 or len(columns) % 128):
                return False
            if target == "vllm":
                if len(columns) * bits % 32:
                    return False
                if not symmetric and any(rows * bits % 32 for rows in parts):
                    return False
    return True


def entries_of(hidden, inter, heads, kv, head, grid):
    shapes = {
        "self_attn.q_proj": (heads * head, hidden),
        "self_attn.k_proj": (kv * head, hidden),
        "self_attn.v_proj": (kv * head, hidden),
        "self_attn.o_proj": (hidden, heads * head),
        "mlp.gate_proj": (inter, hidden),
        "mlp.up_proj": (inter, hidden),
        "mlp.down_proj": (hidden, inter),
    }
    return [
        Entry(TensorSpec(f"model.layers.0.{name}.weight", "BF16", shape), grid, block=True, linear=True)
        for name, shape in shapes.items()
    ]


@settings(max_examples=400, deadline=None)
@given(
    target=st.sampled_from(["vllm", "sglang"]),
    tp=st.sampled_from([1, 2, 3, 4, 6, 8]),
    kv=st.integers(1, 8),
    share=st.integers(1, 4),
    head=st.sampled_from([12, 16, 32, 64, 96, 128]),
    hidden=st.integers(1, 24).map(lambda n: 32 * n),
    inter=st.one_of(st.integers(1, 24).map(lambda n: 64 * n), st.integers(1, 400).map(lambda n: 4 * n)),
    bits=st.sampled_from([4, 8]),
    group=st.sampled_from([PER_ROW, 32, 64, 128]),
    symmetric=st.booleans(),
)
def test_what_is_accepted_lies_whole_on_every_device(
    target, tp, kv, share, head, hidden, inter, bits, group, symmetric
):
    heads = kv * share
    if not symmetric:
        bits = 4
    entries = entries_of(hidden, inter, heads, kv, head, IntegerSpec(bits, group, symmetric))
    if any(entry.in_features % (1 if group == PER_ROW else group) for entry in entries):
        return  # no plan has such groups
    config = {"num_attention_heads": heads, "num_key_value_heads": kv}
    found = violations(targets()[target], "compressed-tensors", entries, config, Machine(tp))
    whole = whole_on_devices(target, tp, heads, kv, head, hidden, inter, bits, group, symmetric)
    assert (not found) == whole, found
