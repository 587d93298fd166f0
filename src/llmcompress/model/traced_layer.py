"""A layer on random weights, run in float64 again and again, its products with matrices watched and changed.

The weights of a matrix are a window that slides over a few random numbers: they take no memory to speak of, and
products with large ones are correlations, which a Fourier transform computes. So a layer runs at its true size.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from llmcompress.model.streamed_model import StreamedModel

_LARGE = 1 << 20  # weights from which on a Fourier transform is faster
_SIZE = 4.0  # of the outputs of matrices that read normalised states: some channels pass where others are clipped
_NARROW = {torch.float32, torch.float16, torch.bfloat16}
_NARROWING = {Tensor.float, Tensor.half, Tensor.bfloat16}
_PRODUCTS = {torch.matmul, torch.mm, Tensor.matmul, Tensor.__matmul__, Tensor.mm}


class RandomWeights:
    """Weights float64 by name. shapes: may be filled after a model was made that reads them."""

    def __init__(self) -> None:
        self.shapes: dict[str, torch.Size] = {}
        self._generator = torch.Generator().manual_seed(0)

    def __contains__(self, name: str) -> bool:
        return name in self.shapes

    def read(self, name: str) -> Tensor:
        shape = self.shapes[name]
        if len(shape) < 2:
            return torch.rand(shape, dtype=torch.float64, generator=self._generator) + 0.5
        strides = range(len(shape), 0, -1)  # all different, so that a transposed matrix shows
        size = 1 + sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))
        numbers = torch.randn(max(size, 1), dtype=torch.float64, generator=self._generator)
        return numbers.mul_(_SIZE * max(shape[-1], 1) ** -0.5).as_strided(shape, tuple(strides))


@dataclass
class Trace:
    """One run. calls: inputs and outputs [tokens, channels] of every product with a matrix, by module path, before
    outputs were multiplied.

    cut: matrices of which only parts were used, or which were used otherwise than in a product. left: all that other
    layers may see: what the layer returned, and the tensors in what it was called with.
    """

    left: list[Tensor] = field(default_factory=list)
    calls: dict[str, list[tuple[Tensor, Tensor]]] = field(default_factory=dict)
    cut: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Changes:
    """What is different in a run. vectors: other values of parameters of one axis, by path.

    outputs, inputs: factors of the outputs and inputs of matrices by module path. replayed: a trace that gives all
    products but those whose outputs are multiplied.
    """

    vectors: Mapping[str, Tensor] = field(default_factory=dict)
    outputs: Mapping[str, Tensor] = field(default_factory=dict)
    inputs: Mapping[str, Tensor] = field(default_factory=dict)
    replayed: Trace | None = None


class Widened(TorchFunctionMode):
    """A context in which what asks for less precision than float64 is computed in float64."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        wide = tuple(torch.float64 if _is_narrow(value) else value for value in args)
        named = {key: torch.float64 if _is_narrow(value) else value for key, value in (kwargs or {}).items()}
        return self.compute(Tensor.double if func in _NARROWING else func, wide, named)

    def compute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return func(*args, **kwargs)


