"""Which inputs a matrix can best do without, and what its other columns become so that its outputs stay near."""

import torch
from torch import Tensor

from llmcompress.errors import RunError
from llmcompress.solve.damping import damp

_LADDER = (1.0, 10.0, 100.0)


def input_energy(weight: Tensor, hessian: Tensor) -> Tensor:
    """[in]: ||W[:, c]||^2 H_cc, the mean square of what input c adds to the outputs of W [out, in].

    hessian [in, in]: mean x x^T of the inputs.
    """
    return weight.square().sum(dim=0) * hessian.diagonal()


def strongest(weight: Tensor, hessian: Tensor, count: int) -> Tensor:
    """Numbers of the `count` inputs of the largest energy, rising; of equal ones the first."""
    return input_energy(weight, hessian).argsort(descending=True, stable=True)[:count].sort().values


def least_missed(weight: Tensor, hessian: Tensor, count: int, percdamp: float, rounds: int = 64) -> Tensor:
    """Numbers of `count` inputs, rising, that are left when those go that the others make up for best.

    In each round those of the lowest ||W[:, c]||^2 / [H^-1]_cc go (optimal brain surgery for whole columns, as in
    arXiv:2302.04089, section 3), and W and H^-1 become what they are without them; so of two inputs that are alike one
    stays. RunError if H has no inverse.
    """
    inverse = torch.cholesky_inverse(_factor(hessian, percdamp))
    left, moved = torch.arange(weight.shape[1], device=weight.device), weight.to(torch.float64)
    step = max(1, -(-(len(left) - count) // rounds))
    while len(left) > count:
        costs = moved.square().sum(dim=0) / inverse.diagonal()
        order = costs.argsort(stable=True)
        gone = order[: min(step, len(left) - count)]
        stay = order[len(gone) :].sort().values
        block = torch.linalg.cholesky(inverse[gone][:, gone])
        across = torch.cholesky_solve(inverse[gone][:, stay], block)
        moved = moved[:, stay] - moved[:, gone] @ across
        inverse = inverse[stay][:, stay] - inverse[stay][:, gone] @ across
        left = left[stay]
    return left


def refitted(weight: Tensor, hessian: Tensor, kept: Tensor, percdamp: float) -> Tensor:
    """W' [out, kept] such that W' x[kept] is nearest to W x: least squares on H = mean x x^T [in, in], float32.

    W' = W[:, K] + W[:, P] H[P, K] (H[K, K] + damping)^-1 for the kept K and the others P: W H[:, K] H[K, K]^-1 without
    damping, and with it drawn towards the weights that were, not towards zero. RunError if H has no inverse.
    """
    gone = torch.ones(weight.shape[1], dtype=torch.bool, device=weight.device)
    gone[kept] = False
    lower = _factor(hessian[kept][:, kept], percdamp)
    missing = (weight[:, gone] @ hessian[gone][:, kept]).to(torch.float64)
    return weight[:, kept] + torch.cholesky_solve(missing.T, lower).T.to(torch.float32)


def narrowing_loss(weight: Tensor, hessian: Tensor, kept: Tensor, after: Tensor) -> float:
    """Squared error of the outputs per token, as a share of their energy, when W' [out, kept] takes W's place."""
    delta = weight.clone()
    delta[:, kept] -= after
    energy = float((weight @ hessian).mul_(weight).sum())
    return float((delta @ hessian).mul_(delta).sum()) / max(energy, 1e-30)


def _factor(hessian: Tensor, percdamp: float) -> Tensor:
    """Lower Cholesky factor, float64, with percdamp * mean(diagonal) added; ten and a hundred times that if it must."""
    lower: Tensor
    for step in _LADDER:
        lower, info = torch.linalg.cholesky_ex(damp(hessian.to(torch.float64, copy=True), percdamp * step))
        if int(info) == 0:
            return lower
    most = f"{percdamp * _LADDER[-1]:g}"
    raise RunError(
        f"a Gram matrix of {hessian.shape[0]} inputs is not positive definite even with {most} of its mean added",
        "use more calibration samples",
    )
