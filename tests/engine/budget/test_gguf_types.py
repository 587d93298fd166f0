"""GGUF files by a budget: kept to the byte, refused where it cannot be, and closer than a mixture of the same size."""

import json
import shutil

import gguf
import pytest

from llmcompress.engine.budget import gguf_types as budgets
from llmcompress.engine.budget.gguf_types import Budget, fitted_to_budget
from llmcompress.engine.budget.type_losses import candidates
from llmcompress.engine.execute import run
from llmcompress.engine.plan.make_plan import make_plan
from llmcompress.engine.plan.run_options import Options
from llmcompress.errors import PlanError
from llmcompress.recipe import load, parse
from llmcompress.store.sealed import content_of, sealed
from llmcompress.validate.gguf_verify import verify_gguf
from llmcompress.validate.session import Request, evaluate_paths
from madetokenizers import byte_level, save

TEXT = {"source": "default", "samples": 4, "length": 64}


def recipe(shard_size=None, kind="Q2_K", **types):
    data = {
        "calibration": TEXT,
        "steps": [{"method": "rtn", "gguf": {"type": kind, "search": "fast", **types}}],
        "output": {"format": "gguf"},
    }
    made = parse(data)
    return made.model_copy(update={"output": made.output.model_copy(update={"shard_size": shard_size})})


def fitted(model, out, kept=None, threads=1, size=None, bits=None, **wishes):
    options = Options(out=out, threads=threads)
    return fitted_to_budget(recipe(**wishes), model, options, Budget(size, bits), kept)


def write(made, model, out):
    run(make_plan(made, model, Options(out=out, threads=1)))
    return out


def types(file):
    return {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(file).tensors}


def kl(file, model):
    return evaluate_paths(Request(file, model, "default", 64, 4, 4, "cpu", "float32"), lambda done, of: None)["kl"]


@pytest.fixture(scope="module")
def losses(tiny_model_dir, tmp_path_factory):
    """Losses of the tiny model, measured once."""
    folder = tmp_path_factory.mktemp("losses")
    fitted(tiny_model_dir, folder / "model.gguf", folder / "losses.json", bits=8)
    return folder / "losses.json"


@pytest.fixture
def unmeasured(monkeypatch):
    """Whatever measures now fails."""
    monkeypatch.setattr(budgets, "measure", None)


@pytest.fixture(scope="module")
def narrow(random_model_dir, tmp_path_factory):
    """Experts, with rows too narrow for blocks of 256."""
    path = tmp_path_factory.mktemp("narrow") / "model"
    shutil.copytree(random_model_dir("mixtral", vocab_size=288), path)
    return save(byte_level(), path)


@pytest.mark.parametrize("kind", ["Q3_K_M", "Q4_K_M"])
def test_it_is_closer_than_the_mixture_of_the_same_size(kind, tiny_model_dir, losses, unmeasured, tmp_path):
    fixed = write(recipe(kind=kind), tiny_model_dir, tmp_path / "fixed.gguf")
    size = fixed.stat().st_size
    made, ledger = fitted(tiny_model_dir, tmp_path / "chosen.gguf", losses, size=size)
    chosen = write(made, tiny_model_dir, tmp_path / "chosen.gguf")
    assert 0.98 * size < chosen.stat().st_size <= size
    assert kl(chosen, tiny_model_dir) <= 0.9 * kl(fixed, tiny_model_dir)
    assert [check.name for check in verify_gguf(chosen, tiny_model_dir) if not check.ok] == []
    (note,) = ledger.entries
    assert "KL divergence of 0.0" in note.why


@pytest.mark.slow
def test_runs_that_know_their_inputs_choose_among_types_by_eights_too(shallow_model_dir, tmp_path, main, capsys):
    calibrated = ("--calibration", "default", "--samples", 8, "--length", 64, "-q")
    fixed, chosen, kept = (tmp_path / name for name in ("fixed.gguf", "chosen.gguf", "new.json"))
    assert main("gguf", shallow_model_dir, "--type", "IQ2_XXS", *calibrated, "-o", fixed) == 0
    size = fixed.stat().st_size
    asked = ("gguf", shallow_model_dir, "--size", size / 1e9, *calibrated, "-o", chosen, "--losses")
    assert main(*asked, kept) == 0
    assert 0.97 * size < chosen.stat().st_size <= size
    assert any(kind.startswith(("IQ1", "IQ2")) for kind in types(chosen).values())
    assert kl(chosen, shallow_model_dir) <= 0.9 * kl(fixed, shallow_model_dir)
    assert [check.name for check in verify_gguf(chosen, shallow_model_dir) if not check.ok] == []
    assert main("gguf", shallow_model_dir, "--bpw", 5, "-o", tmp_path / "plain.gguf", "--losses", kept) == 2
    assert "new.json holds no losses of this calibration" in capsys.readouterr().err
    longer = (*asked[:6], "--samples", 8, "--length", 128, "-q", "-o", tmp_path / "longer.gguf", "--losses", kept)
    assert main(*longer) == 2
    assert "new.json holds no losses of this calibration" in capsys.readouterr().err
    table = json.loads(kept.read_text())["losses"]["blk.1.ffn_up.weight"]
    assert list(table) == list(candidates(256, True))
    sizes = [gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]] for kind in table]
    assert [nbytes / count for count, nbytes in sizes] == sorted(nbytes / count for count, nbytes in sizes)
    by_size = [table[kind] for kind in ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "Q4_K")]
    assert by_size == sorted(by_size, reverse=True)


