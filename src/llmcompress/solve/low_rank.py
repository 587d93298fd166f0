"""The matrix of low rank that makes up best for an error."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LowRank:
    """b [out, rank] times a [rank, in]; float32."""

    b: Tensor
    a: Tensor

    def to(self, dtype: torch.dtype) -> "LowRank":
        """Both factors rounded to a type they can be stored in."""
        return LowRank(self.b.to(dtype), self.a.to(dtype))

    def product(self) -> Tensor:
        """The matrix [out, in], float32."""
        return self.b.to(torch.float32) @ self.a.to(torch.float32)


def low_rank(delta: Tensor, hessian: Tensor | None, rank: int) -> LowRank:
    """B A of that rank nearest to `delta` [out, in] in what it does to outputs: tr((D - BA) H (D - BA)^T) is least.

    hessian [in, in]: mean x x^T of the inputs; None for the identity, which gives the truncated SVD. The optimum
    projects outputs: B holds the first eigenvectors of D H D^T and A = B^T D. That is the B A = U_r S_r V_r^T L^-1 of
    D L = U S V^T with H = L L^T (EoRA, arXiv:2410.21271, section 3), without a factor of H, which may be singular.
    """
    frame, small = torch.linalg.qr(delta) if delta.shape[0] > delta.shape[1] else (None, delta)
    energy = small @ small.T if hessian is None else small @ hessian @ small.T
    _, vectors = torch.linalg.eigh((energy + energy.T).div_(2))  # by rising eigenvalue
    basis = vectors[:, -rank:].flip(1)
    b = (basis if frame is None else frame @ basis).contiguous()
    return LowRank(b, b.T @ delta)


def output_energy(rows: Tensor, hessian: Tensor | None) -> float:
    """tr(R H R^T) of rows [out, in]: the mean square of their outputs, summed; H is the identity if it is None."""
    return float((rows if hessian is None else rows @ hessian).mul(rows).sum(dtype=torch.float64))
