"""Draft heads that are trained: the loss and its gradients by float64, files as vLLM reads them, same bytes always."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from ggufmodels import small_config
from llmcompress.engine.draft.draft_plan import DraftRequest, plan_draft
from llmcompress.engine.draft.head_training import train_draft
from llmcompress.engine.draft.learner import DraftLearner, frequent
from llmcompress.engine.draft.states import target_model, target_states, training_text
from llmcompress.engine.execute import run
from llmcompress.engine.plan.make_plan import make_plan
from llmcompress.engine.plan.run_options import Options
from llmcompress.errors import CheckpointError, PlanError, RunError
from llmcompress.model.draft_heads.base import CALM
from llmcompress.model.draft_heads.eagle3 import EagleShape
from llmcompress.model.draft_heads.head_files import head_kinds, read_draft
from llmcompress.model.draft_heads.medusa import MedusaShape
from llmcompress.recipe import Calibration, build, parse
from llmcompress.store.staging import Staging
from llmcompress.validate.load import load_whole
from llmcompress.workers import SERIAL

LENGTH = 24


@pytest.fixture(scope="module")
def ids(tmp_path_factory):
    """Windows that repeat three tokens of their own, which can be learnt."""
    generator = torch.Generator().manual_seed(1)
    path = tmp_path_factory.mktemp("ids") / "ids.safetensors"
    save_file({"input_ids": torch.randint(2, 90, (64, 3), generator=generator).repeat(1, LENGTH // 3)}, path)
    return path


@pytest.fixture(scope="module")
def model(random_model_dir):
    return random_model_dir("llama", num_hidden_layers=4)


def planned(
    model, out, ids, steps=8, rate=1e-3, samples=64, written=0, threads=1, vocabulary=40, length=LENGTH, kind="eagle3"
):
    text = build(Calibration, {"source": str(ids), "samples": samples, "length": length}, "here")
    options = Options(out=out, compute_dtype="float32", threads=threads)
    return plan_draft(model, DraftRequest(kind, steps, vocabulary, written, rate), text, options)


def drafted(*arguments, **settings):
    return train_draft(planned(*arguments, **settings))


MOVED = {  # some tensors of each kind
    "eagle3": ("fc.weight", "lm_head.weight", "norm.weight", "layers.0.self_attn.q_proj.weight"),
    "medusa": ("lm_head.weight", "blocks.0.layers.0.weight", "blocks.3.layers.0.weight"),
}


def states_read(whole, out, shape):
    """What a head reads of a text, by transformers' whole model: side by side [tokens, width]."""
    if not shape.states:
        return out.hidden_states[-1][0]
    every = list(out.hidden_states[:-1])
    positions = whole.model.rotary_emb(every[-1], torch.arange(LENGTH)[None])
    behind = whole.model.layers[-1](every[-1], position_embeddings=positions, attention_mask=None)
    every.append(behind if torch.is_tensor(behind) else behind[0])
    return torch.cat([every[number][0] for number in shape.states], dim=-1)


@pytest.mark.parametrize("kind", MOVED)
def test_the_loss_is_the_divergence_of_each_depth_and_its_gradients_are_slopes(kind, model, ids, tmp_path):
    """Against transformers' whole model and its hidden states in float64; gradients by differences."""
    plan = planned(model, tmp_path / "out", ids, kind=kind)
    given = plan.opened.tokens()
    staged = Staging(tmp_path / "work", plan.identity)
    with SERIAL.with_threads(1) as workers:
        text, target = training_text(plan, given, staged), target_model(plan)
        states = target_states(plan, target, text.tokens, staged, workers, lambda: None)
        with target.outer(embed=True, head=True):
            learner = DraftLearner(plan, target, text, states, workers)
            begun = {name: item.value().clone() for name, item in learner.trained.items()}
            generator = torch.Generator().manual_seed(3)
            for item in learner.trained.values():
                item.learnt += 0.05 * torch.randn(item.learnt.shape, generator=generator)
            with learner.heads():
                loss, gradients = learner.gradients([0, 5])
                assert learner.divergence([0, 5]) == pytest.approx(loss, rel=1e-5)
                values = {name: item.value().clone() for name, item in learner.trained.items()}
                for name in MOVED[kind]:
                    item = learner.trained[name]
                    before, gradient = item.learnt.clone(), gradients[name]
                    step = 1e-2 * gradient / gradient.norm()
                    sides = []
                    for sign in (1, -1):
                        item.learnt = before + sign * step
                        sides.append(learner.divergence([0, 5]))
                    item.learnt = before
                    assert sides[0] - sides[1] == pytest.approx(2e-2 * float(gradient.norm()), rel=0.05), name
    staged.close()
    whole = load_whole(model, dtype=torch.float64)
    if kind == "eagle3":
        norm, gains = whole.model.norm.weight.detach().float().abs(), begun["norm.weight"]
        torch.testing.assert_close(gains / norm, torch.full_like(norm, float(gains[0] / norm[0])), rtol=1e-2, atol=0)
    else:
        rows = whole.get_output_embeddings().weight.detach().float()[learner.ids]
        torch.testing.assert_close(begun["lm_head.weight"], CALM * rows)
    head = plan.shape.head({name: value.double() for name, value in values.items()})
    total = 0.0
    for window in (0, 5):
        tokens = text.tokens[window]
        with torch.no_grad():
            out = whole(tokens[None], output_hidden_states=True)
            states = states_read(whole, out, plan.shape)[:-1]
            embedded = whole.model.embed_tokens.weight[tokens[1:]]
            depths = head_kinds()[kind].depths
            for depth, output in enumerate(head.unrolled(embedded, states, depths)):
                for row in range(depth, LENGTH - 1):
                    p = out.logits[0, row + 1].softmax(-1)[learner.ids]
                    q = head.logits(output[row : row + 1])[0].softmax(-1)
                    share = p.sum()
                    divergence = share * (p / share * (p / share / q).log()).sum()
                    total += float(divergence) / (LENGTH - 1 - depth) / depths / 2
    assert loss == pytest.approx(total, rel=1e-3)


