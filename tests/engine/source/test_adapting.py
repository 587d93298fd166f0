"""Adapters merged while a model is read: held to a merge in float64, refused where they do not fit, known to a run."""

import json
import math
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from llmcompress.engine.execute import run
from llmcompress.engine.plan.make_plan import make_plan
from llmcompress.engine.plan.run_options import Options
from llmcompress.engine.source.adapting import with_adapter
from llmcompress.engine.source.matrix_refs import matrices_of
from llmcompress.engine.source.open import open_checkpoint, source_headers
from llmcompress.engine.write.export_work import export_work
from llmcompress.errors import CheckpointError, PlanError, StoppedError
from llmcompress.ledger import Ledger
from llmcompress.validate.gguf_verify import verify_gguf
from llmcompress.validate.request import Request
from llmcompress.validate.session import writer
from llmcompress.validate.verify import passed, verify
from tinyruns import after, compress, recipe, steps_recipe

Q, DOWN = "model.layers.{}.self_attn.q_proj", "model.layers.{}.mlp.down_proj"
PREFIX = "base_model.model."


def factors(module, rows, columns, rank, seed=0):
    """Tensors of a correction of a matrix [rows, columns]."""
    generator = torch.Generator().manual_seed(seed)
    return {
        f"{PREFIX}{module}.lora_A.weight": 0.2 * torch.randn(rank, columns, generator=generator),
        f"{PREFIX}{module}.lora_B.weight": 0.2 * torch.randn(rows, rank, generator=generator),
    }


def save_adapter(path, tensors, **config):
    path.mkdir(exist_ok=True)
    save_file(tensors, path / "adapter_model.safetensors")
    said = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], **config}
    (path / "adapter_config.json").write_text(json.dumps(said))
    return path


def of_queries(path, model, **config):
    """An adapter of every q_proj of a model."""
    weights = load_file(model / "model.safetensors")
    tensors = {}
    for name, weight in weights.items():
        if name.endswith("q_proj.weight"):
            tensors |= factors(name.removesuffix(".weight"), *weight.shape, 4, seed=len(tensors))
    return save_adapter(path, tensors, **config)


def merged(model, adapter):
    """The tensors of a model into which an adapter is merged."""
    headers = source_headers(model, Ledger())
    found = with_adapter(headers, matrices_of(headers, False, Ledger()), adapter, Ledger())
    checkpoint = open_checkpoint(found)
    return {name: checkpoint.read(name) for name in headers.tensors}


def doubles(weight, tensors, module, scale, magnitude=None):
    """The merge in float64."""
    a, b = (tensors[f"{PREFIX}{module}.lora_{part}.weight"].double() for part in "AB")
    total = weight.double() + scale * (b @ a)
    return total if magnitude is None else total * (magnitude.double() / total.square().sum(1).sqrt())[:, None]


@pytest.mark.parametrize("root", [False, True])
@pytest.mark.parametrize("dora", [False, True])
def test_matrices_are_those_of_a_merge_in_float64(root, dora, random_model_dir, tmp_path):
    model = random_model_dir("llama", dtype="float32")
    weights, tensors, magnitudes = load_file(model / "model.safetensors"), {}, {}
    ranks = {Q: 4, DOWN: 6}
    for layer in range(2):
        for name, rank in ranks.items():
            module = name.format(layer)
            tensors |= factors(module, *weights[f"{module}.weight"].shape, rank, seed=7 * layer + rank)
            if dora:
                magnitudes[module] = weights[f"{module}.weight"].norm(dim=1) * 1.5
    stored = {**tensors, **{f"{PREFIX}{name}.lora_magnitude_vector": value for name, value in magnitudes.items()}}
    adapter = save_adapter(
        tmp_path / "adapter",
        stored,
        target_modules=r".*\.(q_proj|down_proj)",
        use_rslora=root,
        use_dora=dora,
        rank_pattern={"down_proj": 6},
        alpha_pattern={r"layers\.1\.mlp\.down_proj": 3},
    )
    found = merged(model, adapter)
    for name, weight in weights.items():
        module = name.removesuffix(".weight")
        if f"{PREFIX}{module}.lora_A.weight" not in tensors:
            assert torch.equal(found[name], weight)
            continue
        rank = tensors[f"{PREFIX}{module}.lora_A.weight"].shape[0]
        scale = (3 if module == DOWN.format(1) else 8) / (math.sqrt(rank) if root else rank)
        wanted = doubles(weight, tensors, module, scale, magnitudes.get(module))
        torch.testing.assert_close(found[name].double(), wanted, rtol=1e-5, atol=1e-6)
        assert not torch.allclose(found[name], weight)


