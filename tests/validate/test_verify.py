"""The independent reader finds every planted damage, and finds nothing where there is none.

Damage is planted twice: as it is, when the recorded hashes must catch it; and with the hashes of the report renewed, as
if the writer itself had gone wrong, when the checks of meaning must.
"""

import ast
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from llmcompress.engine.execute import run
from llmcompress.engine.plan.make_plan import make_plan
from llmcompress.engine.plan.run_options import Options
from llmcompress.recipe import parse
from llmcompress.store.headers import INDEX
from llmcompress.validate import verify as module
from llmcompress.validate.stored import read_tensors
from llmcompress.validate.verify import passed, verify
from resealed import reseal

MODULE = "model.layers.0.self_attn.k_proj"
CASES = {
    "gptq sym": ("gptq", {"bits": 4, "group_size": 32}),
    "gptq asym": ("gptq", {"bits": 4, "group_size": 32, "sym": False}),
    "awq sym": ("awq", {"bits": 4, "group_size": 32}),
    "awq asym": ("awq", {"bits": 4, "group_size": 32, "sym": False, "set": {"layers.0.mlp.*": {"skip": True}}}),
    "packed sym": ("compressed-tensors", {"bits": 4, "group_size": 32}),
    "packed asym": ("compressed-tensors", {"bits": 4, "group_size": 32, "sym": False}),
    "packed row": ("compressed-tensors", {"bits": 8, "group_size": -1}),
    "dense": ("dense", {"bits": 3, "group_size": 32}),
}


def compressed(model, out, format_="gptq", method="rtn", **options):
    recipe = {"steps": [{"method": method, **options}], "output": {"format": format_}}
    run(make_plan(parse(recipe), model, Options(out=out)))
    return out


@pytest.fixture(scope="module")
def source(random_model_dir):
    return random_model_dir("qwen2")


@pytest.fixture(scope="module")
def outputs(source, tmp_path_factory):
    root = tmp_path_factory.mktemp("outputs")
    return {
        name: compressed(source, root / name.replace(" ", "-"), format_, **options)
        for name, (format_, options) in CASES.items()
    }


@pytest.fixture
def copy_of(outputs, tmp_path):
    def copy(name):
        return Path(shutil.copytree(outputs[name], tmp_path / "copy"))

    return copy


def failures(out, source=None):
    return {check.name: check.detail for check in verify(out, source) if not check.ok}


def edit_json(path, change):
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def edit_tensors(out, change, renew=True):
    """Apply `change` to the dictionary of tensors; renew: record the new hashes, as a faulty writer would have."""
    tensors = {name: tensor.clone() for name, tensor in load_file(out / "model.safetensors").items()}
    change(tensors)
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    if renew:
        reseal(out)


def edit_settings(out, change):
    """Change quantization_config, and quantize_config.json with it where there is one."""
    edit_json(out / "config.json", lambda config: change(config["quantization_config"]))
    if (out / "quantize_config.json").exists():
        edit_json(out / "quantize_config.json", change)


@pytest.mark.parametrize("name", CASES)
def test_what_was_written_passes(outputs, source, name):
    assert failures(outputs[name]) == {}
    assert failures(outputs[name], source) == {}
    assert [check.name for check in verify(outputs[name], source)] == [
        "files", "report", "directory", "hashes", "finite", "config", "plan", "matrices", "fused", "source", "bound"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("family", "format_", "options"),
    [
        ("llama", "compressed-tensors", {"bits": 2, "group_size": 16}),
        ("gpt2", "gptq", {"bits": 8, "group_size": 64}),  # matrices stored [in, out], some of them square
        ("gpt2", "dense", {"bits": 4, "group_size": 64}),
        ("mixtral", "gptq", {"bits": 4, "group_size": 32}),  # with routers that stay as they are
        ("mixtral", "compressed-tensors", {"bits": 4, "group_size": 32}),
        ("mixtral", "awq", {"bits": 4, "group_size": 32, "sym": False}),
        ("opt", "awq", {"bits": 4, "group_size": -1}),
        ("gpt_neox", "compressed-tensors", {"bits": 4, "group_size": 32}),
        ("opt", "compressed-tensors", {"bits": 4, "group_size": 32}),  # with projections outside of the layers
        ("gemma2", "gptq", {"bits": 3, "group_size": 32}),
    ],
)
def test_other_families_pass(random_model_dir, tmp_path, family, format_, options):
    model = random_model_dir(family)
    assert failures(compressed(model, tmp_path / "out", format_, **options), model) == {}


