"""Multipliers of Falcon H1 in its matrices: a model that has them there already gives the same files.

Multipliers that are powers of two: whatever they multiply, no float is rounded, so both ways give the same bytes.
"""

import json
import shutil

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file

from ggufmodels import small_config
from llmcompress.engine.budget.gguf_types import Budget, fitted_to_budget
from llmcompress.engine.execute import run
from llmcompress.engine.plan.make_plan import make_plan
from llmcompress.engine.plan.run_options import Options
from llmcompress.errors import CheckpointError, PlanError
from llmcompress.formats.gguf.names import gguf_tensors
from llmcompress.formats.gguf.tensors import convert
from llmcompress.recipe import parse
from llmcompress.store.output_file import beside
from llmcompress.validate.gguf_verify import verify_gguf
from llmcompress.validate.load import load_whole
from madetokenizers import byte_level, save

ROWS = 288  # of the embedding: more than the 260 tokens
TEXT = {"source": "default", "samples": 8, "length": 64}
POWERS = {
    "embedding_multiplier": 2.0, "lm_head_multiplier": 0.5, "key_multiplier": 4.0, "attention_in_multiplier": 0.25,
    "attention_out_multiplier": 8.0, "mlp_multipliers": [0.125, 16.0], "ssm_in_multiplier": 0.0625,
    "ssm_out_multiplier": 32.0, "ssm_multipliers": [64.0, 0.03125, 128.0, 0.015625, 256.0],
}  # fmt: skip
NONE = {key: [1.0] * len(value) if isinstance(value, list) else 1.0 for key, value in POWERS.items()}
SSM = [128, 128, 16, 16, 8]  # rows of ssm_in: gate, x, B, C, steps
OF_TENSORS = {
    "embedding_multiplier": ["token_embd"], "lm_head_multiplier": ["output"], "key_multiplier": ["attn_k"],
    "attention_in_multiplier": ["attn_q", "attn_k", "attn_v"], "attention_out_multiplier": ["attn_output"],
    "mlp_multipliers": ["ffn_gate", "ffn_down"], "ssm_in_multiplier": ["ssm_in"], "ssm_out_multiplier": ["ssm_out"],
    "ssm_multipliers": ["ssm_in"],
}  # fmt: skip


def premultiplied(tensors):
    """The tensors of a model with POWERS as those of one without multipliers."""
    ssm = torch.tensor(POWERS["ssm_multipliers"]).repeat_interleave(torch.tensor(SSM))[:, None]
    gate, down = POWERS["mlp_multipliers"]
    entering = POWERS["attention_in_multiplier"]
    factors = {
        "embed_tokens": POWERS["embedding_multiplier"], "lm_head": POWERS["lm_head_multiplier"],
        "q_proj": entering, "k_proj": entering * POWERS["key_multiplier"], "v_proj": entering,
        "o_proj": POWERS["attention_out_multiplier"], "gate_proj": gate, "down_proj": down,
        "in_proj": POWERS["ssm_in_multiplier"] * ssm, "out_proj": POWERS["ssm_out_multiplier"],
    }  # fmt: skip
    return {name: value * factors.get(name.split(".")[-2], 1.0) for name, value in tensors.items()}


@pytest.fixture(scope="module")
def models(random_model_dir, tmp_path_factory):
    """A model with multipliers, and the same without, whose matrices are multiplied."""
    root = tmp_path_factory.mktemp("falcon")
    made = random_model_dir("falcon_h1", **small_config("falcon_h1", ROWS), model_type="falcon_h1", dtype="float32")
    config, tensors = json.loads((made / "config.json").read_text()), load_file(made / "model.safetensors")
    for folder, multipliers, values in (("with", POWERS, tensors), ("without", NONE, premultiplied(tensors))):
        (root / folder).mkdir()
        (root / folder / "config.json").write_text(json.dumps(config | multipliers))
        save_file(values, root / folder / "model.safetensors", metadata={"format": "pt"})
        save(byte_level(), root / folder)
    return root / "with", root / "without"


def write(model, out, kind, method="rtn", pruned=False):
    """The report of a GGUF file."""
    before = [{"method": "wanda", "sparsity": 0.5}] if pruned else []
    step = {"method": method, "gguf": {"type": kind, "pure": True}}
    recipe = {"calibration": TEXT, "steps": [*before, step], "output": {"format": "gguf"}}
    run(make_plan(parse(recipe), model, Options(out=out)))
    return json.loads(beside(out, "report.json").read_text())


def test_both_models_compute_the_same(models):
    ids = torch.arange(2, 34)[None]
    with torch.no_grad():
        one, other = (load_whole(model, dtype=torch.float32)(ids, use_cache=False).logits for model in models)
    assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("method", "kind", "pruned"),
    [
        *(("rtn", kind, False) for kind in ("F32", "F16", "Q8_0", "Q4_1")),
        *(("gptq", kind, False) for kind in ("Q8_0", "Q4_0", "Q4_1")),
        ("rtn", "F32", True),
        ("gptq", "Q4_0", True),
    ],
)
def test_files_and_errors_are_those_of_multiplied_matrices(method, kind, pruned, models, tmp_path):
    reports = []
    for number, model in enumerate(models):
        file = tmp_path / str(number) / "model.gguf"
        file.parent.mkdir()
        reports.append(write(model, file, kind, method, pruned))
        assert not [check for check in verify_gguf(file, model) if not check.ok]
    one, other = reports
    assert one["tensors"] == other["tensors"]  # hashes
    assert one["linears"] == other["linears"]  # errors and losses
    ids = torch.arange(2, 34)[None]
    with torch.no_grad():
        logits = [
            load_whole(tmp_path / str(number) / "model.gguf", dtype=torch.float32, source=model)(ids, use_cache=False)
            for number, model in enumerate(models)
        ]
    assert torch.equal(logits[0].logits, logits[1].logits)


