"""Recovered GGUF files: scales of blocks and gains move, and not one other bit; the gguf package reads the result."""

import json
import shutil
from functools import cache

import gguf
import numpy as np
import pytest
import torch
from recovered import compressed, planned, recovered, write_ids

from llmcompress.engine.execute import run
from llmcompress.engine.plan.make_plan import make_plan
from llmcompress.engine.plan.run_options import Options
from llmcompress.engine.recover.recovery import recover
from llmcompress.engine.train.trained import TrainedMatrix
from llmcompress.errors import CheckpointError, PlanError
from llmcompress.grids.encoders import encode
from llmcompress.grids.grid_type import gguf_specs
from llmcompress.packing.ggml import pack
from llmcompress.recipe import parse
from llmcompress.validate.gguf_verify import verify_gguf
from llmcompress.validate.load import open_streamed
from llmcompress.workers import SERIAL
from madetokenizers import byte_level, save

# bytes of a block, and where in it `d`, then `dmin` or `m`, begin: the structures of ggml-common.h
SCALES = {
    "Q4_0": (18, 0), "Q4_1": (20, 0, 2), "Q5_0": (22, 0), "Q5_1": (24, 0, 2), "Q8_0": (34, 0), "IQ4_NL": (18, 0),
    "Q2_K": (84, 80, 82), "Q3_K": (110, 108), "Q4_K": (144, 0, 2), "Q5_K": (176, 0, 2), "Q6_K": (210, 208),
    "IQ4_XS": (136, 0), "IQ2_XXS": (66, 0), "IQ2_XS": (74, 0), "IQ2_S": (82, 0), "IQ3_XXS": (98, 0), "IQ3_S": (110, 0),
    "IQ1_S": (50, 0), "TQ1_0": (54, 52), "TQ2_0": (66, 64),
}  # fmt: skip
FIXED = {"MXFP4", "NVFP4"}
MIXED = {
    "attn_q": "Q4_0", "attn_k": "Q5_1", "attn_v": "Q8_0", "attn_output": "IQ4_XS", "ffn_gate": "Q3_K",
    "ffn_up": "Q4_K", "ffn_down": "Q2_K",
}  # fmt: skip


@cache
def free(kind):
    """The bits of a block that its float16 scales are: uint8 [bytes]."""
    if kind == "IQ1_M":  # a nibble of each of four words of scales
        mask = np.zeros(56, np.uint8)
        mask[49::2] = 0xF0
        return mask
    size, *places = SCALES[kind]
    mask = np.zeros(size, np.uint8)
    for at in places:
        mask[at : at + 2] = 0xFF
    return mask


def decoded(rows, kind):
    return gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[kind])


def rounded(kind):
    """A matrix [3, 512] in a type; TQ types hold no others than of three levels."""
    weight = torch.randn(3, 512, generator=torch.Generator().manual_seed(5)) / 8
    return encode(weight, gguf_specs()[kind], "fast", SERIAL, None)


@pytest.mark.parametrize("kind", sorted(gguf_specs().keys() - FIXED))
def test_slopes_are_those_of_what_the_package_decodes_and_scales_alone_move(kind):
    coded = rounded(kind)
    item = TrainedMatrix.of("", lambda: coded, torch.float16, transposed=False)
    blocks = pack(coded).numpy().reshape(3, -1, len(free(kind)))
    assert item.learnt.shape == blocks.shape[:2]
    generator = torch.Generator().manual_seed(6)
    gradient = torch.randn(3, 512, generator=generator)
    learnt = torch.zeros(item.learnt.shape, dtype=torch.float64, requires_grad=True)
    own = torch.from_numpy(decoded(blocks.reshape(3, -1), kind)).double().view(*learnt.shape, -1)
    (own * learnt.exp()[..., None] * gradient.double().view(own.shape)).sum().backward()
    torch.testing.assert_close(item.slope(item.value(), gradient).double(), learnt.grad, rtol=1e-5, atol=1e-6)

    item.learnt += 0.1 * torch.randn(item.learnt.shape, generator=generator)
    moved = pack(item.coded()).numpy().reshape(blocks.shape)
    assert not ((moved ^ blocks) & ~free(kind)).any()
    assert ((moved ^ blocks).any(-1)).all()
    values = torch.from_numpy(decoded(moved.reshape(3, -1), kind))
    assert torch.equal(values, item.value())
    wanted = (own * item.learnt.double().exp()[..., None]).view(3, 512)
    torch.testing.assert_close(values.double(), wanted, rtol=2e-3, atol=5e-4)


@pytest.mark.parametrize("kind", sorted(FIXED))
def test_scales_that_are_no_free_numbers_are_left(kind):
    assert TrainedMatrix.of("", lambda: rounded(kind), torch.float16, transposed=False) is None


