"""Importance matrices measured layer by layer, against hooks on the whole model; and rounding by them."""

import json
import re
import shutil

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from ggufmodels import small_config
from llmcompress.engine.execute import run
from llmcompress.engine.plan.make_plan import make_plan
from llmcompress.engine.plan.run_options import Options
from llmcompress.engine.run.measure_imatrix import measure_imatrix
from llmcompress.errors import CalibrationError, PlanError
from llmcompress.formats.gguf.imatrix import Imatrix, ImatrixEntry
from llmcompress.formats.gguf.imatrix_file import read_imatrix, write_imatrix
from llmcompress.ledger import Ledger
from llmcompress.recipe import Calibration, build, parse
from llmcompress.store.folder import Folder
from llmcompress.validate.session import Request, evaluate_paths

SAMPLES, LENGTH = 6, 48
LINEARS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@pytest.fixture
def ids(tmp_path):
    tokens = torch.randint(2, 90, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(1))
    file = tmp_path / "ids.safetensors"
    save_file({"input_ids": tokens}, file)
    return file, tokens


def text(file, **given):
    return build(Calibration, {"source": str(file), "samples": SAMPLES, "length": LENGTH, **given}, "here")


def measured(model, file, tmp_path, ledger=None, threads=1, **given):
    options = Options(compute_dtype="float32", threads=threads)
    (tmp_path / "scratch").mkdir(exist_ok=True)
    scratch = Folder(tmp_path / "scratch")
    return measure_imatrix(model, text(file, **given), scratch, options, Ledger() if ledger is None else ledger)


def energies(model, tokens, modules):
    """Sums of squares of the inputs of modules, float64, by transformers running the whole model."""
    sums = dict.fromkeys(modules, 0.0)

    def hook(name):
        def see(_, args):
            sums[name] = sums[name] + args[0].double().square().reshape(-1, args[0].shape[-1]).sum(0)

        return see

    whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for name in modules:
        whole.get_submodule(name).register_forward_pre_hook(hook(name))
    with torch.no_grad():
        whole(tokens, use_cache=False)
    return {name: np.asarray(value) for name, value in sums.items()}


def test_sums_are_those_of_the_whole_model(random_model_dir, ids, tmp_path):
    file, tokens = ids
    model = random_model_dir("llama")
    found = measured(model, file, tmp_path)
    names = {f"model.layers.{n}.{ours}": f"blk.{n}.{theirs}.weight" for n in (0, 1) for ours, theirs in LINEARS.items()}
    assert sorted(found.entries) == sorted(names.values())
    assert (found.chunk_count, found.chunk_size, found.datasets) == (SAMPLES, LENGTH, ("ids.safetensors",))
    for module, sums in energies(model, tokens, names).items():
        entry = found.entries[names[module]]
        assert entry.counts.tolist() == [SAMPLES * LENGTH]
        np.testing.assert_allclose(entry.sum2[0], sums, rtol=1e-4)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_every_token_counts_for_the_experts_it_was_sent_to(family, random_model_dir, ids, tmp_path):
    file, tokens = ids
    stacked = small_config("gpt_oss", 96) | {"vocab_size": 96}  # whose experts are one tensor on disk
    special = {"qwen3_moe": {"norm_topk_prob": True}, "gpt_oss": stacked}
    model = random_model_dir(family, **special.get(family, {}))
    ledger = Ledger()
    found = measured(model, file, tmp_path, ledger)
    config = json.loads((model / "config.json").read_text())
    entry = found.entries["blk.1.ffn_down_exps.weight"]
    experts = config.get("num_local_experts") or config["num_experts"]
    assert entry.sum2.shape == (experts, config.get("moe_intermediate_size") or config["intermediate_size"])
    assert entry.counts.sum() == SAMPLES * LENGTH * config["num_experts_per_tok"]
    gate = found.entries["blk.1.ffn_gate_exps.weight"]
    assert gate.counts.tolist() == entry.counts.tolist() == found.entries["blk.1.ffn_up_exps.weight"].counts.tolist()
    # every token goes to so many experts: together they saw the input of the block that often
    block = "model.layers.1.post_attention_layernorm"
    whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    seen = []
    whole.get_submodule(block).register_forward_hook(lambda _, __, out: seen.append(out.double()))
    with torch.no_grad():
        whole(tokens, use_cache=False)
    sums = seen[0].square().reshape(-1, seen[0].shape[-1]).sum(0) * config["num_experts_per_tok"]
    np.testing.assert_allclose(gate.sum2.sum(0), np.asarray(sums), rtol=1e-4)


def test_keys_and_values_that_no_layer_runs_have_the_energy_of_what_they_would_read(random_model_dir, ids, tmp_path):
    """Of Gemma 3n, whose last layers take those of earlier ones, and whose files have the matrices all the same."""
    config = {**small_config("gemma3n_text"), "num_hidden_layers": 25, "num_kv_shared_layers": 5}
    model = tmp_path / "model"
    shutil.copytree(random_model_dir("gemma3n_text", **config), model)
    tensors = load_file(model / "model.safetensors")
    before = [name for name in tensors if re.search(r"layers\.1\.self_attn\.[kv]_", name)]
    tensors |= {name.replace("layers.1", "layers.24"): tensors[name].clone() for name in before}
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    found = measured(model, ids[0], tmp_path).entries
    assert (found["blk.24.attn_k.weight"].sum2 == found["blk.24.attn_q.weight"].sum2).all()


def test_an_expert_that_saw_no_token_is_told(random_model_dir, ids, tmp_path):
    file, _ = ids
    ledger = Ledger()
    found = measured(random_model_dir("mixtral"), file, tmp_path, ledger, samples=1, length=2)
    starved = {name for name, entry in found.entries.items() if (entry.counts == 0).any()}
    assert starved
    assert {entry["subject"] for entry in ledger.as_json() if entry["kind"] == "importance"} == starved


