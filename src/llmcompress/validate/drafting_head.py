"""Speculative decoding with a draft head, which drafts upon hidden states of its target.

A token x that was drafted with chance q(x) is accepted with chance min(1, p(x) / q(x)) where the target gives it p(x);
in place of a rejected one a token is drawn from max(p - q, 0), normalised. So the text has the target's distribution
(arXiv:2211.17192, section 2.3 and appendix A).
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import DynamicCache

from llmcompress.errors import CheckpointError
from llmcompress.model.draft_heads.base import DraftHead, DraftShape
from llmcompress.model.draft_heads.head_files import read_draft
from llmcompress.validate.speculative import Drafted
from llmcompress.validate.token_statistics import Array

_AT_HEAD = -1  # stands for what the model's head reads


class Draws(Protocol):
    """Where chance comes from."""

    def token(self, chances: Tensor) -> int:
        """A token, drawn by chances [vocabulary] that sum to 1."""
        ...

    def accepts(self, chance: float) -> bool:
        """True as often as `chance` says."""
        ...


class RandomDraws:
    """Draws of a generator of its own."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def token(self, chances: Tensor) -> int:
        return int(torch.multinomial(chances.to("cpu", torch.float64), 1, generator=self._generator))

    def accepts(self, chance: float) -> bool:
        return float(torch.rand((), dtype=torch.float64, generator=self._generator)) < chance


