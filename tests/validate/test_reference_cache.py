"""`--ref-cache`: the second evaluation beside a reference runs none of its layers, and finds the same to the bit."""

import json
import os
import pickle
import shutil
import signal
import sys
from dataclasses import astuple
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from forked import ended, forked
from llmcompress.api.evaluation import evaluate
from llmcompress.errors import LlmcompressError, PlanError, RecipeError, RunError
from llmcompress.model.streamed_model import StreamedModel
from llmcompress.store.folder import HeldFile
from llmcompress.store.unfinished import claimed
from llmcompress.validate import reference_cache
from llmcompress.validate.evaluate import measure_several
from llmcompress.validate.reference_cache import ReferenceCache
from streaming import ids, streamed

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from zoo import zoo

SMALL = {"windows": 3, "length": 16, "batch": 2}
EVAL = ["--windows", 3, "--length", 16, "--batch", 2]
# plain; capped logits; scaled ones; several streams, and inputs by layer; embeddings for every layer; values that are
# handed on from layer to layer
KINDS = ["gpt2", "gemma2", "cohere", "gemma3n_text", "zamba2", "glm_moe_dsa", "zaya"]


@pytest.fixture(scope="module")
def outs(shallow_model_dir, tmp_path_factory):
    """Two compressed models."""
    from llmcompress.engine.execute import run
    from llmcompress.engine.plan.make_plan import make_plan
    from llmcompress.engine.plan.run_options import Options
    from llmcompress.recipe import parse

    found = []
    for bits in (3, 8):
        found.append(tmp_path_factory.mktemp("compressed") / f"w{bits}")
        recipe = parse({"steps": [{"method": "rtn", "group_size": 64, "bits": bits}]})
        run(make_plan(recipe, shallow_model_dir, Options(out=found[-1])))
    return found


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def ran(monkeypatch):
    """The layers that are read, as (model, number), in order."""
    found, layer = [], StreamedModel.layer

    def counted(self, number, *more):
        found.append((id(self), number))
        return layer(self, number, *more)

    monkeypatch.setattr(StreamedModel, "layer", counted)
    return found


def layers_of(ran):
    """How many layers ran since the last call."""
    count = len(ran)
    ran.clear()
    return count


def document(model, ref, **options):
    return dict(evaluate(model, ref, **SMALL | options).document)


@pytest.mark.parametrize("kind", KINDS)
def test_the_head_alone_gives_the_same_to_the_bit(kind, cache, tmp_path):
    ((_, model),) = zoo(tmp_path / "zoo", [kind])
    tokens, kept = ids(5), ReferenceCache(cache, {})
    (alone,) = measure_several([streamed(model)], streamed(model), tokens, batch=2)
    (first,) = measure_several([streamed(model)], streamed(model), tokens, batch=2, kept=kept)
    assert kept.outcome == "miss"
    reference = streamed(model)
    reference.layer = None  # nobody may call it
    (second,) = measure_several([streamed(model)], reference, tokens, batch=2, kept=kept)
    assert kept.outcome == "hit"
    for one, two, three in zip(astuple(alone), astuple(first), astuple(second), strict=True):
        assert one.tobytes() == two.tobytes() == three.tobytes()
    assert (second.kl == 0).all()
    assert second.ref_nll.std() > 0.01


def test_the_second_model_costs_the_layers_of_one(outs, shallow_model_dir, cache, ran):
    documents, costs = [], []
    for out in outs:
        for folder in (None, cache):
            documents.append(document(out, shallow_model_dir, ref_cache=folder))
            costs.append(layers_of(ran))
    assert [found.pop("ref_cache", None) for found in documents] == [None, "miss", None, "hit"]
    assert documents[0] == documents[1] != documents[2]
    assert documents[2] == documents[3]
    assert costs == [4, 4, 4, 2]
    assert len(list(cache.iterdir())) == 1


def test_compare_and_backends_take_what_eval_has_kept(main, capsys, outs, shallow_model_dir, cache, ran):
    document(outs[0], shallow_model_dir, ref_cache=cache)
    layers_of(ran)
    compare = ["compare", *outs, "--ref", shallow_model_dir, *EVAL, "--json"]
    assert main(*compare) == 0
    found = json.loads(capsys.readouterr().out)
    assert layers_of(ran) == 6
    assert main(*compare, "--ref-cache", cache) == 0
    assert layers_of(ran) == 4
    assert json.loads(capsys.readouterr().out) == [{**one, "ref_cache": "hit"} for one in found]
    whole = [document(outs[0], shallow_model_dir, backend="torch", ref_cache=folder) for folder in (None, cache)]
    assert layers_of(ran) == 8 + 6  # two models that are loaded whole, and those that run beside
    assert whole[1]["ref_cache"] == "hit"
    assert whole[0]["figures"] == whole[1]["figures"]
    assert len(list(cache.iterdir())) == 1


