"""Fisher information, measured layer by layer, against autograd on the whole model in float64."""

from collections import Counter

import pytest
import torch
from transformers import AutoModelForCausalLM

from llmcompress import arch
from llmcompress.engine.run.gradient_pass import EMBEDDING, HEAD, fisher_information
from llmcompress.model.gradients import drawn
from llmcompress.model.skeleton import load_config
from llmcompress.model.streamed_model import StreamedModel
from llmcompress.stats.fisher import of_matrix
from llmcompress.store.checkpoint import Checkpoint
from llmcompress.store.folder import Folder
from llmcompress.workers import SERIAL

SEED, LENGTH, SAMPLES = 5, 12, 3
TOKENS = torch.randint(3, 96, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(7))
PATHS = {
    "llama": ("self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj"),
    "gemma2": ("self_attn.k_proj", "mlp.up_proj"),
    "gpt2": ("attn.c_attn", "mlp.c_proj"),
    "mixtral": ("self_attn.o_proj",),
}


def measured(path, paths, tmp_path, count=1):
    config = load_config(path)
    model = StreamedModel(Checkpoint(path), config, arch.find(config.model_type), dtype=torch.float64)
    steps = []
    every = [paths] * len(model.layers)
    with SERIAL.with_threads(count) as workers:
        found = fisher_information(model, TOKENS, every, SEED, Folder(tmp_path), workers, steps.append)
    assert len(steps) == 2 * len(model.layers) + 1
    return found


def by_autograd(path, paths):
    """The same from the whole model: the diagonal itself [out, in] of each matrix, token by token."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, experts_implementation="eager")
    spec = arch.find(model.config.model_type)
    names = {
        (number, below): model.get_submodule(f"{spec.layers}.{number}.{below}")
        for number in range(model.config.num_hidden_layers)
        for below in paths
    }
    names |= {EMBEDDING: model.get_submodule(spec.embed), HEAD: model.get_submodule(spec.head)}
    seen = {}
    for name, module in names.items():
        module.register_forward_hook(lambda _, args, out, name=name: seen.__setitem__(name, (args[0], out)))
    total = {}
    for window, ids in enumerate(TOKENS):
        logs = model(input_ids=ids[None]).logits.log_softmax(-1)[0]
        labels = drawn(logs.detach().exp(), torch.Generator().manual_seed(SEED + window))
        picked = logs.gather(1, labels[:, None]).sum()
        inner = [name for name in seen if name != HEAD]
        gradients = torch.autograd.grad(picked, [seen[name][1] for name in inner], retain_graph=True)
        for name, g in zip(inner, gradients, strict=True):
            x = seen[name][0] if name != EMBEDDING else torch.nn.functional.one_hot(ids, 96)[None].to(g.dtype)
            parts = torch.einsum("to,ti->toi", g.reshape(LENGTH, -1), x.reshape(LENGTH, -1)).square().sum(0)
            total[name] = total.get(name, 0) + parts.detach() / TOKENS.numel()
        x, out = seen[HEAD]
        for token in range(96):  # the head's is the expectation over every token that might be drawn
            (g,) = torch.autograd.grad(logs[:, token].sum(), out, retain_graph=True)
            weighted = g[0].square() * logs[:, token, None].detach().exp()
            parts = torch.einsum("to,ti->oi", weighted, x[0].square()).detach()
            total[HEAD] = total.get(HEAD, 0) + parts / TOKENS.numel()
    total[EMBEDDING] = total[EMBEDDING].T
    return total


@pytest.mark.parametrize("family", list(PATHS))
def test_every_sum_is_that_of_the_gradients_of_every_token(family, random_model_dir, tmp_path):
    path = random_model_dir(family, dtype="float32")
    found, expected = measured(path, PATHS[family], tmp_path), by_autograd(path, PATHS[family])
    assert found.keys() == expected.keys()
    for name, fisher in found.items():
        torch.testing.assert_close(fisher.outputs, expected[name].sum(1), rtol=1e-4, atol=1e-12, msg=f"{name}")
        torch.testing.assert_close(fisher.inputs, expected[name].sum(0), rtol=1e-4, atol=1e-12, msg=f"{name}")


def test_experts_see_the_tokens_routed_to_them(random_model_dir, tmp_path):
    path = random_model_dir("mixtral", dtype="float32")
    paths = [f"mlp.experts.{number}.down_proj" for number in range(4)]
    found = measured(path, paths, tmp_path)
    seen = {name for name in found if isinstance(name, tuple)}
    assert seen
    assert all(float(found[name].outputs.sum()) == pytest.approx(float(found[name].inputs.sum())) for name in seen)


def test_the_number_of_threads_changes_nothing(random_model_dir, tmp_path):
    path = random_model_dir("llama", dtype="float32")
    one, two = (measured(path, PATHS["llama"], tmp_path, count) for count in (1, 2))
    assert all(torch.equal(one[name].outputs, two[name].outputs) for name in one)
    assert all(torch.equal(one[name].inputs, two[name].inputs) for name in one)


def test_tokens_are_drawn_as_often_as_they_are_likely():
    likely = torch.tensor([0.5, 0.0, 0.3, 0.2])
    tokens = drawn(likely.expand(20_000, 4), torch.Generator().manual_seed(0)).tolist()
    share = {token: count / 20_000 for token, count in Counter(tokens).items()}
    assert share == pytest.approx({0: 0.5, 2: 0.3, 3: 0.2}, abs=0.02)


def test_the_information_of_a_matrix_counts_each_token_by_its_own_gradient():
    x, g = torch.tensor([[1.0, 0.0], [0.0, 9.0]]), torch.tensor([[4.0], [0.0]])
    assert of_matrix(x, g).inputs.tolist() == [16.0, 0.0]
