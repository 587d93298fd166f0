"""Inputs in int8, as checkpoints of LLM.int8() are run: rounded token by token, but for channels with outliers.

The products of codes are sums of whole numbers, so that rounding the inputs and multiplying decoded values gives what
an int8 kernel gives, up to the order of sums.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from llmcompress.engine.decoded import DecodedCheckpoint
from llmcompress.model.build import StreamedModel

_LIMIT = 127


def beyond(x: Tensor, threshold: float) -> Tensor:
    """x [..., in] in int8 as bitsandbytes has it: channels in which any |x| reaches `threshold` stay as they are.

    The values that do reach it do not widen a token's step; the others of their channels do.
    """
    large = x.abs() >= threshold
    step = x.masked_fill(large, 0).abs().amax(dim=-1, keepdim=True).to(torch.float32) / _LIMIT
    return _rounded(x, step, large.reshape(-1, x.shape[-1]).any(dim=0))


def beside(x: Tensor, index: Tensor) -> Tensor:
    """x [..., in] in int8 but for the channels index [k] int64, which neither are rounded nor widen a token's step."""
    kept = torch.zeros(x.shape[-1], dtype=torch.bool, device=x.device)
    kept[index] = True
    step = x.masked_fill(kept, 0).abs().amax(dim=-1, keepdim=True).to(torch.float32) / _LIMIT
    return _rounded(x, step, kept)


def _rounded(x: Tensor, step: Tensor, kept: Tensor) -> Tensor:
    codes = (x.to(torch.float32) * torch.where(step > 0, 1 / step, 0.0)).round_().clamp_(-_LIMIT, _LIMIT)
    return torch.where(kept, x, codes.mul_(step).to(x.dtype))


@contextmanager
def int8_inputs(model: StreamedModel, number: int, layer: nn.Module) -> Iterator[None]:
    """Within, the linears of a layer round their inputs where the checkpoint is one of LLM.int8()."""
    weights = model.weights
    hooks = []
    if isinstance(weights, DecodedCheckpoint):
        for name, module in layer.named_modules():
            if isinstance(module, nn.Linear):
                disk = model.disk_name(number, f"{name}.weight").removesuffix(".weight")
                hooks += watched(weights, disk, module)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def watched(weights: DecodedCheckpoint, disk: str, module: nn.Module) -> list[Any]:
    """Handles of the hook that rounds a linear's inputs, if its on-disk module is one of LLM.int8()."""
    headers = weights.headers
    if disk not in headers.packed:
        return []
    settings = headers.stored.config["quantization_config"]
    if headers.format.name == "int8-outliers":
        index = weights.part(f"{disk}.outlier_index").to(torch.int64)
        rounding = partial(beside, index=index[index >= 0])
    elif headers.format.name == "bitsandbytes" and settings.get("load_in_8bit"):
        rounding = partial(beyond, threshold=float(settings.get("llm_int8_threshold", 6.0)))
    else:
        return []
    return [module.register_forward_pre_hook(lambda _, inputs: (rounding(inputs[0]), *inputs[1:]))]