def test_what_pruning_leaves_of_bfloat16_weights_is_multiplied_exactly(random_model_dir, tmp_path):
    config = small_config("falcon_h1", ROWS) | {"model_type": "falcon_h1"}
    made = shutil.copytree(random_model_dir("falcon_h1", **config), tmp_path / "model")
    write(save(byte_level(), made), tmp_path / "model.gguf", "F32", pruned=True)
    assert not [check for check in verify_gguf(tmp_path / "model.gguf", made) if not check.ok]
    source = load_file(made / "model.safetensors")["model.layers.0.self_attn.k_proj.weight"].float()
    product = source * config["key_multiplier"] * config["attention_in_multiplier"]
    found = next(
        item for item in gguf.GGUFReader(tmp_path / "model.gguf").tensors if item.name == "blk.0.attn_k.weight"
    )
    stored = torch.from_numpy(found.data.copy())
    assert torch.equal(stored, torch.where(stored == 0, 0, product))
    assert float((stored == 0).float().mean()) == 0.5


def test_the_width_of_heads_may_be_left_to_the_others(models):
    config, read = json.loads((models[0] / "config.json").read_text()), load_file(models[0] / "model.safetensors")
    source = [(name, value.shape) for name, value in read.items()]
    for left in ({"mamba_d_head": "auto"}, {"mamba_d_head": "auto", "mamba_d_ssm": None}):
        assert gguf_tensors(config | left, source) == gguf_tensors(config, source)


def test_a_budget_chooses_types_by_the_errors_of_multiplied_matrices(models, tmp_path):
    chosen = []
    for number, model in enumerate(models):
        step = {"method": "rtn", "gguf": {"type": "Q2_K", "search": "fast"}}
        recipe = parse({"calibration": TEXT, "steps": [step], "output": {"format": "gguf"}})
        kept = tmp_path / f"{number}.json"
        fitted_to_budget(recipe, model, Options(out=tmp_path / "out.gguf", threads=1), Budget(None, 6.0), kept)
        chosen.append(json.loads(kept.read_text())["losses"])
    one, other = chosen
    assert one.keys() == other.keys()
    for name, losses in one.items():  # several factors in one matrix weigh the sums over its rows otherwise
        assert losses == pytest.approx(other[name], rel=0.05 if "ssm_in" in name else 1e-5)


def test_codes_of_a_quantised_source_are_not_kept_where_they_are_multiplied(models, tmp_path):
    step = {"method": "rtn", "bits": 4, "group_size": 32}
    run(make_plan(parse({"steps": [step], "output": {"format": "gptq"}}), models[0], Options(out=tmp_path / "source")))
    report = write(tmp_path / "source", tmp_path / "model.gguf", "Q4_0")
    methods = {record["name"].rpartition(".")[2]: record["method"] for record in report["linears"]}
    assert [name for name, method in methods.items() if method == "recoded"] == ["up_proj"]
    assert not [check for check in verify_gguf(tmp_path / "model.gguf", tmp_path / "source") if not check.ok]


@pytest.mark.parametrize("field", POWERS)
def test_each_multiplier_is_in_its_tensors_alone(field, models):
    config, read = json.loads((models[0] / "config.json").read_text()), load_file(models[0] / "model.safetensors")
    source = [(name, value.shape) for name, value in read.items()]

    def made(changes):
        return {tensor.name: convert(tensor, read.get) for tensor in gguf_tensors(config | changes, source)}

    every, less = made({}), made({field: NONE[field]})
    changed = {
        name.removesuffix(".weight").split(".")[-1] for name in every if not torch.equal(every[name], less[name])
    }
    assert changed == set(OF_TENSORS[field])
    assert all(torch.equal(less[name], value) for name, value in made({field: None}).items())  # left out: 1


def test_a_tied_head_is_written_with_its_own_factor(models):
    config, read = json.loads((models[0] / "config.json").read_text()), load_file(models[0] / "model.safetensors")
    del read["lm_head.weight"]
    source = [(name, value.shape) for name, value in read.items()]
    made = {tensor.name: tensor for tensor in gguf_tensors(config | {"tie_word_embeddings": True}, source)}
    table = read["model.embed_tokens.weight"]
    assert torch.equal(convert(made["token_embd.weight"], read.get), 2 * table)
    assert torch.equal(convert(made["output.weight"], read.get), table / 2)


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"key_multiplier": 0}, CheckpointError, "key_multiplier is 0, not a number other than 0"),
        ({"ssm_multipliers": [1.0] * 4}, CheckpointError, "ssm_multipliers .* not 5 numbers"),
        ({"mlp_multipliers": 2.0}, CheckpointError, "mlp_multipliers is 2.0, not 2 numbers"),
        ({"attention_bias": True}, PlanError, "attention_bias is True"),
        ({"mamba_rms_norm": True}, PlanError, "mamba_norm_before_gate"),
        ({"time_step_limit": [0.0, 1.0]}, PlanError, "time_step_limit"),
    ],
)
def test_what_cannot_be_multiplied_or_computed_is_refused(changes, error, says, models):
    config, read = json.loads((models[0] / "config.json").read_text()), load_file(models[0] / "model.safetensors")
    with pytest.raises(error, match=says):
        gguf_tensors(config | changes, [(name, value.shape) for name, value in read.items()])
