"""Static scales of cached keys and values: what transformers' cache sees of the written model, over what 8 bits hold.

The command line is used where it decides; all else goes through plans.
"""

import hashlib
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DynamicCache

from llmcompress.engine.execute import run
from llmcompress.engine.plan.make_plan import make_plan
from llmcompress.engine.plan.run_options import Options
from llmcompress.errors import CheckpointError, PlanError, RecipeError, StoppedError
from llmcompress.recipe import parse
from llmcompress.validate.evaluate import measure
from llmcompress.validate.key_value_cache import ByScale, CacheOptions, TokenCodes, cache_of
from llmcompress.validate.load import open_streamed
from llmcompress.validate.verify import passed, verify

TOKENS = torch.randint(3, 96, (6, 24), generator=torch.Generator().manual_seed(2))
END = {"fp8": 448, "int8": 127}


@pytest.fixture
def compressed(random_model_dir, tmp_path):
    """compressed(method, code, format, family="llama", stop=..., **options): what was written."""
    save_file({"input_ids": TOKENS}, tmp_path / "ids.safetensors")

    def make(method="gptq", code="fp8", format_="compressed-tensors", name="out", family="llama", stop=None, **options):
        recipe = {
            "calibration": {"source": str(tmp_path / "ids.safetensors"), "samples": 6, "length": 24},
            "steps": [{"method": method, "bits": 4, "group_size": 32, **options}],
            "output": {"format": format_},
            "kv_cache": None if code is None else {"code": code},
        }
        places = Options(out=tmp_path / name, compute_dtype="float32", batch=2, threads=1)
        plan = make_plan(parse(recipe), random_model_dir(family), places)
        run(plan, stop=stop or (lambda finished: False))
        written = sum(file.stat().st_size for file in (tmp_path / name).glob("*.safetensors"))
        assert written == plan.estimate.output_bytes
        return tmp_path / name

    return make


class Watching(DynamicCache):
    """Keeps the largest magnitudes of what it is given."""

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        self.__dict__.setdefault("seen", {})[layer_idx] = [float(x.abs().max()) for x in (key_states, value_states)]
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


def seen_by_transformers(path):
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    cache = Watching(config=model.config)
    with torch.no_grad():
        model(TOKENS, past_key_values=cache, use_cache=True)
    return cache.seen


def scales_in(path):
    tensors = load_file(path / "model.safetensors")
    return {name: value for name, value in tensors.items() if name.endswith(("k_scale", "v_scale"))}


@pytest.mark.parametrize(
    ("method", "code", "family", "options"),
    [
        ("gptq", "fp8", "llama", {}),
        ("gptq", "int8", "qwen3", {}),
        ("rtn", "fp8", "phi3", {}),
        ("gptq", "fp8", "qwen3_moe", {}),
        ("gptq", "fp8", "llama", {"set": {"self_attn.o_proj": {"skip": True}, "mlp.*": {"skip": True}}}),
    ],
)
def test_scales_are_the_largest_of_what_the_written_model_caches(
    compressed, random_model_dir, method, code, family, options
):
    options = {"bits": 2, **options}  # with more bits it would hardly show that they are the compressed model's
    out = compressed(method, code, family=family, name="packed", **options)
    dense = compressed(method, None, "dense", family=family, name="dense", **options)
    wanted, found = seen_by_transformers(dense), scales_in(out)
    assert len(found) == 4
    original = seen_by_transformers(random_model_dir(family))
    assert wanted != {layer: pytest.approx(largest, rel=0.03) for layer, largest in original.items()}
    for layer, (key, value) in wanted.items():
        for part, largest in (("k_scale", key), ("v_scale", value)):
            scale = found[f"model.layers.{layer}.self_attn.{part}"]
            assert (scale.shape, scale.dtype) == ((1,), torch.bfloat16)
            # the dense twin's weights are rounded to bfloat16
            assert float(scale) * END[code] == pytest.approx(largest, rel=0.02)
    scheme = json.loads((out / "config.json").read_text())["quantization_config"]["kv_cache_scheme"]
    assert (scheme["num_bits"], scheme["type"]) == (8, {"fp8": "float", "int8": "int"}[code])
    assert passed(verify(out))


