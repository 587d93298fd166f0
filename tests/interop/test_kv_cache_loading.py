"""transformers with the compressed-tensors package caches keys and values under our scales as we simulate it."""

import json

import pytest
import torch
from safetensors.torch import load_file

from llmcompress.engine.execute import run
from llmcompress.engine.plan.make_plan import make_plan
from llmcompress.engine.plan.run_options import Options
from llmcompress.recipe import KvCache
from llmcompress.validate.key_value_cache import CacheOptions, cache_of
from llmcompress.validate.load import open_streamed

pytestmark = pytest.mark.interop

IDS = torch.randint(0, 96, (2, 24), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def written(model_and_recipe, tmp_path_factory):
    """written(family, code): a compressed model with scales."""
    root = tmp_path_factory.mktemp("kv")

    def make(family, code):
        out = root / f"{family}-{code}"
        if not out.exists():
            source, plain = model_and_recipe(family, "bfloat16", "compressed-tensors", bits=8, group_size=32)
            recipe = plain.model_copy(update={"kv_cache": KvCache(code=code)})
            run(make_plan(recipe, source, Options(out=out, compute_dtype="float32")))
        return out

    return make


def ours(path, cache):
    model = open_streamed(path, dtype=torch.float32)
    model.cache = cache
    states = model.embed(IDS)
    with torch.no_grad():
        for number in range(len(model.layers)):
            with model.layer(number) as layer:
                states = model.call(number, layer, states)
        with model.outer(embed=False, head=True) as causal:
            return model.logits(causal, states)


@pytest.mark.parametrize("code", ["fp8", "int8"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3"])
def test_logits_move_as_ours_do(written, family, code):
    from transformers import AutoModelForCausalLM

    path = written(family, code)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    stored = load_file(path / "model.safetensors")
    for number, layer in enumerate(model.model.layers):
        for part in ("k_scale", "v_scale"):
            loaded, name = getattr(layer.self_attn, part), f"model.layers.{number}.self_attn.{part}"
            assert torch.equal(loaded.data.float(), stored[name].float()), name
    with torch.no_grad():
        theirs = model(IDS, use_cache=True).logits.float()
    plain, changed = ours(path, None), ours(path, cache_of(path, CacheOptions()))
    moved = (changed - plain).abs().mean()
    assert moved > 1e-3 * plain.abs().mean()  # the scales do show
    # codes next to a tie may fall to its other side
    assert (theirs - changed).abs().mean() < 0.05 * moved


@pytest.mark.parametrize("code", ["fp8", "int8"])
def test_the_package_reads_the_scheme(written, code):
    from compressed_tensors.quantization import QuantizationConfig

    settings = json.loads((written("llama", code) / "config.json").read_text())["quantization_config"]
    scheme = QuantizationConfig.model_validate(settings).kv_cache_scheme
    assert (scheme.num_bits, scheme.type, scheme.symmetric, scheme.strategy, scheme.dynamic) == (
        8, {"fp8": "float", "int8": "int"}[code], True, "tensor", False
    )  # fmt: skip
