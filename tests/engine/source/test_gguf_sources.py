"""GGUF files of quantised checkpoints, of the text part of multimodal ones, and of other GGUF files."""

import json
import shutil

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from ggufmodels import MODELS, small_config
from llmcompress.engine.execute import run
from llmcompress.engine.plan.make_plan import make_plan
from llmcompress.engine.plan.run_options import Options
from llmcompress.engine.run.measure_imatrix import measure_imatrix
from llmcompress.engine.source.open import directory_headers, open_checkpoint, source_headers
from llmcompress.errors import CheckpointError, PlanError, StoppedError
from llmcompress.formats.gguf.family import known_types
from llmcompress.formats.gguf.imatrix_file import write_imatrix
from llmcompress.ledger import Ledger
from llmcompress.recipe import Calibration, parse
from llmcompress.store.folder import Folder
from llmcompress.store.gguf_model import decoded, read_gguf, tensor_bytes
from llmcompress.validate.gguf_verify import verify_gguf
from llmcompress.validate.session import Request, evaluate_paths
from madetokenizers import byte_level, save
from multimodals import multimodal
from tinyruns import FEW, compress, steps_recipe

MODEL_TYPES = [*sorted(known_types().keys() - MODELS.keys()), "deepseek_v3", "granitemoeshared"]
TEXT = {"calibration": {"samples": 4, "length": 64}}
OVERRIDES = {
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3_text": {"query_pre_attn_scalar": 16},
    "qwen3_moe": {"norm_topk_prob": True},
}


def gguf_plan(model, out, kind, method="rtn", imatrix=None, output=None, overwrite=False, **types):
    step = {"method": method, "gguf": {"type": kind, "search": "fast", **types}}
    text = {**TEXT["calibration"], **({"imatrix": str(imatrix)} if imatrix else {})}
    recipe = {"calibration": text, "steps": [step], "output": {"format": "gguf", **(output or {})}}
    return make_plan(parse(recipe), model, Options(out=out, overwrite=overwrite))


def write(model, out, *arguments, **options):
    """The report of a GGUF file of `model`, which lies at `out`."""
    return run(gguf_plan(model, out, *arguments, **options))


def quantised(model, out, format_, **options):
    recipe = {"steps": [{"method": "rtn", "bits": 4, "group_size": 32, **options}], "output": {"format": format_}}
    run(make_plan(parse(recipe), model, Options(out=out)))
    return out


def same_tensors(one, other):
    one, other = read_gguf(one), read_gguf(other)
    assert list(one.tensors) == list(other.tensors)
    for name, tensor in one.tensors.items():
        assert tensor.type == other.tensors[name].type
        assert np.array_equal(tensor_bytes(one, name), tensor_bytes(other, name)), name


def kinds(report):
    return {entry["kind"] for entry in report["ledger"]}


@pytest.fixture(scope="module")
def model_of(random_model_dir, tmp_path_factory):
    """A random model of a family with a tokenizer; wide enough for blocks of 256."""
    root = tmp_path_factory.mktemp("models")

    def make(kind, dtype="bfloat16", **config):
        path = root / f"model-{len(list(root.iterdir()))}"
        small = {"model_type": kind, **small_config(kind, 288)} if kind in MODELS else OVERRIDES.get(kind, {})
        shutil.copytree(random_model_dir(kind, dtype=dtype, **{**small, "vocab_size": 288, **config}), path)
        return save(byte_level(), path)

    return make


# -- quantised checkpoints ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format_", ["gptq", "awq", "compressed-tensors"])
@pytest.mark.parametrize(
    ("options", "kind", "exact"),
    [
        ({}, "Q4_0", True),
        ({"group_size": 128}, "Q4_0", True),
        ({"group_size": -1}, "Q8_0", True),
        ({"sym": False}, "Q5_0", True),
        ({"sym": False}, "Q4_1", False),
    ],
)
def test_codes_are_kept_where_the_type_has_a_place_for_them(format_, options, kind, exact, shallow_model_dir, tmp_path):
    source = quantised(shallow_model_dir, tmp_path / "source", format_, **options)
    file = tmp_path / "model.gguf"
    report = write(source, file, kind, tensors={"ffn_*": kind, "attn_*": kind})
    assert {(item["method"], item["grid"]) for item in report["linears"]} == {("recoded", kind)}
    errors = [item["relative_error"] for item in report["linears"]]
    assert (set(errors) == {0}) if exact else all(0 < error < 1e-3 for error in errors)
    assert kinds(report) == (set() if exact else {"requantised"})
    assert [check for check in verify_gguf(file, source) if not check.ok] == []
    checkpoint, header = open_checkpoint(directory_headers(source, Ledger())), read_gguf(file)
    ours = checkpoint.read("model.layers.1.mlp.up_proj.weight")
    theirs = torch.from_numpy(decoded(header, "blk.1.ffn_up.weight"))
    assert torch.equal(ours, theirs) == exact
    coded = checkpoint.coded("model.layers.1.mlp.up_proj")
    if kind == "Q4_0":  # by the bytes of the format itself: nibbles 0-15 and 16-31 of a block in one byte
        raw = tensor_bytes(header, "blk.1.ffn_up.weight").reshape(len(ours), -1, 18)
        nibbles = np.concatenate([raw[..., 2:] & 15, raw[..., 2:] >> 4], axis=-1).reshape(ours.shape)
        assert np.array_equal(nibbles, coded.codes.numpy())