@pytest.mark.parametrize(("family", "makers"), [("llama", ("k_proj", "v_proj")), ("phi3", ("qkv_proj", "qkv_proj"))])
def test_modelopt_has_the_same_scales_at_the_matrices_that_make_keys_and_values(compressed, family, makers):
    fp8 = {"type": "fp8", "activations": "fp8-token", "bits": 8, "group_size": None}
    one = compressed("rtn", family=family, name="one", **fp8)
    out = compressed("rtn", format_="modelopt", family=family, name="modelopt", **fp8)
    other, found = scales_in(one), scales_in(out)
    assert len(found) == len(other) == 4
    for layer in range(2):
        for maker, part in zip(makers, ("k_scale", "v_scale"), strict=True):
            scale = found[f"model.layers.{layer}.self_attn.{maker}.{part}"]
            assert (scale.shape, scale.dtype) == ((), torch.float32)
            rounded = other[f"model.layers.{layer}.self_attn.{part}"]  # up, in bfloat16
            assert float(scale) <= float(rounded) == pytest.approx(float(scale), rel=2**-7)
    settings = json.loads((out / "config.json").read_text())["quantization_config"]
    assert settings["kv_cache_scheme"] == {"dynamic": False, "num_bits": 8, "type": "float"}
    assert json.loads((out / "hf_quant_config.json").read_text())["quantization"]["kv_cache_quant_algo"] == "FP8"
    assert passed(verify(out))
    cache = cache_of(out, CacheOptions())
    assert isinstance(cache, ByScale)
    assert {layer: tuple(map(float, pair)) for layer, pair in cache.scales.items()} == {
        layer: tuple(
            float(found[f"model.layers.{layer}.self_attn.{maker}.{part}"])
            for maker, part in zip(makers, ("k_scale", "v_scale"), strict=True)
        )
        for layer in range(2)
    }


FP8 = {"type": "fp8", "activations": "fp8-token", "bits": 8, "group_size": None}


def test_modelopt_has_no_scales_of_integers(compressed):
    with pytest.raises(PlanError, match=r"ModelOpt knows scales of keys and values in fp8 and nvfp4"):
        compressed("rtn", "int8", format_="modelopt", **FP8)


def test_scales_of_nvfp4_are_those_of_fp8_under_another_name(compressed):
    """ModelOpt divides the largest magnitude by 448 for both."""
    eight = compressed("rtn", "fp8", format_="modelopt", name="eight", **FP8)
    four = compressed("rtn", "nvfp4", format_="modelopt", name="four", **FP8)
    assert (eight / "model.safetensors").read_bytes() == (four / "model.safetensors").read_bytes()
    assert json.loads((four / "config.json").read_text())["quantization_config"]["kv_cache_scheme"] == "NVFP4"
    assert json.loads((four / "hf_quant_config.json").read_text())["quantization"]["kv_cache_quant_algo"] == "NVFP4"
    assert passed(verify(four))
    cache = cache_of(four, CacheOptions())
    assert cache.code == "nvfp4"
    assert cache.scales == cache_of(eight, CacheOptions()).scales
    assert cache_of(four, CacheOptions(type="fp8")) == ByScale("fp8", {})
    config = json.loads((four / "config.json").read_text())
    config["quantization_config"]["kv_cache_scheme"] = "NVFP8"
    (four / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="kv_cache_scheme"):
        cache_of(four, CacheOptions())
    assert not passed(verify(four))


def test_nvfp4_needs_modelopt_and_whole_blocks(compressed, random_model_dir, tmp_path):
    with pytest.raises(PlanError, match="no place for keys and values in nvfp4") as refused:
        compressed("rtn", "nvfp4")
    assert "--format modelopt" in refused.value.hint
    narrow = random_model_dir("llama", head_dim=24)
    recipe = {"steps": [{"method": "rtn", **FP8}], "output": {"format": "modelopt"}, "kv_cache": {"code": "nvfp4"}}
    with pytest.raises(PlanError, match="blocks of 16, and a head of this model 24 channels"):
        make_plan(parse(recipe), narrow, Options(out=tmp_path / "out"))