class _Watched(Widened):
    """The same, where products with the matrices of a layer are traced and changed."""

    def __init__(self, matrices: Mapping[int, tuple[str, int]], changes: Changes) -> None:
        """matrices: path of the module and number of weights by the address of the numbers of a matrix."""
        super().__init__()
        self.matrices, self.changes, self.trace = matrices, changes, Trace()

    def compute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found = _product(func, args, kwargs)
        if found is not None:
            x, weight, bias = found
            known = self._known(weight)
            if known is not None:
                return self._through(known[0], weight.numel() == known[1], x, weight, bias)
        out = func(*args, **kwargs)
        self._note_other_uses((*args, *kwargs.values()), out)
        return out

    def _known(self, value: Any) -> tuple[str, int] | None:
        if not isinstance(value, Tensor) or value.ndim < 2 or value.is_meta:
            return None
        return self.matrices.get(value.untyped_storage().data_ptr())

    def _note_other_uses(self, values: tuple[Any, ...], out: Any) -> None:
        for known in filter(None, map(self._known, values)):
            results = out if isinstance(out, tuple | list) else (out,)
            if any(isinstance(result, Tensor) and self._known(result) != known for result in results):
                self.trace.cut.add(known[0])

    def _through(self, path: str, whole: bool, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The output of a matrix [in, out]."""
        calls = self.trace.calls.setdefault(path, [])
        earlier = self.changes.replayed
        if not whole:
            self.trace.cut.add(path)
        shape = (*x.shape[:-1], weight.shape[1])
        again = earlier.calls.get(path, [])[len(calls) :] if earlier is not None else []
        if again and again[0][1].numel() == math.prod(shape) and path not in self.changes.outputs:
            y = again[0][1].clone().view(shape)  # some add to it in place
        else:
            factors = self.changes.inputs.get(path) if whole else None
            y = _multiplied(x if factors is None else x * factors, weight)
            y = y if bias is None else y + bias
        calls.append((x.reshape(-1, x.shape[-1]).clone(), y.reshape(-1, y.shape[-1]).clone()))
        return y * self.changes.outputs[path] if whole and path in self.changes.outputs else y


class TracedLayer:
    """A layer of a model on `RandomWeights`, and the hidden states that enter it."""

    def __init__(self, model: StreamedModel, number: int, layer: nn.Module, hidden: Tensor) -> None:
        self.layer, self._model, self._number, self._hidden = layer, model, number, hidden
        self._matrices = {
            value.untyped_storage().data_ptr(): (path.removesuffix(".weight"), value.numel())
            for path, value in layer.named_parameters()
            if value.ndim > 1
        }

    @torch.no_grad()
    def run(self, changes: Changes | None = None) -> Trace:
        watched = _Watched(self._matrices, changes or Changes())
        before = {path: _exchanged(self.layer, path, value) for path, value in watched.changes.vectors.items()}
        hook = self.layer.register_forward_hook(
            lambda _, args, named, out: watched.trace.left.extend(map(Tensor.clone, _tensors((args, named, out)))),
            with_kwargs=True,
        )
        try:
            with watched:
                self._model.call(self._number, self.layer, self._hidden.clone())
        finally:
            hook.remove()
            for path, value in before.items():
                _exchanged(self.layer, path, value)
        return watched.trace


def _tensors(value: Any) -> Iterator[Tensor]:
    """All tensors in nested containers, but for those of whole numbers and truth values."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value if value.ndim else value[None]
    elif isinstance(value, Mapping):
        yield from _tensors(tuple(value.values()))
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)


def _is_narrow(value: Any) -> bool:
    return isinstance(value, torch.dtype) and value in _NARROW


def _product(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """Input, weight [in, out] and bias, if a call is the product of an input and what may be a matrix."""
    if func is nn.functional.linear:
        given = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
        return given["input"], given["weight"].T, given.get("bias")
    if func in _PRODUCTS and len(args) == 2 and args[1].ndim == 2:
        return args[0], args[1], None
    if func is torch.addmm and not kwargs:
        return args[1], args[2], args[0]
    return None


def _multiplied(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., in] times a window [in, out] that slides over numbers."""
    if weight.numel() < _LARGE:
        return x @ weight
    (inputs, outputs), (step, stride) = weight.shape, weight.stride()
    spread = x.new_zeros(*x.shape[:-1], (inputs - 1) * step + 1)
    spread[..., ::step] = x
    width = spread.shape[-1] + (outputs - 1) * stride
    numbers = weight.as_strided((width,), (1,))
    size = 1 << (width - 1).bit_length()
    found: Tensor = torch.fft.irfft(torch.fft.rfft(numbers, size) * torch.fft.rfft(spread, size).conj(), size)
    return found[..., : (outputs - 1) * stride + 1 : stride]


def _exchanged(layer: nn.Module, path: str, value: Tensor) -> Tensor:
    """The value that the parameter at `path` had before it got this one."""
    owner, _, leaf = path.rpartition(".")
    parameters: Any = layer.get_submodule(owner)._parameters
    before: Tensor = parameters[leaf].data
    parameters[leaf] = nn.Parameter(value, requires_grad=False)
    return before