def test_other_types_are_rounded_anew_and_the_ledger_says_so(shallow_model_dir, tmp_path):
    source = quantised(shallow_model_dir, tmp_path / "source", "gptq")
    for kind in ("Q4_K_M", "F16"):
        file = tmp_path / f"{kind}.gguf"
        (note,) = (entry for entry in gguf_plan(source, file, kind).ledger if entry.kind == "requantised")
        assert note.subject == f"{7 * FEW} matrices"
        report = write(source, file, kind)
        assert kinds(report) == {"requantised"}
        assert "recoded" not in {item["method"] for item in report["linears"]}
        assert [check for check in verify_gguf(file, source) if not check.ok] == []
    dense = tmp_path / "dense"  # the same values as floats give the same blocks
    run(make_plan(parse({"steps": [{"method": "rtn", "group_size": 32}], "output": {"format": "dense"}}),
                  shallow_model_dir, Options(out=dense)))  # fmt: skip
    write(dense, tmp_path / "dense.gguf", "Q4_0")
    write(source, tmp_path / "kept.gguf", "Q4_0")
    kept, rounded = read_gguf(tmp_path / "kept.gguf"), read_gguf(tmp_path / "dense.gguf")
    near = [abs(decoded(kept, name) - decoded(rounded, name)).max() for name in kept.tensors]
    assert max(near) < 0.1


@pytest.mark.parametrize("kind", ["gpt2", "qwen3_moe", "gpt_neox"])
def test_matrices_stored_the_other_way_round_and_experts_are_recoded_too(kind, model_of, tmp_path):
    source = quantised(model_of(kind), tmp_path / "source", "gptq")
    for name in ("config.json", "tokenizer.json"):
        assert (source / name).exists()
    report = write(source, tmp_path / "model.gguf", "Q4_0")
    assert {(item["method"], item["relative_error"]) for item in report["linears"]} == {("recoded", 0.0)}
    assert [check for check in verify_gguf(tmp_path / "model.gguf", source) if not check.ok] == []


def test_a_quantised_source_may_be_calibrated_and_gptq_takes_up_what_is_not_kept(shallow_model_dir, tmp_path):
    source = quantised(shallow_model_dir, tmp_path / "source", "gptq")
    report = write(source, tmp_path / "model.gguf", "Q4_0", "gptq", tensors={"ffn_down": "Q3_K"})
    assert {item["method"] for item in report["linears"]} == {"recoded", "gptq"}
    request = Request(tmp_path / "model.gguf", source, "default", 64, 4, 4, "cpu", "float32")
    assert evaluate_paths(request, lambda done, of: None)["kl"] < 0.1


def test_foreign_formats_are_refused(shallow_model_dir, tmp_path, main, capsys):
    source = quantised(shallow_model_dir, tmp_path / "source", "gptq")
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"]["quant_method"] = "aqlm"
    (source / "config.json").write_text(json.dumps(config))
    assert main("gguf", source, "--type", "Q4_0", "-o", tmp_path / "out.gguf") == 2
    assert "already quantised (aqlm)" in capsys.readouterr().err


@pytest.mark.parametrize(
    "damage",
    [
        {"bits": "four"},
        {"bits": 8},
        {"bits": None},
        {"group_size": {}},
        {"dynamic": ["x"]},
        {"dynamic": {"+:(": {}}},
        {"bits": 7},
    ],
)
def test_a_config_that_lies_about_its_codes_ends_in_one_line(damage, shallow_model_dir, tmp_path, main, capsys):
    source = quantised(shallow_model_dir, tmp_path / "source", "gptq")
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"].update(damage)
    (source / "config.json").write_text(json.dumps(config))
    assert main("gguf", source, "--type", "Q4_0", "-o", tmp_path / "out.gguf", "-q") in (1, 2)
    lines = capsys.readouterr().err.strip().splitlines()
    assert len([line for line in lines if line.startswith("error: ")]) == 1
    assert len(lines) <= 2
    assert not (tmp_path / "out.gguf").exists()


