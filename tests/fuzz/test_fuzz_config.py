"""Damaged config.json: a plan from headers alone, or a refusal in one line; and the same for transformers' reading."""

import json
import tracemalloc

import pytest

from llmcompress.engine.plan.make_plan import make_plan
from llmcompress.engine.plan.run_options import Options
from llmcompress.model.skeleton import load_config, skeleton
from llmcompress.recipe import parse
from mutations import FEWER_INPUTS, SCALARS, fuzz, measured, mutated, spoilt

KEYS = [
    "quantization_config", "auto_map", "text_config", "num_experts", "num_local_experts", "n_layer", "n_embd",
    "num_hidden_layers", "hidden_size", "vocab_size", "model_type", "architectures", "tie_word_embeddings",
    "_name_or_path", "attn_implementation", "rope_scaling", "torch_dtype", "layer_types", "n_inner",
]  # fmt: skip
VALUES = ['"gpt2"', '"opt"', '"mixtral"', '"qwen3_moe"', '"gpt_neox"', '"bfloat16"', '"org/name"', '["a.b"]', *SCALARS]
RECIPES = [
    {"steps": [{"method": "gptq", "bits": 4, "group_size": 64}]},
    {"steps": [{"method": "rtn", "bits": 3}], "output": {"format": "gptq"}},
    {"steps": [{"method": "rtn", "set": {"mlp.*": {"skip": True}}}], "output": {"format": "dense"}},
]


@FEWER_INPUTS
def test_damaged_configs(inputs, hollow_model, tmp_path):
    file, options = hollow_model / "config.json", Options(out=tmp_path / "out")
    whole = json.loads(file.read_text())
    recipes = [parse(data) for data in RECIPES]
    make_plan(recipes[0], hollow_model, options)  # what is built once

    def check(dice):
        recipe = dice.choose(recipes)
        file.write_bytes(spoilt(whole, dice, KEYS, VALUES))
        plan = measured(lambda: make_plan(recipe, hollow_model, options), file.stat().st_size)
        if plan is not None:
            assert len(plan.layers) == 2

    fuzz(inputs, check)


@pytest.mark.parametrize("inputs", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_damaged_configs_in_transformers(inputs, hollow_model, tmp_path):
    """Fewer, and without a limit on memory: transformers imports a family's code when a config names it."""
    tracemalloc.stop()
    file, options = hollow_model / "config.json", Options(out=tmp_path / "out")
    whole = json.loads(file.read_text())
    recipe = parse(RECIPES[0])

    def build():
        plan = make_plan(recipe, hollow_model, options)
        skeleton(load_config(hollow_model), plan.spec)

    build()

    def check(dice):
        file.write_bytes(mutated(whole, dice, KEYS, VALUES).encode("utf-8", "surrogatepass"))
        measured(lambda: load_config(hollow_model), 0)
        measured(build, 0)

    fuzz(inputs, check)
