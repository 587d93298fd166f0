"""A matrix that cannot be compressed ends the run: what is published passes `verify`."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

MATRIX = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture
def changed(random_model_dir, tmp_path):
    """changed(change): a model with one matrix changed."""

    def model(change, name=MATRIX):
        folder = shutil.copytree(random_model_dir("llama", intermediate_size=128), tmp_path / "model")
        tensors = load_file(folder / "model.safetensors")
        tensors[name] = change(tensors[name].float()).to(tensors[name].dtype).contiguous()
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    return model


def outlier(weight):
    weight = weight.clone()
    weight[3, 5] = 1e4
    return weight


BAD = {
    "huge": lambda w: w * 1e30,
    "tiny": lambda w: w * 1e-30,
    "denormal": lambda w: w * 1e-39,
    "beyond float16": lambda w: w * 1e6,
}
GOOD = {
    "zero": torch.zeros_like,
    "minus zero": lambda w: -torch.zeros_like(w),
    "constant": lambda w: torch.full_like(w, 0.3),
    "constant rows": lambda w: w[:, :1].expand_as(w),
    "an outlier": outlier,
}
COMMANDS = {
    "int4": ["rtn", "--bits", 4, "--group-size", 32, "--asym", "--format", "gptq"],
    "fp8": ["fp8"],
    "nf4": ["nf4"],
    "int8": ["int8"],
    "codebook": ["rtn", "--type", "codebook", "--bits", 3, "--format", "codebook"],
    "pruned": ["magnitude", "--sparsity", 0.5],
}


@pytest.mark.parametrize("how", BAD)
@pytest.mark.parametrize("what", COMMANDS)
def test_what_floats_cannot_hold_is_refused(how, what, main, capsys, changed, tmp_path):
    command, *options = COMMANDS[what]
    assert main(command, changed(BAD[how]), "-o", tmp_path / "out", *options, "-q") == 1
    error = capsys.readouterr().err
    assert "q_proj reach" in error
    assert "skip: true" in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("how", GOOD)
@pytest.mark.parametrize("what", COMMANDS)
def test_what_is_odd_and_possible_passes_verify(how, what, main, changed, tmp_path):
    model, out = changed(GOOD[how]), tmp_path / "out"
    command, *options = COMMANDS[what]
    assert main(command, model, "-o", out, *options, "-q") == 0
    assert main("verify", out, "--source", model) == 0


def test_a_sparsity_that_leaves_no_weight_of_a_row_is_refused(main, capsys, random_model_dir, tmp_path):
    command = ["magnitude", random_model_dir("llama", intermediate_size=128), "--sparsity", 0.9999]
    by_row = [*command, "--compare", "row"]
    assert main("plan", *by_row) == main(*by_row, "-o", tmp_path / "out") == 2
    assert "leaves none of the 64 inputs" in capsys.readouterr().err
    assert main(*command, "-o", tmp_path / "out") == 1  # nor any of the smaller matrices
    assert "becomes zeros" in capsys.readouterr().err


def test_a_tensor_beyond_its_type_in_gguf_is_refused(main, capsys, tiny_model_dir, tmp_path):
    folder = shutil.copytree(tiny_model_dir, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"] *= 1e9
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for kind in ("F16", "Q8_0"):
        assert main("gguf", folder, "-o", tmp_path / f"{kind}.gguf", "--type", kind, "-q") == 1
        assert "--tensor-type token_embd=F32" in capsys.readouterr().err
        assert not list(tmp_path.glob("*.gguf"))
    wider = ["--type", "Q8_0", "--tensor-type", "token_embd=F32"]
    assert main("gguf", folder, "-o", tmp_path / "out.gguf", *wider, "-q") == 0
    assert main("verify", tmp_path / "out.gguf", "--source", folder) == 0


@pytest.mark.parametrize("command", ["awq", "smoothquant"])
def test_scaled_norms_of_float32_are_the_sources_times_their_factors(command, main, tiny_model_dir, tmp_path):
    folder, out = shutil.copytree(tiny_model_dir, tmp_path / "model"), tmp_path / "out"
    tensors = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert main(command, folder, "-o", out, "--samples", 2, "--length", 16, "-q") == 0
    assert main("verify", out, "--source", folder) == 0


def test_what_pruning_leaves_of_float32_weights_is_written_as_it_was(main, random_model_dir, tmp_path):
    model, out = random_model_dir("llama", dtype="float32"), tmp_path / "out"
    assert main("magnitude", model, "-o", out, "--sparsity", 0.5, "-q") == 0
    before, after = (load_file(path / "model.safetensors")[MATRIX] for path in (model, out))
    assert torch.equal(after, torch.where(after == 0, 0, before))
    assert float((after == 0).float().mean()) == pytest.approx(0.5, abs=0.02)