@pytest.fixture(scope="module")
def ids(tmp_path_factory):
    return write_ids(tmp_path_factory.mktemp("ids") / "ids.safetensors", vocabulary=280)


@pytest.fixture(scope="module")
def small(random_model_dir, tmp_path_factory):
    """small(family, **config): a random model of it, with a tokenizer."""

    def make(family, **config):
        path = tmp_path_factory.mktemp("small") / family
        return save(byte_level(), shutil.copytree(random_model_dir(family, vocab_size=288, **config), path))

    return make


def rtn(kind, **types):
    return {"method": "rtn", "gguf": {"type": kind, "search": "fast", **types}}


def written(model, out, *steps, **settings):
    return compressed(model, out, *steps, form="gguf", **settings)


def good(file, model):
    checks = verify_gguf(file, model)
    return all(check.ok for check in checks) or checks


def gguf_tensors(file):
    return {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}


def moved(before, after):
    """Names of tensors that differ, of two files that differ in scales of blocks and float32 tensors alone."""
    first, second = (np.fromfile(file, np.uint8) for file in (before, after))
    assert len(first) == len(second)
    changed, names = first ^ second, set()
    for name, tensor in gguf_tensors(before).items():
        part = changed[tensor.data_offset : tensor.data_offset + tensor.n_bytes]
        if part.any():
            names.add(name)
            kind = tensor.tensor_type.name
            allowed = np.uint8(0xFF) if kind == "F32" else np.tile(free(kind), len(part) // len(free(kind)))
            part &= ~allowed
    assert not changed.any()
    return names


@pytest.fixture(scope="module")
def mixed(tiny_model_dir, ids, tmp_path_factory):
    """A file of many types, its recovery, and the report of that."""
    folder = tmp_path_factory.mktemp("mixed")
    file = written(tiny_model_dir, folder / "mixed.gguf", rtn("Q4_K", tensors=MIXED))
    return file, folder / "to.gguf", recovered(file, tiny_model_dir, folder / "to.gguf", ids, rate=1e-3)


def test_scales_and_gains_of_a_file_are_trained_and_all_else_stays(mixed, tiny_model_dir):
    file, to, report = mixed
    assert good(to, tiny_model_dir) is True
    assert all(held["kl"] < held["kl_before"] for held in report["recovery"]["held_back"].values())
    layers = {name for name in gguf_tensors(file) if name.startswith("blk.")}
    assert moved(file, to) == {*layers, "output_norm.weight"}
    assert report["recovery"]["matrices"] == 28
    assert all(item["recovered"] for item in report["linears"])
    assert report["ledger"] == json.loads(file.with_name(f"{file.name}.report.json").read_text())["ledger"]


def test_what_was_trained_is_what_the_package_decodes(mixed, tiny_model_dir):
    """Rows of q and k come in llama.cpp's order: they are put back here by the formula of its converter."""
    _, to, _ = mixed
    model = open_streamed(to, source=tiny_model_dir, dtype=torch.float32)
    stored = gguf_tensors(to)
    heads = {"q": model.config.num_attention_heads, "k": model.config.num_key_value_heads}
    for number in range(len(model.layers)):
        for ours, theirs in (("self_attn.q_proj", "attn_q"), ("self_attn.k_proj", "attn_k"), ("mlp.up_proj", "ffn_up")):
            tensor = stored[f"blk.{number}.{theirs}.weight"]
            values = decoded(tensor.data, tensor.tensor_type.name)
            if theirs[-1] in heads:
                pairs = values.reshape(heads[theirs[-1]], -1, 2, values.shape[1])
                values = pairs.swapaxes(1, 2).reshape(values.shape)
            assert torch.equal(model.weights.read(f"model.layers.{number}.{ours}.weight"), torch.from_numpy(values))


def test_an_interrupted_run_gives_the_same_bytes(mixed, tiny_model_dir, ids):
    file, to, _ = mixed
    again = to.with_name("again.gguf")
    plan = planned(file, tiny_model_dir, again, ids, rate=1e-3, threads=2)

    def stop(done, of):
        if done == of - 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        recover(plan, stop)
    assert not again.exists()
    recover(planned(file, tiny_model_dir, again, ids, rate=1e-3))
    for end in ("", ".report.json", ".transforms.npz"):
        assert to.with_name(f"{to.name}{end}").read_bytes() == again.with_name(f"{again.name}{end}").read_bytes()


@pytest.mark.parametrize("family", ["gemma2", "mixtral", "gpt2", "olmo2"])
def test_families_with_other_norms_experts_and_orders_of_rows(family, small, ids, tmp_path):
    """Gemma adds 1 to gains, experts lie in one tensor, GPT-2's matrices are turned, OLMo 2 has gains in q's order."""
    model = small(family, **({"query_pre_attn_scalar": 16} if family == "gemma2" else {}))
    file = written(model, tmp_path / "model.gguf", rtn("Q4_0"))
    report = recovered(file, model, tmp_path / "to.gguf", ids, rate=1e-3)
    assert good(tmp_path / "to.gguf", model) is True
    norms = {name for name, tensor in gguf_tensors(file).items() if "norm.weight" in name}
    names = moved(file, tmp_path / "to.gguf")
    assert norms <= names
    matrices = {name for name in names - norms if name.startswith("blk.")}
    assert names == norms | matrices
    assert (len(matrices) == 0) == (family == "gpt2")
    assert report["recovery"]["matrices"] == sum("recovered" in item for item in report["linears"])


@pytest.mark.parametrize("kind", sorted(FIXED))
def test_gains_alone_are_trained_where_scales_are_no_free_numbers(kind, small, ids, tmp_path):
    model = small("llama", intermediate_size=128)
    file = written(model, tmp_path / "model.gguf", rtn(kind))
    report = recovered(file, model, tmp_path / "to.gguf", ids, rate=1e-3)
    assert good(tmp_path / "to.gguf", model) is True
    assert {name.rpartition(".")[0].rpartition("_")[2] for name in moved(file, tmp_path / "to.gguf")} == {"norm"}
    assert sum(entry["kind"] == "untrained" for entry in report["ledger"]) == 14


def test_factors_of_scaled_channels_and_a_modelfile_are_kept(small, ids, tmp_path):
    model = small("llama")
    file = written(model, tmp_path / "model.gguf", {"method": "awq", "steps": 2}, rtn("Q4_0"), source=ids)
    for start, to in ((file, tmp_path / "to.gguf"), (tmp_path / "to.gguf", tmp_path / "again.gguf")):
        start.with_name(f"{start.name}.Modelfile").write_text(f'FROM ./{start.name}\nPARAMETER stop "</s>"\n')
        recovered(start, model, to, ids, rate=1e-3)
        assert good(to, model) is True
        said = to.with_name(f"{to.name}.Modelfile").read_text()
        assert said == f'FROM ./{to.name}\nPARAMETER stop "</s>"\n'


def test_rotated_files_are_recovered(small, ids, tmp_path):
    """The head of such a file is its own, though the original's is tied."""
    model = small("llama", tie_word_embeddings=True)
    file = written(model, tmp_path / "model.gguf", {"method": "rotate"}, rtn("Q4_0"))
    assert "output.weight" in gguf_tensors(file)
    held = recovered(file, model, tmp_path / "to.gguf", ids, rate=1e-3)["recovery"]["held_back"]["calibration"]
    assert held["kl"] < held["kl_before"]
    assert good(tmp_path / "to.gguf", model) is True
    assert "output.weight" not in moved(file, tmp_path / "to.gguf")


def test_what_is_no_whole_file_with_its_report_is_refused(mixed, tiny_model_dir, ids, tmp_path):
    file, *_ = mixed
    lonely = shutil.copy(file, tmp_path / "lonely.gguf")
    with pytest.raises(CheckpointError, match=r"lonely.gguf has no lonely.gguf.report.json"):
        planned(lonely, tiny_model_dir, tmp_path / "to.gguf", ids)
    shards = tmp_path / "shards"
    recipe = parse({"steps": [rtn("Q4_0")], "output": {"format": "gguf", "shard_size": 1_000_000}})
    run(make_plan(recipe, tiny_model_dir, Options(out=shards)))
    with pytest.raises(PlanError, match=r"is one of \d files of a model, and one is written"):
        planned(next(shards.glob("*.gguf")), tiny_model_dir, tmp_path / "to.gguf", ids)
    with pytest.raises(PlanError, match="to is not called like a GGUF file"):
        planned(file, tiny_model_dir, tmp_path / "to", ids)
    with pytest.raises(PlanError, match="is the model itself"):
        planned(file, tiny_model_dir, file, ids)
    with pytest.raises(PlanError, match=r"mixed.gguf is a GGUF file, which has no config.json"):
        planned(file, file, tmp_path / "to.gguf", ids)
    report = json.loads(file.with_name(f"{file.name}.report.json").read_text())
    (tmp_path / "lonely.gguf.report.json").write_text(json.dumps({**report, "format": "gptq"}))
    with pytest.raises(CheckpointError, match="is not the report of a GGUF file"):
        planned(lonely, tiny_model_dir, tmp_path / "to.gguf", ids)