def test_nothing_else_changes_with_scales(compressed):
    plain, scaled = compressed("rtn", None, name="plain"), compressed("rtn", "fp8", name="scaled")
    before, after = load_file(plain / "model.safetensors"), load_file(scaled / "model.safetensors")
    assert after.keys() - before.keys() == scales_in(scaled).keys()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert json.loads((plain / "config.json").read_text())["quantization_config"]["kv_cache_scheme"] is None


@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_a_run_taken_up_again_writes_the_same_bytes(compressed, method):
    whole = compressed(method, name="whole")
    with pytest.raises(StoppedError):
        compressed(method, name="again", stop=lambda finished: finished == 1)
    again = compressed(method, name="again")
    for name in ("model.safetensors", "report.json", "config.json"):
        sums = [hashlib.sha256((path / name).read_bytes()).hexdigest() for path in (whole, again)]
        assert sums[0] == sums[1], name


@pytest.mark.parametrize("format_", ["dense", "gptq"])
def test_formats_without_a_place_for_scales_refuse(compressed, format_):
    with pytest.raises(PlanError, match=f"format {format_} has no place for scales"):
        compressed("rtn", format_=format_)


@pytest.mark.parametrize("family", ["gpt_neox", "gpt2"])
def test_families_whose_attention_loaders_do_not_know_are_refused(compressed, family):
    with pytest.raises(PlanError, match=r"no known place|Conv1D"):
        compressed("rtn", family=family)


def test_recipes_know_three_codes():
    with pytest.raises(RecipeError, match="code = 'int4'"):
        parse({"steps": [{"method": "rtn"}], "kv_cache": {"code": "int4"}})
    kept = parse({"steps": [{"method": "rtn"}], "kv_cache": {"code": "int8"}})
    assert parse(kept.as_data()) == kept


def test_eval_applies_the_scales_that_a_checkpoint_brings(compressed):
    out = compressed("rtn", "fp8")
    scales = scales_in(out)
    own = cache_of(out, CacheOptions())
    assert isinstance(own, ByScale)
    assert own.code == "fp8"
    assert own.scales[1][0] == scales["model.layers.1.self_attn.k_scale"]
    assert own.scales[1][1] == scales["model.layers.1.self_attn.v_scale"]
    assert cache_of(out, CacheOptions(bits=16)) is None
    assert cache_of(out, CacheOptions(bits=4)) == TokenCodes(4)
    assert cache_of(out, CacheOptions(type="fp8")) == own

    def loss(cache):
        models = [open_streamed(out, dtype=torch.float32) for _ in range(2)]
        models[0].cache = cache
        return float(measure(*models, TOKENS).kl.mean())

    assert loss(None) == 0
    assert 0 < loss(own) < loss(TokenCodes(4))
    assert loss(ByScale("fp8", {0: (torch.full((1,), 1e-3),) * 2})) > 3 * loss(own)  # too small: all saturates


@pytest.mark.parametrize(
    "scheme",
    [
        "fp8",
        [],
        {},
        {"num_bits": 4},
        {"dynamic": True},
        {"strategy": "attn_head"},
        {"strategy": ["tensor"]},
        {"type": []},
    ],
)
def test_eval_refuses_a_scheme_it_does_not_know(compressed, tmp_path, scheme):
    damaged = tmp_path / "damaged"
    shutil.copytree(compressed("rtn"), damaged)
    config = json.loads((damaged / "config.json").read_text())
    settings = config["quantization_config"]
    settings["kv_cache_scheme"] = {**settings["kv_cache_scheme"], **scheme} if scheme and scheme != "fp8" else scheme
    (damaged / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"scale|scheme"):
        cache_of(damaged, CacheOptions())
    assert cache_of(damaged, CacheOptions(bits=16)) is None


