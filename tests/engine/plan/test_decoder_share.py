"""How much of a decoder a plan changes, beside a count of the tensors by hand."""

import pytest

from llmcompress import plan
from llmcompress.engine.plan.decoder_share import decoder_share

SIZES = {"q_proj": 256 * 256, "k_proj": 128 * 256, "v_proj": 128 * 256, "o_proj": 256 * 256} | dict.fromkeys(
    ("gate_proj", "up_proj", "down_proj"), 512 * 256
)  # of a layer of the tiny model


@pytest.mark.parametrize("settings", [{"method": "rtn", "bits": 4}, {"method": "gguf", "type": "Q4_0"}], ids=repr)
def test_everything_changes(settings, tiny_model_dir):
    found = decoder_share(plan(tiny_model_dir, **settings))
    assert (found.changed, found.left) == (1.0, ())


def test_what_is_left_is_named_by_its_share(tiny_model_dir):
    skipped = {"*.1.mlp.down_proj": {"skip": True}, "*.[kv]_proj": {"skip": True}}
    found = decoder_share(plan(tiny_model_dir, method="rtn", bits=4, set=skipped))
    whole = 4 * sum(SIZES.values())
    left = {
        "model.layers.*.self_attn.k_proj.weight": 4 * SIZES["k_proj"] / whole,
        "model.layers.*.self_attn.v_proj.weight": 4 * SIZES["v_proj"] / whole,
        "model.layers.*.mlp.down_proj.weight": SIZES["down_proj"] / whole,
    }
    assert dict(found.left) == pytest.approx(left)
    assert found.changed == pytest.approx(1 - sum(left.values()))
    assert found.left == tuple(sorted(found.left, key=lambda item: -item[1]))


def test_routers_count_as_left(random_model_dir):
    found = decoder_share(plan(random_model_dir("mixtral"), method="rtn", bits=4, group_size=32))
    assert [name for name, _ in found.left] == ["model.layers.*.block_sparse_moe.gate.weight"]
    assert 0.99 < found.changed + found.left[0][1] <= 1.0
