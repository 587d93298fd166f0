"""Our own reader: whatever we write runs, packed or decoded, and gives what its codes say."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from llmcompress.engine.execute import run
from llmcompress.engine.plan.make_plan import make_plan
from llmcompress.engine.plan.run_options import Options
from llmcompress.grids.coded import Coded
from llmcompress.grids.integer import IntegerSpec, fit
from llmcompress.recipe import parse
from llmcompress.validate.load import load_whole, open_streamed
from llmcompress.validate.packed import PackedLinear

IDS = torch.randint(3, 90, (2, 10), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("spec", "kernel"),
    [
        (IntegerSpec(4, 32), "int4"),
        (IntegerSpec(4, 64, symmetric=False), "int4"),
        (IntegerSpec(8, -1), "int8"),
        (IntegerSpec(8, 32), "decode"),
        (IntegerSpec(3, 16), "decode"),
        (IntegerSpec(4, 16), "decode"),
    ],
    ids=lambda value: getattr(value, "name", value),
)
@pytest.mark.parametrize("bias", [True, False])
def test_packed_products_match_the_decoded_matrix(spec, kernel, bias):
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(48, 64, generator=generator) * 0.1
    grid = fit(weight, spec)
    coded = Coded(grid.encode(weight), grid)
    b = torch.randn(48, generator=generator) if bias else None
    x = torch.randn(3, 5, 64, generator=generator)
    linear = PackedLinear(coded, b, torch.float32)
    assert linear.kernel == kernel
    assert (linear.weight.shape, linear.weight.dtype) == (weight.shape, x.dtype)  # which some models ask for
    expected = x.double() @ coded.decode().double().T + (0 if b is None else b.double())
    bound = 1e-5 * (x.abs().double() @ coded.decode().abs().double().T + 1)
    assert ((linear(x).double() - expected).abs() <= bound).all()


@pytest.mark.parametrize(("width", "kernel"), [(96, "int8"), (100, "decode")])
def test_rows_that_end_within_a_vector_are_not_read_beyond_their_end(width, kernel):
    """torch's product of 8 bits with bfloat16 does so."""
    weight = torch.randn(48, width, generator=torch.Generator().manual_seed(3))
    grid = fit(weight, IntegerSpec(8, -1))
    coded = Coded(grid.encode(weight), grid)
    linear, x = PackedLinear(coded, None, torch.bfloat16), torch.eye(width, dtype=torch.bfloat16)
    assert linear.kernel == kernel
    torch.testing.assert_close(linear(x).T, coded.decode().to(torch.bfloat16), atol=1e-2, rtol=2**-7)


@pytest.mark.parametrize("spec", [IntegerSpec(4, 32), IntegerSpec(8, -1)], ids=lambda spec: spec.name)
def test_zero_points_beside_the_middle_count_whatever_a_file_calls_its_grid(spec):
    weight = torch.randn(48, 64, generator=torch.Generator().manual_seed(3))
    grid = fit(weight, replace(spec, symmetric=False))
    moved = replace(grid, spec=spec)
    coded = Coded(grid.encode(weight), moved)
    assert not moved.centred
    linear = PackedLinear(coded, None, torch.float32)
    torch.testing.assert_close(linear(torch.eye(64)).T, coded.decode(), atol=1e-5, rtol=1e-5)


def test_groups_in_activation_order_are_never_given_to_a_kernel_that_ignores_them():
    weight = torch.randn(32, 64)
    grid = fit(weight, IntegerSpec(4, 32), order=torch.randperm(64))
    coded = Coded(grid.encode(weight), grid)
    linear = PackedLinear(coded, None, torch.float32)
    assert linear.kernel == "decode"
    assert torch.allclose(linear(torch.eye(64)).T, coded.decode(), atol=1e-6)


@pytest.mark.parametrize(
    ("family", "format_", "options"),
    [
        ("llama", "compressed-tensors", {"bits": 4}),
        ("llama", "compressed-tensors", {"bits": 8, "group_size": -1}),
        ("llama", "compressed-tensors", {"bits": 4, "sym": False}),
        ("llama", "gptq", {"bits": 3}),
        ("llama", "awq", {"bits": 4, "sym": False}),
        ("llama", "gptq", {"bits": 4, "sym": False}),
        ("qwen2", "gptq", {"bits": 2}),
        ("gpt2", "gptq", {"bits": 4}),
        ("opt", "gptq", {"bits": 8}),
        ("phi3", "compressed-tensors", {"bits": 4}),
        ("gemma2", "compressed-tensors", {"bits": 4}),
        ("gpt_neox", "gptq", {"bits": 4}),
        ("mixtral", "compressed-tensors", {"bits": 4}),
        ("qwen3_moe", "dense", {"bits": 6}),
    ],
)
def test_what_is_written_runs_and_equals_its_dense_twin(random_model_dir, tmp_path, family, format_, options):
    model = random_model_dir(family)

    def made(name):
        step = {"method": "rtn", "group_size": 32, **options}
        recipe = parse({"steps": [step], "output": {"format": name}})
        run(make_plan(recipe, model, Options(out=tmp_path / name)))
        return tmp_path / name

    written = made(format_)
    packed = load_whole(written, dtype=torch.float32)
    streamed = open_streamed(written, dtype=torch.float32)
    with torch.no_grad():
        logits = packed(IDS, use_cache=False).logits
        states = streamed.embed(IDS)
        for number in range(len(streamed.layers)):
            with streamed.layer(number) as layer:
                states = streamed.call(number, layer, states)
        with streamed.outer(embed=False, head=True) as causal:
            again = streamed.logits(causal, states)
        assert torch.allclose(logits, again, atol=1e-4, rtol=1e-4)
        dense = written if format_ == "dense" else made("dense")
        twin = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32)(IDS, use_cache=False).logits
        original = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)(IDS, use_cache=False).logits
    scale = float((twin - original).abs().max())
    assert scale > 1e-4  # the codes do show
    assert float((logits - twin).abs().max()) < 0.05 * scale + 2e-2 * float(original.abs().max())