@pytest.mark.parametrize("format_", ["gptq", "compressed-tensors", "dense"])
def test_modules_with_settings_of_their_own_and_shards_of_the_source_pass(random_model_dir, tmp_path, format_):
    model = random_model_dir("llama", shard="60KB")
    own = {"mlp.down_proj": {"bits": 8}, "layers.1.self_attn.*": {"skip": True}}
    out = compressed(model, tmp_path / "out", format_, bits=4, group_size=32, set=own)
    assert failures(out, model) == {}
    assert len(quantised_names(out)) == 10


def quantised_names(out):
    return [item["name"] for item in json.loads((out / "report.json").read_text())["linears"]]


@pytest.mark.parametrize("name", CASES)
def test_one_flipped_bit_in_any_tensor_is_found(outputs, tmp_path, name):
    for tensor in read_tensors(outputs[name]).values():
        data = bytearray((outputs[name] / "model.safetensors").read_bytes())
        data[tensor.begin + tensor.nbytes // 2] ^= 1
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        shutil.copytree(outputs[name], tmp_path / "out")
        (tmp_path / "out" / "model.safetensors").write_bytes(data)
        assert failures(tmp_path / "out")["hashes"] == f"{tensor.name} is not what was written"


@pytest.mark.parametrize("name", ["gptq sym", "packed sym", "packed row", "dense"])
def test_files_that_are_cut_off_padded_or_gone_are_found(copy_of, name):
    out = copy_of(name)
    file = out / "model.safetensors"
    whole = file.read_bytes()
    for data in (whole[:-1], whole[:-1000], whole[:100], whole[:4], b"", whole + b"\0"):
        file.write_bytes(data)
        assert "model.safetensors" in failures(out)["files"]
    file.unlink()
    assert "0 weight files" in failures(out)["files"]
    file.write_bytes(whole)
    assert failures(out) == {}
    shutil.copy(file, out / "stray.safetensors")
    assert "2 weight files" in failures(out)["files"]


def test_headers_that_lie_are_found(copy_of):
    out = copy_of("packed sym")
    file = out / "model.safetensors"
    whole = file.read_bytes()
    for old, new in (
        (b'"I32"', b'"F32"'),
        (b'"I64"', b'"I16"'),
        (b"[2]", b"[3]"),
        (b'"data_offsets":[0,', b'"data_offsets":[8,'),
    ):
        assert old in whole[:2000]
        file.write_bytes(whole.replace(old, new, 1))
        assert failures(out)


def test_damage_to_the_index_and_its_shards_is_found(random_model_dir, tmp_path):
    model = random_model_dir("llama", shard="60KB")
    out = tmp_path / "out"
    compressed(model, out, bits=4, group_size=32)
    tensors = load_file(out / "model.safetensors")
    half = len(tensors) // 2
    parts = [dict(list(tensors.items())[:half]), dict(list(tensors.items())[half:])]
    names = [f"model-{n:05d}-of-00002.safetensors" for n in (1, 2)]
    (out / "model.safetensors").unlink()
    for name, part in zip(names, parts, strict=True):
        save_file(part, out / name, {"format": "pt"})
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    index = {
        "metadata": {"total_size": total},
        "weight_map": {key: name for name, part in zip(names, parts, strict=True) for key in part},
    }
    (out / INDEX).write_text(json.dumps(index))
    reseal(out)
    assert failures(out, model) == {}
    first = next(iter(parts[0]))
    for change in (
        lambda value: value["weight_map"].update({first: names[1]}),
        lambda value: value["weight_map"].pop(first),
        lambda value: value["weight_map"].update(extra=names[0]),
        lambda value: value["metadata"].update(total_size=total + 1),
        lambda value: value.pop("weight_map"),
    ):
        edit_json(out / INDEX, change)
        assert failures(out)["files"]
        (out / INDEX).write_text(json.dumps(index))
    (out / names[0]).rename(out / "elsewhere.safetensors")
    assert names[0] in failures(out)["files"]


PARTS = {
    "gptq sym": ["qweight", "qzeros", "scales", "g_idx", "bias"],
    "awq asym": ["qweight", "qzeros", "scales", "bias"],
    "packed asym": ["weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "bias"],
    "dense": ["weight", "bias"],
}


@pytest.mark.parametrize(("name", "part"), [(name, part) for name, parts in PARTS.items() for part in parts])
def test_a_tensor_that_is_missing_is_found(copy_of, source, name, part):
    out = copy_of(name)
    edit_tensors(out, lambda tensors: tensors.pop(f"{MODULE}.{part}"), renew=False)
    assert f"{MODULE}.{part} is in report.json and in no file" in failures(out)["hashes"]
    edit_tensors(out, lambda tensors: None)
    found = failures(out, source)
    assert "hashes" not in found
    assert f"{MODULE}" in " ".join(found.values())


def test_a_whole_module_left_out_is_found(copy_of, source):
    out = copy_of("packed sym")

    def drop(tensors):
        for part in ("weight_packed", "weight_scale", "weight_shape"):
            tensors.pop(f"{MODULE}.{part}")

    edit_tensors(out, drop)
    found = failures(out, source)
    assert f"{MODULE} is in report.json and is not quantised" in found["config"]
    assert f"{MODULE}.weight of the source is missing" in found["source"]


def test_a_tensor_too_many_is_found(copy_of, source):
    out = copy_of("packed sym")
    edit_tensors(out, lambda tensors: tensors.update({"model.extra": torch.ones(2)}))
    assert failures(out, source)["source"] == "model.extra does not come from the source"


def test_a_tied_head_may_be_left_out_or_untied_but_not_invented(random_model_dir, tmp_path):
    tied = random_model_dir("llama", tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(tied / "model.safetensors")
    written_out = Path(shutil.copytree(tied, tmp_path / "source"))  # as older writers saved tied models
    tensors = load_file(tied / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    save_file({**tensors, "lm_head.weight": embedding.clone()}, written_out / "model.safetensors")
    out = compressed(tied, tmp_path / "out", bits=4, group_size=32)
    assert failures(out, tied) == failures(out, written_out) == {}
    edit_tensors(out, lambda tensors: tensors.update({"lm_head.weight": embedding.clone()}))
    assert failures(out, tied) == {}
    edit_tensors(out, lambda tensors: tensors["lm_head.weight"].mul_(2))
    assert failures(out, tied)["source"] == "lm_head.weight does not come from the source"


def test_a_tensor_that_should_have_been_copied_is_compared_with_the_source(copy_of, source):
    out = copy_of("gptq sym")
    edit_tensors(out, lambda tensors: tensors["model.norm.weight"].mul_(1.01))
    assert failures(out) == {}
    assert failures(out, source)["source"] == "model.norm.weight differs from the source"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0])
@pytest.mark.parametrize(
    ("name", "part"), [("gptq sym", "scales"), ("packed sym", "weight_scale"), ("packed row", "weight_scale")]
)
def test_scales_that_are_no_numbers_or_zero_are_found(copy_of, name, part, value):
    out = copy_of(name)
    edit_tensors(out, lambda tensors: tensors[f"{MODULE}.{part}"].view(-1)[1].fill_(value))
    found = failures(out)
    assert "scales" in found["matrices"]
    assert ("finite" in found) is (value != 0)


@pytest.mark.parametrize("tensor", ["model.embed_tokens.weight", "model.norm.weight", f"{MODULE}.bias"])
def test_values_that_are_not_finite_are_found(copy_of, tensor):
    out = copy_of("dense")
    edit_tensors(out, lambda tensors: tensors[tensor].view(-1)[-1].fill_(float("nan")))
    assert failures(out)["finite"] == f"{tensor} holds values that are not finite"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda index: index[0].fill_(9), "names groups outside"),
        (lambda index: index[0].fill_(-1), "names groups outside"),
        (lambda index: index.copy_(index.flip(0)), "not in natural order"),
        (lambda index: index[0].fill_(1), "groups of unequal size"),
    ],
)
def test_a_wrong_group_index_is_found(copy_of, change, message):
    out = copy_of("gptq sym")
    edit_tensors(out, lambda tensors: change(tensors[f"{MODULE}.g_idx"]))
    assert message in failures(out)["matrices"]


