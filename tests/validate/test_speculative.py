"""Speculative decoding: what is counted is what transformers did, what is foretold follows from total variation."""

import json

import numpy as np
import pytest
import torch

from llmcompress.engine.execute import run
from llmcompress.engine.plan.make_plan import make_plan
from llmcompress.engine.plan.run_options import Options
from llmcompress.recipe import parse
from llmcompress.validate.load import load_whole
from llmcompress.validate.speculative import Drafted, acceptance_figures, speculate, total_variations

PROMPT = torch.tensor([[5, 6, 7]])


@pytest.fixture(scope="module")
def coarse(tiny_model_dir, tmp_path_factory):
    """The tiny model in 2 bits."""
    out = tmp_path_factory.mktemp("draft") / "out"
    run(make_plan(parse({"steps": [{"method": "rtn", "bits": 2, "group_size": 64}]}), tiny_model_dir, Options(out=out)))
    return out


@pytest.fixture(scope="module")
def target(tiny_model_dir):
    return load_whole(tiny_model_dir, dtype=torch.float32)


def test_a_model_accepts_all_that_its_twin_drafts(target, tiny_model_dir):
    twin = load_whole(tiny_model_dir, dtype=torch.float32)
    found = speculate(target, twin, PROMPT, 22, 4, 0)
    assert found.accepted == found.proposed == [4, 4, 4, 4, 1]
    assert found.starts == [0, 5, 10, 15, 20]
    assert found.ids.shape == (25,)
    figures = acceptance_figures(found, total_variations(target, twin, found))
    assert figures["acceptance"] == figures["acceptance_expected"] == 1
    assert figures["accepted_per_step"] == figures["accepted_per_step_expected"] == 17 / 5
    assert figures["tokens_per_step_expected"]["2"] == pytest.approx((20 * 3 + 3 + 2) / 22, rel=1e-5)


def test_what_is_accepted_is_what_total_variation_says(target, coarse):
    draft = load_whole(coarse, dtype=torch.float32)
    before = torch.random.get_rng_state(), target.generation_config, draft.generation_config
    found = speculate(target, draft, PROMPT, 200, 3, 1)
    assert torch.equal(torch.random.get_rng_state(), before[0])
    assert (target.generation_config, draft.generation_config) == before[1:]
    assert sum(count + 1 for count in found.accepted) == 200
    figures = acceptance_figures(found, total_variations(target, draft, found))
    assert 0.3 < figures["acceptance_expected"] < 0.9
    assert abs(figures["acceptance"] - figures["acceptance_expected"]) < 4 * figures["acceptance_se"]
    apart = abs(figures["accepted_per_step"] - figures["accepted_per_step_expected"])
    assert apart < 4 * figures["accepted_per_step_se"]
    again = speculate(target, draft, PROMPT, 200, 3, 1)
    assert again.accepted == found.accepted


def test_distances_are_total_variation_at_each_prefix(target, coarse):
    draft = load_whole(coarse, dtype=torch.float32)
    ids = torch.tensor([5, 6, 7, 8, 9])
    found = total_variations(target, draft, Drafted(ids, 3, [1], [1], 0.0))
    with torch.no_grad():
        for number, length in enumerate((3, 4)):
            p, q = (model(ids[None, :length]).logits[0, -1].double().softmax(-1) for model in (target, draft))
            assert found[number] == pytest.approx(1 - float(torch.minimum(p, q).sum()), abs=1e-5)
    assert len(found) == 2


def test_expected_tokens_are_sums_over_all_ways_to_be_rejected():
    """By the definition of a mean: over every number of accepted tokens, how likely it is times how many they are."""
    chance = np.array([0.9, 0.5, 0.8, 0.7, 0.6])

    def mean(start, count):
        wanted = chance[start : start + count]
        total = 0.0
        for accepted in range(len(wanted) + 1):
            likely = np.prod(wanted[:accepted]) * (1 - wanted[accepted] if accepted < len(wanted) else 1)
            total += accepted * likely
        return total

    figures = acceptance_figures(Drafted(torch.zeros(8), 3, [1, 2], [3, 2], 0.0), 1 - chance)
    assert figures["accepted_per_step_expected"] == pytest.approx((mean(0, 3) + mean(2, 2)) / 2, rel=1e-5)
    wanted = 1 + np.mean([mean(start, 4) for start in range(5)])
    assert figures["tokens_per_step_expected"]["4"] == pytest.approx(wanted, rel=1e-5)
    assert set(figures["tokens_per_step_expected"]) == {"2", "3", "4", "5"}
    assert figures["acceptance"] == pytest.approx(3 / 4)  # of the second step, both were accepted
    assert figures["acceptance_expected"] == pytest.approx(chance[:4].mean())  # nobody judges what follows both


