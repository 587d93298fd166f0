"""Gradients through a model of which one section at a time is in memory: head, layers and embedding, from the end back.

What is differentiated is the log-probability of a token drawn from the model's own prediction at every position: the
squares of its gradients are, in expectation, the Fisher information.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from llmcompress.model.streamed_model import StreamedModel
from llmcompress.stats.fisher import Fisher, of_squares, of_table

_DRAWN_AT_ONCE = 16  # distributions: sums in float64 that stay in a processor's cache
P = TypeVar("P")


def head_gradient(
    model: StreamedModel, causal: nn.Module, hidden: Tensor, generator: torch.Generator, informed: bool = True
) -> tuple[Fisher | None, Tensor]:
    """Fisher information of the head, and the gradient at the last layer's outputs `hidden` [batch, length, hidden].

    Within `outer(embed=False, head=True)`. generator: draws the tokens, on the CPU. The head's own is the expectation
    over all tokens, p (1 - p) of each output; what is done to logits after it (scaling, capping) counts too. informed:
    whether it is wanted.
    """
    seen: list[tuple[Tensor, Tensor]] = []
    head = causal.get_submodule(model.spec.head)
    handle = head.register_forward_hook(lambda _, args, out: seen.append((args[0], out)))
    try:
        hidden = hidden.detach().requires_grad_()
        with torch.enable_grad():
            logits = model.logits(causal, hidden)
    finally:
        handle.remove()
    wide = torch.promote_types(logits.dtype, torch.float32)
    probabilities = logits.detach().to(wide).softmax(dim=-1)
    places = drawn(probabilities, generator).unsqueeze(-1)
    # of the logarithm of a softmax: 1 at the token that was drawn, less the probabilities
    back = probabilities.neg().scatter_add_(-1, places, probabilities.new_ones(places.shape))
    (gradient,) = torch.autograd.grad(logits, hidden, back.to(logits.dtype), retain_graph=informed)
    if not informed:
        return None, gradient
    x, out = seen[0]
    with torch.enable_grad():
        total = logits.sum()
    (slope,) = torch.autograd.grad(total, out)  # each logit depends on its own output alone
    squares = (probabilities * (1 - probabilities)).mul_(slope.square())
    width, rows = x.shape[-1], squares.shape[-1]
    return of_squares(x.detach().reshape(-1, width).square(), squares.reshape(-1, rows)), gradient


def drawn(probabilities: Tensor, generator: torch.Generator) -> Tensor:
    """A token [...] for each distribution [..., vocabulary]; generator: on the CPU."""
    chances = probabilities.reshape(-1, probabilities.shape[-1])
    places = torch.rand(len(chances), 1, generator=generator, dtype=torch.float64).to(chances.device)
    parts = (torch.split(part, _DRAWN_AT_ONCE) for part in (chances, places))
    return torch.cat([_drawn(*some) for some in zip(*parts, strict=True)]).view(probabilities.shape[:-1])


def _drawn(chances: Tensor, places: Tensor) -> Tensor:
    """A token [rows] for each of `chances` [rows, vocabulary]; places [rows, 1]: shares of their sum, below 1."""
    ends = chances.cumsum(dim=-1, dtype=torch.float64)
    return torch.searchsorted(ends, places * ends[:, -1:], right=True).squeeze(-1).clamp_max_(chances.shape[-1] - 1)


class LayerGradient(Generic[P]):
    """Runs a layer and goes back through it; any number of threads may call it within `watching`."""

    def __init__(
        self,
        model: StreamedModel,
        number: int,
        layer: nn.Module,
        paths: Sequence[str],
        part: Callable[[str, Tensor, Tensor, int], P],
    ) -> None:
        """paths: of the watched matrices below the layer, which need not hold them all.

        part: reduces a matrix's input [..., in] and the gradient [..., out] at its output to the value to keep; it is
        told the path of the matrix and the number of the window.
        """
        self.model, self.number, self.layer, self.paths, self.part = model, number, layer, paths, part
        self.blind: set[str] = set()  # paths of matrices that ran without gradients, such as those of an indexer
        self._local = threading.local()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """A context in which calls watch the matrices."""
        modules = dict(self.layer.named_modules())  # without keys and values that a layer takes from an earlier one
        handles = [modules[path].register_forward_hook(self._see(path)) for path in self.paths if path in modules]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def __call__(self, window: int, hidden: Tensor, gradient: Tensor) -> tuple[dict[str, list[P]], Tensor]:
        """Parts by path, one for each time that a matrix was used, and the gradient at `hidden`.

        window: its number. gradient: at the layer's output. A matrix that no token reached, such as an expert's, is
        absent.
        """
        found: dict[str, list[P]] = {}
        self._local.found, self._local.window = found, window
        hidden = hidden.detach().requires_grad_()
        with torch.enable_grad():
            out = self.model.call(self.number, self.layer, hidden)
            (back,) = torch.autograd.grad(out, hidden, gradient)
        return found, back

    def _see(self, path: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def hook(_: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
            if not out.requires_grad:
                self.blind.add(path)
                return
            found, window, x = self._local.found, self._local.window, args[0].detach().clone()

            def back(gradient: Tensor) -> None:
                found.setdefault(path, []).append(self.part(path, x, gradient, window))

            out.register_hook(back)  # type: ignore[no-untyped-call]

        return hook


def embedding_gradient(model: StreamedModel, causal: nn.Module, ids: Tensor, gradient: Tensor) -> Fisher:
    """Fisher information of the embedding's table for ids [batch, length], from the gradient at the first layer.

    Within `outer(embed=True, head=False)`.
    """
    looked: list[Tensor] = []

    def hook(_: nn.Module, __: Any, out: Tensor) -> Tensor:
        looked.append(out.detach().requires_grad_())
        return looked[0]

    table = causal.get_submodule(model.spec.embed)
    handle = table.register_forward_hook(hook)
    try:
        with torch.enable_grad():
            hidden = model.entering(causal, ids)
    finally:
        handle.remove()
    (back,) = torch.autograd.grad(hidden, looked[0], gradient)
    rows = int(table.weight.shape[0])  # type: ignore[index]
    return of_table(ids.reshape(-1), back.reshape(-1, back.shape[-1]), rows)