def test_values_are_rounded_once_to_the_type_of_the_model(tiny_model_dir, tmp_path):
    adapter = of_queries(tmp_path / "adapter", tiny_model_dir)
    tensors, weights = load_file(adapter / "adapter_model.safetensors"), load_file(tiny_model_dir / "model.safetensors")
    found, module = merged(tiny_model_dir, adapter), Q.format(2)
    exact = doubles(weights[f"{module}.weight"], tensors, module, 2.0).float()
    assert found[f"{module}.weight"].dtype == weights[f"{module}.weight"].dtype
    near = (found[f"{module}.weight"] == exact.to(found[f"{module}.weight"].dtype)).float().mean()
    assert near > 0.999  # float32 sums in another order, which may change a rounding


def test_a_matrix_stored_as_inputs_by_outputs_is_corrected_so(random_model_dir, tmp_path):
    model = random_model_dir("gpt2", dtype="float32")
    weights = load_file(model / "model.safetensors")
    (name,) = [name for name in weights if name.endswith("h.1.mlp.c_fc.weight")]
    columns, rows = weights[name].shape
    tensors = factors("transformer.h.1.mlp.c_fc", rows, columns, 4)
    adapter = save_adapter(tmp_path / "adapter", tensors, target_modules=["h.1.mlp.c_fc"], fan_in_fan_out=True)
    wanted = doubles(weights[name].T, tensors, "transformer.h.1.mlp.c_fc", 2.0).T
    torch.testing.assert_close(merged(model, adapter)[name].double(), wanted, rtol=1e-5, atol=1e-6)


def test_codes_of_a_quantised_source_are_decoded_and_corrected(random_model_dir, tmp_path):
    model = random_model_dir("llama")
    compress(model, tmp_path / "w8", steps_recipe([{"method": "rtn", "bits": 8}], "compressed-tensors"))
    adapter = of_queries(tmp_path / "adapter", model)
    plain = open_checkpoint(source_headers(tmp_path / "w8", Ledger()))
    tensors, found = load_file(adapter / "adapter_model.safetensors"), merged(tmp_path / "w8", adapter)
    wanted = doubles(plain.read(f"{Q.format(1)}.weight"), tensors, Q.format(1), 2.0)
    torch.testing.assert_close(found[f"{Q.format(1)}.weight"].double(), wanted, rtol=1e-5, atol=1e-6)
    made = steps_recipe([{"method": "rtn", "bits": 8}], "compressed-tensors")
    compress(tmp_path / "w8", tmp_path / "out", made, adapter=adapter)
    assert passed(verify(tmp_path / "out", tmp_path / "w8", adapter))


def test_a_run_with_an_adapter_is_proven_with_it_alone(tiny_model_dir, tmp_path, main, capsys):
    adapter, out = of_queries(tmp_path / "adapter", tiny_model_dir), tmp_path / "out"
    few = ("--samples", "4", "--length", "64")
    assert main("gptq", tiny_model_dir, "--adapter", adapter, "--bits", "8", *few, "-o", out) == 0
    assert main("verify", out, "--source", tiny_model_dir, "--adapter", adapter) == 0
    capsys.readouterr()
    assert main("verify", out, "--source", tiny_model_dir) == 3
    assert "an adapter was merged into the source: give it as --adapter" in capsys.readouterr().err
    other = of_queries(tmp_path / "other", tiny_model_dir, lora_alpha=2)
    assert main("verify", out, "--source", tiny_model_dir, "--adapter", other) == 3
    report = json.loads((out / "report.json").read_text())
    (note,) = [entry for entry in report["ledger"] if entry["kind"] == "adapter"]
    assert report["adapter"]["sha256"] in note["why"]
    assert report["adapter"]["sha256"] in (out / "README.md").read_text()
    assert str(tmp_path) not in (out / "report.json").read_text() + (out / "README.md").read_text()


