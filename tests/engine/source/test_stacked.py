"""Experts that are one tensor on disk are read, quantised and verified matrix by matrix, or left with the reason."""

import json
import re
import shutil

import pytest
import torch
from safetensors import safe_open

from ggufmodels import small_config
from llmcompress.engine.source.open import checkpoint_headers
from llmcompress.engine.source.stacked import unstacked_headers
from llmcompress.ledger import Ledger
from llmcompress.store.checkpoint import Checkpoint
from llmcompress.validate.gguf_verify import verify_gguf
from llmcompress.validate.load import open_streamed
from llmcompress.validate.verify import verify
from madetokenizers import byte_level, save
from streaming import ids, reference_logits, streamed, streamed_logits
from tinyruns import compress, recipe, steps_recipe

SMALL = {"num_attention_heads": 4, "num_key_value_heads": 2}
ROUTED = {**SMALL, "num_local_experts": 3, "num_experts_per_tok": 2}
FAMILIES = {
    "granitemoe": ROUTED,
    "gpt_oss": {**ROUTED, "head_dim": 16, "rope_parameters": None},
    "llama4_text": {**ROUTED, "head_dim": 16, "num_experts_per_tok": 1, "moe_layers": [0, 1]},
    "aria_text": {**SMALL, "head_dim": 16, "moe_num_experts": 3, "moe_topk": 2, "moe_num_shared_experts": 1},
    "dbrx": {"d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 64,
             "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8},
             "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 3, "moe_top_k": 2, "hidden_size": 64}},
    "jetmoe": {"num_local_experts": 3, "num_experts_per_tok": 2, "num_key_value_heads": 2, "kv_channels": 16,
               "num_attention_heads": 4},
}  # fmt: skip
INPUT, OUTPUT = (f"model.layers.1.block_sparse_moe.{side}_linear.weight" for side in ("input", "output"))


def halves(whole):
    return whole.chunk(2)


CUTS = {  # of layer 1: the block on disk, its tensors, and from those what an expert has of them
    "granitemoe": (
        "model.layers.1.block_sparse_moe", ["input_linear.weight", "output_linear.weight"],
        lambda e, up, down: {"gate_proj.weight": halves(up[e])[0], "up_proj.weight": halves(up[e])[1],
                             "down_proj.weight": down[e]},
    ),
    "gpt_oss": (
        "model.layers.1.mlp",
        [f"experts.{name}" for name in ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")],
        lambda e, up, upper, down, lower: {
            "gate_proj.weight": up[e, :, ::2].T, "gate_proj.bias": upper[e, ::2], "up_proj.weight": up[e, :, 1::2].T,
            "up_proj.bias": upper[e, 1::2], "down_proj.weight": down[e].T, "down_proj.bias": lower[e],
        },
    ),
    "llama4_text": (
        "model.layers.1.feed_forward", ["experts.gate_up_proj", "experts.down_proj"],
        lambda e, up, down: {"gate_proj.weight": halves(up[e].T)[0], "up_proj.weight": halves(up[e].T)[1],
                             "down_proj.weight": down[e].T},
    ),
    "aria_text": (
        "model.layers.1.mlp", ["experts.fc1.weight", "experts.fc2.weight"],
        lambda e, up, down: {"gate_proj.weight": halves(up[e].T)[0], "up_proj.weight": halves(up[e].T)[1],
                             "down_proj.weight": down[e].T},
    ),
    "dbrx": (
        "transformer.blocks.1.ffn", [f"experts.mlp.{name}" for name in ("w1", "v1", "w2")],
        lambda e, gate, up, down: {"gate_proj.weight": gate.chunk(3)[e], "up_proj.weight": up.chunk(3)[e],
                                   "down_proj.weight": down.chunk(3)[e].T},
    ),
}  # fmt: skip


@pytest.fixture
def source(random_model_dir, tiny_model_dir, tmp_path):
    def make(family):
        path = tmp_path / family
        shutil.copytree(random_model_dir(family, vocab_size=1200, **FAMILIES[family]), path)
        for file in tiny_model_dir.iterdir():
            if file.suffix in (".json", ".jinja") and file.name != "config.json" and not (path / file.name).exists():
                shutil.copy(file, path)
        return path

    return make


def tensors(path):
    with safe_open(path / "model.safetensors", "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


@pytest.mark.parametrize("family", CUTS)
def test_every_tensor_of_an_expert_is_cut_out_of_its_stack(family, source):
    path, ledger = source(family), Ledger()
    block, stacks, parts = CUTS[family]
    held, seen = tensors(path), Checkpoint(unstacked_headers(checkpoint_headers(path), ledger))
    names = set()
    for number in range(3):
        for name, value in parts(number, *(held[f"{block}.{stack}"] for stack in stacks)).items():
            names.add(f"{block}.experts.{number}.{name}")
            assert torch.equal(seen.read(f"{block}.experts.{number}.{name}"), value), name
    assert names == {name for name in seen.names() if name.startswith(f"{block}.experts.")}
    assert not {f"{block}.{stack}" for stack in stacks} & set(seen.names())
    # of llama4 transformers takes blocks apart before it loads codes; for the others it has no rule
    assert [entry.kind for entry in ledger.entries] == ([] if family == "llama4_text" else ["engine"])


def test_a_matrix_of_every_expert_is_cut_into_as_many(source):
    path = source("jetmoe")
    held, seen = tensors(path), Checkpoint(unstacked_headers(checkpoint_headers(path), Ledger()))
    for block in ("mlp.input_linear", "mlp.output_linear", "self_attention.experts.input_linear"):
        for number, value in enumerate(held[f"model.layers.1.{block}.weight"]):
            assert torch.equal(seen.read(f"model.layers.1.{block}.{number}.weight"), value)
        assert f"model.layers.1.{block}.weight" not in seen


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_with_stacked_experts_runs_section_by_section(family, source):
    path = source(family)
    truth = reference_logits(path, ids())
    close = {"rtol": 1e-5, "atol": 1e-5 * float(truth.abs().max())}
    torch.testing.assert_close(streamed_logits(streamed(path), ids()), truth, **close)


@pytest.mark.parametrize("family", FAMILIES)
def test_stacked_experts_are_quantised_and_verified_one_by_one(family, source, tmp_path):
    path, out = source(family), tmp_path / "out"
    report = compress(path, out, recipe(calibration={"samples": 2}, bits=8, group_size=32))
    of_many = re.compile(r"\.\d+\..*\.\d+(\.|$)")
    recorded = {record["name"]: record for record in report["linears"] if of_many.search(record["name"])}
    assert len(recorded) == 2 * 3 * (4 if family == "jetmoe" else 3)
    assert all(record["relative_error"] < 0.02 for record in recorded.values())
    assert not [check for check in verify(out, path) if not check.ok]
    truth = streamed_logits(streamed(path), ids())
    assert float((streamed_logits(open_streamed(out, dtype=torch.float32), ids()) - truth).abs().mean()) < 0.1 * float(
        truth.abs().mean()
    )


def test_transformers_loads_the_experts_that_it_takes_apart_itself(source, tmp_path):
    path, out = source("llama4_text"), tmp_path / "out"
    compress(path, out, recipe("rtn", bits=8, group_size=32), target="transformers")
    mine = streamed_logits(open_streamed(out, dtype=torch.float32), ids())
    torch.testing.assert_close(reference_logits(out, ids()), mine, rtol=1e-3, atol=1e-3 * float(mine.abs().max()))


@pytest.mark.parametrize("change", ["gate for up", "other experts", "not turned", "rows in order"])
def test_verify_notices_a_stack_that_was_cut_otherwise(change, source, tmp_path):
    path, out = source("gpt_oss"), tmp_path / "out"
    compress(path, out, recipe("rtn", bits=8, group_size=32))
    text = json.loads((out / "report.json").read_text())
    up = text["unstacked"]["model.layers.1.mlp.experts.gate_up_proj"]
    if change == "gate for up":
        up["parts"].reverse()
    elif change == "other experts":
        up["experts"] = 4
    elif change == "not turned":
        up["turned"] = False
    else:
        up["interleaved"] = False
    (out / "report.json").write_text(json.dumps(text))
    assert any(check.name in ("bound", "source") and not check.ok for check in verify(out, path))


@pytest.mark.parametrize(
    ("family", "format_", "target"),
    [
        ("granitemoe", "dense", None),
        ("granitemoe", "compressed-tensors", "transformers"),  # which would leave separate ones at random values
        ("gpt_oss", "gptq", None),
    ],
)
def test_stacks_that_cannot_be_written_one_by_one_are_left_and_named(family, format_, target, source, tmp_path):
    path = source(family)
    report = compress(path, tmp_path / "out", recipe("rtn", format_), target=target)
    left = {entry["subject"]: entry["why"] for entry in report["ledger"] if entry["kind"] == "unquantised"}
    stacks = [name for name, value in tensors(path).items() if value.ndim == 3]
    assert len(stacks) == 4
    assert all("in one tensor on disk" in left[name] for name in stacks)
    assert "unstacked" not in report
    assert not [check for check in verify(tmp_path / "out", path) if not check.ok]


@pytest.mark.parametrize("family", ["granitemoe", "gpt_oss", "llama4_text", "gemma4_text"])
def test_experts_of_gguf_files_are_calibrated_one_by_one(family, random_model_dir, tmp_path):
    config = {**small_config(family, 288), "vocab_size": 288}
    shutil.copytree(random_model_dir(family, **config), tmp_path / "model")
    model, out = save(byte_level(), tmp_path / "model"), tmp_path / "out.gguf"
    report = compress(model, out, steps_recipe([{"method": "gptq", "gguf": {"type": "Q4_0"}}], "gguf"))
    experts = [record for record in report["linears"] if ".experts." in record["name"]]
    layers, count = (2, 4) if family in ("granitemoe", "gpt_oss") else (4, 4)
    assert len(experts) == 3 * layers * count
    assert sum(record["loss"] for record in experts) < len(experts)  # of what rounding alone loses
    assert not [check for check in verify_gguf(out, model) if not check.ok]

    # where nothing is calibrated, files are those that the stacks themselves become
    compress(model, out, steps_recipe([{"method": "rtn", "gguf": {"type": "F32"}}], "gguf"), overwrite=True)
    out.with_name("out.gguf.report.json").unlink()
    assert not [check for check in verify_gguf(out, model) if not (check.ok or check.warning)]
