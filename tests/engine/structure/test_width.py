"""Width pruning, against transformers running the whole model with channels silenced."""

import json

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from llmcompress.engine.plan.run_options import Options
from llmcompress.engine.structure.width import CHANNELS, WidthRequest, plan_width, prune_width
from llmcompress.errors import PlanError
from llmcompress.recipe import Calibration, build
from llmcompress.validate.verify import passed, verify

SAMPLES, LENGTH = 6, 40
READERS = {
    "llama": "model.layers.{}.mlp.down_proj",
    "phi3": "model.layers.{}.mlp.down_proj",
    "gemma2": "model.layers.{}.mlp.down_proj",
    "olmo2": "model.layers.{}.mlp.down_proj",
    "opt": "model.decoder.layers.{}.fc2",
    "gpt2": "transformer.h.{}.mlp.c_proj",
    "gpt_neox": "gpt_neox.layers.{}.mlp.dense_4h_to_h",
}
MORE = {"llama": {"mlp_bias": True}, "gemma2": {"query_pre_attn_scalar": 16}}


@pytest.fixture
def ids(tmp_path):
    tokens = torch.randint(2, 90, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(1))
    save_file({"input_ids": tokens}, tmp_path / "ids.safetensors")
    return tmp_path / "ids.safetensors", tokens


def width(model, out, ids, *, threads=1, **asked):
    text = build(Calibration, {"source": str(ids), "samples": SAMPLES, "length": LENGTH}, "here")
    options = Options(out=out, compute_dtype="float32", threads=threads)
    return prune_width(plan_width(model, WidthRequest(**{"multiple_of": 16, **asked}), text, options))


def whole(path):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@pytest.mark.parametrize("family", READERS)
@pytest.mark.parametrize("by", ["energy", "cost"])
def test_the_result_is_the_model_with_the_other_channels_silent(family, by, random_model_dir, ids, tmp_path):
    file, tokens = ids
    model = random_model_dir(family, **MORE.get(family, {}))
    report = width(model, tmp_path / "out", file, ratio=0.5, by=by, repair=False)
    causal = whole(model)
    channels = np.load(tmp_path / "out" / CHANNELS)
    for number in range(2):
        module = causal.get_submodule(READERS[family].format(number))
        weight = module.weight.data if isinstance(module, Conv1D) else module.weight.data.T
        silent = np.setdiff1d(np.arange(report["width"]["before"]), channels[str(number)])
        assert len(silent) == report["width"]["before"] - report["width"]["after"] > 0
        weight[torch.from_numpy(silent)] = 0
    with torch.no_grad():
        torch.testing.assert_close(
            whole(tmp_path / "out")(tokens, use_cache=False).logits, causal(tokens, use_cache=False).logits
        )
    assert passed(verify(tmp_path / "out"))


@pytest.mark.parametrize("family", ["llama", "gpt2", "phi3"])
def test_repair_is_least_squares_on_what_the_pruned_layers_before_give(family, random_model_dir, ids, tmp_path):
    file, tokens = ids
    model = random_model_dir(family, dtype="float32", **({"mlp_bias": True} if family == "llama" else {}))
    report = width(model, tmp_path / "out", file, ratio=0.5)
    assert all(item["loss"] < item["cut"] for item in report["width"]["layers"])
    channels = np.load(tmp_path / "out" / CHANNELS)
    original, pruned = whole(model), whole(tmp_path / "out")
    for number in range(2):
        path = READERS[family].format(number)
        # the first layer's channels as they were; the second's on what the pruned first layer gives
        mixed = whole(model)
        for before in range(number):
            block = READERS[family].format(before).rpartition(".")[0]
            parent, _, name = block.rpartition(".")
            setattr(mixed.get_submodule(parent), name, pruned.get_submodule(block))
        x = inputs(mixed, path, tokens).double()
        kept = torch.from_numpy(channels[str(number)])
        weight = matrix(original.get_submodule(path)).double()
        square = x.T @ x / len(x)
        damping = 0.01 * square[kept][:, kept].diagonal().mean() * torch.eye(len(kept))
        missing = weight @ square[:, kept] - weight[:, kept] @ square[kept][:, kept]
        wanted = weight[:, kept] + torch.linalg.solve(square[kept][:, kept] + damping, missing.T).T
        torch.testing.assert_close(matrix(pruned.get_submodule(path)).double(), wanted, rtol=1e-3, atol=1e-4)


def matrix(module):
    return module.weight.data.T if isinstance(module, Conv1D) else module.weight.data


@torch.no_grad()
def inputs(model, path, tokens):
    seen = []
    model.get_submodule(path).register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model(tokens, use_cache=False)
    return torch.cat(seen).reshape(-1, seen[0].shape[-1])


