"""Experts that are one tensor on disk are read, quantised and verified matrix by matrix, or left with the reason."""

import json
import shutil

import pytest
import torch
from safetensors import safe_open

from llmcompress.engine.source.open import checkpoint_headers
from llmcompress.engine.source.stacked import unstacked_headers
from llmcompress.ledger import Ledger
from llmcompress.store.checkpoint import Checkpoint
from llmcompress.validate.load import open_streamed
from llmcompress.validate.verify import verify
from streaming import ids, reference_logits, streamed, streamed_logits
from tinyruns import compress, recipe

SMALL = {"num_attention_heads": 4, "num_key_value_heads": 2}
FAMILIES = {
    "granitemoe": {**SMALL, "num_local_experts": 3, "num_experts_per_tok": 2},
    "gpt_oss": {**SMALL, "num_local_experts": 3, "num_experts_per_tok": 2, "head_dim": 16, "rope_parameters": None},
}
INPUT, OUTPUT = (f"model.layers.1.block_sparse_moe.{side}_linear.weight" for side in ("input", "output"))


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


def test_every_matrix_is_the_range_of_its_stack(source):
    path, ledger = source("granitemoe"), Ledger()
    held, seen = tensors(path), Checkpoint(unstacked_headers(checkpoint_headers(path), ledger))
    up, down = held[INPUT], held[OUTPUT]
    block = "model.layers.1.block_sparse_moe.experts"
    for number in range(3):
        half = up.shape[1] // 2
        assert torch.equal(seen.read(f"{block}.{number}.gate_proj.weight"), up[number, :half])
        assert torch.equal(seen.read(f"{block}.{number}.up_proj.weight"), up[number, half:])
        assert torch.equal(seen.read(f"{block}.{number}.down_proj.weight"), down[number])
    assert not {INPUT, OUTPUT} & set(seen.names())
    assert [entry.kind for entry in ledger.entries] == ["engine"]  # transformers has no rule for these names


@pytest.mark.parametrize("family", ["granitemoe", "gpt_oss"])
def test_a_model_with_stacked_experts_runs_section_by_section(family, source):
    path = source(family)
    truth = reference_logits(path, ids())
    close = {"rtol": 1e-5, "atol": 1e-5 * float(truth.abs().max())}
    torch.testing.assert_close(streamed_logits(streamed(path), ids()), truth, **close)


def test_stacked_experts_are_quantised_and_verified_one_by_one(source, tmp_path):
    path, out = source("granitemoe"), tmp_path / "out"
    report = compress(path, out, recipe(calibration={"samples": 2}, bits=8, group_size=32))
    recorded = {record["name"]: record for record in report["linears"] if ".experts." in record["name"]}
    assert len(recorded) == 2 * 3 * 3
    assert all(record["relative_error"] < 0.02 for record in recorded.values())
    assert report["unstacked"][OUTPUT] == ["model.layers.1.block_sparse_moe.experts.{e}.down_proj.weight"]
    assert not [check for check in verify(out, path) if not check.ok]
    truth = streamed_logits(streamed(path), ids())
    assert float((streamed_logits(open_streamed(out, dtype=torch.float32), ids()) - truth).abs().mean()) < 0.1 * float(
        truth.abs().mean()
    )

    text = json.loads((out / "report.json").read_text())
    text["unstacked"][INPUT].reverse()  # gate for up
    (out / "report.json").write_text(json.dumps(text))
    assert any(check.name == "bound" and not check.ok for check in verify(out, path))


@pytest.mark.parametrize(
    ("family", "format_", "target"),
    [
        ("granitemoe", "dense", None),
        ("granitemoe", "compressed-tensors", "transformers"),  # which would leave separate ones at random values
        ("gpt_oss", "compressed-tensors", None),
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
