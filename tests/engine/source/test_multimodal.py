"""Multimodal models: the language model is compressed, all else is copied; text is measured as the whole runs it."""

import json

import pytest
import torch
from safetensors.torch import load_file

from llmcompress.errors import PlanError
from llmcompress.validate.evaluate import measure
from llmcompress.validate.load import load_whole, open_streamed
from llmcompress.validate.verify import passed, verify
from multimodals import multimodal
from tinyruns import carry_out, compress, recipe

IDS = torch.randint(2, 256, (3, 24), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return multimodal("gemma4", tmp_path_factory.mktemp("gemma4") / "model", torch.bfloat16)[0]


def whole(path):
    """transformers' own model of a directory."""
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()


def log_probabilities(model):
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits.double().log_softmax(-1)


def test_the_language_model_is_compressed_and_all_else_copied(source, tmp_path):
    report = compress(source, tmp_path / "out", recipe(group_size=16))
    assert len(report["linears"]) >= 14
    assert {entry["kind"] for entry in report["ledger"]} >= {"multimodal"}
    checks = verify(tmp_path / "out", source)
    assert passed(checks), checks
    before, after = (load_file(path / "model.safetensors") for path in (source, tmp_path / "out"))
    left = [
        name for name in before if "language_model.layers" not in name and "language_model.model.layers" not in name
    ]
    assert any("vision" in name for name in left)
    assert all(torch.equal(before[name], after[name]) for name in left)
    config, own = (json.loads((path / "config.json").read_text()) for path in (source, tmp_path / "out"))
    settings = own.pop("quantization_config")
    assert own == config
    assert any(name.startswith("model.vision_tower.") for name in settings["ignore"])
    assert (tmp_path / "out" / "preprocessor_config.json").read_bytes() == (
        source / "preprocessor_config.json"
    ).read_bytes()


def test_text_is_measured_as_transformers_runs_the_whole(source, tmp_path):
    """Each sample has inputs of its own for every layer."""
    carry_out(source, tmp_path / "out", [{"method": "gptq", "bits": 3, "group_size": 16}])
    theirs, ours = log_probabilities(whole(source)), log_probabilities(whole(tmp_path / "out"))
    assert torch.allclose(log_probabilities(load_whole(source, dtype=torch.float32)), theirs, atol=1e-4)
    wanted = (theirs.exp() * (theirs - ours)).sum(-1)[:, :-1]
    models = [open_streamed(path, dtype=torch.float32) for path in (tmp_path / "out", source)]
    found = measure(*models, IDS).kl
    assert float(wanted.mean()) > 1e-3
    assert torch.allclose(torch.as_tensor(found).double().reshape(wanted.shape), wanted, atol=1e-5, rtol=1e-3)


def test_scales_move_between_the_matrices_of_a_declared_language_model(tmp_path):
    source, _ = multimodal("mistral3", tmp_path / "model")
    carry_out(source, tmp_path / "out", [{"method": "awq"}, {"method": "rtn", "bits": 4, "group_size": 16}])
    checks = verify(tmp_path / "out", source)
    assert passed(checks), checks
    exact = log_probabilities(whole(source))
    scaled, plain = log_probabilities(whole(tmp_path / "out")), tmp_path / "plain"
    carry_out(source, plain, [{"method": "rtn", "bits": 4, "group_size": 16}])
    divergence = [
        float((exact.exp() * (exact - other)).sum(-1).mean()) for other in (scaled, log_probabilities(whole(plain)))
    ]
    assert 0 < divergence[0] < 2 * divergence[1]
    with pytest.raises(PlanError, match="cannot be rotated: what its other parts make of images"):
        carry_out(source, tmp_path / "turned", [{"method": "rotate"}])


def test_inspect_tells_of_the_language_model(source, main, capsys):
    assert main("inspect", source, "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["model_type"], facts["layers"], facts["hidden_size"]) == ("gemma4", 2, 64)


def test_the_structure_of_a_multimodal_model_is_not_changed(source, tmp_path, main, capsys):
    assert main("depth", source, "--drop", "1", "-o", tmp_path / "out") == 2
    assert "is a multimodal model" in capsys.readouterr().err