@pytest.mark.parametrize("shape", [[64, 32], [32, 64, 1], [0, 64], [32, 65]])
def test_a_wrong_shape_is_found(copy_of, shape):
    out = copy_of("packed sym")
    edit_tensors(out, lambda tensors: tensors.update({f"{MODULE}.weight_shape": torch.tensor(shape)}))
    assert MODULE in failures(out)["matrices"]


@pytest.mark.parametrize("name", ["gptq sym", "awq sym", "packed asym"])
def test_zero_points_that_moved_are_found(copy_of, source, name):
    out = copy_of(name)
    part = "weight_zero_point" if name == "packed asym" else "qzeros"
    edit_tensors(out, lambda tensors: tensors[f"{MODULE}.{part}"].view(-1)[0].bitwise_xor_(1))
    found = failures(out, source)
    assert "bound" in found  # rounding took other codes for the old zero point
    if name != "packed asym":
        assert "other zero points than 8" in found["matrices"]


@pytest.mark.parametrize(
    "name", ["gptq sym", "gptq asym", "awq sym", "awq asym", "packed sym", "packed asym", "packed row"]
)
def test_a_single_wrong_code_of_rounding_is_found(copy_of, source, name):
    out = copy_of(name)
    part = "weight_packed" if name.startswith("packed") else "qweight"
    edit_tensors(out, lambda tensors: tensors[f"{MODULE}.{part}"][0, 0].bitwise_xor_(4))
    assert failures(out) == {}  # codes can be any
    assert f"{MODULE} has 1 values further from the source than rounding takes them" in failures(out, source)["bound"]