def test_training_brings_the_head_nearer_and_writes_what_vllm_reads(model, ids, tmp_path):
    report = drafted(model, tmp_path / "out", ids, steps=48, rate=3e-3)
    held = report["draft"]["held_back"]["calibration"]
    assert held["loss"] < 0.9 * held["loss_before"]
    assert held["windows"] == 4
    assert len(held["acceptance"]) == 4
    shape, _ = read_draft(tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    names = {"fc", "norm", "lm_head", "input_layernorm", "hidden_norm", "post_attention_layernorm"}
    names |= {f"self_attn.{part}_proj" for part in "qkvo"} | {f"mlp.{part}_proj" for part in ("gate", "up", "down")}
    assert {name.removeprefix("layers.0.").removesuffix(".weight") for name in tensors} == names | {"d2t", "t2d"}
    assert tensors["layers.0.self_attn.q_proj.weight"].shape[1] == 2 * shape.hidden
    assert tensors["fc.weight"].shape == (shape.hidden, 3 * shape.hidden)
    known = tensors["t2d"].nonzero()[:, 0]
    assert torch.equal(torch.arange(40) + tensors["d2t"], known)
    assert torch.equal(known, frequent(load_file(ids)["input_ids"][[n for n in range(64) if n % 16 != 15]], shape))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["speculators_config"]["verifier"] == {
        "name_or_path": model.name,
        "architectures": ["LlamaForCausalLM"],
    }
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 3, 4]
    written = "".join(
        file.read_text() for file in (tmp_path / "out").glob("*.[jm][sd]*") if file.suffix != ".safetensors"
    )
    assert str(tmp_path) not in written


def test_blocks_of_medusa_learn_and_are_written_as_vllm_reads_them(model, ids, tmp_path):
    report = drafted(model, tmp_path / "out", ids, steps=48, rate=1e-2, kind="medusa")
    held = report["draft"]["held_back"]["calibration"]
    assert held["loss"] < 0.9 * held["loss_before"]
    assert (report["format"], len(held["acceptance"])) == ("medusa", 4)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {key: config[key] for key in ("architectures", "model_type", "num_heads", "num_hidden_layers")} == {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "num_heads": 4,
        "num_hidden_layers": 1,
    }
    assert (config["original_lm_head"], config["truncated_vocab_size"]) == (True, 40)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert set(tensors) == {"lm_head.weight", "token_map", *(f"blocks.{block}.layers.0.weight" for block in range(4))}
    counted = frequent(
        load_file(ids)["input_ids"][[n for n in range(64) if n % 16 != 15]], read_draft(tmp_path / "out")[0]
    )
    assert torch.equal(tensors["token_map"], counted)


def test_all_tokens_need_no_map(model, ids, tmp_path):
    drafted(model, tmp_path / "out", ids, steps=8, rate=1e-2, kind="medusa", vocabulary=10**6)
    shape, checkpoint = read_draft(tmp_path / "out")
    assert "token_map" not in load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(shape.ids(checkpoint.read), torch.arange(shape.target_vocabulary))