def test_the_expected_divergence_is_near_the_measured_one(tiny_model_dir, losses, tmp_path):
    made, ledger = fitted(tiny_model_dir, tmp_path / "model.gguf", losses, bits=5)
    expected = float(ledger.entries[0].why.split(" of ")[1].split()[0])
    found = kl(write(made, tiny_model_dir, tmp_path / "model.gguf"), tiny_model_dir)
    assert 0.5 < expected / found < 2


@pytest.mark.parametrize("bits", [2.7, 3.3, 4.0, 5.5, 8.6, 40])
def test_bits_per_weight_are_kept_as_the_gguf_package_counts_them(bits, tiny_model_dir, losses, unmeasured, tmp_path):
    made, _ = fitted(tiny_model_dir, tmp_path / "model.gguf", losses, bits=bits)
    file = write(made, tiny_model_dir, tmp_path / "model.gguf")
    tensors = gguf.GGUFReader(file).tensors
    found = 8 * sum(int(t.n_bytes) for t in tensors) / sum(int(t.n_elements) for t in tensors)
    assert 0.93 * min(bits, 16) < found <= bits


@pytest.mark.parametrize("most", [0.02, 0.08])
def test_the_smallest_file_of_a_divergence_is_as_small_as_one_by_size(
    most, tiny_model_dir, losses, unmeasured, tmp_path, main, capsys
):
    out = tmp_path / "model.gguf"
    asked = ("gguf", tiny_model_dir, "-o", out, "--losses", losses, "-q", "--kl", most)
    assert main(*asked) == 0
    report = json.loads((tmp_path / "model.gguf.report.json").read_text())
    expected = float(report["ledger"][0]["why"].split(" of ")[1].split()[0])
    assert 0.9 * most < expected <= most
    assert 0.5 < expected / kl(out, tiny_model_dir) < 2
    size = out.stat().st_size
    _, ledger = fitted(tiny_model_dir, tmp_path / "other.gguf", losses, size=int(0.98 * size))
    assert float(ledger.entries[0].why.split(" of ")[1].split()[0]) > expected
    assert main(*asked, "--overwrite", "--size", size / 1e9) == 0
    assert main(*asked, "--overwrite", "--size", 0.98 * size / 1e9) == 2
    assert f"--kl {most} is not possible within --size" in capsys.readouterr().err


def test_the_file_is_called_after_the_type_of_most_tensors(tiny_model_dir, losses, tmp_path):
    made, _ = fitted(tiny_model_dir, tmp_path / "model.gguf", losses, bits=6.6)
    assert made.steps[0].gguf.type in ("Q5_K", "Q6_K", "Q8_0")
    file = write(made, tiny_model_dir, tmp_path / "model.gguf")
    assert gguf.GGUFReader(file).get_field("general.file_type").contents() in (17, 18, 7)


def test_less_than_the_smallest_types_take_is_refused_before_measuring(
    tiny_model_dir, losses, unmeasured, tmp_path, main, capsys
):
    out = tmp_path / "model.gguf"
    for asked in (("--size", 0.0005), ("--bpw", 2)):
        assert main("gguf", tiny_model_dir, *asked, "-o", out) == 2
        shown = capsys.readouterr().err
        assert f"{asked[0]} {asked[1]} is not possible: the smallest types make 9" in shown
        bits = shown.split("--bpw ")[-1].split()[0]
        least = shown.split("--size ")[-1].split()[0]
        for possible in (("--size", least), ("--bpw", bits)):
            assert main("plan", "gguf", tiny_model_dir, *possible, "-o", out, "--losses", losses) == 0
    assert list(tmp_path.iterdir()) == []


def test_the_number_of_threads_changes_nothing(tiny_model_dir, losses, tmp_path):
    one, _ = fitted(tiny_model_dir, tmp_path / "model.gguf", losses, bits=4.3)
    two, _ = fitted(tiny_model_dir, tmp_path / "model.gguf", tmp_path / "two.json", threads=2, bits=4.3)
    assert (tmp_path / "two.json").read_bytes() == losses.read_bytes()
    assert one == two
    assert sorted(path.name for path in tmp_path.iterdir()) == ["two.json"]