def test_scales_asked_for_go_before_those_of_the_checkpoint(compressed, random_model_dir):
    assert cache_of(random_model_dir("llama"), CacheOptions()) is None
    assert cache_of(random_model_dir("llama"), CacheOptions(type="fp8")) == ByScale("fp8", {})
    assert cache_of(compressed("rtn", "int8"), CacheOptions(bits=8, type="fp8")) == ByScale("fp8", {})
    assert CacheOptions(4, "nvfp4") != CacheOptions(None, "nvfp4")
    for bits, kind in ((3, None), (4, "fp8"), (8, "nvfp4"), (16, "int")):
        with pytest.raises(RecipeError):
            CacheOptions(bits, kind)


def _drop_scheme(tensors, config):
    config["quantization_config"]["kv_cache_scheme"] = None


def _drop_scale(tensors, config):
    del tensors["model.layers.1.self_attn.v_scale"]


def _negate(tensors, config):
    tensors["model.layers.0.self_attn.k_scale"].neg_()


def _double(tensors, config):
    tensors["model.layers.0.self_attn.k_scale"].mul_(2)


def _reshape(tensors, config):
    tensors["model.layers.0.self_attn.k_scale"] = tensors["model.layers.0.self_attn.k_scale"].repeat(2)


def _other_code(tensors, config):
    config["quantization_config"]["kv_cache_scheme"]["type"] = "int"


def _dynamic(tensors, config):
    config["quantization_config"]["kv_cache_scheme"]["dynamic"] = True


@pytest.mark.parametrize("damage", [_drop_scheme, _drop_scale, _negate, _double, _reshape, _other_code, _dynamic])
def test_verify_sees_scales_that_are_not_what_they_should_be(compressed, tmp_path, damage):
    damaged = tmp_path / "damaged"
    shutil.copytree(compressed("rtn"), damaged)
    tensors = load_file(damaged / "model.safetensors")
    config = json.loads((damaged / "config.json").read_text())
    damage(tensors, config)
    save_file(tensors, damaged / "model.safetensors", metadata={"format": "pt"})
    (damaged / "config.json").write_text(json.dumps(config))
    found = {check.name: check.ok for check in verify(damaged)}
    assert not found["cache"]


def test_the_command_line_plans_scales_and_a_gguf_file_goes_without(main, tiny_model_dir, tmp_path, capsys):
    options = ["--kv-cache", "fp8", "--samples", 4, "--length", 32, "-o", tmp_path / "out", "-q"]
    assert main("plan", "rtn", tiny_model_dir, *options, "--json") == 0
    planned = json.loads(capsys.readouterr().out)
    names = [f"model.layers.{n}.self_attn.{part}" for n in range(4) for part in ("k_scale", "v_scale")]
    assert [item["name"] for item in planned["tensors"]][-8:] == names
    assert "scales of keys and values" in str(planned["targets"]["llama.cpp"])
    assert planned["targets"]["vllm"] == "ok"
    assert main("rtn", tiny_model_dir, *options) == 0
    assert main("verify", tmp_path / "out", "--source", tiny_model_dir) == 0
    assert main("inspect", tmp_path / "out") == 0
    assert "keys and values float 8 by tensor" in capsys.readouterr().out
    assert main("gguf", tmp_path / "out", "--type", "Q8_0", "-o", tmp_path / "x.gguf", "--json") == 0
    assert "kv_cache" in {entry["kind"] for entry in json.loads(capsys.readouterr().out)["ledger"]}


def test_eval_reports_the_cache_it_simulates(main, tiny_model_dir, tiny_eval_text, capsys):
    options = ["--text", tiny_eval_text, "--length", 48, "--windows", 4, "--json"]
    losses = []
    for chosen, called in (([], None), (["--kv-bits", 8], "int8 per token and head"), (["--kv-bits", 4], "int4 per"),
                           (["--kv-type", "fp8"], "fp8, scales 1"),
                           (["--kv-type", "nvfp4"], "nvfp4, scales 1")):  # fmt: skip
        assert main("eval", tiny_model_dir, "--ref", tiny_model_dir, *options, *chosen) == 0
        figures = json.loads(capsys.readouterr().out)
        assert figures["kv_cache"] is None if called is None else figures["kv_cache"].startswith(called)
        losses.append(figures["kl"])
    assert losses[0] == 0
    assert 0 < losses[1] < losses[3] < min(losses[2], losses[4])