def test_a_token_that_the_target_draws_itself_is_not_foretold():
    deeper = 1 - np.array([[0.8] * 4, *([[0.4] * 4] * 7)])
    figures = acceptance_figures(Drafted(torch.zeros(7), 3, [1, 0, 0], [1, 1, 0], 0.0), deeper)
    assert (figures["acceptance"], figures["acceptance_expected"]) == (0.5, pytest.approx(0.8))
    nothing = acceptance_figures(Drafted(torch.zeros(4), 3, [0], [0], 0.0), deeper[:, :1])
    assert nothing["acceptance"] == nothing["acceptance_expected"] == nothing["acceptance_expected_se"] == 0


def test_fewer_tokens_may_be_proposed_than_were_asked_for():
    """Where the text ends first: a row for each number of tokens before, of which the first ones count."""
    rows = np.tile(1 - np.array([0.9, 0.5, 0.8, 0.7, 0.6]), (13, 1))
    drafted = Drafted(torch.zeros(8), 3, [1, 2], [3, 2], 0.0)
    assert acceptance_figures(drafted, rows) == acceptance_figures(drafted, rows[0])


def test_the_command_line_counts_shows_and_gates(main, capsys, coarse, tiny_model_dir):
    command = ["eval", "--draft", coarse, "--ref", tiny_model_dir, "--generate", "The water", "--max-new-tokens", 12]
    assert main(*command, "--json", "--fail-if", "acceptance < 0") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["new_tokens"] == 12
    assert found["draft_tokens"] == 4
    assert 0 <= found["acceptance"] <= 1
    assert set(found["speed"]) == {"drafted", "alone"}
    assert isinstance(found["generated"], str)
    assert main(*command, "--draft-tokens", 2, "--fail-if", "acceptance_expected < 1") == 3
    shown = capsys.readouterr()
    words = " ".join(shown.out.split())  # lines break where the path is long
    assert "drafts 2 tokens at a time" in words
    assert "by total variation" in words
    assert "the gate was acceptance_expected < 1" in shown.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--draft", "OUT"], "--draft needs --ref"),
        (["--draft", "OUT", "--ref", "MODEL"], "--draft needs --generate"),
        (["OUT", "--draft", "OUT", "--ref", "MODEL", "--generate", "a"], "eval takes a model, or one that drafts"),
        ([], "eval takes a model, or one that drafts"),
        (["--draft", "OUT", "--ref", "MODEL", "--generate", "a", "--kv-bits", "8"], "does not simulate caches"),
        (
            ["--draft", "OUT", "--ref", "MODEL", "--generate", "a", "--windows", "3"],
            "--draft does not go with --windows",
        ),
        (["OUT", "--ref", "MODEL", "--draft-tokens", "3"], "--draft-tokens is of use with --draft only"),
        (["OUT", "--ref", "MODEL", "--max-new-tokens", "3"], "--max-new-tokens is of use with --generate only"),
        (["--draft", "OUT", "--ref", "MODEL", "--generate", "a", "-o", "x.json"], "no result for --output"),
        (["--draft", "OUT", "--ref", "MODEL", "--generate", "a", "--fail-if", "kl > 1"], "'kl', which is not measured"),
    ],
)
def test_what_does_not_go_with_a_draft_is_refused_in_one_line(main, capsys, coarse, tiny_model_dir, arguments, words):
    places = {"OUT": coarse, "MODEL": tiny_model_dir}
    assert main("eval", *(places.get(item, item) for item in arguments)) == 2
    first, *rest = capsys.readouterr().err.splitlines()
    assert words in first
    assert all(line.startswith("  hint: ") for line in rest)


def test_another_vocabulary_is_refused(main, capsys, coarse, random_model_dir):
    other = random_model_dir("llama")
    assert main("eval", "--draft", other, "--ref", coarse, "--generate", "a") == 2
    assert "has 96 tokens" in capsys.readouterr().err