def test_decoded_weights_off_their_grid_are_found(copy_of, source):
    out = copy_of("dense")
    originals = load_file(source / "model.safetensors")
    name = f"{MODULE}.weight"
    edit_tensors(out, lambda tensors: tensors[name].copy_(originals[name]))
    found = failures(out, source)
    assert f"{MODULE} has groups of more than 8 values" in found["matrices"]
    assert f"{MODULE} has a relative error of 0" in found["bound"]


def test_errors_that_the_report_embellishes_are_found(copy_of, source):
    for name in ("gptq sym", "dense"):
        out = copy_of(name)

        def change(report):
            report["linears"][0]["relative_error"] *= 0.9

        edit_json(out / "report.json", change)
        assert "report.json says" in failures(out, source)["bound"]
        shutil.rmtree(out)


@pytest.mark.parametrize(
    ("format_", "sym", "part"),
    [
        ("gptq", True, "mlp.down_proj.qweight"),
        ("gptq", True, "mlp.up_proj.qzeros"),
        ("compressed-tensors", True, "mlp.down_proj.weight_packed"),
        ("compressed-tensors", False, "mlp.up_proj.weight_zero_point"),
    ],
)
def test_widths_that_leave_words_part_empty_pass_and_their_padding_is_looked_at(
    random_model_dir, tmp_path, format_, sym, part
):
    model = random_model_dir("llama", intermediate_size=100)
    out = compressed(model, tmp_path / "out", format_, bits=4, group_size=-1, sym=sym)
    assert failures(out, model) == {}
    name = f"model.layers.0.{part}"
    edit_tensors(out, lambda tensors: tensors[name][-1, -1].bitwise_xor_(1 << 30))
    assert "padding bits" in failures(out)["matrices"]


def with_tokenizer(model, path):
    """A copy of a model with a tokenizer, which calibration asks for."""
    shutil.copytree(model, path)
    vocabulary = {f"t{number}": number for number in range(96)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="t0").save_pretrained(path)
    return path


@pytest.mark.parametrize(
    ("format_", "actorder"),
    [(form, order) for form in ("gptq", "dense") for order in ("none", "static", "group")]
    + [("compressed-tensors", "none"), ("compressed-tensors", "static")],  # which refuses permuted groups
)
def test_outputs_of_gptq_pass_in_any_order(random_model_dir, tmp_path, format_, actorder):
    model = with_tokenizer(random_model_dir("llama"), tmp_path / "model")
    ids = torch.randint(0, 96, (8, 32), generator=torch.Generator().manual_seed(0))
    save_file({"input_ids": ids}, tmp_path / "ids.safetensors")
    calibration = {"source": str(tmp_path / "ids.safetensors"), "samples": 8, "length": 32}
    step = {"method": "gptq", "bits": 2, "group_size": 16, "actorder": actorder}
    recipe = {"calibration": calibration, "steps": [step], "output": {"format": format_}}
    run(make_plan(parse(recipe), model, Options(out=tmp_path / "out")))
    assert failures(tmp_path / "out", model) == {}
    if (format_, actorder) == ("gptq", "group"):
        index = load_file(tmp_path / "out" / "model.safetensors")[f"{MODULE}.g_idx"]
        assert (index.diff() < 0).any()


