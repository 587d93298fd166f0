"""Speculative decoding for real: a compressed model drafts tokens that its original accepts or rejects.

A token of the draft q is accepted with probability sum_x min(p, q) = 1 - TV(p, q) by a target p (Leviathan et al.,
arXiv:2211.17192, section 3.2). transformers' assisted generation draws and judges tokens; this module counts the
accepted tokens and compares them with the acceptance that the total variation at every prefix promises.
"""

import time
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import GenerationConfig
from transformers.generation import BaseStreamer

from llmcompress.significant import significant
from llmcompress.validate.token_statistics import Array

GUESSES = (2, 3, 4, 5, 6, 7, 8)  # draft lengths for which tokens per step are predicted


@dataclass(frozen=True)
class Drafted:
    """ids [prompt + new] int64. prompt: number of its tokens. accepted, proposed: draft tokens in each step."""

    ids: Tensor
    prompt: int
    accepted: list[int]
    proposed: list[int]
    seconds: float

    @property
    def starts(self) -> list[int]:
        """The number, from 0, of the first new token of each step."""
        return list(accumulate((count + 1 for count in self.accepted[:-1]), initial=0))


class _Steps(BaseStreamer):  # type: ignore[misc]
    """A streamer that counts the tokens of each step: the accepted draft tokens and one token of the target."""

    def __init__(self) -> None:
        self.told: list[int] = []

    def put(self, value: Tensor) -> None:
        self.told.append(value.numel())

    def end(self) -> None:
        pass


def speculate(target: nn.Module, draft: nn.Module, prompt: Tensor, tokens: int, guesses: int, seed: int) -> Drafted:
    """Sample `tokens` new tokens from the target's distribution after prompt [1, length], drafting `guesses` at once.

    An end-of-text token does not stop sampling, so that every step counts. Global random state is restored.
    """
    plain = draft.generation_config
    steps = _Steps()
    draft.generation_config = GenerationConfig(
        num_assistant_tokens=guesses, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.0
    )
    try:
        begun = time.perf_counter()
        ids = _sampled(target, prompt, tokens, seed, assistant_model=draft, streamer=steps)
        seconds = time.perf_counter() - begun
    finally:
        draft.generation_config = plain
    accepted = [count - 1 for count in steps.told[1:]]  # the first count is the prompt
    done = accumulate((count + 1 for count in accepted[:-1]), initial=0)
    return Drafted(ids, prompt.shape[1], accepted, [min(guesses, tokens - count - 1) for count in done], seconds)


def sample(target: nn.Module, prompt: Tensor, tokens: int, seed: int) -> float:
    """Seconds that the target takes to sample `tokens` tokens without a draft."""
    begun = time.perf_counter()
    _sampled(target, prompt, tokens, seed)
    return time.perf_counter() - begun


def _sampled(target: nn.Module, prompt: Tensor, tokens: int, seed: int, **options: Any) -> Tensor:
    """prompt [1, length] followed by tokens sampled from the full distribution: [length + tokens]."""
    own: Any = target.generation_config
    asked = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=tokens, pad_token_id=own.pad_token_id or 0
    )
    target.generation_config = asked  # otherwise generate mixes in the checkpoint's settings
    devices = [prompt.device] if prompt.device.type == "cuda" else []
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=devices):
            torch.manual_seed(seed)
            out = target.generate(prompt, attention_mask=torch.ones_like(prompt), **options)  # type: ignore[operator]
    finally:
        target.generation_config = own
    if prompt.device.type == "cuda":
        torch.cuda.synchronize(prompt.device)
    return out[0]  # type: ignore[no-any-return]


@torch.no_grad()
def total_variations(target: nn.Module, draft: nn.Module, drafted: Drafted) -> Array:
    """Total variation [new] between both models at the prefix of every new token."""
    ids = drafted.ids[None]
    first = drafted.prompt - 1
    chances = [
        model(ids, use_cache=False).logits[0, first:-1].to(torch.float32).softmax(dim=-1) for model in (target, draft)
    ]
    found: Array = (chances[0] - chances[1]).abs().sum(dim=-1).div(2).to("cpu", torch.float64).numpy()
    return found


def acceptance_figures(drafted: Drafted, tv: Array) -> dict[str, Any]:
    """Figures of a drafted text: as measured, and as tv [new] predicts for the same steps.

    tv may be [depths, new], where it hangs on how many tokens of a step come before: one row for each number of them,
    as many as can be drafted.

    acceptance: share of judged tokens that were accepted; tokens after a step's first rejected token are not judged.
    """
    accepted, proposed = np.array(drafted.accepted), np.array(drafted.proposed)
    judged = accepted + (accepted < proposed)
    depths = depths_of(int(proposed.max(initial=0)))
    chance: Array = 1 - tv[:depths] if tv.ndim == 2 else np.broadcast_to(1 - tv, (depths, len(tv)))
    own = np.concatenate(
        [chance.diagonal(start)[:count] for start, count in zip(drafted.starts, judged, strict=True)] or [np.empty(0)]
    )
    rate = float(accepted.sum() / max(judged.sum(), 1))
    foretold = [_accepted(chance, start, count) for start, count in zip(drafted.starts, proposed, strict=True)]
    return {
        "new_tokens": int((accepted + 1).sum()),
        "steps": len(accepted),
        "draft_tokens": int(proposed.max(initial=0)),
        "accepted_per_step": significant(accepted.mean()),
        "accepted_per_step_se": significant(_error(accepted)),
        "accepted_per_step_expected": significant(np.mean(foretold)),
        "acceptance": significant(rate),
        "acceptance_se": significant((rate * (1 - rate) / max(judged.sum(), 1)) ** 0.5),
        "acceptance_expected": significant(own.mean() if len(own) else 0.0),
        "acceptance_expected_se": significant(_error(own)),
        "tokens_per_step_expected": {
            str(count): significant(1 + np.mean([_accepted(chance, start, count) for start in range(chance.shape[1])]))
            for count in GUESSES
            if count <= min(chance.shape)
        },
    }


def _accepted(chance: Array, start: int, count: int) -> float:
    """Expected accepted tokens of `count` tokens drafted from `start` on. chance [depths, new]: of acceptance."""
    return float(np.cumprod(chance.diagonal(start)[:count]).sum())


def depths_of(guesses: int) -> int:
    """How many depths figures of so many tokens drafted at a time are made of."""
    return max(*GUESSES, guesses)


def _error(values: Array | Any) -> float:
    """Standard error of a mean."""
    return float(np.std(values, ddof=1) / len(values) ** 0.5) if len(values) > 1 else 0.0
