"""`gguf`, `imatrix` and `imatrix-merge` as a user meets them: what they print, write and refuse."""

import json
import shutil
import struct
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
import yaml
from safetensors.torch import load_file, save_file

from llmcompress.formats.gguf.imatrix import Imatrix, ImatrixEntry
from llmcompress.formats.gguf.imatrix_file import write_imatrix

SHORT = ["--calibration", "default", "--samples", "2", "--length", "32"]
BYTES = {"add_prefix_space": False, "trim_offsets": True, "use_regex": False}
Q4 = ["gguf", "MODEL", "--type", "Q4_K_M"]


@pytest.fixture
def model(tiny_model_dir, tmp_path):
    """A copy of the tiny model."""
    return Path(shutil.copytree(tiny_model_dir, tmp_path / "model"))


def one_line(capsys, words):
    shown = capsys.readouterr().err
    lines = [line for line in shown.splitlines() if not line.startswith("  hint: ")]
    assert [line[:7] for line in lines] == ["error: "], shown
    for word in words:
        assert word in shown, shown


def test_the_plan_names_every_tensor_and_the_size_to_the_byte(model, main, capsys):
    assert main("plan", "gguf", model, "--type", "Q4_K_M", "--json") == 0
    planned = json.loads(capsys.readouterr().out)
    assert main("plan", "gguf", model, "--type", "Q4_K_M") == 0
    printed = capsys.readouterr().out
    assert main("gguf", model, "--type", "Q4_K_M", "-q") == 0
    out = model.with_name("model-Q4_K_M.gguf")
    assert out.stat().st_size == planned["output_bytes"]
    tensors = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(out).tensors}
    assert {tensor["name"]: tensor["dtype"] for tensor in planned["tensors"]} == tensors
    rows = [line.split() for line in printed.splitlines()]
    for name, kind in tensors.items():
        assert any(row[:1] == [name] and kind in row for row in rows), name
    told = next(line for line in printed.splitlines() if "weight files" in line)
    size, bits = told.split(maxsplit=2)[2].strip().removesuffix(" bits per quantised weight").split(" bytes exactly, ")
    assert size == f"{planned['output_bytes']:,}"
    assert float(bits) == pytest.approx(planned["bits_per_quantised_weight"], abs=6e-4)


def test_a_file_without_quantised_weights_has_no_bits_per_quantised_weight(model, main, capsys):
    assert main("gguf", model, "--type", "F16") == 0
    shown = capsys.readouterr()
    assert "of the source; " in shown.err.splitlines()[-2]
    assert "bits per" not in shown.err + shown.out


def test_json_tells_what_was_written(model, main, capsys):
    out = model.parent / "out.gguf"
    assert main(*["gguf", model, "--type", "Q2_K", "-o", out, *SHORT, "--json", "--modelfile"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["output"] == str(out)
    assert result["recipe"]["steps"][0]["method"] == "gptq"
    assert result["output_bytes"] == out.stat().st_size
    assert (model.parent / "out.gguf.Modelfile").read_text().startswith("FROM ./out.gguf\n")
    assert json.loads((model.parent / "out.gguf.report.json").read_text())["tensors"] == result["tensors"]


def test_a_printed_recipe_gives_the_same_file(model, main, capsys):
    options = ["--type", "Q3_K_M", "--tensor-type", "ffn_down=Q6_K", "--output-type", "Q8_0", *SHORT]
    assert main("gguf", model, *options, "--print-recipe") == 0
    recipe = model.parent / "recipe.yaml"
    recipe.write_text(capsys.readouterr().out)
    assert yaml.safe_load(recipe.read_text())["steps"][0]["gguf"]["tensors"] == {"ffn_down": "Q6_K"}
    assert main("gguf", model, *options, "-o", model.parent / "one.gguf", "-q") == 0
    assert main("run", recipe, model, "-o", model.parent / "two.gguf", "-q") == 0
    assert (model.parent / "one.gguf").read_bytes() == (model.parent / "two.gguf").read_bytes()


def test_an_importance_matrix_is_measured_and_used(model, main, capsys):
    made = [model.parent / name for name in ("one.gguf", "two.dat")]
    assert main("imatrix", model, "-o", made[0], *SHORT, "--json") == 0
    assert json.loads(capsys.readouterr().out) == {
        "output": str(made[0]),
        "entries": 28,
        "chunks": 2,
        "chunk_size": 32,
        "ledger": [],
    }
    assert main("imatrix", model, "-o", made[1], *SHORT, "--legacy", "-q") == 0
    assert made[1].read_bytes()[:4] == struct.pack("<i", 28)
    for imatrix in made:
        out = imatrix.with_suffix(".out.gguf")
        assert main("gguf", model, "--type", "IQ4_XS", "--imatrix", imatrix, "-o", out, "-q") == 0
        said = gguf.GGUFReader(out).get_field("quantize.imatrix.file").contents()
        assert said == imatrix.name
    capsys.readouterr()
    assert main("imatrix", model, "-o", made[0], *SHORT) == 2
    one_line(capsys, ["one.gguf exists", "--overwrite"])


def foreign(model):
    entry = ImatrixEntry(np.ones((1, 64), np.float32), np.ones(1, np.float32))
    write_imatrix(model.parent / "im.gguf", Imatrix({"blk.0.ffn_up.weight": entry}, ("text",), 1, 512))


def cut(model):
    foreign(model)
    file = model.parent / "im.gguf"
    file.write_bytes(file.read_bytes()[:-40])


def tokenizer(change):
    def rewrite(model):
        state = json.loads((model / "tokenizer.json").read_text())
        change(state)
        (model / "tokenizer.json").write_text(json.dumps(state))

    return rewrite


CUTS = {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, {"type": "ByteLevel", **BYTES}]}


def no_tokenizer(model):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model / name).unlink()


