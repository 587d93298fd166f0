"""Hadamard rotations of any width: a constructed Hadamard matrix times random signs, in float64.

Orders are built, not listed: Sylvester's doubling of Paley's first (q + 1, q prime, q = 3 mod 4) and second (2q + 2,
q prime, q = 1 mod 4) constructions (R. Paley, 1933). Where no factorisation gives the width, blocks along the diagonal
of the largest order that divides it.
"""

from functools import cached_property

import torch
from torch import Tensor


class Rotation:
    """An orthogonal matrix R [size, size] = diag(signs) blockdiag(H, ..., H) / sqrt(order), H of order `order`."""

    def __init__(self, size: int, seed: int) -> None:
        self.size, self.order = size, largest_order(size)
        generator = torch.Generator().manual_seed(seed)
        self.signs = torch.randint(0, 2, (size,), generator=generator).to(torch.float64).mul_(2).sub_(1)

    @cached_property
    def _core(self) -> tuple[Tensor, int]:
        """The part of H that is not Sylvester's, and how often it is doubled."""
        core, doublings = _split(self.order)
        return _core(core), doublings

    def turn(self, x: Tensor) -> Tensor:
        """x R for x [..., size], in float64."""
        core, doublings = self._core
        small = core.shape[0]
        y = (x.to(torch.float64) * self.signs).reshape(-1, small, 1 << doublings)
        y = torch.einsum("rim,ij->rjm", y, core).contiguous()
        half = 1
        while half < 1 << doublings:  # the fast Walsh-Hadamard transform
            pairs = y.view(-1, (1 << doublings) // (2 * half), 2, half)
            y = torch.stack((pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]), dim=2)
            half *= 2
        turned: Tensor = y.reshape(x.shape) / self.order**0.5
        return turned

    def matrix(self) -> Tensor:
        """R itself."""
        return self.turn(torch.eye(self.size, dtype=torch.float64))


def largest_order(size: int) -> int:
    """The largest order of a Hadamard matrix built here that divides `size`."""
    return max(order for order in range(1, size + 1) if size % order == 0 and _split(order)[0])


def _split(order: int) -> tuple[int, int]:
    """(order of a core, doublings) whose product is a Hadamard matrix of `order`; (0, 0) if there is none here."""
    doublings = 0
    while True:
        if order == 1 or _paley(order):
            return order, doublings
        if order % 2:
            return 0, 0
        order, doublings = order // 2, doublings + 1


def _paley(order: int) -> int:
    """Which of Paley's constructions gives this order: 1, 2, or 0 for none."""
    if order % 4 == 0 and _prime(order - 1) and (order - 1) % 4 == 3:
        return 1
    if order % 4 == 0 and _prime(order // 2 - 1) and (order // 2 - 1) % 4 == 1:
        return 2
    return 0


def _prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, int(number**0.5) + 1))


def _core(order: int) -> Tensor:
    """A Hadamard matrix of this order, entries 1 and -1, float64: H H^T = order I."""
    kind = _paley(order)
    if kind == 0:
        return torch.ones(1, 1, dtype=torch.float64)
    prime = order - 1 if kind == 1 else order // 2 - 1
    squares = {number * number % prime for number in range(1, prime)}
    legendre = torch.tensor([0.0] + [1.0 if n in squares else -1.0 for n in range(1, prime)], dtype=torch.float64)
    places = torch.arange(prime)
    border = torch.zeros(prime + 1, prime + 1, dtype=torch.float64)
    border[1:, 1:] = legendre[(places[:, None] - places) % prime]
    border[0, 1:] = 1.0
    border[1:, 0] = -1.0 if kind == 1 else 1.0
    if kind == 1:
        return border + torch.eye(prime + 1, dtype=torch.float64)
    plus = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    zero = torch.tensor([[1.0, -1.0], [-1.0, -1.0]], dtype=torch.float64)
    return torch.kron(border, plus) + torch.kron(torch.eye(prime + 1, dtype=torch.float64), zero)
