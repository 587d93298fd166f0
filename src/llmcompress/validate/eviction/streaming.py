"""StreamingLLM: the first four tokens and the most recent ones stay (Xiao et al. 2023, section 3.2)."""

import torch
from torch import Tensor

from llmcompress.validate.eviction.score import Context, Score

_SINKS = 4


def _score(context: Context) -> Tensor:
    places = torch.arange(context.key.shape[2], device=context.key.device, dtype=torch.float32)
    places[:_SINKS] = torch.inf
    return places.expand(context.key.shape[:3])


SCORE = Score("streaming", _score, always=_SINKS)
