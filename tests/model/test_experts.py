"""Blocks of experts as separate linears compute what transformers' fused blocks compute, for every layout there is."""

from importlib import import_module

import pytest
import torch
from torch import nn
from transformers import AutoConfig

from llmcompress.model.experts import UnfusedExperts, layout_of, split

SIZES = {"hidden_size": 24, "intermediate_size": 16, "moe_intermediate_size": 16, "expert_ffn_hidden_size": 16}
COUNTS = {"num_experts": 5, "num_local_experts": 5, "n_routed_experts": 5, "zero_expert_num": 2}

BLOCKS = {
    "qwen2_moe": ("Qwen2MoeExperts", {}),
    "nemotron_h": ("NemotronHExperts", {"gated": False}),
    "gpt_oss": ("GptOssExperts", {"bias": True, "interleaved": True}),
    "deepseek_v4": ("DeepseekV4Experts", {}),  # clamps gate and up
    "longcat_flash": ("LongcatFlashExperts", {"idle": True}),
    "llama4_text": ("Llama4TextExperts", {"sorted": True}),
}


def block_of(model_type):
    """transformers' own block of a family, with random weights, and one token in eight sent where it would clamp."""
    config = AutoConfig.for_model(model_type)
    for key, value in (SIZES | COUNTS).items():
        if hasattr(config, key):
            setattr(config, key, value)
    config._experts_implementation = "eager"
    home = import_module(f"transformers.models.{model_type.removesuffix('_text')}")
    modeling = import_module(f"{home.__name__}.modeling_{model_type.removesuffix('_text')}")
    block = getattr(modeling, BLOCKS[model_type][0])(config)
    generator = torch.Generator().manual_seed(0)
    for parameter in block.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    return block.eval()


def separate(block):
    layout = layout_of(block)
    unfused = UnfusedExperts.like(block, layout)
    unfused.load_state_dict(
        {
            f"{number}.{path}": value
            for name, parameter in block.named_parameters()
            for path, values in split(layout.stacks[name], parameter.data)
            for number, value in enumerate(values[: layout.count])
        }
    )
    return unfused


@pytest.mark.parametrize("model_type", BLOCKS)
@torch.no_grad()
def test_separate_experts_compute_what_the_fused_block_does(model_type):
    block = block_of(model_type)
    layout = layout_of(block)
    assert (layout.count, layout.hidden, layout.inner) == (5, 24, block.down_proj.numel() // 5 // 24)
    flags = ("gated", "bias", "interleaved", "sorted", "idle")
    unlike = {flag: getattr(layout, flag) for flag in flags if getattr(layout, flag) != (flag == "gated")}
    assert unlike == BLOCKS[model_type][1]
    generator = torch.Generator().manual_seed(1)
    if layout.sorted:
        tokens = torch.randn(5, 11, 24, generator=generator)
        tokens[torch.rand(5, 11, generator=generator) < 0.5] = 0  # not sent to that expert
        arguments = (tokens.reshape(-1, 24),)
    else:
        wide = 5 + 2 * layout.idle
        index = torch.rand(11, wide, generator=generator).topk(2).indices
        arguments = (torch.randn(11, 24, generator=generator), index, torch.rand(11, 2, generator=generator))
    expected = block(*arguments)
    torch.testing.assert_close(
        separate(block)(*arguments), expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max())
    )


def test_the_input_of_the_last_matrix_is_what_it_reads():
    unfused, x = separate(block_of("gpt_oss")), torch.randn(3, 24)
    seen = []
    unfused[2].down_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    unfused[2](x)
    assert torch.equal(seen[0], unfused[2].inner(x))


def test_blocks_that_nothing_tells_how_to_take_apart_are_left():
    class Stranger(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate_up_proj, self.down_proj = nn.Parameter(torch.ones(2, 8, 6)), nn.Parameter(torch.ones(2, 6, 4))
            self.act_fn = nn.SiLU()

        def forward(self, hidden_states, top_k_index, top_k_weights): ...

    assert layout_of(Stranger()) is None  # its gate may come second
    block = block_of("qwen2_moe")
    block.has_post_expert_norm = True
    assert layout_of(block) is None
    block = block_of("qwen2_moe")
    block.extra = nn.Parameter(torch.ones(3))
    assert layout_of(block) is None
    assert layout_of(nn.Linear(3, 3)) is None


@torch.no_grad()
def test_a_matrix_of_every_expert_is_so_many_linears():
    modeling = import_module("transformers.models.jetmoe.modeling_jetmoe")
    block, generator = modeling.JetMoeParallelExperts(3, 8, 6), torch.Generator().manual_seed(0)
    block.weight.data = torch.randn(block.weight.shape, generator=generator)
    unfused = separate(block)
    assert [type(matrix).__mro__[1] for matrix in unfused] == [nn.Linear] * 3
    x = torch.randn(7, 8, generator=generator)
    torch.testing.assert_close(unfused(x, [4, 0, 3]), block(x, [4, 0, 3]))