def test_divergence_is_measured_from_the_original_with_its_adapter(tiny_model_dir, tmp_path, main, capsys):
    """As from a directory into which the adapter was merged before."""
    adapter, out, whole = of_queries(tmp_path / "adapter", tiny_model_dir), tmp_path / "out", tmp_path / "whole"
    assert main("rtn", tiny_model_dir, "--adapter", adapter, "--bits", "8", "-o", out) == 0
    shutil.copytree(tiny_model_dir, whole)
    save_file(merged(tiny_model_dir, adapter), whole / "model.safetensors")

    def figures(ref, *more):
        capsys.readouterr()
        assert main("eval", out, "--ref", ref, "--length", "64", "--windows", "2", "--json", *more) == 0
        return json.loads(capsys.readouterr().out)

    wanted = figures(whole, "--generate", "It was", "--max-new-tokens", "4")
    found = figures(tiny_model_dir, "--ref-adapter", adapter, "--generate", "It was", "--max-new-tokens", "4")
    assert found.pop("generated")[str(tiny_model_dir)] == wanted.pop("generated")[str(whole)]
    assert found == wanted
    assert figures(tiny_model_dir)["kl"] > 3 * found["kl"]
    same = Request(tiny_model_dir, tiny_model_dir, "default", 2, None, 1, "cpu", None, ref_adapter=adapter)
    texts = [writer(same, tiny_model_dir, original)(range(5, 9), 12) for original in (False, True)]
    assert texts[0] != texts[1]  # the original alone has it
    assert main("eval", out, "--ref-adapter", adapter) == 2
    assert "give the original model's directory as --ref" in capsys.readouterr().err
    assert main("eval", out, "--ref", tiny_model_dir, "--ref-adapter", adapter, "--backend", "torch") == 2
    assert "leave --draft and --backend out" in capsys.readouterr().err


def test_a_gguf_file_of_a_model_with_an_adapter_in_one_command(tiny_model_dir, tmp_path, main):
    adapter, file = of_queries(tmp_path / "adapter", tiny_model_dir), tmp_path / "out.gguf"
    assert main("gguf", tiny_model_dir, "--adapter", adapter, "--type", "Q8_0", "-o", file) == 0
    assert passed(verify_gguf(file, tiny_model_dir, adapter))
    assert not passed(verify_gguf(file, tiny_model_dir))
    assert (
        main("gguf", file, "--adapter", adapter, "--type", "Q4_0", "--allow-requantize", "-o", tmp_path / "o.gguf") == 2
    )


def test_a_stopped_run_goes_on_with_the_same_adapter_only(tiny_model_dir, tmp_path):
    adapter = of_queries(tmp_path / "adapter", tiny_model_dir)
    other = of_queries(tmp_path / "other", tiny_model_dir, lora_alpha=2)
    with pytest.raises(StoppedError):
        compress(tiny_model_dir, tmp_path / "out", stop=after(2), adapter=adapter)
    for wrong in (other, None):
        with pytest.raises(PlanError, match="another run"):
            compress(tiny_model_dir, tmp_path / "out", adapter=wrong)
    compress(tiny_model_dir, tmp_path / "out", adapter=adapter, keep_work=True)
    whole = run(make_plan(recipe(), tiny_model_dir, Options(out=tmp_path / "whole", adapter=adapter)))
    assert json.loads((tmp_path / "out" / "report.json").read_text())["tensors"] == whole["tensors"]
    (exported,) = export_work(tmp_path / "out.work", ["dense"], tmp_path / "dense", False)
    assert passed(verify(exported.output, tiny_model_dir, adapter))


def broken(change):
    """A function that saves an adapter of q_proj with its tensors changed."""

    def save(path, model):
        adapter = of_queries(path, model)
        tensors = load_file(adapter / "adapter_model.safetensors")
        change(tensors)
        save_file(tensors, adapter / "adapter_model.safetensors")
        return adapter

    return save


