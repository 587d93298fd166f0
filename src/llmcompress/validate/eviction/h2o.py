"""Heavy hitters: what got the most attention, per query that could see it, stays (Zhang et al. 2023, section 4).

The paper sums attention while it generates; over a context that was read at once each sum is divided by the number of
its queries, as in kvpress' ObservedAttention, or early tokens would win by their age.
"""

import torch
from torch import Tensor

from llmcompress.validate.eviction.score import Context, Score


def _score(context: Context) -> Tensor:
    length = context.key.shape[2]
    queries = torch.arange(length, 0, -1, device=context.weights.device, dtype=context.weights.dtype)
    return context.by_key_head(context.weights.sum(2) / queries)


SCORE = Score("h2o", _score)
