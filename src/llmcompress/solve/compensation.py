"""What GPTQ leaves of an error, known before any code is chosen."""

import torch
from torch import Tensor

from llmcompress.solve.damping import inverse_factor


def relief(seen: Tensor, weighed: Tensor, percdamp: float) -> Tensor:
    """The share [in] of an error's cost in each input channel that is left once later columns have made up for it.

    seen: mean Gram matrix [in, in] of the inputs, by which GPTQ compensates: of an error in column j it makes one along
    row j of U over U_jj, with (H + damping)^-1 = U^T U (arXiv:2210.17323, section 3.3). weighed: Gram matrix [in, in]
    by which errors are judged. Columns are in order of their energy. A channel without any cost keeps all of it.
    """
    order = torch.argsort(seen.diagonal(), descending=True, stable=True)
    factor = inverse_factor(seen[order][:, order], percdamp)
    rows = factor.ahead + torch.eye(len(order), device=seen.device)
    judged = weighed[order][:, order]
    cost, before = ((rows @ judged) * rows).sum(dim=1), judged.diagonal()
    share = torch.empty_like(before)
    share[order] = torch.where(before > 0, cost / before, 1.0)
    return share