def test_the_recipe_repeats_the_result_without_measuring(tiny_model_dir, losses, unmeasured, tmp_path, main):
    out = tmp_path / "out"
    assert main("gguf", tiny_model_dir, "--bpw", 4.5, "-o", out, "--losses", losses, "-q") == 0
    (first,) = out.glob("*.gguf")
    report = json.loads((out / "report.json").read_text())
    assert [entry["kind"] for entry in report["ledger"]] == ["budget"]
    again = write(load(out / "llmcompress.yaml"), tiny_model_dir, tmp_path / "again.gguf")
    assert again.read_bytes() == first.read_bytes()


def test_types_that_are_named_stay(tiny_model_dir, losses, tmp_path):
    named = {"tensors": {"attn_v": "Q8_0", "blk.2.ffn_*": "Q4_0"}, "embedding": "Q6_K"}
    made, _ = fitted(tiny_model_dir, tmp_path / "model.gguf", losses, bits=5, **named)
    found = types(write(made, tiny_model_dir, tmp_path / "model.gguf"))
    assert {found[f"blk.{layer}.attn_v.weight"] for layer in range(4)} == {"Q8_0"}
    assert (found["blk.2.ffn_up.weight"], found["token_embd.weight"]) == ("Q4_0", "Q6_K")
    with pytest.raises(PlanError, match="is not possible"):
        fitted(tiny_model_dir, tmp_path / "other.gguf", losses, bits=3, **named)


def test_a_divergence_that_no_types_have_is_refused(tiny_model_dir, losses, unmeasured, tmp_path):
    data = content_of(json.loads(losses.read_text()))
    data["losses"]["blk.1.attn_q.weight"] = dict.fromkeys(data["losses"]["blk.1.attn_q.weight"], 0.03)
    (tmp_path / "losses.json").write_bytes(sealed(data))
    options = Options(out=tmp_path / "model.gguf", threads=1)
    with pytest.raises(PlanError, match=r"--kl 0\.02 is not possible: of the largest types 0\.03 is expected"):
        fitted_to_budget(recipe(), tiny_model_dir, options, Budget(), tmp_path / "losses.json", kl=0.02)


def test_losses_are_kept_where_they_can_be(tiny_model_dir, unmeasured, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(PlanError, match=r"losses\.json cannot be created"):
        fitted(tiny_model_dir, tmp_path / "model.gguf", tmp_path / "file" / "losses.json", bits=5)


def test_experts_of_a_stack_share_a_type_and_split_files_keep_the_budget(narrow, tmp_path):
    kept = tmp_path / "new" / "losses.json"
    whole, _ = fitted(narrow, tmp_path / "model.gguf", kept, bits=6)
    found = types(write(whole, narrow, tmp_path / "model.gguf"))
    assert found["blk.0.ffn_gate_inp.weight"] == "F32"
    assert found["blk.1.ffn_down_exps.weight"] in candidates(96, False)
    assert [check.name for check in verify_gguf(tmp_path / "model.gguf", narrow) if not check.ok] == []
    size = (tmp_path / "model.gguf").stat().st_size
    split, _ = fitted(narrow, tmp_path / "split", kept, size=size, shard_size=45_000)
    run(make_plan(split, narrow, Options(out=tmp_path / "split")))
    files = list((tmp_path / "split").glob("*.gguf"))
    assert len(files) > 1
    assert 0.95 * size < sum(file.stat().st_size for file in files) <= size


@pytest.mark.parametrize("damage", ["other model", "a tensor", "a type", "a number", "json"])
def test_losses_that_are_not_of_this_model_are_refused(damage, tiny_model_dir, losses, tmp_path, main, capsys):
    data = json.loads(losses.read_text())
    table = data["losses"]
    if damage == "other model":
        data["model"] = "0" * 64
    elif damage == "a tensor":
        table.pop("blk.1.attn_q.weight")
    elif damage == "a type":
        table["blk.1.attn_q.weight"].pop("Q4_K")
    elif damage == "a number":
        table["blk.1.attn_q.weight"]["Q4_K"] = -1
    file = tmp_path / "losses.json"
    file.write_text("{" if damage == "json" else json.dumps(data))
    assert main("gguf", tiny_model_dir, "--bpw", 5, "-o", tmp_path / "m.gguf", "--losses", file) in (1, 2)
    assert "losses.json" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--type", "Q4_K_M", "--bpw", 4),
        ("--size", 1, "--bpw", 4),
        ("--bpw", "nan"),
        ("--bpw", -1),
        ("--size", -1),
        ("--bpw", 4, "--pure"),
        ("--type", "Q4_K_M", "--kl", 0.1),
        ("--kl", 0),
        ("--kl", 0.1, "--pure"),
        ("--type", "Q4_K_M", "--losses", "losses.json"),
    ],
)
def test_contradictions_are_refused(options, tiny_model_dir, unmeasured, tmp_path, main, capsys):
    assert main("gguf", tiny_model_dir, *options, "-o", tmp_path / "model.gguf") == 2
    assert capsys.readouterr().err.count("error: ") == 1
