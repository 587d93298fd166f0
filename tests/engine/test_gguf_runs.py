"""From a model directory to a GGUF file: read back by the gguf package, and by a verifier that decodes with it."""

import json
import re
import resource
import shutil
import signal
from contextlib import contextmanager

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from ggufmodels import small_config
from llmcompress.engine.execute import run
from llmcompress.engine.plan.make_plan import make_plan
from llmcompress.engine.plan.run_options import Options
from llmcompress.engine.source.gguf_input import carried_keys, gguf_headers
from llmcompress.errors import PlanError, RecipeError, RunError, StoppedError
from llmcompress.grids.blocks import BLOCK_TYPES
from llmcompress.grids.encoders import encode
from llmcompress.grids.nvfp4 import fit
from llmcompress.packing.ggml import pack
from llmcompress.recipe import parse
from llmcompress.store.gguf_model import decoded, read_gguf, tensor_bytes
from llmcompress.validate.gguf_verify import verify_gguf
from llmcompress.validate.load import load_whole
from llmcompress.validate.session import Request, evaluate_paths
from llmcompress.workers import SERIAL
from madetokenizers import byte_level, save

KINDS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_K_M", "Q2_K", "IQ4_NL", "TQ2_0", "MXFP4", "NVFP4")
CALIBRATION = {"source": "default", "samples": 4, "length": 64}


def plan(model, out, kind="Q4_K_M", method="rtn", shard_size=None, overwrite=False, **types):
    recipe = parse(
        {
            "calibration": CALIBRATION,
            "steps": [{"method": method, "gguf": {"type": kind, **types}}],
            "output": {"format": "gguf"},
        }
    )
    output = recipe.output.model_copy(update={"shard_size": shard_size})  # smaller than users may ask for
    return make_plan(recipe.model_copy(update={"output": output}), model, Options(out=out, overwrite=overwrite))


def write(model, out, *arguments, **options):
    run(plan(model, out, *arguments, **options))
    return out


def failures(file, model):
    return {check.name: check.detail for check in verify_gguf(file, model) if not check.ok}


def types(file):
    return {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(file).tensors}


