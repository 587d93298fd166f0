"""Descent on the scales of a block grid: multiples and minima of groups, then d and dmin of blocks, on the full Gram
matrix and for fixed codes; no step raises the loss of a row.

A row's loss is (w - q) H (w - q)^T. A change of the values of one group or block, delta, lowers it by
2 gradient . delta - delta H delta^T with gradient = (w - q) H; so each step is a parabola in one or two unknowns.
"""

import torch
from torch import Tensor

from llmcompress.grids.blocks import BlockGrid, float16
from llmcompress.grids.coded import Coded


def refit_blocks(codes: Tensor, grid: BlockGrid, hessian: Tensor, target: Tensor) -> Coded:
    """Better scales for codes uint8 [out, in], block by block. target [out, in]: W H."""
    spec = grid.spec
    levels = grid.levels(codes)
    gradient = target - grid.decode(codes) @ hessian
    parts = {name: tensor.clone() for name, tensor in grid.parts.items()}
    size = spec.block_size
    for block in range(codes.shape[1] // size):
        columns = slice(block * size, (block + 1) * size)
        here = _Block(
            BlockGrid(spec, **{name: tensor[:, _share(tensor, grid, block)] for name, tensor in parts.items()}),
            levels[:, columns],
            gradient[:, columns].clone(),
            hessian[columns, columns],
        )
        moved = here.descend()
        for name, tensor in here.grid.parts.items():
            parts[name][:, _share(tensor, here.grid, block)] = tensor
        gradient[:, columns.stop :].addmm_(moved, hessian[columns, columns.stop :], alpha=-1)
    return Coded(codes, BlockGrid(spec, **parts))


def _share(tensor: Tensor, grid: BlockGrid, block: int) -> slice:
    """Columns of one of a grid's tensors that belong to a block."""
    per = tensor.shape[1] // grid.d.shape[1]
    return slice(block * per, (block + 1) * per)


class _Block:
    """One block of every row: its grid, levels [out, size], gradient [out, size] and the Gram matrix of its columns."""

    def __init__(self, grid: BlockGrid, levels: Tensor, gradient: Tensor, hessian: Tensor) -> None:
        self.grid, self.levels, self.gradient, self.hessian = grid, levels, gradient, hessian

    def descend(self) -> Tensor:
        """Two rounds of groups, then the block; the change of the values [out, size]."""
        before = self._values()
        for _ in range(2):
            if self.grid.multiples is not None:
                self._groups()
            self._units()
        return self._values() - before

    def _values(self) -> Tensor:
        grid, size = self.grid, self.grid.spec.group_size
        value = self.levels * grid.scale.repeat_interleave(size, dim=1)
        return value if grid.offset is None else value + grid.offset.repeat_interleave(size, dim=1)

    def _groups(self) -> None:
        """Every multiple and minimum, one after another, to the whole number that is best for it alone."""
        grid, size = self.grid, self.grid.spec.group_size
        low, high = grid.spec.multiples or (0, 0)
        for group in range(grid.spec.groups_per_block):
            columns = slice(group * size, (group + 1) * size)
            directions = [(grid.multiples, self.levels[:, columns] * grid.d)]
            if grid.dmin is not None and grid.minima is not None:
                directions.append((grid.minima, (-grid.dmin).expand(-1, size)))
            for whole, direction in directions:
                assert whole is not None
                slope = (self.gradient[:, columns] * direction).sum(dim=1)
                bend = ((direction @ self.hessian[columns, columns]) * direction).sum(dim=1)
                step = torch.where(bend > 0, slope / bend, 0.0)
                new = (whole[:, group] + step).round_().clamp_(low, high)
                delta = direction * (new - whole[:, group]).unsqueeze(1)
                self.gradient.addmm_(delta, self.hessian[columns], alpha=-1)
                whole[:, group] = new

    def _units(self) -> None:
        """d and dmin together by least squares, rounded to float16; rows that would not gain keep theirs."""
        grid, size = self.grid, self.grid.spec.group_size
        per_d = self.levels if grid.multiples is None else self.levels * grid.multiples.repeat_interleave(size, dim=1)
        basis = [per_d]
        if grid.dmin is not None:
            least = torch.ones_like(per_d) if grid.minima is None else grid.minima.repeat_interleave(size, dim=1)
            basis.append(-least)
        old = torch.cat([grid.d] if grid.dmin is None else [grid.d, grid.dmin], dim=1)
        bent = [vector @ self.hessian for vector in basis]
        slope = torch.stack([(self.gradient * vector).sum(dim=1) for vector in basis], dim=1)
        square = torch.stack([torch.stack([(one * other).sum(dim=1) for other in basis], dim=1) for one in bent], dim=1)
        ridge = 1e-6 * square.diagonal(dim1=1, dim2=2).mean(dim=1).clamp_min(1e-30)
        eye = torch.eye(len(basis), device=old.device)
        step = torch.linalg.solve(square + ridge[:, None, None] * eye, slope)
        new = float16(old + torch.where(torch.isfinite(step), step, 0.0))
        if grid.minima is not None:  # engines take any sign, but a negative one is not what encoders write
            new[:, 1:].clamp_(min=0)
        change = new - old
        gain = (2 * slope - torch.einsum("rij,rj->ri", square, change)).mul_(change).sum(dim=1)
        change = torch.where(gain[:, None] > 0, change, 0.0)
        old += change
        grid.d.copy_(old[:, :1])
        if grid.dmin is not None:
            grid.dmin.copy_(old[:, 1:])
        delta = sum((change[:, i : i + 1] * vector for i, vector in enumerate(basis)), torch.zeros_like(per_d))
        self.gradient.addmm_(delta, self.hessian, alpha=-1)
