"""Depth pruning, against transformers running the whole model with layers taken out of it."""

import json
import shutil
import sys
from copy import deepcopy
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from llmcompress import arch
from llmcompress.engine.execute import run
from llmcompress.engine.plan.make_plan import make_plan
from llmcompress.engine.plan.run_options import Options
from llmcompress.engine.structure.depth import DepthRequest, plan_depth, prune_depth
from llmcompress.errors import PlanError
from llmcompress.recipe import Calibration, build, parse
from llmcompress.registry import discover
from llmcompress.validate.load import load_whole
from llmcompress.validate.verify import passed, verify
from resealed import reseal

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

from zoo import config_of

SAMPLES, LENGTH = 4, 24
SPECS = discover(arch, "ARCH")
FAMILIES = sorted(kind for spec in SPECS.values() for kind in spec.model_types)
MORE = {
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3_text": {"query_pre_attn_scalar": 16},
    "gpt2": {"n_layer": 6},
    "qwen3_moe": {"norm_topk_prob": True, "decoder_sparse_step": 2, "intermediate_size": 96},
}


@pytest.fixture
def ids(tmp_path):
    tokens = torch.randint(2, 90, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(1))
    save_file({"input_ids": tokens}, tmp_path / "ids.safetensors")
    return tmp_path / "ids.safetensors", tokens


def depth(model, out, ids, drop, *, threads=1, overwrite=False, batch=None, **asked):
    text = build(Calibration, {"source": str(ids), "samples": SAMPLES, "length": LENGTH}, "here")
    options = Options(out=out, compute_dtype="float32", threads=threads, overwrite=overwrite, batch=batch)
    asked = {"keep_first": 0, "keep_last": 0, **asked}
    return prune_depth(plan_depth(model, DepthRequest(drop, **asked), text, options))


def deep(random_model_dir, family, layers=6):
    return random_model_dir(family, **{"num_hidden_layers": layers, **MORE.get(family, {})})


def whole(path):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@torch.no_grad()
def logits_without(model, spec, tokens, gone):
    """Logits of transformers' own model with some layers replaced by nothing."""
    model = deepcopy(model)
    layers = model.get_submodule(spec.layers)
    for number in gone:
        layers[number].forward = lambda hidden_states, *_, **__: (
            hidden_states if spec.outputs == 1 else (hidden_states, *[None] * (spec.outputs - 1))
        )
    return model(tokens, use_cache=False).logits


@torch.no_grad()
def passed_states(model, tokens):
    """What enters each layer, and what leaves the last, in float64."""
    seen = {}
    for number, layer in enumerate(model.model.layers):
        layer.register_forward_pre_hook(lambda _, args, n=number: seen.update({n: args[0].double()}))
        layer.register_forward_hook(lambda _, __, out, n=number: seen.update({n + 1: out.double()}))
    model(tokens, use_cache=False)
    return seen


def divergence(before, after):
    p, q = before.double().log_softmax(-1), after.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


@pytest.mark.parametrize("family", FAMILIES)
def test_the_result_is_the_model_without_those_layers(family, random_model_dir, ids, tmp_path):
    file, tokens = ids
    model = deep(random_model_dir, family)
    report = depth(model, tmp_path / "out", file, 2)
    removed = report["depth"]["removed"]
    made = whole(tmp_path / "out")
    with torch.no_grad():
        torch.testing.assert_close(
            made(tokens, use_cache=False).logits, logits_without(whole(model), arch.find(family), tokens, removed)
        )
    assert passed(verify(tmp_path / "out", model))


def test_similarity_is_that_of_transformers_hidden_states(random_model_dir, ids, tmp_path):
    file, tokens = ids
    model = deep(random_model_dir, "llama")
    for span, contiguous in ((1, False), (3, True)):
        report = depth(model, tmp_path / f"{span}", file, 3, contiguous=contiguous)
        [record] = report["depth"]["scores"]
        states = passed_states(whole(model), tokens)
        wanted = {
            str(n): float(torch.cosine_similarity(states[n], states[n + span], dim=-1).mean()) for n in range(7 - span)
        }
        assert record["scores"] == pytest.approx(wanted, rel=1e-4)
        best = sorted(wanted, key=lambda n: -wanted[n])
        first = int(best[0])
        assert report["depth"]["removed"] == (
            [first, first + 1, first + 2] if contiguous else sorted(map(int, best[:3]))
        )


