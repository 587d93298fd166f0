"""Grids of many matrices as patterns: whatever the grids, a step resolves to them; and few patterns say much."""

from hypothesis import given, settings
from hypothesis import strategies as st

from llmcompress.engine.budget.patterns import options_of, patterns_of
from llmcompress.engine.plan.matrix_options import resolve_matrix_options
from llmcompress.grids.float8 import Float8Spec
from llmcompress.grids.integer import IntegerSpec
from llmcompress.grids.nvfp4 import Nvfp4Spec
from llmcompress.ledger import Ledger
from llmcompress.methods.rtn import Rtn

PLACES = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "attn.c_proj", "mlp.c_proj", "dense", "mlp.dense")
EXPERTS = ("mlp.experts.0.up_proj", "mlp.experts.1.up_proj", "mlp.experts.11.w1", "mlp.experts.2.w1")
SMALL, LARGE, FINE = IntegerSpec(3, 128), IntegerSpec(8, 128), IntegerSpec(3, 32)


def modules(layers, places=PLACES + EXPERTS):
    return [f"model.layers.{number}.{place}" for number in range(layers) for place in places]


def resolved(grids, common):
    step = Rtn(**options_of(common), set=patterns_of(grids, common))
    found = resolve_matrix_options(step, dict.fromkeys(grids, 1024), Ledger())
    return {module: method.grid for module, method in found.items()}


@given(st.integers(1, 24), st.sampled_from([SMALL, LARGE]), st.data())
@settings(deadline=None, max_examples=60)
def test_every_module_gets_its_grid(layers, common, data):
    grids = {name: data.draw(st.sampled_from([SMALL, SMALL, LARGE, FINE])) for name in modules(layers)}
    assert resolved(grids, common) == grids


@given(st.integers(1, 24), st.sampled_from([SMALL, Nvfp4Spec(), Float8Spec()]), st.data())
@settings(deadline=None, max_examples=60)
def test_every_module_gets_its_grid_where_there_are_several_types(layers, common, data):
    choices = st.sampled_from([Nvfp4Spec(), Nvfp4Spec(), Float8Spec(), SMALL, FINE])
    grids = {name: data.draw(choices) for name in modules(layers)}
    assert resolved(grids, common) == grids


def test_what_most_layers_have_is_said_once_and_layers_are_joined_by_digits():
    grids = dict.fromkeys(modules(30, (*PLACES[:3], "mlp.down_proj")), SMALL)
    wanted = {7: LARGE, 10: LARGE, 11: LARGE, 12: LARGE, 15: LARGE, 29: LARGE}
    for number, grid in wanted.items():
        grids |= {f"model.layers.{number}.self_attn.{leaf}_proj": grid for leaf in "qkv"}
    grids |= {name: FINE for name in grids if "down_proj" in name}
    assert patterns_of(grids, SMALL) == {
        "layers.7.self_attn.[qkv]_proj": {"bits": 8, "group_size": 128},
        "layers.1[0-25].self_attn.[qkv]_proj": {"bits": 8, "group_size": 128},
        "layers.29.self_attn.[qkv]_proj": {"bits": 8, "group_size": 128},
        "mlp.down_proj": {"bits": 3, "group_size": 32},
    }


def test_one_grid_for_all_needs_no_pattern():
    assert patterns_of(dict.fromkeys(modules(3), FINE), FINE) == {}
