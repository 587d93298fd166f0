"""Keys of small norm stay: they get the most attention (Devoto et al. 2024, "A simple and effective L2 norm")."""

import torch
from torch import Tensor

from llmcompress.validate.eviction.score import Context, Score


def _score(context: Context) -> Tensor:
    kind = torch.promote_types(context.key.dtype, torch.float32)
    norms: Tensor = torch.linalg.vector_norm(context.key, dim=-1, dtype=kind)
    return -norms


SCORE = Score("knorm", _score)