def test_bytes_do_not_depend_on_threads(random_model_dir, ids, tmp_path):
    made = []
    for threads in (1, 2):
        out = tmp_path / str(threads)
        width(random_model_dir("llama"), out, ids[0], ffn=48, threads=threads)
        made.append({file.name: file.read_bytes() for file in out.iterdir()})
    assert made[0] == made[1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2", "ids.safetensors"]


def test_repair_is_worth_it_and_the_result_goes_on_to_gguf(main, tiny_model_dir, tiny_eval_text, tmp_path, capsys):
    kl = {}
    for repair in ("--repair", "--no-repair"):
        out = tmp_path / repair[2:]
        options = ["--ratio", 0.5, "--samples", 32, "--length", 64, repair]
        assert main("width", tiny_model_dir, "-o", out, *options, "--multiple-of", 256, "-q") == 0
        capsys.readouterr()
        text = ["--text", tiny_eval_text, "--windows", 8, "--length", 64, "--json"]
        assert main("eval", out, "--ref", tiny_model_dir, *text) == 0
        kl[repair] = json.loads(capsys.readouterr().out)["kl"]
    assert kl["--repair"] < 0.7 * kl["--no-repair"]
    assert json.loads((out / "config.json").read_text())["intermediate_size"] == 256
    assert main("gguf", out, "-o", tmp_path / "out.gguf", "--type", "F16", "-q") == 0
    assert gguf.GGUFReader(tmp_path / "out.gguf").get_field("llama.feed_forward_length").contents() == 256


def test_widths_are_rounded_to_what_kernels_like(tiny_model_dir, tmp_path):
    text = build(Calibration, {}, "here")
    for asked, wanted in (
        (WidthRequest(ratio=0.25), 384),
        (WidthRequest(ratio=0.3, multiple_of=256), 256),
        (WidthRequest(ffn=448), 448),
    ):
        assert plan_width(tiny_model_dir, asked, text, Options(out=tmp_path / "out")).width == wanted


def test_the_plan_knows_the_size_to_the_byte(tiny_model_dir, tmp_path):
    text = build(Calibration, {"samples": 4, "length": 32}, "here")
    plan = plan_width(tiny_model_dir, WidthRequest(ratio=0.25), text, Options(out=tmp_path / "out"))
    prune_width(plan)
    assert plan.derived.nbytes == (tmp_path / "out" / "model.safetensors").stat().st_size
    before, after = (load_file(path / "model.safetensors") for path in (tiny_model_dir, tmp_path / "out"))
    assert before.keys() == after.keys()
    unchanged = [name for name in before if "mlp" not in name]
    assert all(torch.equal(before[name], after[name]) for name in unchanged)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "give either --ffn or --ratio"),
        (["--ffn", 128, "--ratio", 0.5], "give either --ffn or --ratio"),
        (["--ffn", 100], "--ffn 100 is not a multiple of 64"),
        (["--ffn", 512], "512 channels are not fewer than the 512 of the feed-forward"),
        (["--ratio", 1.5], "invalid value for '--ratio'"),
        (["--ratio", "nan"], "invalid value for '--ratio'"),
        (["--ratio", 0.01], "512 channels are not fewer"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(main, tiny_model_dir, tmp_path, capsys, options, words):
    assert main("width", tiny_model_dir, "-o", tmp_path / "out", *options) == 2
    assert words in " ".join(capsys.readouterr().err.split())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("family", "words"), [("mixtral", "have experts"), ("bloom", "no declared feed-forward")])
def test_models_without_a_feed_forward_that_is_known_are_refused(family, words, random_model_dir, ids, tmp_path):
    with pytest.raises(PlanError, match=words):
        width(random_model_dir(family), tmp_path / "out", ids[0], ratio=0.5)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("family", READERS)
@pytest.mark.parametrize("repair", [True, False])
def test_verify_knows_the_source_of_a_narrower_model(family, repair, random_model_dir, ids, tmp_path):
    model, out = random_model_dir(family, **MORE.get(family, {})), tmp_path / "out"
    width(model, out, ids[0], ratio=0.5, repair=repair)
    checks = verify(out, model)
    assert passed(checks), checks
    other = random_model_dir(family, **{**MORE.get(family, {}), "max_position_embeddings": 64})
    assert not passed(verify(out, other))


@pytest.mark.parametrize("damage", ["a row of up", "a row of q", "other channels", "no channels", "down as it was"])
def test_verify_sees_what_does_not_come_from_the_source(damage, random_model_dir, ids, tmp_path):
    model, out = random_model_dir("llama"), tmp_path / "out"
    width(model, out, ids[0], ratio=0.5)
    tensors, channels = load_file(out / "model.safetensors"), dict(np.load(out / CHANNELS))
    below, wanted = "model.layers.1.", "model.layers.1.mlp.up_proj.weight does not hold"
    if damage == "a row of up":
        tensors[f"{below}mlp.up_proj.weight"][3] *= 2
    elif damage == "a row of q":
        tensors[f"{below}self_attn.q_proj.weight"][3] *= 2
        wanted = "q_proj.weight differs from the source"
    elif damage == "other channels":
        channels["1"] = np.setdiff1d(np.arange(96), channels["1"])[:48]
    elif damage == "no channels":
        (out / CHANNELS).unlink()
        wanted = "channels.npz cannot be read"
    else:
        original = load_file(model / "model.safetensors")[f"{below}mlp.down_proj.weight"]
        tensors[f"{below}mlp.down_proj.weight"] = original[:, torch.from_numpy(channels["1"])].contiguous()
        wanted = "holds those of the source"
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    if damage != "no channels":
        np.savez(out / CHANNELS, **channels)
    [source] = [check for check in verify(out, model) if check.name == "source"]
    assert not source.ok
    assert wanted in source.detail