def inside(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture(scope="module")
def narrow(random_model_dir, tmp_path_factory):
    """Widths of 64 and 96: too narrow for blocks of 256."""
    path = tmp_path_factory.mktemp("narrow") / "model"
    shutil.copytree(random_model_dir("llama", vocab_size=288), path)
    return save(byte_level(), path)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", ["narrow", "wide"])
def test_every_type_is_of_the_planned_size_and_near_the_source(kind, width, narrow, tiny_model_dir, tmp_path):
    model = narrow if width == "narrow" else tiny_model_dir
    planned = plan(model, tmp_path / "model.gguf", kind)
    run(planned)
    file = tmp_path / "model.gguf"
    assert file.stat().st_size == planned.estimate.output_bytes
    assert failures(file, model) == {}
    assert inside(tmp_path) == ["model.gguf", "model.gguf.report.json"]
    found = types(file)
    assert found["blk.0.attn_norm.weight"] == "F32"
    expected = {"Q4_K_M": ("Q5_0", "Q4_K"), "Q2_K": ("Q4_0", "Q2_K"), "TQ2_0": ("Q4_0", "TQ2_0")}.get(
        kind, (kind, kind)
    )
    assert found["blk.1.ffn_up.weight"] == expected[width == "wide"]
    assert (
        gguf.GGUFReader(file).get_field("general.file_type").contents()
        == gguf.LlamaFileType[{"F32": "ALL_F32", "MXFP4": "MOSTLY_MXFP4_MOE"}.get(kind, f"MOSTLY_{kind}")]
    )


@pytest.mark.parametrize("kind", ["Q2_K", pytest.param("IQ3_S", marks=pytest.mark.slow), "TQ1_0", "MXFP4", "NVFP4"])
def test_calibration_makes_the_same_bytes_closer(kind, shallow_model_dir, tmp_path):
    kl, sizes = [], []
    for method in ("rtn", "gptq"):
        file = write(shallow_model_dir, tmp_path / f"{method}.gguf", kind, method)
        assert failures(file, shallow_model_dir) == {}
        request = Request(file, shallow_model_dir, "default", 64, 4, 4, "cpu", "float32")
        kl.append(evaluate_paths(request, lambda done, of: None)["kl"])
        sizes.append(file.stat().st_size)
    assert sizes[0] == sizes[1]
    assert kl[1] < 0.8 * kl[0]


@pytest.mark.slow
def test_fewer_bits_by_eights_than_by_one_are_no_further_from_the_original(shallow_model_dir, tmp_path):
    kl, sizes = [], []
    for kind in ("IQ2_M", "Q2_K", "IQ1_M", "TQ2_0"):
        file = write(shallow_model_dir, tmp_path / f"{kind}.gguf", kind, "gptq", pure=True)
        assert failures(file, shallow_model_dir) == {}
        request = Request(file, shallow_model_dir, "default", 64, 4, 4, "cpu", "float32")
        kl.append(evaluate_paths(request, lambda done, of: None)["kl"])
        sizes.append(file.stat().st_size)
    assert sizes[0] < sizes[1]
    assert kl[0] < kl[1]
    assert sizes[2] < sizes[3]
    assert kl[2] < kl[3]


@pytest.mark.parametrize("method", ["rtn", "gptq"])
@pytest.mark.parametrize("kind", ["TQ1_0", "TQ2_0"])
def test_ternary_weights_are_stored_exactly(kind, method, tiny_model_dir, tmp_path):
    model = tmp_path / "ternary"
    shutil.copytree(tiny_model_dir, model)
    stored = load_file(model / "model.safetensors")
    layers = [name for name in stored if name.endswith("_proj.weight")]
    for name in layers:
        values = stored[name].float()
        stored[name] = (values.sign() * (values.abs() > values.abs().median()) * 0.0371).to(torch.bfloat16)
    save_file(stored, model / "model.safetensors", metadata={"format": "pt"})
    planned = plan(model, tmp_path / "model.gguf", kind, method)
    assert not [note for note in planned.ledger if note.kind == "ternary"]
    run(planned)
    assert failures(tmp_path / "model.gguf", model) == {}
    report = json.loads((tmp_path / "model.gguf.report.json").read_text())
    errors = {record["name"]: record["relative_error"] for record in report["linears"]}
    assert errors == dict.fromkeys((name.removesuffix(".weight") for name in layers), 0)


def test_weights_that_are_not_ternary_are_named_with_their_error(tiny_model_dir, tmp_path):
    notes = plan(tiny_model_dir, tmp_path / "out.gguf", "TQ2_0").ledger
    (said,) = [note for note in notes if note.kind == "ternary"]
    name, percent = re.search(r"(blk\S+) is off by (\d+)%", said.why).groups()
    file = write(tiny_model_dir, tmp_path / "model.gguf", "TQ2_0")
    (tensor,) = [tensor for tensor in gguf.GGUFReader(file).tensors if tensor.name == name]
    (plain,) = [
        tensor
        for tensor in gguf.GGUFReader(write(tiny_model_dir, tmp_path / "plain.gguf", "F32")).tensors
        if tensor.name == name
    ]
    rounded = gguf.quants.dequantize(tensor.data, tensor.tensor_type)[:64]
    error = np.linalg.norm(rounded - plain.data[:64]) / np.linalg.norm(plain.data[:64])
    assert abs(100 * error - int(percent)) < 1


def test_what_types_by_eights_cannot_do_is_refused(tiny_model_dir, tmp_path):
    out = tmp_path / "out.gguf"
    with pytest.raises(PlanError, match="IQ2_XS needs the importance of inputs"):
        plan(tiny_model_dir, out, "IQ2_XS")
    with pytest.raises(RecipeError, match="NVFP4 as llama-quantize rounds it is not known"):
        plan(tiny_model_dir, out, "NVFP4", search="compat")
    steps = [{"method": "wanda", "sparsity": 0.5}, {"method": "gptq", "gguf": {"type": "IQ3_S"}}]
    recipe = parse({"calibration": CALIBRATION, "steps": steps, "output": {"format": "gguf"}})
    with pytest.raises(PlanError, match=r"IQ3_S has no zero, and wanda leaves zeros in model\.layers\.0"):
        make_plan(recipe, tiny_model_dir, Options(out=out))


@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_a_run_that_stopped_goes_on_to_the_same_bytes(method, tiny_model_dir, tmp_path):
    whole = write(tiny_model_dir, tmp_path / "whole.gguf", method=method)
    cut = tmp_path / "cut.gguf"
    with pytest.raises(StoppedError):
        run(plan(tiny_model_dir, cut, method=method), stop=lambda finished: finished >= 2)
    assert not cut.exists()
    write(tiny_model_dir, cut, method=method)
    assert cut.read_bytes() == whole.read_bytes()
    report = json.loads((tmp_path / "whole.gguf.report.json").read_text())
    assert report == json.loads((tmp_path / "cut.gguf.report.json").read_text())
    assert len(inside(tmp_path)) == 4


def test_what_is_in_the_way_is_replaced_only_if_it_is_a_gguf_file_and_if_asked(narrow, tmp_path):
    file = write(narrow, tmp_path / "model.gguf", "Q8_0")
    first = file.read_bytes()
    with pytest.raises(PlanError, match=r"model\.gguf already exists"):
        plan(narrow, file, "Q4_0")
    assert file.read_bytes() == first
    write(narrow, file, "Q4_0", overwrite=True)
    assert types(file)["blk.0.ffn_up.weight"] == "Q4_0"
    for name, make in {
        "notes.gguf": lambda path: path.write_text("notes"),
        "folder.gguf": lambda path: path.mkdir(),
        "link.gguf": lambda path: path.symlink_to(file),
    }.items():
        make(tmp_path / name)
        with pytest.raises(PlanError, match="is not overwritten"):
            plan(narrow, tmp_path / name, overwrite=True)
    assert (tmp_path / "notes.gguf").read_text() == "notes"


def test_split_files_hold_the_same_tensors(narrow, tmp_path):
    whole = read_gguf(write(narrow, tmp_path / "whole.gguf", "Q8_0"))
    planned = plan(narrow, tmp_path / "split", "Q8_0", shard_size=45_000)
    run(planned)
    shards = sorted((tmp_path / "split").glob("*.gguf"))
    assert [file.name for file in shards] == [f"model-Q8_0-{n:05d}-of-00003.gguf" for n in (1, 2, 3)]
    assert sum(file.stat().st_size for file in shards) == planned.estimate.output_bytes
    for number, file in enumerate(shards):
        reader = gguf.GGUFReader(file)
        said = [reader.get_field(f"split.{key}").contents() for key in ("no", "count", "tensors.count")]
        assert said == [number, 3, len(whole.tensors)]
        assert sum(tensor.n_bytes for tensor in reader.tensors) <= 45_000
        assert (reader.get_field("tokenizer.ggml.tokens") is None) == (number > 0)
    joined = read_gguf(shards[0])
    assert joined.nbytes == sum(int(tensor.n_bytes) for file in shards for tensor in gguf.GGUFReader(file).tensors)
    assert list(joined.tensors) == list(whole.tensors)
    assert all(np.array_equal(tensor_bytes(joined, name), tensor_bytes(whole, name)) for name in whole.tensors)
    assert failures(shards[0], narrow) == {}
    with pytest.raises(PlanError, match=r"3 files are needed, .*other\.gguf is one"):
        plan(narrow, tmp_path / "other.gguf", "Q8_0", shard_size=45_000)


def test_a_directory_gets_the_same_file_with_its_papers(narrow, tmp_path):
    file = write(narrow, tmp_path / "single.gguf", "Q4_0")
    folder = write(narrow, tmp_path / "folder", "Q4_0")
    assert (folder / "model-Q4_0.gguf").read_bytes() == file.read_bytes()
    assert {"README.md", "llmcompress.yaml", "report.json"} < set(inside(folder))
    reports = [json.loads(path.read_text()) for path in (folder / "report.json", tmp_path / "single.gguf.report.json")]
    names = [sorted(report.pop("files")) for report in reports]
    assert names == [["README.md", "llmcompress.yaml", "model-Q4_0.gguf"], ["model.gguf"]]
    assert [len(report.pop("sha256")) for report in reports] == [64, 64]
    assert reports[0] == reports[1]


def test_types_may_be_chosen_by_name_of_tensor(narrow, tmp_path):
    asked = {"tensors": {"ffn_down": "Q8_0", "blk.1.attn_*": "Q5_1"}, "embedding": "Q4_1", "output": "F16"}
    file = write(narrow, tmp_path / "model.gguf", "Q4_0", **asked)
    found = types(file)
    assert found["blk.0.ffn_down.weight"] == found["blk.1.ffn_down.weight"] == "Q8_0"
    assert (found["blk.0.attn_q.weight"], found["blk.1.attn_q.weight"]) == ("Q4_0", "Q5_1")
    assert (found["token_embd.weight"], found["output.weight"]) == ("Q4_1", "F16")
    assert failures(file, narrow) == {}


def test_wrong_wishes_are_refused_before_anything_is_written(narrow, tmp_path, main, capsys):
    with pytest.raises(RecipeError, match=r"unknown .*'Q4_K_X'") as unknown:
        plan(narrow, tmp_path / "model.gguf", "Q4_K_X")
    assert "did you mean" in unknown.value.hint
    with pytest.raises(PlanError, match=r"pattern 'ffn_dwn' fits no matrix"):
        plan(narrow, tmp_path / "model.gguf", tensors={"ffn_dwn": "Q8_0"})
    assert main("gguf", narrow, "--type", "Q9", "-o", tmp_path / "model.gguf") == 2
    assert main("gguf", narrow, "--type", "Q8_0", "--tensor-type", "ffn_down", "-o", tmp_path / "model.gguf") == 2
    assert main("gguf", narrow, "--type", "Q8_0", "-o", tmp_path / "model.gguf", "--dry-run") == 0
    assert capsys.readouterr().err.count("error: ") == 2
    assert inside(tmp_path) == []


@contextmanager
def files_of_at_most(nbytes):
    """The system refuses to make files larger, as if the disk were full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_leaves_no_file(narrow, tmp_path):
    planned = plan(narrow, tmp_path / "model.gguf", "F32")
    with files_of_at_most(200_000), pytest.raises(RunError, match=r"model\.gguf cannot be written"):
        run(planned)
    assert inside(tmp_path) == ["model.gguf.work"]
    whole = write(narrow, tmp_path / "other" / "model.gguf", "F32").read_bytes()
    assert write(narrow, tmp_path / "model.gguf", "F32").read_bytes() == whole


@pytest.mark.parametrize("kind", sorted(BLOCK_TYPES))
def test_what_solvers_see_is_what_the_gguf_package_decodes(kind, tiny_model_dir):
    weight = load_file(tiny_model_dir / "model.safetensors")["model.layers.1.mlp.down_proj.weight"][:64].float()
    with SERIAL.with_threads(1) as workers:
        coded = encode(weight, BLOCK_TYPES[kind], "compat", workers)
    theirs = gguf.quants.dequantize(pack(coded).numpy(), gguf.GGMLQuantizationType[kind])
    assert torch.equal(coded.decode(), torch.from_numpy(theirs))


def factor(file, name):
    return float(tensor_bytes(read_gguf(file), f"{name}.scale").view(np.float32)[0])


def test_factors_stand_beside_nvfp4_and_are_kept_where_it_is(tiny_model_dir, tmp_path):
    """The values are those of compressed-tensors with the same codes; copied tensors keep their factors."""
    file = write(tiny_model_dir, tmp_path / "model.gguf", "NVFP4")
    name = "blk.0.ffn_up"
    stored = read_gguf(file)
    plain = gguf.quants.dequantize(
        tensor_bytes(stored, f"{name}.weight").reshape(stored.tensors[f"{name}.weight"].shape[0], -1),
        gguf.GGMLQuantizationType.NVFP4,
    )
    weight = load_file(tiny_model_dir / "model.safetensors")["model.layers.0.mlp.up_proj.weight"].to(torch.float32)
    grid = fit(weight)
    assert factor(file, name) == pytest.approx(float(1 / grid.divisor), rel=1e-6)
    assert np.allclose(plain * factor(file, name), grid.decode(grid.encode(weight)).numpy(), rtol=1e-6, atol=0)
    assert np.array_equal(decoded(stored, f"{name}.weight"), plain * np.float32(factor(file, name)))

    again = write(file, tmp_path / "again.gguf", "NVFP4")
    assert read_gguf(again).tensors.keys() == stored.tensors.keys()
    for tensor in stored.tensors:
        assert np.array_equal(tensor_bytes(read_gguf(again), tensor), tensor_bytes(stored, tensor))
    wider = write(file, tmp_path / "wider.gguf", "Q8_0", allow_requantize=True)
    assert failures(again, file) == failures(wider, file) == {}
    assert not [tensor for tensor in read_gguf(wider).tensors if tensor.endswith(".scale")]
    values = decoded(stored, f"{name}.weight")
    error = np.linalg.norm(decoded(read_gguf(wider), f"{name}.weight") - values) / np.linalg.norm(values)
    assert error < 0.01


def test_factors_are_made_for_what_a_gguf_file_holds_in_16_bits(tiny_model_dir, tmp_path):
    whole = write(tiny_model_dir, tmp_path / "whole.gguf", "F32")
    file = write(whole, tmp_path / "model.gguf", "NVFP4")
    assert failures(file, whole) == {}
    direct, found, source = (
        read_gguf(write(tiny_model_dir, tmp_path / "direct.gguf", "NVFP4")),
        *map(read_gguf, (file, whole)),
    )
    assert found.tensors.keys() == direct.tensors.keys()
    for name in source.tensors:  # factors of a GGUF file's queries, keys and values need not be one
        values = decoded(source, name)
        errors = [np.linalg.norm(decoded(header, name) - values) for header in (found, direct)]
        assert errors[0] == pytest.approx(errors[1], rel=0.02)


def test_a_first_file_may_hold_keys_alone(narrow, tmp_path):
    """As llama-gguf-split writes it (`--no-tensor-first-split`)."""
    whole = write(narrow, tmp_path / "whole.gguf", "F16")
    stored = gguf.GGUFReader(whole)
    writer = gguf.GGUFWriter(None, "llama", split_max_tensors=len(stored.tensors), small_first_shard=True)
    carried_keys(gguf_headers(whole), 1)(writer)
    for tensor in stored.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    (tmp_path / "split").mkdir()
    writer.write_header_to_file(tmp_path / "split" / "model.gguf")
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    first, *others = sorted((tmp_path / "split").glob("*.gguf"))
    assert others
    assert not gguf.GGUFReader(first).tensors
    one, other = (write(source, tmp_path / f"{source.stem}-8.gguf", "Q8_0") for source in (whole, first))
    for name in read_gguf(one).tensors:
        assert np.array_equal(tensor_bytes(read_gguf(one), name), tensor_bytes(read_gguf(other), name))


def test_experts_have_a_factor_each(random_model_dir, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(random_model_dir("mixtral", vocab_size=288), model)
    save(byte_level(), model)
    file = write(model, tmp_path / "model.gguf", "NVFP4")
    tensors = read_gguf(file).tensors
    assert tensors["blk.0.ffn_up_exps.scale"].shape == (tensors["blk.0.ffn_up_exps.weight"].shape[0],)
    assert failures(file, model) == {}


@pytest.mark.parametrize(
    ("family", "options", "words"),
    [
        ("qwen2", {}, "leaves out the factors of NVFP4 in models of architecture qwen2"),
        ("llama", {"pure": True}, "cannot be NVFP4"),
        ("llama", {"embedding": "NVFP4"}, "token_embd.weight cannot be NVFP4"),
        ("llama", {"search": "compat"}, "NVFP4 as llama-quantize rounds it is not known"),
    ],
)
def test_what_llama_cpp_would_misread_is_refused(family, options, words, random_model_dir, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(random_model_dir(family, vocab_size=288, tie_word_embeddings=False), model)
    save(byte_level(), model)
    with pytest.raises((PlanError, RecipeError), match=words):
        plan(model, tmp_path / "out.gguf", "NVFP4", **options)


def test_the_package_rounds_to_mxfp4_where_it_is_asked_to(tiny_model_dir, tmp_path):
    file = write(tiny_model_dir, tmp_path / "model.gguf", "MXFP4", search="compat")
    weight = load_file(tiny_model_dir / "model.safetensors")["model.layers.0.mlp.up_proj.weight"].to(torch.float32)
    theirs = gguf.quants.quantize(weight.numpy(), gguf.GGMLQuantizationType.MXFP4)
    assert tensor_bytes(read_gguf(file), "blk.0.ffn_up.weight").tobytes() == theirs.tobytes()


def test_numbers_of_layers_become_keys_and_are_read_back_from_them(random_model_dir, tmp_path):
    path, other = tmp_path / "model", tmp_path / "other"
    shutil.copytree(random_model_dir("apertus", model_type="apertus", **small_config("apertus", 288)), path)
    shutil.copytree(save(byte_level(), path), other)
    tensors = load_file(other / "model.safetensors")
    numbers = [tensors[f"model.layers.{layer}.mlp.act_fn.alpha_p"] for layer in range(2)]
    numbers[1].add_(0.5)
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    file = write(other, tmp_path / "model.gguf", "Q8_0", method="gptq")
    assert gguf.GGUFReader(file).fields["xielu.alpha_p"].contents() == [float(value) for value in numbers]
    assert not failures(file, other)
    assert any("xielu.alpha_p" in str(detail) for detail in failures(file, path).values())
    whole = load_whole(file, dtype=torch.float32, source=path)  # from the file, not from the directory beside it
    assert whole.model.layers[1].mlp.act_fn.alpha_p.item() == float(numbers[1])


@pytest.mark.parametrize("norms", [None, 1, 2])
def test_falcon_has_one_norm_or_two(norms, random_model_dir, tmp_path):
    config = small_config("falcon", 288) | {"new_decoder_architecture": True, "num_ln_in_parallel_attn": norms}
    model = tmp_path / "model"
    shutil.copytree(random_model_dir("falcon", **config | {"num_kv_heads": 2}), model)
    save(byte_level(), model)
    file = write(model, tmp_path / "model.gguf", "Q8_0")
    assert failures(file, model) == {}
    assert ("blk.0.attn_norm_2.weight" in read_gguf(file).tensors) == (norms != 1)