def nothing(_):
    pass


REFUSED = {
    "a type nobody knows": (nothing, ["gguf", "MODEL", "--type", "Q4_K_L"], ["'Q4_K_L'", "did you mean 'Q4_K_S'"]),
    "a type that is not written": (nothing, ["gguf", "MODEL", "--type", "Q2_0"], ["unknown GGUF file type 'Q2_0'"]),
    "a type of points that needs importance": (
        nothing,
        ["gguf", "MODEL", "--type", "IQ2_XXS"],
        ["IQ2_XXS needs the importance of inputs"],
    ),
    "a tensor type nobody knows": (nothing, [*Q4, "--tensor-type", "ffn_down=Q6"], ["'Q6'", "did you mean 'Q6_K'"]),
    "a pattern that fits nothing": (nothing, [*Q4, "--tensor-type", "nope=Q6_K"], ["'nope' fits no matrix"]),
    "a pattern that is none": (nothing, [*Q4, "--tensor-type", "ffn_down"], ["ffn_down"]),
    "both ways to measure": (nothing, [*Q4, *SHORT, "--imatrix", "IMATRIX"], ["--imatrix and --calibration"]),
    "an imatrix that is not there": (nothing, [*Q4, "--imatrix", "IMATRIX"], ["im.gguf does not exist"]),
    "an imatrix of another model": (foreign, [*Q4, "--imatrix", "IMATRIX"], ["im.gguf", "of another model"]),
    "an imatrix cut short": (cut, [*Q4, "--imatrix", "IMATRIX"], ["im.gguf", "the file end before tensor"]),
    "a type that needs importance": (nothing, ["gguf", "MODEL", "--type", "Q2_K_S"], ["Q2_K_S needs the importance"]),
    "no tokenizer": (no_tokenizer, Q4, ["model", "tokenizer"]),
    "a tokenizer that changes text": (
        tokenizer(lambda state: state.update(normalizer={"type": "Lowercase"})),
        Q4,
        ["tokenizer.json", "changes text"],
    ),
    "a tokenizer that cuts text its own way": (
        tokenizer(lambda state: state["pre_tokenizer"].update(CUTS)),
        Q4,
        ["tokenizer.json", "--pre NAME"],
    ),
    "a budget for a file": (nothing, ["gguf", "FILE", "--bpw", "4.5"], ["is a GGUF file", "asks for the directory"]),
    "two sizes": (nothing, [*Q4, "--bpw", "4.5"], ["--type and --bpw", "give one of"]),
    "no size": (nothing, ["gguf", "MODEL"], ["nothing says how large"]),
    "files too small": (nothing, [*Q4, "--split-max-size", "0.0001"], ["shard_size"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_headers_tell_is_refused_at_once(name, main, model, tmp_path, capsys):
    spoil, command, words = REFUSED[name]
    spoil(model)
    before = sorted(tmp_path.rglob("*"))
    places = {"MODEL": model, "IMATRIX": tmp_path / "im.gguf", "FILE": tmp_path / "model.gguf"}
    begin = time.process_time()
    code = main(*(places.get(item, item) for item in command), "-o", tmp_path / "out.gguf")
    assert time.process_time() - begin < 2
    assert code == 2
    one_line(capsys, words)
    assert sorted(tmp_path.rglob("*")) == before


def test_several_types_are_several_files_and_none_if_one_is_refused(model, main, capsys):
    out = model.parent / "out.gguf"
    assert main("gguf", model, "--type", "Q4_K_M", "--type", "Q2_K_S", "-o", out) == 2
    one_line(capsys, ["Q2_K_S needs the importance"])
    assert list(model.parent.glob("out*")) == []
    assert main("gguf", model, "--type", "Q4_K_M", "--type", "Q2_K", "-o", out, "--json") == 0
    results = json.loads(capsys.readouterr().out)
    assert [result["output"] for result in results] == [
        str(out.with_name(f"out-{kind}.gguf")) for kind in ("Q4_K_M", "Q2_K")
    ]
    for result, kind in zip(results, ("Q4_K_M", "Q2_K"), strict=True):
        assert (
            gguf.GGUFReader(result["output"]).get_field("general.file_type").contents()
            == gguf.LlamaFileType[f"MOSTLY_{kind}"]
        )
        alone = model.parent / "alone.gguf"
        assert main("gguf", model, "--type", kind, "-o", alone, "--overwrite", "-q") == 0
        assert alone.read_bytes() == Path(result["output"]).read_bytes()


def test_the_file_says_what_it_was_made_from_and_verify_knows_it(model, main, capsys):
    out = model.parent / "out.gguf"
    command = ["gguf", model, "--type", "Q8_0", "-o", out, "-q"]
    assert main(*command, "--base-model", "me/Tuned-1B", "--license", "mit") == 0
    found = gguf.GGUFReader(out)
    assert found.get_field("general.license").contents() == "mit"
    assert found.get_field("general.base_model.0.repo_url").contents() == "https://huggingface.co/me/Tuned-1B"
    assert main("verify", out, "--source", model) == 0
    capsys.readouterr()
    assert main("gguf", out, "--type", "Q8_0", "-o", model.parent / "b.gguf", "--license", "mit") == 2
    one_line(capsys, ["leave --license out"])


@pytest.mark.parametrize("factor", [1e-6, 1e-30])
def test_an_embedding_that_a_type_takes_for_zeros_is_not_published(factor, model, main, capsys):
    tensors = load_file(model / "model.safetensors")
    name = "model.embed_tokens.weight"
    tensors[name] = (tensors[name].float() * factor).to(tensors[name].dtype)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    assert main("gguf", model, "--type", "Q6_K", "-o", model.parent / "out.gguf", "-q") == 1
    one_line(capsys, ["Q6_K does not hold the values of token_embd.weight"])
    assert not (model.parent / "out.gguf").exists()


def test_guided_weighs_the_tokens_of_a_text_and_needs_one(main, tiny_model_dir, tmp_path, capsys):
    assert main("gguf", tiny_model_dir, "--type", "Q4_K_M", "--guided", "-o", tmp_path / "out.gguf") == 2
    assert "--guided follows gradients of a calibration text, and there is none" in capsys.readouterr().err
    command = ["gguf", tiny_model_dir, "--type", "Q2_K", "--calibration", "default", *SHORT, "--guided"]
    assert main(*command, "-o", tmp_path / "out.gguf", "--print-recipe") == 0
    assert "guided: true" in capsys.readouterr().out


def test_recovery_trains_on_a_text_and_needs_one(main, shallow_model_dir, tmp_path, capsys):
    command = ["gguf", shallow_model_dir, "--type", "Q2_K", "--recover", "block", "-o", tmp_path / "out.gguf", "-q"]
    assert main(*command) == 2
    assert "--recover trains on a calibration text, and there is none" in capsys.readouterr().err
    assert main(*command, "--calibration", "default", "--samples", "32", "--length", "64") == 0
    report = json.loads((tmp_path / "out.gguf.report.json").read_text())
    assert [layer["layer"] for layer in report["recovered_layers"]] == [0, 1]
    assert any(layer["error"] < layer["error_before"] for layer in report["recovered_layers"])
    assert main("verify", tmp_path / "out.gguf", "--source", shallow_model_dir) == 0


def test_files_made_by_another_importance_matrix_are_not_finished(model, main, tmp_path):
    kinds = ("--type", "Q4_1", "--type", "Q4_0", "--imatrix", tmp_path / "im.gguf")
    for samples in (2, 4):
        measured = ("imatrix", model, "-o", tmp_path / "im.gguf", "--samples", samples, "--length", 32, "--overwrite")
        assert main(*measured) == 0
        assert main("gguf", model, *kinds, "-o", tmp_path / f"fresh{samples}.gguf") == 0
    assert main("gguf", model, *kinds, "-o", tmp_path / "fresh2.gguf") == 2  # another matrix, and no --overwrite
    assert main("gguf", model, *kinds, "-o", tmp_path / "fresh4.gguf") == 0


def test_what_is_made_of_a_file_in_an_output_directory_lies_beside_it(model, main, tmp_path):
    out = tmp_path / "out"
    assert main("gguf", model, "--type", "Q8_0", "-o", out, "-q") == 0
    (file,) = out.glob("*.gguf")
    assert main("gguf", file, "--type", "Q4_0", "--allow-requantize", "-q") == 0
    assert [made.stem.startswith(file.stem) for made in tmp_path.glob("*.gguf")] == [True]
    assert main("verify", out) == 0
