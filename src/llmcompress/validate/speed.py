"""The speed of a whole model in reading a prompt and in decoding. On a GPU a decoding step is a CUDA graph."""

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, StaticCache

from llmcompress.significant import significant
from llmcompress.validate.request import Timing

_WARM = 3  # steps on a side stream before a capture


def speeds(model: nn.Module, device: torch.device, timing: Timing) -> list[dict[str, Any]]:
    """Tokens per second of all sequences together, at each batch, after an untimed first run.

    model: a transformers causal model. Decoding is greedy.
    """
    return [_speed(model, device, batch, timing) for batch in timing.batches]


@torch.no_grad()
def _speed(model: Any, device: torch.device, batch: int, timing: Timing) -> dict[str, Any]:
    prompt, new = timing.prompt, timing.new
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, int(model.config.get_text_config().vocab_size), (batch, prompt), generator=generator)
    ids = ids.to(device)
    room = prompt + 2 * new + _WARM

    def read() -> tuple[Any, Tensor]:
        cache = StaticCache(model.config, room) if device.type == "cuda" else DynamicCache(config=model.config)
        logits = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        return cache, logits[:, -1:].argmax(dim=-1)

    read()
    reading = median(_timed(read, device) for _ in range(timing.repeats))
    cache, token = read()

    def step() -> None:
        logits = model(token, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        token.copy_(logits[:, -1:].argmax(dim=-1))

    go, captured = (step, False) if device.type != "cuda" else _captured(step)
    go()

    def write() -> None:
        for _ in range(new):
            go()

    return {
        "batch": batch,
        "prompt": prompt,
        "new": new,
        "prefill_tokens_per_second": significant(batch * prompt / reading, 4),
        "decode_tokens_per_second": significant(batch * new / _timed(write, device), 4),
        "cuda_graph": captured,
    }


def _captured(step: Callable[[], None]) -> tuple[Callable[[], None], bool]:
    """A step as a CUDA graph and True; the step itself and False if the step cannot be captured."""
    aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(_WARM):
            step()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            step()
    except RuntimeError:
        torch.cuda.synchronize()
        return step, False
    return graph.replay, True


def _timed(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of `work`, including what the device still has to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begun = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begun
