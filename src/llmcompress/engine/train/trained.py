"""What is trained of a compressed model: scales of matrices on codes, weights nothing has rounded, and gains of norms.

Scales and gains are multiplied by factors, whose logarithms are learnt, from zero on; codes and zeros stay as they are.
The model runs on values rounded to the types that they are stored in; gradients pass the rounding as if there were none
(straight through, arXiv:1308.3432).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, Protocol
from zlib import crc32

import torch
from torch import Tensor

from llmcompress.grids.coded import Coded
from llmcompress.store.checkpoint import Checkpoint

RANK = 16  # of what is added to a matrix

Weights = Literal["full", "low-rank"]
"""How weights that nothing has rounded are trained: each for itself, or by a change of low rank."""


class Learnt(Protocol):
    """What is learnt. learnt: float32, of any shape; a step moves every number by the rate.

    pace: of what is learnt, by which the rate is multiplied.
    """

    pace: ClassVar[float]
    learnt: Tensor


class Trained(Learnt, Protocol):
    """A tensor of which something is learnt."""

    def value(self) -> Tensor:
        """The tensor as the checkpoint decodes it, with what is learnt as it is now."""
        ...

    def slope(self, value: Tensor, gradient: Tensor) -> Tensor:
        """The gradient at `learnt`, from the tensor's value and the gradient there."""
        ...


@dataclass
class TrainedMatrix:
    """A matrix [out, in] on codes, of which scales are learnt. learnt [out, groups]: logarithms of factors.

    read: gives the codes, on scales as they were. scale_dtype: the type of its scales, where that is a matter of
    choice. transposed: the tensor is [in, out].
    """

    pace: ClassVar[float] = 1.0
    module: str
    read: Callable[[], Coded | None]
    scale_dtype: torch.dtype
    transposed: bool
    index: Tensor
    learnt: Tensor

    @classmethod
    def of(
        cls, module: str, read: Callable[[], Coded | None], scale_dtype: torch.dtype, transposed: bool
    ) -> "TrainedMatrix | None":
        """The matrix of a module; None where there are no codes, or its scales are no free numbers of that type."""
        coded = read()
        index = None if coded is None else coded.grid.factor_index
        if coded is None or index is None:
            return None
        learnt = torch.zeros(coded.codes.shape[0], int(index.max()) + 1)
        found = cls(module, read, scale_dtype, transposed, index, learnt)
        return found if torch.equal(found.coded().decode(), coded.decode()) else None

    def coded(self) -> Coded:
        """The codes, and their scales times the factors."""
        coded = self.read()
        assert coded is not None  # it was there when the object was made
        return replace(coded, grid=coded.grid.multiplied(self.learnt.exp(), self.scale_dtype))

    def value(self) -> Tensor:
        value = self.coded().decode()
        return value.t().contiguous() if self.transposed else value

    def slope(self, value: Tensor, gradient: Tensor) -> Tensor:
        product = value.to(torch.float32) * gradient
        product = product.t() if self.transposed else product
        sums = torch.zeros(self.learnt.shape, device=product.device)
        return sums.index_add_(1, self.index.to(product.device), product).to(self.learnt.device)


class TrainedWeight(ABC):
    """A matrix that nothing has rounded, of which weights are learnt.

    learnt: float32; a step of all numbers by the rate moves the weights by a share of their root mean square.
    """

    pace: ClassVar[float] = 1.0
    learnt: Tensor

    def __init__(self, checkpoint: Checkpoint, name: str, sparse: bool) -> None:
        """name: of the tensor, which is read again for each value. sparse: whether its zeros stay."""
        self.checkpoint, self.name, self.sparse = checkpoint, name, sparse
        base = checkpoint.read_finite(name)
        self.shape, self.dtype = base.shape, base.dtype
        self.root_mean_square: float = float(base.to(torch.float32).norm()) / max(int(base.count_nonzero()), 1) ** 0.5

    def value(self) -> Tensor:
        base = self.checkpoint.read(self.name)
        moved = self._moved(base.to(torch.float32))
        return (torch.where(base == 0, 0, moved) if self.sparse else moved).to(self.dtype)

    def slope(self, value: Tensor, gradient: Tensor) -> Tensor:
        stays = torch.where(value == 0, 0, gradient) if self.sparse else gradient
        slope: Tensor = self._at_learnt(stays.to(torch.float32))
        return slope.to(self.learnt.device)

    @abstractmethod
    def _moved(self, base: Tensor) -> Tensor:
        """The weights [rows, columns] float32, with what is learnt."""

    @abstractmethod
    def _at_learnt(self, gradient: Tensor) -> Tensor:
        """The gradient at `learnt`, from that at the weights [rows, columns]."""


