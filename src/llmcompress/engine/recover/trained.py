"""What is trained of a compressed model: a factor for every scale of a matrix, and for every gain of a norm.

The logarithms of the factors are learnt, from zero on; codes stay as they are. The model runs on values rounded to the
types that they are stored in; gradients pass the rounding as if there were none (straight through, arXiv:1308.3432).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from llmcompress.grids.coded import Coded
from llmcompress.store.checkpoint import Checkpoint


class Trained(Protocol):
    """A tensor whose factors are learnt. log [rows, columns] or [channels] float32: the logarithms of the factors.

    pace: of its logarithms, by which the rate is multiplied.
    """

    pace: ClassVar[float]
    log: Tensor

    def value(self) -> Tensor:
        """The tensor as the checkpoint decodes it, with the factors as they are now."""
        ...

    def slope(self, value: Tensor, gradient: Tensor) -> Tensor:
        """The gradient at `log`, from the tensor's value and the gradient there."""
        ...


@dataclass
class TrainedMatrix:
    """A matrix [out, in] on codes, of which scales are learnt.

    scale_dtype: the type of its scales, where that is a matter of choice. transposed: the tensor is [in, out].
    """

    pace: ClassVar[float] = 1.0
    checkpoint: Checkpoint
    module: str
    scale_dtype: torch.dtype
    transposed: bool
    index: Tensor
    log: Tensor

    @classmethod
    def of(
        cls, checkpoint: Checkpoint, module: str, scale_dtype: torch.dtype, transposed: bool
    ) -> "TrainedMatrix | None":
        """The matrix of a module; None where none of its scales can be any number."""
        coded = checkpoint.coded(module)
        index = None if coded is None else coded.grid.factor_index
        if coded is None or index is None:
            return None
        log = torch.zeros(coded.codes.shape[0], int(index.max()) + 1)
        return cls(checkpoint, module, scale_dtype, transposed, index, log)

    def coded(self) -> Coded:
        """The codes, and their scales times the factors."""
        coded = self.checkpoint.coded(self.module)
        assert coded is not None  # it was there when the object was made
        return replace(coded, grid=coded.grid.multiplied(self.log.exp(), self.scale_dtype))

    def value(self) -> Tensor:
        value = self.coded().decode()
        return value.t().contiguous() if self.transposed else value

    def slope(self, value: Tensor, gradient: Tensor) -> Tensor:
        product = value.to(torch.float32) * gradient
        product = product.t() if self.transposed else product
        sums = torch.zeros(self.log.shape, device=product.device)
        return sums.index_add_(1, self.index.to(product.device), product).to(self.log.device)


@dataclass
class TrainedNorm:
    """The weight [channels] of a norm. base: float32, before training. offset: the gain is the weight plus this."""

    pace: ClassVar[float] = 4.0  # gains are few: steps at which millions of scales shake each other loose suit them
    base: Tensor
    dtype: torch.dtype
    offset: float = 0.0
    log: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.log = torch.zeros_like(self.base)

    def value(self) -> Tensor:
        return ((self.base + self.offset) * self.log.exp() - self.offset).to(self.dtype)

    def slope(self, value: Tensor, gradient: Tensor) -> Tensor:
        return ((value.to(torch.float32) + self.offset) * gradient).to(self.log.device)


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
    """Adam (arXiv:1412.6980, algorithm 1) on the logarithms of `trained`."""

    def __init__(self, trained: Mapping[str, Trained], betas: tuple[float, float] = (0.9, 0.95)) -> None:
        self.trained, self.betas, self.steps = trained, betas, 0
        self.means = {name: torch.zeros_like(item.log) for name, item in trained.items()}
        self.squares = {name: torch.zeros_like(item.log) for name, item in trained.items()}

    def step(self, gradients: Mapping[str, Tensor], rate: float) -> None:
        """Move every logarithm of which there is a gradient."""
        self.steps += 1
        first, second = self.betas
        for name, gradient in gradients.items():
            mean, square = self.means[name].lerp_(gradient, 1 - first), self.squares[name]
            square.lerp_(gradient.square(), 1 - second)
            spread = (square / (1 - second**self.steps)).sqrt_().add_(1e-12)
            item = self.trained[name]
            item.log.addcdiv_(mean, spread, value=-rate * item.pace / (1 - first**self.steps))