def test_a_model_beside_itself_is_kept_too(shallow_model_dir, cache, ran):
    first = document(shallow_model_dir, None, mlp_sparsity=0.5, ref_cache=cache)
    second = document(shallow_model_dir, None, mlp_sparsity=0.9, ref_cache=cache)
    assert [first["ref_cache"], second["ref_cache"]] == ["miss", "hit"]
    assert first["figures"]["ref_perplexity"] == second["figures"]["ref_perplexity"]
    assert layers_of(ran) == 6


def test_what_is_printed_and_saved_says_whether_it_served(main, capsys, outs, shallow_model_dir, cache, tmp_path):
    command = ["eval", outs[0], "--ref", shallow_model_dir, *EVAL, "--ref-cache", cache]
    for number, outcome in enumerate(("miss", "hit")):
        file = tmp_path / f"{number}.json"
        assert main(*command, "--json", "-o", file) == 0
        assert json.loads(capsys.readouterr().out)["ref_cache"] == outcome
        assert json.loads(file.read_text())["ref_cache"] == outcome
    assert main(*command, "-q") == 0
    assert "reference from its cache" in " ".join(capsys.readouterr().out.split())


def test_a_sweep_runs_the_layers_of_its_original_once(main, capsys, shallow_model_dir, cache, ran, tmp_path):
    sweep = ["sweep", "rtn-w8", shallow_model_dir, "--bits", "3,4", "--json"]
    protocol = ["--evaluate", "default", "--eval-windows", 2, "--eval-length", 16]
    found = []
    for name, more, layers in (("a", [], 8), ("b", ["--ref-cache", cache], 6)):
        assert main(*sweep, "-o", tmp_path / name, *protocol, *more) == 0
        found.append([run["figures"] for run in json.loads(capsys.readouterr().out)["runs"]])
        assert layers_of(ran) == layers
    assert found[0] == found[1]
    assert main(*sweep, "-o", tmp_path / "c", "--ref-cache", cache) == 2
    assert "--evaluate" in capsys.readouterr().err


def changed_weight(model):
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][3, 5] *= 2
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})


def changed_config(model):
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))


def with_code(model):
    (model / "modeling_other.py").write_text("# it may compute something else\n")


@pytest.mark.parametrize("change", [changed_weight, changed_config, with_code])
def test_another_reference_finds_nothing(change, outs, shallow_model_dir, cache, tmp_path):
    other = shutil.copytree(shallow_model_dir, tmp_path / "other")
    document(outs[0], shallow_model_dir, ref_cache=cache)
    assert document(outs[0], other, ref_cache=cache)["ref_cache"] == "hit"  # a name is no part of a model
    change(other)
    alone = document(outs[0], other)
    beside = document(outs[0], other, ref_cache=cache)
    assert beside.pop("ref_cache") == "miss"
    assert beside == alone
    assert len(list(cache.iterdir())) == 2


@pytest.mark.parametrize(
    "other", [{"windows": 2}, {"length": 24}, {"batch": 3}, {"compute_dtype": "bfloat16"}, {"text": "other"}], ids=str
)
def test_another_protocol_finds_nothing(other, outs, shallow_model_dir, cache, tiny_eval_text):
    other = {"text": tiny_eval_text} if "text" in other else other
    document(outs[0], shallow_model_dir, ref_cache=cache)
    alone = document(outs[0], shallow_model_dir, **other)
    beside = document(outs[0], shallow_model_dir, **other, ref_cache=cache)
    assert beside.pop("ref_cache") == "miss"
    assert beside == alone
    assert document(outs[0], shallow_model_dir, **other, ref_cache=cache)["ref_cache"] == "hit"


def test_an_adapter_of_the_reference_belongs_to_it(main, outs, shallow_model_dir, cache, tmp_path):
    adapter = tmp_path / "adapter"
    repair = ["--rank", 2, "--samples", 4, "--length", 16, "-q"]
    assert main("lora", shallow_model_dir, outs[0], "-o", adapter, *repair) == 0
    document(outs[0], shallow_model_dir, ref_cache=cache)
    for outcome in ("miss", "hit"):
        found = document(outs[0], shallow_model_dir, ref_adapter=adapter, ref_cache=cache)
        assert found.pop("ref_cache") == outcome
        assert found == document(outs[0], shallow_model_dir, ref_adapter=adapter)


@pytest.mark.parametrize("what", ["threads", "capability", "torch", "own version"])
def test_another_machine_finds_nothing(what, outs, shallow_model_dir, cache, monkeypatch):
    document(outs[0], shallow_model_dir, ref_cache=cache)
    if what == "threads":
        monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    elif what == "capability":
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "another")
    elif what == "torch":
        monkeypatch.setattr(torch, "__version__", "99.0")
    else:
        monkeypatch.setattr(reference_cache, "__version__", "99.0")
    assert document(outs[0], shallow_model_dir, ref_cache=cache)["ref_cache"] == "miss"


def flipped(at):
    def damage(file):
        raw = bytearray(file.read_bytes())
        raw[at if at >= 0 else len(raw) + at] ^= 1
        file.write_bytes(raw)

    return damage