class FullWeight(TrainedWeight):
    """Every weight is learnt. learnt [rows, columns]."""

    def __init__(self, checkpoint: Checkpoint, name: str, sparse: bool) -> None:
        super().__init__(checkpoint, name, sparse)
        self.unit = self.root_mean_square / 2
        self.learnt = torch.zeros(self.shape)

    def _moved(self, base: Tensor) -> Tensor:
        return base.add(self.learnt, alpha=self.unit)

    def _at_learnt(self, gradient: Tensor) -> Tensor:
        return self.unit * gradient


class LowRankWeight(TrainedWeight):
    """The change of the weights is a product of two matrices of low rank (LoRA, arXiv:2106.09685), of which the second
    begins as zeros, and the first as signs.

    learnt [RANK, columns + rows]: both, side by side.
    """

    def __init__(self, checkpoint: Checkpoint, name: str, sparse: bool) -> None:
        super().__init__(checkpoint, name, sparse)
        rows, self.columns = self.shape
        self.unit = self.root_mean_square / RANK**0.5
        signs = torch.randint(2, (RANK, self.columns), generator=torch.Generator().manual_seed(crc32(name.encode())))
        self.learnt = torch.cat([signs.to(torch.float32) * 2 - 1, torch.zeros(RANK, rows)], dim=1)

    def _moved(self, base: Tensor) -> Tensor:
        first, second = self._factors()
        return torch.addmm(base, second.t(), first, alpha=self.unit)

    def _at_learnt(self, gradient: Tensor) -> Tensor:
        first, second = (part.to(gradient.device) for part in self._factors())
        scaled = gradient * self.unit
        return torch.cat([second @ scaled, first @ scaled.t()], dim=1)

    def _factors(self) -> tuple[Tensor, Tensor]:
        """[RANK, columns] and [RANK, rows]."""
        return self.learnt[:, : self.columns], self.learnt[:, self.columns :]


WEIGHTS: Mapping[Weights, type[TrainedWeight]] = {"full": FullWeight, "low-rank": LowRankWeight}


@dataclass
class TrainedNorm:
    """The weight [channels] of a norm. base: float32, in the source. offset: the gain is the weight plus this.

    factors [channels]: float64, of the gains before training. learnt [channels]: logarithms of further ones.
    """

    pace: ClassVar[float] = 4.0  # gains are few: steps at which millions of scales shake each other loose suit them
    base: Tensor
    factors: Tensor
    dtype: torch.dtype
    offset: float = 0.0
    learnt: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.learnt = torch.zeros_like(self.base)

    def value(self) -> Tensor:
        factors = (self.factors * self.learnt.exp()).to(torch.float32)  # one product, as the record is read back
        return ((self.base + self.offset) * factors - self.offset).to(self.dtype)

    def slope(self, value: Tensor, gradient: Tensor) -> Tensor:
        return ((value.to(torch.float32) + self.offset) * gradient).to(self.learnt.device)


class TrainedWeights:
    """The tensors of a checkpoint by name, those that are trained as they are now."""

    def __init__(self, checkpoint: Checkpoint, trained: Mapping[str, Trained]) -> None:
        self.checkpoint, self.trained = checkpoint, trained

    def __contains__(self, name: str) -> bool:
        return name in self.checkpoint

    def read(self, name: str) -> Tensor:
        found = self.trained.get(name)
        return self.checkpoint.read(name) if found is None else found.value()


class Adam:
    """Adam (arXiv:1412.6980, algorithm 1) on what is learnt of `trained`."""

    def __init__(self, trained: Mapping[str, Learnt], betas: tuple[float, float] = (0.9, 0.95)) -> None:
        self.trained, self.betas, self.steps = trained, betas, 0
        self.means = {name: torch.zeros_like(item.learnt) for name, item in trained.items()}
        self.squares = {name: torch.zeros_like(item.learnt) for name, item in trained.items()}

    def step(self, gradients: Mapping[str, Tensor], rate: float) -> None:
        """Move all of which there is a gradient."""
        self.steps += 1
        first, second = self.betas
        for name, gradient in gradients.items():
            mean, square = self.means[name].lerp_(gradient, 1 - first), self.squares[name]
            square.lerp_(gradient.square(), 1 - second)
            spread = (square / (1 - second**self.steps)).sqrt_().add_(1e-12)
            item = self.trained[name]
            item.learnt.addcdiv_(mean, spread, value=-rate * item.pace / (1 - first**self.steps))
