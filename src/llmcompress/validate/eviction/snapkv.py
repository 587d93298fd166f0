"""SnapKV: what the last 64 queries attend to, smoothed over 5 neighbours, stays (Li et al. 2024, section 4)."""

import torch
from torch import Tensor
from torch.nn import functional

from llmcompress.validate.eviction.score import Context, Score

_WINDOW = 64  # last queries, whose own keys are always kept
_KERNEL = 5  # positions that one mean goes over


def _score(context: Context) -> Tensor:
    looked_at = context.weights[:, :, -_WINDOW:, :-_WINDOW].mean(2)
    smooth = functional.avg_pool1d(looked_at, _KERNEL, stride=1, padding=_KERNEL // 2)
    return functional.pad(context.by_key_head(smooth), (0, _WINDOW), value=torch.inf)


SCORE = Score("snapkv", _score, always=_WINDOW)