GPTQ_CHANGES = {
    "no sym": lambda s: s.pop("sym"),
    "no desc_act": lambda s: s.pop("desc_act"),
    "no group size": lambda s: s.pop("group_size"),
    "bits": lambda s: s.update(bits=8),
    "group size": lambda s: s.update(group_size=64),
    "asymmetric": lambda s: s.update(sym=False),
    "convention": lambda s: s.update(checkpoint_format="gptq_v2"),
    "head": lambda s: s.update(lm_head=True),
    "damping": lambda s: s.update(damp_percent=1.5),
    "skipped": lambda s: s.update(dynamic={r"-:^model\.layers\.0\.self_attn\.k_proj$": {}}),
    "overridden": lambda s: s.update(dynamic={r"+:^model\.layers\.0\.self_attn\.k_proj$": {"bits": 8}}),
    "pattern": lambda s: s.update(dynamic={"-:(": {}}),
    "modules": lambda s: s.update(modules_in_block_to_quantize=[[MODULE]]),
    "method": lambda s: s.update(quant_method="awq"),
}
AWQ_CHANGES = {
    "no group size": lambda s: s.pop("group_size"),
    "no list": lambda s: s.pop("modules_to_not_convert"),
    "bits": lambda s: s.update(bits=8),
    "group size": lambda s: s.update(group_size=64),
    "symmetric": lambda s: s.update(zero_point=False),
    "version": lambda s: s.update(version="gemv"),
    "no rules": lambda s: s.pop("dynamic"),
    "fewer rules": lambda s: s["dynamic"].pop(next(iter(s["dynamic"]))),
    "skipped": lambda s: s["dynamic"].update({f"-:^{re.escape(MODULE)}$": {}}),
    "listed": lambda s: s["modules_to_not_convert"].append(MODULE),
    "unlisted": lambda s: s["modules_to_not_convert"].pop(0),
    "part of a name": lambda s: s["modules_to_not_convert"].append("k_pro"),  # which transformers would not match
    "pattern": lambda s: s["modules_to_not_convert"].append("("),
    "head": lambda s: s["modules_to_not_convert"].remove("lm_head"),
}
PACKED_CHANGES = {
    "no status": lambda s: s.pop("quantization_status"),
    "status": lambda s: s.update(quantization_status="frozen"),
    "no format": lambda s: s.pop("format"),
    "format": lambda s: s.update(format="int-quantized"),
    "no groups": lambda s: s.pop("config_groups"),
    "no group format": lambda s: s["config_groups"]["group_0"].pop("format"),
    "no head in ignore": lambda s: s.update(ignore=[]),
    "ignored": lambda s: s["ignore"].append(MODULE),
    "bits": lambda s: s["config_groups"]["group_0"]["weights"].update(num_bits=8),
    "group size": lambda s: s["config_groups"]["group_0"]["weights"].update(group_size=64),
    "strategy": lambda s: s["config_groups"]["group_0"]["weights"].update(strategy="channel", group_size=None),
    "asymmetric": lambda s: s["config_groups"]["group_0"]["weights"].update(symmetric=False),
    "unknown key": lambda s: s["config_groups"]["group_0"]["weights"].update(colour="red"),
    "targets": lambda s: s["config_groups"]["group_0"].update(targets=[MODULE]),
    "type": lambda s: s.update(config_groups=7),
}


@pytest.mark.parametrize(
    ("name", "change"),
    [pytest.param("gptq sym", change, id=f"gptq {key}") for key, change in GPTQ_CHANGES.items()]
    + [pytest.param("awq asym", change, id=f"awq {key}") for key, change in AWQ_CHANGES.items()]
    + [pytest.param("packed sym", change, id=f"packed {key}") for key, change in PACKED_CHANGES.items()],
)
def test_a_config_that_contradicts_the_tensors_is_found(copy_of, name, change):
    out = copy_of(name)
    edit_settings(out, change)
    assert failures(out).keys() & {"files", "config", "matrices"}