def cut(file):
    file.write_bytes(file.read_bytes()[:-7])


def emptied(file):
    file.write_bytes(b"")


def pickled(file):
    file.write_bytes(pickle.dumps({"0": [1.0]}))


def foreign(file):
    """What another library wrote there."""
    save_file({name: tensor + 1 for name, tensor in load_file(file).items()}, file)


@pytest.mark.parametrize(
    "damage", [flipped(0), flipped(12), flipped(200), flipped(-1), flipped(-4000), cut, emptied, pickled, foreign]
)
def test_what_is_damaged_is_made_again(damage, outs, shallow_model_dir, cache):
    wanted = document(outs[0], shallow_model_dir, ref_cache=cache)
    (file,) = cache.iterdir()
    before = file.read_bytes()
    damage(file)
    assert file.read_bytes() != before
    assert document(outs[0], shallow_model_dir, ref_cache=cache) == wanted
    assert file.read_bytes() == before
    assert document(outs[0], shallow_model_dir, ref_cache=cache)["ref_cache"] == "hit"


def test_a_file_under_the_name_of_another_is_not_taken_for_it(outs, shallow_model_dir, cache):
    wanted = document(outs[0], shallow_model_dir, ref_cache=cache)
    (file,) = cache.iterdir()
    document(outs[0], shallow_model_dir, text=str(shallow_model_dir / "LICENSE"), ref_cache=cache)
    (other,) = set(cache.iterdir()) - {file}
    shutil.copy(other, file)
    assert document(outs[0], shallow_model_dir, ref_cache=cache) == wanted


def test_what_a_killed_run_leaves_is_never_read(outs, shallow_model_dir, cache, monkeypatch):
    wanted = document(outs[0], shallow_model_dir)

    def work():
        monkeypatch.setattr(HeldFile, "rename", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        document(outs[0], shallow_model_dir, ref_cache=cache)

    assert ended(forked(work)) == -signal.SIGKILL
    (left,) = cache.iterdir()
    assert left.suffix == ".partial"
    for outcome in ("miss", "hit"):
        found = document(outs[0], shallow_model_dir, ref_cache=cache)
        assert found.pop("ref_cache") == outcome
        assert found == wanted
    assert [file.suffix for file in cache.iterdir()] == [".safetensors"]


def test_while_another_run_writes_the_same_nothing_waits_or_fails(outs, shallow_model_dir, cache):
    wanted = document(outs[0], shallow_model_dir, ref_cache=cache)
    (file,) = cache.iterdir()
    file.unlink()
    with claimed(file):
        assert document(outs[0], shallow_model_dir, ref_cache=cache) == wanted
        assert not file.exists()
    document(outs[0], shallow_model_dir, ref_cache=cache)
    assert document(outs[0], shallow_model_dir, ref_cache=cache)["ref_cache"] == "hit"


def test_many_write_and_read_at_once(cache):
    states = [torch.randn(2, 8, 16), torch.randn(1, 8, 16)]

    def work():
        for _ in range(30):
            kept = ReferenceCache(cache, {"a": 1})
            found = kept.read()
            if found is not None:
                assert all(map(torch.equal, found, states))
            kept.write(states)

    assert [ended(process) for process in [forked(work) for _ in range(3)]] == [0, 0, 0]
    assert [file.suffix for file in cache.iterdir()] == [".safetensors"]


def test_a_full_disk_is_said_and_leaves_nothing(outs, shallow_model_dir, cache, monkeypatch):
    def full(self, pieces):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(HeldFile, "write_whole", full)
    with pytest.raises(RunError, match="No space left"):
        document(outs[0], shallow_model_dir, ref_cache=cache)
    assert not cache.exists()


def test_what_cannot_be_kept_is_refused_before_anything_is_read(
    main, capsys, outs, shallow_model_dir, cache, ran, tmp_path
):
    with pytest.raises(RecipeError, match="--ref"):
        document(outs[0], None, ref_cache=cache)
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    for name, said in (("file", "no directory"), ("link", "a link"), ("open", "everybody"), ("file/deep", "not a dir")):
        with pytest.raises(PlanError, match=said):
            document(outs[0], shallow_model_dir, ref_cache=tmp_path / name)
    for option in (["--tasks", "default"], ["--long"]):
        assert main("eval", outs[0], "--ref", shallow_model_dir, *option, "--ref-cache", cache) == 2
        assert f"--ref-cache does not go with {option[0]}" in capsys.readouterr().err
    assert main("eval", "--draft", outs[0], "--ref", shallow_model_dir, "--ref-cache", cache, "--generate", "Once") == 2
    assert "--draft" in capsys.readouterr().err
    assert layers_of(ran) == 0
    assert not cache.exists()


def test_a_link_in_place_of_what_was_kept_is_not_followed(outs, shallow_model_dir, cache, tmp_path):
    document(outs[0], shallow_model_dir, ref_cache=cache)
    (file,) = cache.iterdir()
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(LlmcompressError, match="is a link"):
        document(outs[0], shallow_model_dir, ref_cache=cache)