def test_similarity_is_that_of_hidden_states_alone(random_model_dir, ids, tmp_path):
    """Zaya's layers hand on what routers saw beside them."""
    file, tokens = ids
    config = {**config_of("zaya").to_dict(), "num_hidden_layers": 4}
    del config["dtype"]
    model = random_model_dir("zaya", dtype="float32", **config)
    [record] = depth(model, tmp_path / "out", file, 1)["depth"]["scores"]
    with torch.no_grad():
        states = [state.double() for state in whole(model)(tokens, output_hidden_states=True).hidden_states]
    for number in range(3):  # what leaves the last layer is normed there
        wanted = float(torch.cosine_similarity(states[number], states[number + 1], dim=-1).mean())
        assert record["scores"][str(number)] == pytest.approx(wanted, rel=1e-3)


def test_divergence_is_that_of_the_whole_model_without_a_layer_and_grows_greedily(random_model_dir, ids, tmp_path):
    file, tokens = ids
    model = deep(random_model_dir, "llama")
    report = depth(model, tmp_path / "out", file, 2, by="kl", batch=3)
    causal, gone = whole(model), []
    base = logits_without(causal, SPECS["llama"], tokens, ())
    for record in report["depth"]["scores"]:
        wanted = {
            str(n): divergence(base, logits_without(causal, SPECS["llama"], tokens, [*gone, n]))
            for n in range(6)
            if n not in gone
        }
        assert record["scores"] == pytest.approx(wanted, rel=1e-3)
        assert record["removed"] == [int(min(wanted, key=wanted.get))]
        gone += record["removed"]
    assert report["depth"]["removed"] == sorted(gone)


def test_stretches_are_judged_by_what_they_cost_together(random_model_dir, ids, tmp_path):
    file, tokens = ids
    model = deep(random_model_dir, "llama", 5)
    report = depth(model, tmp_path / "out", file, 2, by="kl", contiguous=True, keep_first=1, keep_last=1)
    causal = whole(model)
    base = logits_without(causal, SPECS["llama"], tokens, ())
    wanted = {str(n): divergence(base, logits_without(causal, SPECS["llama"], tokens, [n, n + 1])) for n in (1, 2)}
    assert report["depth"]["scores"][0]["scores"] == pytest.approx(wanted, rel=1e-3)


def test_bytes_do_not_depend_on_threads_and_nothing_else_is_left(random_model_dir, ids, tmp_path):
    model, made = deep(random_model_dir, "qwen3"), []
    for threads in (1, 2):
        depth(model, tmp_path / "out", ids[0], 2, by="kl", threads=threads, overwrite=True, batch=1)
        made.append({file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()})
        assert sorted(path.name for path in tmp_path.iterdir()) == ["ids.safetensors", "out"]
    assert made[0] == made[1]


def test_kinds_of_attention_stay_with_their_layers(random_model_dir, ids, tmp_path):
    model = deep(random_model_dir, "gemma2")
    before = json.loads((model / "config.json").read_text())["layer_types"]
    report = depth(model, tmp_path / "out", ids[0], 1)
    after = json.loads((tmp_path / "out" / "config.json").read_text())
    [gone] = report["depth"]["removed"]
    assert after["layer_types"] == before[:gone] + before[gone + 1 :]
    assert after["num_hidden_layers"] == 5


def test_a_layer_that_is_made_by_its_number_is_not_moved(random_model_dir, ids, tmp_path):
    model = random_model_dir("gpt2", n_layer=4, scale_attn_by_inverse_layer_idx=True)
    with pytest.raises(PlanError, match="depend on its number"):
        depth(model, tmp_path / "out", ids[0], 1)
    assert not (tmp_path / "out").exists()


