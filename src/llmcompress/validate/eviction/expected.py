"""Expected attention of queries to come, times the norm of the value (Devoto et al. 2025, "Expected Attention").

Queries before rotation are taken for normal, with the mean and the covariance of those of the context; both are turned
by the mean rotation of the next 512 positions. The expectation of exp(q k) is then exp(mean k + k covariance k / 2).
"""

import torch
from torch import Tensor
from torch.nn import functional

from llmcompress.validate.eviction.score import Context, Score

_SINKS = 4  # first tokens: they always stay, and their queries are outliers
_AHEAD = 512  # positions to come


def _score(context: Context) -> Tensor:
    assert context.rotation is not None  # which `rotates` asks for
    length = context.key.shape[2]
    still = context.rotation.undone(context.query)[:, :, _SINKS:]
    mean = still.mean(2, keepdim=True)
    covariance = (still - mean).mT @ (still - mean) / still.shape[2]
    ahead = range(length, length + _AHEAD)
    mean = context.rotation.averaged(mean, ahead)
    covariance = context.rotation.averaged(context.rotation.averaged(covariance, ahead).mT, ahead).mT
    share = context.query.shape[1] // context.key.shape[1]
    key = context.key[:, :, _SINKS:].repeat_interleave(share, dim=1)
    scaled = key * context.scaling
    logits = (scaled @ mean.mT)[..., 0] + ((scaled @ covariance) * scaled).sum(-1) / 2
    attention = context.by_key_head(logits.softmax(-1))
    return functional.pad(attention * context.value[:, :, _SINKS:].norm(dim=-1), (_SINKS, 0), value=torch.inf)


SCORE = Score("expected", _score, always=_SINKS, rotates=True)