@pytest.mark.parametrize(
    "said",
    [
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0}},
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"partial_rotary_factor": 0.5},
        {"mlp_bias": True},
    ],
    ids=str,
)
def test_a_head_that_computes_something_else_is_refused(said, tmp_path):
    shape = EagleShape(16, 24, 96, (1, 2, 3), 32, 2, 2, 8, 128, 1e-5, 1e4)
    tensors = {name: torch.zeros(size) for name, size in shape.matrices.items()}
    save_file({**tensors, "d2t": torch.zeros(24, dtype=torch.int64)}, tmp_path / "model.safetensors")
    config = shape.config("float32", 3, "target", ["LlamaForCausalLM"])
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_draft(tmp_path)[0] == shape
    config["transformer_layer_config"] |= said
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="not known here"):
        read_draft(tmp_path)


def test_frequent_tokens_are_counted():
    shape = MedusaShape(8, 3, 10, (), 4, 1)
    assert frequent(torch.tensor([[7, 7, 5, 5, 5, 9, 2]]), shape).tolist() == [2, 5, 7]


@pytest.mark.parametrize("form", ["compressed-tensors", "gptq"])
def test_compressed_models_are_drafted_for_as_they_are_served(form, model, ids, tmp_path):
    step = {"method": "rtn", "bits": 3, "group_size": 16, "activations": "int8-token"}
    step = step if form == "compressed-tensors" else {"method": "rtn", "bits": 4, "group_size": 16}
    out = tmp_path / "compressed"
    run(
        make_plan(
            parse({"steps": [step], "output": {"format": form}}), model, Options(out=out, compute_dtype="float32")
        )
    )
    plan = planned(out, tmp_path / "out", ids)
    staged = Staging(tmp_path / "work", plan.identity)
    given, whole = plan.opened.tokens()[:4], load_whole(out, dtype=torch.float32)
    with SERIAL.with_threads(1) as workers:
        states = target_states(plan, target_model(plan), given, staged, workers, lambda: None)
    with torch.no_grad():
        wanted = whole(given, output_hidden_states=True).hidden_states
    for number in (2, 3):
        torch.testing.assert_close(states[number].read(slice(0, 4)), wanted[number], rtol=1e-3, atol=1e-3)
    staged.close()


@pytest.mark.parametrize("kind", MOVED)
def test_the_same_bytes_for_any_number_of_threads(kind, model, ids, tmp_path):
    for threads in (1, 2):
        drafted(model, tmp_path / f"to{threads}", ids, threads=threads, steps=16, kind=kind)
    names = {file.name for file in (tmp_path / "to1").iterdir()}
    assert names == {"README.md", "config.json", "model.safetensors", "report.json"}
    assert all((tmp_path / "to1" / name).read_bytes() == (tmp_path / "to2" / name).read_bytes() for name in names)


def test_nothing_is_written_where_the_loss_rises(model, ids, tmp_path):
    with pytest.raises(RunError, match=r"did not fall: calibration \d") as raised:
        drafted(model, tmp_path / "to", ids, steps=4, rate=0.1)
    assert raised.value.exit_code == 1
    assert not list(tmp_path.glob("to*"))


def test_text_of_its_own_is_learnt_too(tiny_model_dir, tmp_path):
    report = drafted(tiny_model_dir, tmp_path / "out", "default", steps=16, samples=16, written=16)
    assert {name: item["windows"] for name, item in report["draft"]["held_back"].items()} == {
        "calibration": 1,
        "written": 1,
    }
    assert report["calibration"]["samples"] == 32


def test_what_no_head_can_be_trained_on_is_refused(model, random_model_dir, ids, tmp_path):
    to = tmp_path / "to"
    with pytest.raises(PlanError, match="--samples 16 and --written 0 leave too few windows"):
        planned(model, to, ids, samples=16)
    with pytest.raises(PlanError, match="windows of 4 tokens have none that is judged"):
        planned(model, to, ids, length=4)
    with pytest.raises(PlanError, match="the model's own text comes beside another"):
        planned(model, to, "self")
    with pytest.raises(PlanError, match="without which it writes no text"):
        planned(model, to, ids, written=16)
    with pytest.raises(PlanError, match="too few for a head that reads 3 states"):
        planned(random_model_dir("llama", num_hidden_layers=1), to, ids)
    assert planned(random_model_dir("llama", num_hidden_layers=1), to, ids, kind="medusa").shape.most == 4
    with pytest.raises(PlanError, match="heads of 15 channels have no rotary positions"):
        planned(random_model_dir("gpt2", hidden_size=60, num_attention_heads=4), to, ids)
    with pytest.raises(CheckpointError):
        planned(tmp_path, to, ids)
    assert not list(tmp_path.glob("to*"))


def test_layers_that_differ_in_their_heads_are_read_and_what_hands_on_more_is_refused(random_model_dir, ids, tmp_path):
    model = random_model_dir("gemma4_text", **small_config("gemma4_text"))
    with pytest.raises(PlanError, match="hand on more than one hidden state"):
        drafted(model, tmp_path / "out", ids)
