"""Speculative decoding for real: a compressed model drafts tokens that its original accepts or rejects.

A token of the draft q is accepted with probability sum_x min(p, q) = 1 - TV(p, q) by a target p (Leviathan et al.,
arXiv:2211.17192, section 3.2). transformers' assisted generation draws and judges; here it is counted, and compared
with what the total variation at every prefix of the target's own text promises.
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

from llmcompress.validate.token_statistics import Array

GUESSES = (2, 3, 4, 5, 6, 7, 8)  # draft lengths whose tokens per step are foretold


@dataclass(frozen=True)
class Drafted:
    """ids [prompt + new] int64. prompt: tokens of it. accepted, proposed: tokens of the draft in each step."""

    ids: Tensor
    prompt: int
    accepted: list[int]
    proposed: list[int]
    seconds: float

    @property
    def starts(self) -> list[int]:
        """The new token, counted from 0, that each step begins with."""
        return list(accumulate((count + 1 for count in self.accepted[:-1]), initial=0))


class _Steps(BaseStreamer):  # type: ignore[misc]
    """Tokens that each step gave, as a streamer is told of them: the accepted ones, and one of the target's own."""

    def __init__(self) -> None:
        self.told: list[int] = []

    def put(self, value: Tensor) -> None:
        self.told.append(value.numel())

    def end(self) -> None:
        pass


def speculate(target: nn.Module, draft: nn.Module, prompt: Tensor, tokens: int, guesses: int, seed: int) -> Drafted:
    """Sample `tokens` new tokens of the target's own distribution after prompt [1, length], `guesses` drafted at once.

    The end of a text does not end it, so that every step counts. Global random state is left as it was.
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
    accepted = [count - 1 for count in steps.told[1:]]  # the first thing a streamer is told is the prompt
    done = accumulate((count + 1 for count in accepted[:-1]), initial=0)
    return Drafted(ids, prompt.shape[1], accepted, [min(guesses, tokens - count - 1) for count in done], seconds)


def sample(target: nn.Module, prompt: Tensor, tokens: int, seed: int) -> float:
    """Seconds that as many tokens take the target alone."""
    begun = time.perf_counter()
    _sampled(target, prompt, tokens, seed)
    return time.perf_counter() - begun


def _sampled(target: nn.Module, prompt: Tensor, tokens: int, seed: int, **options: Any) -> Tensor:
    """prompt [1, length] and what is sampled after it [length + tokens], nothing of the distribution cut off."""
    own: Any = target.generation_config
    asked = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=tokens, pad_token_id=own.pad_token_id or 0
    )
    target.generation_config = asked  # or else what the checkpoint's own says is mixed in
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
def distances(target: nn.Module, draft: nn.Module, drafted: Drafted) -> Array:
    """Total variation [new] between both models at the prefix of every new token."""
    ids = drafted.ids[None]
    first = drafted.prompt - 1
    chances = [
        model(ids, use_cache=False).logits[0, first:-1].to(torch.float32).softmax(dim=-1) for model in (target, draft)
    ]
    found: Array = (chances[0] - chances[1]).abs().sum(dim=-1).div(2).to("cpu", torch.float64).numpy()
    return found


def report(drafted: Drafted, tv: Array) -> dict[str, Any]:
    """Figures of a drafted text: measured ones, and what tv [new] promised for the same steps.

    acceptance: share of judged tokens that were accepted; those after the first rejected one of a step are not judged.
    """
    accepted, proposed = np.array(drafted.accepted), np.array(drafted.proposed)
    judged = accepted + (accepted < proposed)
    chance = 1 - tv
    rate = float(accepted.sum() / max(judged.sum(), 1))
    foretold = [_accepted(chance, start, count) for start, count in zip(drafted.starts, proposed, strict=True)]
    return {
        "new_tokens": int((accepted + 1).sum()),
        "steps": len(accepted),
        "draft_tokens": int(proposed.max(initial=0)),
        "accepted_per_step": _rounded(accepted.mean()),
        "accepted_per_step_se": _rounded(_error(accepted)),
        "accepted_per_step_expected": _rounded(np.mean(foretold)),
        "acceptance": _rounded(rate),
        "acceptance_se": _rounded((rate * (1 - rate) / max(judged.sum(), 1)) ** 0.5),
        "acceptance_expected": _rounded(chance.mean()),
        "acceptance_expected_se": _rounded(_error(chance)),
        "tokens_per_step_expected": {
            str(count): _rounded(1 + np.mean([_accepted(chance, start, count) for start in range(len(chance))]))
            for count in GUESSES
            if count <= len(chance)
        },
    }


def _accepted(chance: Array, start: int, count: int) -> float:
    """Tokens accepted, in the mean, of `count` drafted from `start` on, each with its own chance [new]."""
    return float(np.cumprod(chance[start : start + count]).sum())


def _error(values: Array | Any) -> float:
    """Standard error of a mean."""
    return float(np.std(values, ddof=1) / len(values) ** 0.5) if len(values) > 1 else 0.0


def _rounded(value: Any) -> float:
    return float(f"{float(value):.6g}")