def test_two_configs_that_differ_are_found(copy_of):
    out = copy_of("gptq sym")
    edit_json(out / "quantize_config.json", lambda settings: settings.update(bits=2))
    assert "quantize_config.json and quantization_config differ" in failures(out)["config"]
    (out / "quantize_config.json").unlink()
    assert "quantize_config.json is missing" in failures(out)["config"]


def test_a_config_that_strayed_from_the_source_is_found(copy_of, source):
    out = copy_of("packed sym")
    edit_json(out / "config.json", lambda config: config.update(rms_norm_eps=1.0))
    assert failures(out, source)["source"] == "config.json has another 'rms_norm_eps' than the source"


def test_a_report_that_is_missing_or_damaged_is_found(copy_of):
    out = copy_of("packed sym")
    for text in (
        "{",
        "[]",
        "{}",
        '{"format": "gptq", "linears": [], "tensors": {}}',
        '{"format": "compressed-tensors", "linears": [1], "tensors": {}}',
    ):
        (out / "report.json").write_text(text)
        assert "report" in failures(out)
    (out / "report.json").unlink()
    assert failures(out)["report"] == "report.json is missing"
    assert "hashes" in failures(out)
    (out / "config.json").unlink()
    assert "config.json is missing" in failures(out)["files"]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("config.json", lambda value: value["quantization_config"].update(quant_method=["gptq"])),
        ("config.json", lambda value: value["quantization_config"].update(bits=10**30, group_size=float("inf"))),
        ("report.json", lambda value: value["linears"][0].update(name=["x"])),
        ("report.json", lambda value: value["linears"][0].update(grid=4)),
        ("report.json", lambda value: value["linears"][0].update(relative_error=None)),
        ("report.json", lambda value: value.update(tensors=[])),
    ],
)
def test_values_of_types_that_nobody_writes_are_found(copy_of, source, name, change):
    out = copy_of("gptq sym")
    edit_json(out / name, change)
    assert failures(out, source)


def test_headers_without_end_are_found(copy_of):
    out = copy_of("gptq sym")
    raw = b"[" * 100_000
    (out / "model.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw)
    assert "damaged header" in failures(out)["files"]


def test_a_source_that_cannot_be_read_is_a_failed_check(outputs, tmp_path):
    assert "cannot be read" in failures(outputs["dense"], tmp_path)["source"]


def test_fused_linears_on_different_grids_are_a_warning(copy_of):
    out = copy_of("packed sym")

    def change(settings):
        settings["config_groups"]["group_1"] = json.loads(json.dumps(settings["config_groups"]["group_0"]))
        settings["config_groups"]["group_1"]["targets"] = [MODULE]
        settings["config_groups"]["group_1"]["weights"]["group_size"] = 64

    edit_settings(out, change)

    def coarser(tensors):
        tensors[f"{MODULE}.weight_scale"] = tensors[f"{MODULE}.weight_scale"][:, :1].contiguous()

    edit_tensors(out, coarser)

    def regrid(report):
        next(item for item in report["linears"] if item["name"] == MODULE)["grid"] = "int4-g64-sym"

    edit_json(out / "report.json", regrid)
    reseal(out)
    checks = verify(out)
    assert [check.name for check in checks if not check.ok] == ["fused"]
    assert passed(checks)


def test_the_reader_shares_no_code_with_the_writer():
    folder = Path(module.__file__).parent
    checks = ("verify", "findings", "directory", "config_checks", "source_checks", "removed_parts", "sparsity")
    files = ("published", "source_files")
    own = (
        *checks,
        *files,
        "kv_scale_checks",
        "declared_schemes",
        "expert_parts",
        "awq",
        "progressive",
        "float4",
        "float8_blocks",
        "draft_checks",
        "mlx_codes",
        "table_codes",
        "matrix",
        "matrices",
        "stored",
    )
    allowed = {
        "llmcompress.errors",
        "llmcompress.npzfile",
        "llmcompress.validate.plan_checks",
        "llmcompress.validate.decoded_source",  # of sources that are quantised themselves
        *(f"llmcompress.validate.{name}" for name in own),
    }
    for name in own:
        for node in ast.walk(ast.parse((folder / f"{name}.py").read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("llmcompress"):
                named = {f"{node.module}.{alias.name}" for alias in node.names}
                assert node.module in allowed or named <= allowed
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not {"torch", "safetensors", "transformers"} & set(names)