class Judge(Protocol):
    """The target: a model that reads tokens one after the other."""

    def read(self, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Chances [tokens, vocabulary] of what follows each further token, and its hidden states [tokens, width]."""
        ...

    def forget(self, length: int) -> None:
        """Keep so many of the tokens that were read."""
        ...


class Drafter(Protocol):
    """A head that reads tokens, each beside the hidden states of the token before."""

    def read(self, ids: Sequence[int], states: Tensor) -> Tensor:
        """Chances [vocabulary] of what follows the last of further tokens. states [tokens, width]."""
        ...

    def read_own(self, token: int) -> Tensor:
        """The same of one token that was drafted, until `read` is called again."""
        ...


def decode(
    target: Judge, drafter: Drafter, prompt: Sequence[int], tokens: int, guesses: int, draws: Draws
) -> tuple[list[int], list[int], list[int]]:
    """Sample `tokens` tokens after a prompt: all ids, and by step the tokens that were accepted and proposed."""
    ids, accepted, proposed = list(prompt), list[int](), list[int]()
    states = target.read(ids[:-1])[1] if len(ids) > 1 else None
    while (left := len(prompt) + tokens - len(ids)) > 0:
        drafted, chances = list[int](), list[Tensor]()
        if states is not None:
            while len(drafted) < min(guesses, left - 1):
                last = drafter.read_own(drafted[-1]) if drafted else drafter.read(ids[-len(states) :], states)
                chances.append(last)
                drafted.append(draws.token(last))
        wanted, found = target.read([ids[-1], *drafted])
        count = 0
        while count < len(drafted) and draws.accepts(acceptance(wanted[count], chances[count], drafted[count])):
            count += 1
        judged = wanted[count] if count == len(drafted) else left_over(wanted[count], chances[count])
        ids += [*drafted[:count], draws.token(judged)]
        target.forget(len(ids) - 1)
        states = found[: count + 1]
        accepted.append(count)
        proposed.append(len(drafted))
    return ids, accepted, proposed


def acceptance(wanted: Tensor, chances: Tensor, token: int) -> float:
    """The chance that a drafted token is accepted. wanted, chances [vocabulary]: the target's, and the draft's."""
    return min(1.0, float(wanted[token]) / float(chances[token]))


def left_over(wanted: Tensor, chances: Tensor) -> Tensor:
    """The chances [vocabulary] of the token in place of a rejected one."""
    rest = (wanted - chances).clamp(min=0)
    return rest / rest.sum() if float(rest.sum()) > 0 else wanted


class ModelTarget:
    """A transformers model with its cache. layers: path of the list of its layers.

    states: numbers of the hidden states that are wanted; where there are none, what the model's head reads.
    """

    def __init__(self, model: Any, layers: str, states: Sequence[int]) -> None:
        self.model, self.states = model, states or (_AT_HEAD,)
        self._cache, self._found = DynamicCache(), dict[int, Tensor]()
        modules = list(model.get_submodule(layers).children())
        if not states:
            model.get_output_embeddings().register_forward_pre_hook(self._entering(_AT_HEAD), with_kwargs=True)
        for number in states:
            if number < len(modules):
                modules[number].register_forward_pre_hook(self._entering(number), with_kwargs=True)
            else:
                modules[-1].register_forward_hook(self._leaving(number))

    def _entering(self, number: int) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._found[number] = args[0] if args else kwargs["hidden_states"]

        return hook

    def _leaving(self, number: int) -> Any:
        def hook(_: nn.Module, __: Any, out: Any) -> None:
            self._found[number] = out if isinstance(out, Tensor) else out[0]

        return hook

    @torch.no_grad()
    def read(self, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        given = torch.tensor([list(ids)], device=self.model.device)
        logits = self.model(given, past_key_values=self._cache, use_cache=True).logits[0]
        return logits.to(torch.float32).softmax(dim=-1), self._states()

    def forget(self, length: int) -> None:
        beyond = self._cache.get_seq_length() - length
        if beyond:
            self._cache.crop(-beyond)

    @torch.no_grad()
    def whole(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The same of a whole text [tokens], without the cache."""
        logits = self.model(ids[None], use_cache=False).logits[0]
        return logits.to(torch.float32).softmax(dim=-1), self._states()

    def _states(self) -> Tensor:
        return torch.cat([self._found[number][0] for number in self.states], dim=-1)


class HeadDrafter:
    """A head beside the embedding [vocabulary, hidden] of its target. ids: of the tokens that it can draft."""

    def __init__(self, head: DraftHead, shape: DraftShape, embedding: Tensor, ids: Tensor) -> None:
        self.head, self.shape, self.embedding, self.ids = head, shape, embedding, ids
        self.begin()

    def begin(self) -> None:
        """Forget all that was read."""
        self._drafting = self.head.drafting()

    @torch.no_grad()
    def read(self, ids: Sequence[int], states: Tensor) -> Tensor:
        embedded = self.embedding[torch.tensor(list(ids), device=self.embedding.device)]
        return self._chances(self._drafting.read(embedded, states))

    @torch.no_grad()
    def read_own(self, token: int) -> Tensor:
        return self._chances(self._drafting.read_own(self.embedding[token]))

    def _chances(self, output: Tensor) -> Tensor:
        return self.spread(self.head.logits(output[None]))[0]

    def spread(self, logits: Tensor) -> Tensor:
        """Chances [rows, vocabulary] of all tokens, from logits [rows, draft vocabulary]."""
        chances = logits.to(torch.float32).softmax(dim=-1)
        found = chances.new_zeros(len(logits), len(self.embedding))
        found[:, self.ids] = chances
        return found


def open_head(path: Path, ref: Path, config: Any, embedding: Tensor, dtype: torch.dtype) -> HeadDrafter:
    """The head in a directory, for the model `ref` of a config; CheckpointError where it was made for another."""
    shape, checkpoint = read_draft(path)
    _refuse_other(path, shape, ref, config.get_text_config(), embedding)
    device = embedding.device
    weights = {name: checkpoint.read_finite(name).to(device, dtype) for name in shape.matrices}
    ids = shape.ids(checkpoint.read).to(device)
    if int(ids.min()) < 0 or int(ids.max()) >= shape.target_vocabulary or len(torch.unique(ids)) != len(ids):
        raise CheckpointError(f"{path} drafts tokens that {ref} does not have, by its {shape.ids_name}")
    return HeadDrafter(shape.head(weights), shape, embedding, ids)


def _refuse_other(path: Path, shape: DraftShape, ref: Path, config: Any, embedding: Tensor) -> None:
    facts = {"tokens": (shape.target_vocabulary, embedding.shape[0]), "channels": (shape.hidden, embedding.shape[1])}
    layers, read = config.num_hidden_layers, max(shape.states, default=0)
    if layers < read:
        facts["layers or more"] = read, layers
    for what, (own, found) in facts.items():
        if own != found:
            raise CheckpointError(
                f"{path} drafts for a model of {own} {what}, {ref} has {found}",
                "give the model it was made for as --ref",
            )


def speculate_with_head(
    target: ModelTarget, drafter: HeadDrafter, prompt: Tensor, tokens: int, guesses: int, seed: int
) -> Drafted:
    """`speculate` (validate/speculative.py) with a head for a draft."""
    target.forget(0)
    drafter.begin()
    begun = time.perf_counter()
    ids, accepted, proposed = decode(target, drafter, prompt[0].tolist(), tokens, guesses, RandomDraws(seed))
    seconds = time.perf_counter() - begun
    return Drafted(torch.tensor(ids, device=prompt.device), prompt.shape[1], accepted, proposed, seconds)


@torch.no_grad()
def variations_by_depth(target: ModelTarget, drafter: HeadDrafter, drafted: Drafted, depths: int) -> Array:
    """Total variation [depths, new] at the prefix of every new token, when so many tokens before it were drafted."""
    wanted, states = target.whole(drafted.ids)
    embedded = drafter.embedding[drafted.ids[1:]].to(states.dtype)
    outputs = drafter.head.unrolled(embedded, states[:-1], depths)
    first = drafted.prompt - 2  # the row of the prompt's last token
    rows = []
    for output in outputs:
        chances = drafter.spread(drafter.head.logits(output[max(first, 0) : -1]))
        apart = (wanted[max(first, 0) + 1 : -1] - chances).abs().sum(dim=-1) / 2
        rows.append(apart if first >= 0 else functional.pad(apart, (1, 0), value=1.0))  # nothing to draft the first by
    found: Array = torch.stack(rows).to("cpu", torch.float64).numpy()
    return found