def said(**config):
    return lambda path, model: of_queries(path, model, **config)


def put(name, *shape):
    return broken(lambda tensors: tensors.__setitem__(PREFIX + name, torch.ones(shape)))


def drop(name):
    return broken(lambda tensors: [tensors.pop(key) for key in list(tensors) if name in key])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (said(peft_type="IA3"), "peft_type 'IA3' is not supported"),
        (said(layer_replication=[[0, 2]]), "layer_replication"),
        (said(target_parameters=["experts.down_proj"]), "target_parameters"),
        (said(r=8), "r is 8"),
        (said(lora_alpha=None), "does not say r and lora_alpha"),
        (said(use_dora=True), "lacks its lora_magnitude_vector"),
        (said(target_modules=["q_proj", "v_proj"]), "lacks the tensors of model.layers.0.self_attn.v_proj"),
        (said(target_modules="(("), "patterns of target_modules cannot be used"),
        (said(rank_pattern={"(": 2}), "patterns of modules cannot be used"),
        (said(alpha_pattern={"q_proj": "two"}), "rank or alpha of"),
        (drop("layers.3"), "lacks the tensors of model.layers.3.self_attn.q_proj"),
        (drop("layers.1.self_attn.q_proj.lora_A"), "not one pair of lora_A and lora_B"),
        (put("model.layers.1.self_attn.q_proj.lora_B.weight", 7, 4), r"is \[\d+, \d+\], not \[7, "),
        (put("model.layers.1.self_attn.q_proj.lora_diag", 4), "is not one of a LoRA adapter"),
        (put("model.layers.9.self_attn.q_proj.weight", 4, 4), "has no model.layers.9.self_attn.q_proj"),
        (put("model.embed_tokens.weight", 512, 64), "."),
        (put("model.layers.1.self_attn.q_proj.lora_B.bias", 64), "."),
    ],
)
def test_what_cannot_be_merged_is_refused_by_the_plan_in_one_line(make, words, tiny_model_dir, tmp_path):
    adapter = make(tmp_path / "adapter", tiny_model_dir)
    with pytest.raises(CheckpointError) as raised:
        make_plan(recipe(), tiny_model_dir, Options(out=tmp_path / "out", adapter=adapter))
    assert re.search(words, raised.value.message)
    assert "\n" not in raised.value.message


def test_an_embedding_that_is_the_head_is_not_changed(tiny_model_dir, tmp_path):
    table = load_file(tiny_model_dir / "model.safetensors")["model.embed_tokens.weight"]
    adapter = save_adapter(tmp_path / "adapter", {f"{PREFIX}model.embed_tokens.weight": table.clone()})
    with pytest.raises(CheckpointError, match="which are one tensor"):
        make_plan(recipe(), tiny_model_dir, Options(out=tmp_path / "out", adapter=adapter))


def test_an_adapter_of_more_than_linears_does_not_run_beside_a_model(tiny_model_dir, tmp_path, main, capsys):
    adapter = of_queries(tmp_path / "adapter", tiny_model_dir)
    tensors = load_file(adapter / "adapter_model.safetensors")
    save_adapter(adapter, {**tensors, f"{PREFIX}model.norm.weight": torch.ones(tiny_width(tiny_model_dir))})
    assert main("eval", tiny_model_dir, "--adapter", adapter, "--windows", "1", "--length", "16") == 2
    assert "has more than corrections of linears" in capsys.readouterr().err


def tiny_width(model):
    return json.loads((model / "config.json").read_text())["hidden_size"]


def test_an_adapter_given_as_the_model_names_the_option(tiny_model_dir, tmp_path, main, capsys):
    adapter = of_queries(tmp_path / "adapter", tiny_model_dir)
    assert main("gptq", adapter, "-o", tmp_path / "out") == 2
    assert "--adapter" in capsys.readouterr().err
    made = recipe(calibration={"source": "self"})
    with pytest.raises(PlanError, match="without an adapter"):
        make_plan(made, tiny_model_dir, Options(out=tmp_path / "out", adapter=adapter))
