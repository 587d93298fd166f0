"""TOVA: what the last query attends to, in the mean over all heads, stays (Oren et al. 2024, section 3.2)."""

import torch
from torch import Tensor
from torch.nn import functional

from llmcompress.validate.eviction.score import Context, Score


def _score(context: Context) -> Tensor:
    looked_at = context.weights[:, :, -1, :-1].mean(1, keepdim=True)
    return functional.pad(looked_at, (0, 1), value=torch.inf).expand(context.key.shape[:3])


SCORE = Score("tova", _score, always=1)