def test_groups_in_activation_order_are_not_misread(shallow_model_dir, tmp_path):
    source = quantised(shallow_model_dir, tmp_path / "source", "compressed-tensors")
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight_g_idx"] = torch.arange(256, dtype=torch.int32) % 8
    save_file(tensors, source / "model.safetensors")
    report = write(source, tmp_path / "order.gguf", "Q4_0")  # the scheme says nothing of the index
    methods = {item["name"]: item["method"] for item in report["linears"]}
    assert [name for name, method in methods.items() if method == "rtn"] == ["model.layers.0.mlp.up_proj"]
    assert [check for check in verify_gguf(tmp_path / "order.gguf", source) if not check.ok] == []
    source = quantised(shallow_model_dir, tmp_path / "gptq", "gptq", method="gptq", actorder="group")
    report = write(source, tmp_path / "out.gguf", "Q8_0")  # blocks hold values of many groups
    assert {item["method"] for item in report["linears"]} == {"rtn"}
    assert kinds(report) == {"requantised"}
    assert [check for check in verify_gguf(tmp_path / "out.gguf", source) if not check.ok] == []


# -- multimodal checkpoints --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["gemma3", "llava", "mistral3"])
def test_the_text_part_of_a_multimodal_model_computes_what_the_whole_does(kind, tmp_path):
    path, whole = multimodal(kind, tmp_path / "model")
    file = tmp_path / "model.gguf"
    report = write(path, file, "F32")
    (note,) = [entry for entry in report["ledger"] if entry["kind"] == "text_only"]
    assert note["subject"] == kind
    assert "its text part" in note["why"]
    assert [check for check in verify_gguf(file, path) if not check.ok] == []
    from llmcompress.validate.load import load_whole

    ids = torch.randint(2, 256, (1, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        text = load_whole(file, dtype=torch.float32, source=path)(ids, use_cache=False).logits
        theirs = whole.eval()(input_ids=ids, use_cache=False).logits
    assert torch.allclose(text, theirs, atol=1e-4)
    calibrated = write(path, tmp_path / "calibrated.gguf", "Q8_0", "gptq")
    assert all(item["tokens"] for item in calibrated["linears"])


def test_a_multimodal_model_of_an_unknown_family_is_refused_in_one_line(tmp_path, main, capsys):
    path, _ = multimodal("llava", tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    config["text_config"]["model_type"] = "bloom"
    (path / "config.json").write_text(json.dumps(config))
    assert main("gguf", path, "--type", "Q4_0", "-o", tmp_path / "out.gguf") == 2
    assert capsys.readouterr().err.count("error: ") == 1


# -- GGUF files --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MODEL_TYPES)
def test_a_file_of_floats_gives_the_tensors_that_the_directory_gives(kind, model_of, tmp_path):
    model = model_of(kind)
    write(model, tmp_path / "floats.gguf", "BF16")
    for wanted in ("Q4_K_M", "Q4_0"):
        write(model, tmp_path / f"directory-{wanted}.gguf", wanted)
        write(tmp_path / "floats.gguf", tmp_path / f"file-{wanted}.gguf", wanted)
        same_tensors(tmp_path / f"directory-{wanted}.gguf", tmp_path / f"file-{wanted}.gguf")


@pytest.mark.parametrize("search", ["compat", "fast", "best"])
def test_half_floats_give_the_same_too_with_every_search_and_an_importance_matrix(search, model_of, tmp_path):
    model = model_of("llama", dtype="float16", hidden_size=256, intermediate_size=512)
    file = tmp_path / "f16.gguf"
    write(model, file, "F16")
    asked = Calibration(samples=4, length=32)
    write_imatrix(tmp_path / "imatrix.gguf", measure_imatrix(model, asked, Folder(tmp_path), Options(), Ledger()))
    for imatrix in (None, tmp_path / "imatrix.gguf"):
        types = {"search": search, "embedding": "Q6_K", "tensors": {"ffn_down": "Q5_1"}, "imatrix": imatrix}
        place = tmp_path / ("with" if imatrix else "without")
        reports = [write(source, place / f"{source.stem}.gguf", "Q4_K_M", **types) for source in (model, file)]
        same_tensors(place / f"{model.stem}.gguf", place / "f16.gguf")
        assert reports[0]["tensors"] == reports[1]["tensors"]


def test_keys_are_carried_over_but_for_those_of_the_quantisation(shallow_model_dir, tmp_path):
    write(shallow_model_dir, tmp_path / "f16.gguf", "F16")
    report = write(tmp_path / "f16.gguf", tmp_path / "out.gguf", "Q4_K_M")
    one, other = gguf.GGUFReader(tmp_path / "f16.gguf"), gguf.GGUFReader(tmp_path / "out.gguf")
    assert set(one.fields) == set(other.fields)
    for key, field in one.fields.items():
        if key not in ("general.file_type", "GGUF.kv_count"):
            assert other.fields[key].types == field.types, key
            assert other.fields[key].contents() == field.contents(), key
    assert other.fields["general.file_type"].contents() == gguf.LlamaFileType.MOSTLY_Q4_K_M
    assert report["source"]["config_sha256"] is None
    assert list(report["source"]["files_sha256"]) == ["f16.gguf"]


def test_a_split_source_is_read_and_a_split_output_written(shallow_model_dir, tmp_path):
    write(shallow_model_dir, tmp_path / "f32", "F32", output={"shard_size": 4_000_000})
    shards = sorted((tmp_path / "f32").glob("*.gguf"))
    assert len(shards) > 1
    write(shards[0], tmp_path / "file.gguf", "Q4_K_M")
    write(shallow_model_dir, tmp_path / "directory.gguf", "Q4_K_M")
    same_tensors(tmp_path / "file.gguf", tmp_path / "directory.gguf")
    write(shards[0], tmp_path / "out", "F16", output={"shard_size": 2_000_000})
    assert all(file.name.startswith("tiny-llama-F32-F16-0") for file in (tmp_path / "out").glob("*.gguf"))
    with pytest.raises(PlanError, match="is a part of the model"):
        gguf_plan(shards[0], shards[1], "Q4_K_M", overwrite=True)


def test_a_link_in_a_download_cache_is_called_as_itself_not_as_its_blob(shallow_model_dir, tmp_path, main):
    blob = tmp_path / "models--someone--model" / "blobs" / ("0" * 64)
    folder = tmp_path / "models--someone--model" / "snapshots" / ("1" * 40)
    blob.parent.mkdir(parents=True)
    folder.mkdir(parents=True)
    write(shallow_model_dir, tmp_path / "file.gguf", "F16")
    (tmp_path / "file.gguf").rename(blob)
    link = folder / "tiny-F16.gguf"
    link.symlink_to(blob)
    assert source_headers(link, Ledger()).name == "tiny-F16"
    assert main("gguf", link, "--type", "Q8_0", "-q", "--keep-work") == 0
    made = folder / "tiny-F16-Q8_0.gguf"
    assert sorted(folder.glob("*.gguf")) == [made, link]
    assert main("export", f"{made}.work", "--format", "gguf", "-o", tmp_path / "again.gguf") == 0
    assert (tmp_path / "again.gguf").read_bytes() == made.read_bytes()
    write(link, tmp_path / "out", "Q8_0", output={"shard_size": 1_000_000})
    assert all(file.name.startswith("tiny-F16-Q8_0-0") for file in (tmp_path / "out").glob("*.gguf"))


def test_what_is_quantised_is_rounded_again_only_if_that_is_allowed(shallow_model_dir, tmp_path, main, capsys):
    source, out = tmp_path / "q4.gguf", tmp_path / "out.gguf"
    write(shallow_model_dir, source, "Q4_K_M")
    assert main("gguf", source, "--type", "Q5_K_M", "-o", out) == 2
    err = capsys.readouterr().err
    assert err.count("error: ") == 1
    assert "--allow-requantize" in err
    assert not out.exists()
    assert main("gguf", source, "--type", "Q5_K_M", "-o", out, "--allow-requantize", "-q", "--search", "compat") == 0
    before, after = read_gguf(source), read_gguf(out)
    for name, tensor in after.tensors.items():
        if tensor.type == before.tensors[name].type:  # Q6_K and F32, copied
            assert np.array_equal(tensor_bytes(after, name), tensor_bytes(before, name))
    assert {tensor.type for tensor in after.tensors.values()} == {"Q5_K", "Q6_K", "F32"}
    report = json.loads((tmp_path / "out.gguf.report.json").read_text())
    assert [entry["why"] for entry in report["ledger"]] == ["Q4_K in the file, decoded and rounded anew to Q5_K"]
    again = write(source, tmp_path / "same.gguf", "Q4_K_M")  # nothing is rounded: nothing has to be allowed
    assert (again["ledger"], again["linears"]) == ([], [])
    same_tensors(source, tmp_path / "same.gguf")


def test_what_needs_the_directory_is_refused_for_a_file(shallow_model_dir, tmp_path, main, capsys):
    source = tmp_path / "f16.gguf"
    write(shallow_model_dir, source, "F16")
    for options in (["--calibration", "default"], ["--modelfile"], ["--pre", "llama-bpe"]):
        assert main("gguf", source, "--type", "Q4_0", "-o", tmp_path / "out.gguf", *options) == 2
        err = capsys.readouterr().err
        assert (err.count("error: "), "is a GGUF file" in err) == (1, True)
    assert main("rtn", source, "-o", tmp_path / "out") == 2
    assert "is a file, not a model directory" in capsys.readouterr().err
    with pytest.raises(PlanError, match="is the model itself"):
        gguf_plan(source, source, "Q4_0", overwrite=True)
    assert gguf_plan(source, None, "Q4_0").out == tmp_path / "f16-Q4_0.gguf"


def test_a_run_on_a_file_that_stopped_goes_on_to_the_same_bytes(shallow_model_dir, tmp_path):
    source = tmp_path / "f16.gguf"
    write(shallow_model_dir, source, "F16")
    write(source, tmp_path / "whole.gguf", "Q4_K_M")
    with pytest.raises(StoppedError):
        run(gguf_plan(source, tmp_path / "cut.gguf", "Q4_K_M"), stop=lambda finished: finished >= 1)
    assert not (tmp_path / "cut.gguf").exists()
    write(source, tmp_path / "cut.gguf", "Q4_K_M")
    assert (tmp_path / "cut.gguf").read_bytes() == (tmp_path / "whole.gguf").read_bytes()


def small_file(path, edit=lambda writer: None, arch="llama", blocks=1, floats=np.float32):
    """The least that is taken for a model."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(blocks)
    writer.add_head_count(2)
    edit(writer)
    writer.add_tensor("token_embd.weight", np.ones((8, 32), floats))
    writer.add_tensor("blk.0.attn_q.weight", np.ones((32, 32), floats))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"arch": "clip"}, "architecture 'clip', which is not known"),
        ({"blocks": 2**31}, "holds 1 layers, llama.block_count is 2147483648"),
        ({"edit": lambda writer: writer.add_array("llama.expert_count", ["x"])}, "does not say llama.expert_count"),
        ({"floats": np.float64}, "type F64, which cannot be decoded"),
    ],
)
def test_files_that_lie_or_are_of_something_else_are_refused(options, words, tmp_path):
    assert source_headers(small_file(tmp_path / "good.gguf"), Ledger()).layers == 1
    file = small_file(tmp_path / "bad.gguf", **options)
    with pytest.raises(CheckpointError, match=words):
        gguf_plan(file, tmp_path / "out.gguf", "Q8_0")


def test_a_truncated_file_is_refused_wherever_it_ends(tmp_path):
    whole = small_file(tmp_path / "good.gguf").read_bytes()
    for length in range(0, len(whole), 7):
        (tmp_path / "cut.gguf").write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"cut\.gguf"):
            gguf_plan(tmp_path / "cut.gguf", tmp_path / "out.gguf", "Q8_0")
    assert not (tmp_path / "out.gguf").exists()


def test_values_that_are_not_finite_are_refused(tmp_path):
    from llmcompress.store.checkpoint import WeightsError

    file = small_file(tmp_path / "good.gguf")
    raw = bytearray(file.read_bytes())
    raw[-4:] = np.float32(np.nan).tobytes()
    file.write_bytes(bytes(raw))
    with pytest.raises(WeightsError, match=r"blk\.0\.attn_q\.weight holds values that are not finite"):
        write(file, tmp_path / "out.gguf", "Q8_0")


@pytest.mark.parametrize("kind", ["MXFP4", "NVFP4"])
def test_codes_of_4_bit_floats_are_kept(kind, shallow_model_dir, tmp_path):
    source = tmp_path / "source"
    compress(shallow_model_dir, source, steps_recipe([{"method": "rtn", "type": kind.lower()}], "compressed-tensors"))
    report = write(source, tmp_path / "model.gguf", kind)
    assert {(item["method"], item["grid"]) for item in report["linears"]} == {("recoded", kind.lower())}
    assert report["ledger"] == []
    ours = open_checkpoint(directory_headers(source, Ledger())).read("model.layers.1.mlp.up_proj.weight")
    theirs = torch.from_numpy(decoded(read_gguf(tmp_path / "model.gguf"), "blk.1.ffn_up.weight"))
    assert torch.allclose(ours, theirs, rtol=1e-6, atol=0)
    assert [check for check in verify_gguf(tmp_path / "model.gguf", source) if not check.ok] == []
