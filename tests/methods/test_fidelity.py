"""End to end on a trained model: what the methods promise shows in its predictions on text it has not seen."""

import pytest
import torch

from llmcompress.engine.execute import run
from llmcompress.engine.plan.make_plan import make_plan
from llmcompress.engine.plan.run_options import Options
from llmcompress.recipe import parse
from llmcompress.validate.evaluate import measure
from llmcompress.validate.load import open_streamed
from llmcompress.validate.token_statistics import token_figures


@pytest.fixture(scope="module")
def divergence(tiny_model_dir, held_out_ids, tmp_path_factory):
    """divergence(method, **options): figures of the compressed tiny model against the original."""
    ids = held_out_ids[: 10 * 256].view(10, 256)
    reference = open_streamed(tiny_model_dir, dtype=torch.float32)
    known = {}

    def measured(method, **options):
        key = repr((method, sorted(options.items())))
        if key not in known:
            out = tmp_path_factory.mktemp("fidelity") / "out"
            recipe = parse(
                {
                    "calibration": {"samples": 48, "length": 256},
                    "steps": [{"method": method, "group_size": 64, **options}],
                    "output": {"format": "gptq"},
                }
            )
            run(make_plan(recipe, tiny_model_dir, Options(out=out)))
            known[key] = token_figures(measure(open_streamed(out, dtype=torch.float32), reference, ids))
        return known[key]

    return measured


def test_rounding_hurts_at_four_bits_and_ruins_at_two(divergence):
    four, two = divergence("rtn", bits=4, clip="minmax"), divergence("rtn", bits=2, clip="minmax")
    assert four["kl"] > 0.02
    assert two["perplexity"] > 2.5 * two["ref_perplexity"]


@pytest.mark.parametrize(("bits", "share"), [(4, 0.6), (3, 0.6)])
def test_gptq_is_clearly_more_faithful_than_rounding(divergence, bits, share):
    assert divergence("gptq", bits=bits)["kl"] < share * divergence("rtn", bits=bits)["kl"]


def test_ranges_by_outputs_are_more_faithful_than_ranges_by_weights(divergence):
    covering, searched, by_output = (
        divergence("rtn", bits=3, clip=clip)["kl"] for clip in ("minmax", "search", "output")
    )
    assert by_output < searched < covering
    mixed = divergence("rtn", bits=3, clip="output", set={"self_attn.[qk]_proj": {"clip": "search"}})["kl"]
    assert mixed < searched


@pytest.mark.slow
def test_each_part_of_gptq_earns_its_place(divergence):
    plain = divergence("gptq", bits=3, descent=0, qep_alpha=0, actorder="none", clip="minmax")["kl"]
    ordered = divergence("gptq", bits=3, descent=0, qep_alpha=0, clip="minmax")["kl"]
    searched = divergence("gptq", bits=3, descent=0, qep_alpha=0)["kl"]
    corrected = divergence("gptq", bits=3, descent=0)["kl"]
    descended = divergence("gptq", bits=3)["kl"]
    assert searched < ordered < plain
    assert descended < searched
    assert corrected < 1.02 * searched
    assert descended < 1.02 * corrected


def test_more_bits_are_more_faithful(divergence):
    kl = [divergence("gptq", bits=bits)["kl"] for bits in (2, 3, 4, 8)]
    assert kl == sorted(kl, reverse=True)
    assert kl[-1] < 0.001