def test_bytes_do_not_depend_on_threads(random_model_dir, ids, tmp_path):
    file, _ = ids
    model, made = random_model_dir("mixtral"), []
    for threads in (1, 2):
        path = tmp_path / f"{threads}.gguf"
        write_imatrix(path, measured(model, file, tmp_path, threads=threads))
        made.append(path.read_bytes())
    assert made[0] == made[1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1.gguf", "2.gguf", "ids.safetensors", "scratch"]


def test_what_is_merged_is_what_all_the_text_gives(random_model_dir, ids, tmp_path, main):
    file, tokens = ids
    model, parts = random_model_dir("llama"), []
    for number, half in enumerate((tokens[:2], tokens[2:])):
        part = tmp_path / f"half{number}.safetensors"
        save_file({"input_ids": half.contiguous()}, part)
        out = tmp_path / f"half{number}.gguf"
        command = ["imatrix", model, "-o", out, "--calibration", part, "--length", LENGTH, "--samples", len(half)]
        assert main(*command, "--compute-dtype", "float32", "-q") == 0
        parts.append(out)
    assert main("imatrix-merge", *parts, "-o", tmp_path / "all.gguf") == 0
    whole, merged = measured(model, file, tmp_path), read_imatrix(tmp_path / "all.gguf")
    assert merged.chunk_count == SAMPLES
    for name, entry in whole.entries.items():
        np.testing.assert_allclose(merged.entries[name].sum2, entry.sum2, rtol=1e-4)
        assert merged.entries[name].counts.tolist() == entry.counts.tolist()


# ---- rounding by it ----


def plan(model, out, imatrix, kind="Q2_K", method="rtn", **step):
    step = {"method": method, "gguf": {"type": kind, "search": "fast", **step}}
    calibration = {} if imatrix is None else {"imatrix": str(imatrix)}
    recipe = {"calibration": calibration, "steps": [step], "output": {"format": "gguf"}}
    return make_plan(parse(recipe), model, Options(out=out))


@pytest.fixture(scope="module")
def tiny_imatrix(tiny_model_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("imatrix")
    given = build(Calibration, {"samples": 32, "length": 128}, "here")
    write_imatrix(folder / "tiny.gguf", measure_imatrix(tiny_model_dir, given, Folder(folder), Options(), Ledger()))
    return folder / "tiny.gguf"


def test_it_makes_the_same_bytes_closer_and_is_named_in_the_file(tiny_model_dir, tiny_imatrix, tmp_path):
    kl = {}
    for imatrix in (None, tiny_imatrix):
        file = tmp_path / f"{imatrix is None}.gguf"
        result = run(plan(tiny_model_dir, file, imatrix))
        request = Request(file, tiny_model_dir, "default", 64, 8, 4, "cpu", "float32")
        kl[imatrix] = evaluate_paths(request, lambda done, of: None)["kl"]
    assert kl[tiny_imatrix] < 0.95 * kl[None]
    assert result["imatrix"]["file"] == "tiny.gguf"
    reader = gguf.GGUFReader(file)
    said = {key: reader.get_field(f"quantize.imatrix.{key}").contents() for key in ("file", "chunks_count")}
    assert said == {"file": "tiny.gguf", "chunks_count": 32}
    assert reader.get_field("quantize.imatrix.entries_count").contents() == len(read_imatrix(tiny_imatrix).entries)


def test_a_changed_importance_matrix_is_another_run(tiny_model_dir, tiny_imatrix, tmp_path):
    planned = plan(tiny_model_dir, tmp_path / "out.gguf", tiny_imatrix).identity
    other = read_imatrix(tiny_imatrix)
    doubled = {name: ImatrixEntry(entry.sum2 * 2, entry.counts) for name, entry in other.entries.items()}
    write_imatrix(tmp_path / "other.gguf", Imatrix(doubled, other.datasets, other.chunk_count, other.chunk_size))
    again = plan(tiny_model_dir, tmp_path / "out.gguf", tmp_path / "other.gguf").identity
    assert planned["imatrix"] != again["imatrix"]


def test_tensors_without_data_are_told(tiny_model_dir, tiny_imatrix, tmp_path):
    whole = read_imatrix(tiny_imatrix)
    kept = {name: entry for name, entry in whole.entries.items() if "ffn_up" not in name}
    write_imatrix(tmp_path / "part.gguf", Imatrix(kept, whole.datasets, whole.chunk_count, whole.chunk_size))
    planned = plan(tiny_model_dir, tmp_path / "out.gguf", tmp_path / "part.gguf")
    told = {entry.subject for entry in planned.ledger if entry.kind == "importance"}
    assert {name for name in whole.entries if "ffn_up" in name} <= told
    with pytest.raises(PlanError, match="which Q2_K_S needs"):
        plan(tiny_model_dir, tmp_path / "out.gguf", tmp_path / "part.gguf", "Q2_K_S")


def test_that_of_another_model_is_refused(random_model_dir, tiny_model_dir, ids, tmp_path):
    file, _ = ids
    write_imatrix(tmp_path / "other.gguf", measured(random_model_dir("llama"), file, tmp_path))
    with pytest.raises(CalibrationError, match="of another model"):
        plan(tiny_model_dir, tmp_path / "out.gguf", tmp_path / "other.gguf")


def test_methods_that_calibrate_have_no_use_for_it(tiny_model_dir, tiny_imatrix, tmp_path):
    with pytest.raises(PlanError, match="gptq measures its inputs itself"):
        plan(tiny_model_dir, tmp_path / "out.gguf", tiny_imatrix, method="gptq")