def test_the_result_goes_on_to_eval_and_gguf(main, tiny_model_dir, tiny_eval_text, tmp_path, capsys):
    out = tmp_path / "out"
    calibration = ["--calibration", tiny_eval_text, "--samples", 4, "--length", 32]
    options = ["--drop", 1, "--keep-first", 1, "--keep-last", 0, *calibration]
    assert main("depth", tiny_model_dir, "-o", out, *options, "--by", "kl", "--dry-run", "--json") == 0
    planned = json.loads(capsys.readouterr().out)
    assert (planned["layers"], planned["passes"]) == (4, 1.8)  # 4 layers, and 2 + 1 + 0 after each that is left out
    assert main("depth", tiny_model_dir, "-o", out, *options, "--by", "kl", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert len(report["depth"]["removed"]) == 1
    assert (out / "chat_template.jinja").read_bytes() == (tiny_model_dir / "chat_template.jinja").read_bytes()
    text = ["--text", tiny_eval_text, "--windows", 2, "--length", 32, "--json"]
    assert main("eval", out, "--ref", tiny_model_dir, *text) == 0
    kl = json.loads(capsys.readouterr().out)["kl"]
    assert 0 < kl < 2
    assert main("gguf", out, "-o", tmp_path / "out.gguf", "--type", "F16", "-q") == 0
    assert gguf.GGUFReader(tmp_path / "out.gguf").get_field("llama.block_count").contents() == 3
    capsys.readouterr()
    assert main("eval", tmp_path / "out.gguf", "--ref", out, *text) == 0
    assert json.loads(capsys.readouterr().out)["kl"] < 1e-4


def test_where_all_that_may_go_goes_no_text_runs(random_model_dir, tmp_path):
    report = depth(
        deep(random_model_dir, "llama"), tmp_path / "out", tmp_path / "no text", 3, keep_first=2, keep_last=1
    )
    assert report["depth"]["removed"] == [2, 3, 4]
    assert report["depth"]["scores"] == []
    assert report["calibration"] is None
    assert "Calibration" not in (tmp_path / "out" / "README.md").read_text()


def test_codes_are_decoded_and_layers_behind_those_that_go_are_found(random_model_dir, ids, tmp_path):
    file, tokens = ids
    model, target = deep(random_model_dir, "llama", 4), tmp_path / "target"
    recipe = parse({"steps": [{"method": "rtn", "bits": 3, "group_size": 16}], "output": {"format": "gptq"}})
    run(make_plan(recipe, model, Options(out=target, compute_dtype="float32")))
    report = depth(target, tmp_path / "out", file, 2, keep_last=1)
    decoded = load_whole(target, dtype=torch.float32, linear=None)
    for number in report["depth"]["removed"]:
        decoded.model.layers[number].forward = lambda hidden_states, *_, **__: hidden_states
    with torch.no_grad():
        found, wanted = (item(tokens, use_cache=False).logits for item in (whole(tmp_path / "out"), decoded))
    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)  # written in bfloat16
    assert passed(verify(tmp_path / "out", target))
    assert [entry["why"] for entry in report["ledger"]] == ["gptq, decoded"]


def test_a_layer_in_the_place_of_another_is_found_out(random_model_dir, ids, tmp_path):
    model, out = deep(random_model_dir, "llama"), tmp_path / "out"
    report = depth(model, out, ids[0], 2)
    others = [number for number in range(6) if number not in report["depth"]["removed"]][:2]
    reseal(out, depth={**report["depth"], "removed": others})
    wrong = [check for check in verify(out, model) if not check.ok and not check.warning]
    assert [check.name for check in wrong] == ["source"]
    assert "differs from the source" in wrong[0].detail


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--drop", 2], "--drop 2 of 4 layers, of which the first 2 and the last 1 are kept"),
        (["--drop", 4, "--keep-first", 0, "--keep-last", 1], "drop 3 at most"),
        (["--drop", 1, "--keep-first", 4], "keep fewer"),
        (["--drop", 4, "--keep-first", 0, "--keep-last", 0], "drop 3 at most"),
        (["--drop", 1, "--length", 1 << 24], "longer than the model's 512 positions"),
        (["--drop", 1, "-o", "out.gguf"], "called like a GGUF file"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(main, tiny_model_dir, tmp_path, monkeypatch, capsys, options, words):
    monkeypatch.chdir(tmp_path)
    assert main("depth", tiny_model_dir, "-o", "out", *options) == 2
    assert words in " ".join(capsys.readouterr().err.split())
    assert not list(tmp_path.iterdir())


def test_a_table_with_a_part_for_every_layer_is_not_cut(random_model_dir, ids, tmp_path):
    """Gemma 3n embeds tokens for every layer apart, in one table."""
    sizes = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "head_dim": 16}
    streams = {"hidden_size_per_layer_input": 16, "laurel_rank": 16, "vocab_size_per_layer_input": 96}
    more = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_kv_shared_layers": 0, "pad_token_id": 0}
    model = tmp_path / "model"
    shutil.copytree(random_model_dir("gemma3n_text", **sizes, **streams, **more), model)
    config = json.loads((model / "config.json").read_text())
    del config["activation_sparsity_pattern"]  # which would have to have a value for every layer
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(PlanError, match=r"embed_tokens_per_layer\.weight of shape"):
        depth(model, tmp_path / "out", ids[0], 1)
