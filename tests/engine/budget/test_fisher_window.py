"""What a layer's windows show, against autograd on weights of whole windows."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from llmcompress import arch
from llmcompress.engine.budget.fisher_window import WindowFisher, WindowSplit
from llmcompress.engine.run.gradient_pass import fisher_information
from llmcompress.engine.run.guidance import LayerGuidance
from llmcompress.model.gradients import drawn
from llmcompress.model.skeleton import load_config
from llmcompress.model.streamed_model import StreamedModel
from llmcompress.store.checkpoint import Checkpoint
from llmcompress.store.folder import Folder
from llmcompress.workers import SERIAL

SEED, LENGTH, SAMPLES, FITTED = 5, 12, 3, 2
TOKENS = torch.randint(3, 96, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(7))
SPACES = {
    "llama": {"self_attn.k_proj": "attn_in", "self_attn.v_proj": "attn_in", "mlp.down_proj": "mlp_hidden"},
    "mixtral": {
        f"mlp.experts.{e}.{leaf}_proj": f"{space}.{e}"
        for e in range(4)
        for leaf, space in (("gate", "expert_in"), ("up", "expert_in"), ("down", "expert_hidden"))
    },
}


def by_autograd(path, spaces):
    """Gradients [out, in] of the weights by window, and inputs of the spaces, both of both layers.

    Of the inputs [tokens, in] one for each matrix that reads the space and each window; beside them, with gradients,
    what the matrix makes of them.
    """
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, experts_implementation="eager")
    gradients, inputs = [], {}

    def keep(key, entered, left):
        left.retain_grad()
        inputs.setdefault(key, []).append((entered.detach()[0], left))

    layers = model.model.layers
    for number, layer in enumerate(layers):
        for below, space in spaces.items():
            if "experts" not in below:
                layer.get_submodule(below).register_forward_hook(
                    lambda _, args, left, key=(number, space): keep(key, args[0], left)
                )
    for window, ids in enumerate(TOKENS):
        model.zero_grad()
        logs = model(input_ids=ids[None]).logits.log_softmax(-1)[0]
        labels = drawn(logs.detach().exp(), torch.Generator().manual_seed(SEED + window))
        logs.gather(1, labels[:, None]).sum().backward()
        gradients.append({name: value.grad for name, value in model.named_parameters()})
    return gradients, inputs


def measured(path, spaces, tmp_path, **options):
    config = load_config(path)
    model = StreamedModel(Checkpoint(path), config, arch.find(config.model_type), dtype=torch.float64)
    made = {}

    def gathering(number, workers):
        made[number] = WindowFisher(spaces, True, WindowSplit(FITTED, SAMPLES - FITTED, SAMPLES), workers, **options)
        return made[number]

    paths = [list(spaces)] * len(model.layers)
    return fisher_information(model, TOKENS, paths, SEED, Folder(tmp_path), SERIAL, gathering=gathering), made


def test_sums_are_those_of_the_gradients_of_whole_windows(random_model_dir, tmp_path):
    path, spaces = random_model_dir("llama", dtype="float32"), SPACES["llama"]
    found, made = measured(path, spaces, tmp_path)
    gradients, inputs = by_autograd(path, spaces)
    for number in (0, 1):
        for below in spaces:
            windows = [window[f"model.layers.{number}.{below}.weight"] for window in gradients]
            squares = sum(gradient.square() for gradient in windows) / TOKENS.numel()
            fisher = found[number, below]
            torch.testing.assert_close(fisher.outputs, squares.sum(1), rtol=1e-4, atol=1e-12)
            torch.testing.assert_close(fisher.inputs, squares.sum(0), rtol=1e-4, atol=1e-12)
            for fitted, part in ((True, windows[:FITTED]), (False, windows[FITTED:])):
                gram = sum(gradient.T @ gradient for gradient in part)
                judge = made[number].weighed(below, fitted).double()
                torch.testing.assert_close(judge, gram / gram.diagonal().sum(), rtol=1e-3, atol=1e-6)
        for space in set(spaces.values()):
            entered = inputs[number, space]  # once for each matrix that reads the space
            rows = torch.cat([x for x, _ in entered[: FITTED * len(entered) // SAMPLES]])
            # the first of the matrices that read a space counts its inputs, once
            seen = made[number].seen(space).mean().double() * len(rows)
            expected = rows.T @ rows * seen.trace() / (rows.T @ rows).trace()
            torch.testing.assert_close(seen, expected, rtol=1e-3, atol=1e-5)
            torch.testing.assert_close(seen.trace(), rows.square().sum() * 1.0, rtol=1e-4, atol=1e-6)


def test_tokens_of_a_guided_space_count_as_in_a_guided_run(random_model_dir, tmp_path):
    path, spaces = random_model_dir("llama", dtype="float32"), SPACES["llama"]
    readers = {below: space for below, space in spaces.items() if space == "attn_in"}
    _, made = measured(path, spaces, tmp_path, guided=readers)
    _, inputs = by_autograd(path, spaces)
    for number in (0, 1):
        gathered = LayerGuidance(readers, (), TOKENS.shape)
        expected, entered = 0, inputs[number, "attn_in"]  # keys and values of each window
        for window in range(SAMPLES):
            for below, (x, left) in zip(readers, entered[2 * window : 2 * window + 2], strict=True):
                gathered.add(below, gathered.part(below, x, left.grad, window), window)
        weights = gathered.weights()["attn_in"].view(SAMPLES, LENGTH).double()
        for window in range(FITTED):
            x = entered[2 * window][0]
            expected = expected + (x.T * weights[window]) @ x
        seen = made[number].seen("attn_in")
        assert seen.tokens == FITTED * LENGTH
        mean = seen.mean().double()
        torch.testing.assert_close(mean / mean.trace(), expected / expected.trace(), rtol=1e-3, atol=1e-6)
        hidden = torch.cat([x for x, _ in inputs[number, "mlp_hidden"][:FITTED]])  # nothing weighs its tokens
        torch.testing.assert_close(
            made[number].seen("mlp_hidden").mean().double(), hidden.T @ hidden / len(hidden), rtol=1e-3, atol=1e-6
        )


def test_inputs_that_a_matrix_without_gradients_reads_too_are_summed_in_the_end():
    spaces = dict.fromkeys(("k", "v", "rounded to nearest"), "in")
    guided = {path: spaces[path] for path in ("k", "v")}
    gathered = WindowFisher(spaces, True, WindowSplit(1, 0, 1), SERIAL, guided=guided)
    x, gradient = torch.ones(1, 2, 3), torch.full((1, 2, 4), 2.0)
    for path in ("k", "rounded to nearest"):
        gathered.add(path, gathered.part(path, x, gradient, 0), 0)
    gathered.finish({"v"})
    torch.testing.assert_close(gathered.seen("in").mean(), torch.full((3, 3), 4.0))  # the root of four squares of 2


def test_experts_have_gradients_of_their_own_and_gram_matrices_together(random_model_dir, tmp_path):
    path, spaces = random_model_dir("mixtral", dtype="float32"), SPACES["mixtral"]
    found, made = measured(path, spaces, tmp_path)
    gradients, _ = by_autograd(path, spaces)
    fused = "model.layers.1.mlp.experts.down_proj"
    for expert in range(4):
        below = f"mlp.experts.{expert}.down_proj"
        windows = [window[fused][expert] for window in gradients]
        squares = sum(gradient.square() for gradient in windows) / TOKENS.numel()
        torch.testing.assert_close(found[1, below].outputs, squares.sum(1), rtol=1e-4, atol=1e-12)
    together = sum(torch.einsum("eoi,eoj->ij", window[fused], window[fused]) for window in gradients[:FITTED])
    expected = together / together.diagonal().sum()
    for expert in (0, 3):
        judge = made[1].weighed(f"mlp.experts.{expert}.down_proj", True).double()
        torch.testing.assert_close(judge, expected, rtol=1e-3, atol=1e-6)


def test_without_compensation_no_gram_matrix_is_summed(random_model_dir):
    gathered = WindowFisher(SPACES["llama"], False, WindowSplit(1, 0, 1), SERIAL)
    x, gradient = torch.ones(1, 2, 3), torch.ones(1, 2, 4)
    gathered.add("mlp.down_proj", gathered.part("mlp.down_proj", x, gradient, 0), 0)
    assert gathered.finish(())["mlp.down_proj"].outputs.tolist() == [12.0] * 4
    with pytest.raises(KeyError):
        gathered.seen("mlp_hidden")
