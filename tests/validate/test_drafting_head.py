"""Decoding with a draft head: the text has the target's distribution, figures foretold are those of real drafting."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from llmcompress.errors import CheckpointError
from llmcompress.validate.drafting_head import (
    ModelTarget,
    RandomDraws,
    acceptance,
    decode,
    left_over,
    open_head,
    speculate_with_head,
    variations_by_depth,
)
from llmcompress.validate.load import load_whole
from llmcompress.validate.speculative import acceptance_figures, depths_of

VOCABULARY, NEW, GUESSES = 3, 4, 2


class Enumerated:
    """Draws that go through every way chance can fall, one a run; `likely` is how likely this way was."""

    def __init__(self):
        self.way, self.more = [], True

    def begin(self):
        self.place, self.likely = 0, 1.0

    def _choose(self, chances):
        possible = [number for number, chance in enumerate(chances) if chance > 0]
        if self.place == len(self.way):
            self.way.append([0, len(possible)])
        chosen = possible[self.way[self.place][0]]
        self.place += 1
        self.likely *= chances[chosen]
        return chosen

    def token(self, chances):
        return self._choose(chances.tolist())

    def accepts(self, chance):
        return self._choose([chance, 1 - chance]) == 0

    def end(self):
        while self.way and self.way[-1][0] + 1 == self.way[-1][1]:
            self.way.pop()
        if self.way:
            self.way[-1][0] += 1
        self.more = bool(self.way)


def table(ids, seed):
    """Chances of what follows ids, which hang on the last two: any, but the same every time."""
    generator = torch.Generator().manual_seed(
        seed + sum((token + 1) * 7**place for place, token in enumerate(ids[-2:]))
    )
    return torch.rand(VOCABULARY, generator=generator, dtype=torch.float64).square().softmax(-1)


class Told:
    """A target, or a head, that knows tables; states are the tokens that were read, so that the head sees which."""

    def __init__(self, seed):
        self.seed, self.ids = seed, []

    def read(self, ids, states=None):
        if states is not None:  # a head: what it drafted is forgotten, and its states are those of the tokens before
            self.ids = [*self.known, *ids] if hasattr(self, "known") else [int(states[0]), *ids]
            assert [int(token) for token in states[:, 0]] == self.ids[-len(ids) - 1 : -1]
            self.known = list(self.ids)
            return self.chances()
        chances, start = [], len(self.ids)
        for token in ids:
            self.ids.append(token)
            chances.append(table(self.ids, self.seed))
        return torch.stack(chances), torch.tensor(self.ids[start:])[:, None]

    def read_own(self, token):
        self.ids.append(token)
        return self.chances()

    def chances(self):
        found = table(self.ids, self.seed)
        found[0] = 0  # a token that cannot be drafted
        return found / found.sum()

    def forget(self, length):
        del self.ids[length:]


def test_every_text_is_as_likely_as_the_target_says():
    """By going through every way the draws can fall, of drafting, accepting and drawing again."""
    draws, found, ways = Enumerated(), {}, 0
    while draws.more:
        draws.begin()
        ids, accepted, proposed = decode(Told(1), Told(2), [1, 2], NEW, GUESSES, draws)
        draws.end()
        ways += 1
        assert sum(count + 1 for count in accepted) == NEW
        assert all(count <= most <= GUESSES for count, most in zip(accepted, proposed, strict=True))
        found[tuple(ids[2:])] = found.get(tuple(ids[2:]), 0.0) + draws.likely
    assert ways > 300
    assert sum(found.values()) == pytest.approx(1, abs=1e-9)
    for text, likely in found.items():
        wanted, before = 1.0, [1, 2]
        for token in text:
            wanted *= float(table(before, 1)[token])
            before.append(token)
        assert likely == pytest.approx(wanted, abs=1e-9), text


def test_one_token_is_judged_as_the_paper_says():
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.1, 0.6, 0.3])
    taken = [acceptance(p, q, token) for token in range(3)]
    assert taken == pytest.approx([1, 0.5, 2 / 3])
    rejected = sum(float(q[token]) * (1 - taken[token]) for token in range(3))
    for token in range(3):
        likely = float(q[token]) * taken[token] + rejected * float(left_over(p, q)[token])
        assert likely == pytest.approx(float(p[token]), abs=1e-6)
    assert left_over(p, p).tolist() == p.tolist()


@pytest.fixture(scope="module", params=["trained", "trained_medusa"])
def opened(request, tiny_model_dir):
    model = load_whole(tiny_model_dir, dtype=torch.float32)
    head = request.getfixturevalue(request.param)
    drafter = open_head(head, tiny_model_dir, model.config, model.get_input_embeddings().weight, torch.float32)
    return ModelTarget(model, "model.layers", drafter.shape.states), drafter


@pytest.mark.parametrize("prompt", [[5, 6, 7, 8], [5]])
def test_what_is_accepted_is_what_total_variation_says(opened, prompt):
    target, drafter = opened
    found = speculate_with_head(target, drafter, torch.tensor([prompt]), 150, 3, 1)
    assert sum(count + 1 for count in found.accepted) == 150
    assert found.ids[: len(prompt)].tolist() == prompt
    assert max(found.accepted) > 0
    apart = variations_by_depth(target, drafter, found, drafter.shape.most or depths_of(3))
    figures = acceptance_figures(found, apart)
    assert (
        abs(figures["accepted_per_step"] - figures["accepted_per_step_expected"]) < 4 * figures["accepted_per_step_se"]
    )
    assert abs(figures["acceptance"] - figures["acceptance_expected"]) < 4 * figures["acceptance_se"]


def test_cached_reading_is_reading_anew(opened):
    """What target and head say with caches cut back and gone on with is what they say of whole texts."""
    target, drafter = opened
    ids = [5, 6, 7, 8, 9, 10]
    target.forget(0)
    drafter.begin()
    _, states = target.read(ids[:4])
    drafter.read(ids[1:4], states[:3])
    drafter.read_own(50)
    target.forget(3)
    chances, states = target.read(ids[3:])
    whole, all_states = target.whole(torch.tensor(ids))
    torch.testing.assert_close(chances, whole[3:], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(states, all_states[3:], rtol=1e-3, atol=1e-4)
    found = drafter.read(ids[4:], all_states[3:5])
    embedded = drafter.embedding[torch.tensor(ids[1:])]
    output = drafter.head.unrolled(embedded, all_states[:-1], 1)[0]
    wanted = drafter.spread(drafter.head.logits(output[-1:]))[0]
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-5)


def test_draws_are_those_of_their_seed():
    chances = torch.tensor([0.2, 0.5, 0.3])
    drawn = [[RandomDraws(seed).token(chances) for seed in range(50)] for _ in range(2)]
    assert drawn[0] == drawn[1]
    assert set(drawn[0]) == {0, 1, 2}


def test_more_than_the_blocks_of_medusa_cannot_be_drafted(main, capsys, trained_medusa, tiny_model_dir):
    command = ["eval", "--draft", trained_medusa, "--ref", tiny_model_dir, "--generate", "The water"]
    assert main(*command, "--max-new-tokens", 12, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["draft_tokens"], set(found["tokens_per_step_expected"])) == (4, {"2", "3", "4"})
    assert main(*command, "--draft-tokens", 5) == 2
    assert "drafts 4 tokens at a time, not 5" in capsys.readouterr().err


def test_what_medusa_reads_is_what_the_head_of_the_model_reads(trained_medusa, tiny_model_dir):
    """Behind the last norm, as vLLM hands it on."""
    model = load_whole(tiny_model_dir, dtype=torch.float32)
    target = ModelTarget(model, "model.layers", ())
    ids = torch.tensor([5, 6, 7, 8])
    chances, states = target.whole(ids)
    with torch.no_grad():
        torch.testing.assert_close(states, model.model(ids[None]).last_hidden_state[0])
        torch.testing.assert_close(chances, (states @ model.get_output_embeddings().weight.T).softmax(dim=-1))


def test_the_command_line_decodes_with_a_head(main, capsys, trained, tiny_model_dir):
    command = ["eval", "--draft", trained, "--ref", tiny_model_dir, "--generate", "The water", "--max-new-tokens", 24]
    assert main(*command, "--json", "--draft-tokens", 3) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["new_tokens"], found["draft_tokens"]) == (24, 3)
    assert main(*command, "--adapter", trained) == 2
    assert "--draft names a head" in capsys.readouterr().err


def changed(trained, to, change=None, tensors=None):
    """A copy of a head with another config or other tensors."""
    shutil.copytree(trained, to)
    if change is not None:
        config = json.loads((to / "config.json").read_text())
        change(config)
        (to / "config.json").write_text(json.dumps(config))
    if tensors is not None:
        held = load_file(to / "model.safetensors")
        tensors(held)
        save_file(held, to / "model.safetensors")
    return to


def refused(main, capsys, draft, ref):
    """The words of an evaluation that is refused in one line and a hint."""
    code = main("eval", "--draft", draft, "--ref", ref, "--generate", "a", "--max-new-tokens", 4)
    first, *rest = capsys.readouterr().err.splitlines()
    assert code in (1, 2)
    assert all(line.startswith("  hint: ") for line in rest)
    return first


CONFIGS = {
    "type 'dflash'": lambda config: config.update(speculators_model_type="dflash"),
    "norm_before_residual False is not known": lambda config: config.update(norm_before_residual=False),
    "hidden_act 'gelu'": lambda config: config["transformer_layer_config"].update(hidden_act="gelu"),
    "heads is 'many'": lambda config: config["transformer_layer_config"].update(num_attention_heads="many"),
    "does not name three hidden states": lambda config: config.update(eagle_aux_hidden_state_layer_ids=[1]),
    "config.json asks for": lambda config: config["transformer_layer_config"].update(intermediate_size=7),
    "layers or more": lambda config: config.update(eagle_aux_hidden_state_layer_ids=[1, 2, 40]),
}


@pytest.mark.parametrize("words", CONFIGS)
def test_heads_that_compute_something_else_are_refused(words, main, capsys, trained, tiny_model_dir, tmp_path):
    assert words in refused(main, capsys, changed(trained, tmp_path / "head", CONFIGS[words]), tiny_model_dir)


def test_heads_of_other_models_and_damaged_ones_are_refused(main, capsys, trained, tiny_model_dir, tmp_path):
    def far(held):
        held["d2t"][-1] = 10**6

    def twice(held):
        held["d2t"][0] = held["d2t"][1] + 1

    for name, tensors in (("far", far), ("twice", twice)):
        said = refused(main, capsys, changed(trained, tmp_path / name, None, tensors), tiny_model_dir)
        assert "by its d2t" in said
    assert "tensor fc.weight is missing" in refused(
        main, capsys, changed(trained, tmp_path / "less", None, lambda held: held.pop("fc.weight")), tiny_model_dir
    )
    other = changed(trained, tmp_path / "other", lambda config: config["transformer_layer_config"].update(vocab_size=9))
    assert f"of 9 tokens, {tiny_model_dir} has 1200" in refused(main, capsys, other, tiny_model_dir)


def test_a_head_of_another_width_is_refused(trained, random_model_dir):
    model = load_whole(random_model_dir("llama", vocab_size=1200), dtype=torch.float32)
    with pytest.raises(CheckpointError, match="of 256 channels"):
        open_head(trained, "ref", model.config, model.get_input_embeddings().weight, torch.float32)
