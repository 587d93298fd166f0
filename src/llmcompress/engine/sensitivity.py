"""Measuring how much errors in every matrix of a model matter: its Fisher information, one layer in memory at a time.

All windows run forward once, the hidden states that enter each layer being kept on disk; then gradients run back from
the head, through each layer anew, to the embedding.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llmcompress.engine.gathering import ByToken, Gathering
from llmcompress.engine.resources import return_freed_memory
from llmcompress.errors import RunError
from llmcompress.model.build import StreamedModel
from llmcompress.model.gradients import LayerGradient, embedding_gradient, head_gradient
from llmcompress.parallel import in_order
from llmcompress.stats.fisher import Fisher
from llmcompress.store.windows import Windows, write_windows

EMBEDDING, HEAD = "embedding", "head"
_HEAD_TOKENS = 128  # of which all logits, and a few tensors as large, are in memory at once

Watch = Callable[[], None]
Found = dict[tuple[int, str] | str, Fisher]
"""By layer and path of a matrix below it, or EMBEDDING or HEAD."""


def fisher_information(
    model: StreamedModel,
    tokens: Tensor,
    paths: Sequence[Sequence[str]],
    seed: int,
    folder: Path,
    watch: Watch = lambda: None,
    gathering: Callable[[int], Gathering[Any]] = lambda number: ByToken(),
) -> Found:
    """Mean Fisher information per token of `tokens` [samples, length] for the matrices at `paths` of each layer.

    The tokens that gradients are of are drawn by generators made from `seed` and a window's number. folder: for hidden
    states and gradients, of all layers. watch: told of each layer, twice, and of the head. The same numbers for any
    number of threads. A matrix that no token came to is absent. gathering: how that of a layer's matrices is summed up.
    RunError for gradients that are not finite.
    """
    entering = _forward(model, tokens, folder, watch)
    return_freed_memory()
    found: Found = {}
    gradient = _head(model, entering.pop(), seed, folder, found)
    watch()
    for number in reversed(range(len(model.layers))):
        return_freed_memory()
        gradient = _layer(model, number, entering.pop(), gradient, paths[number], folder, found, gathering)
        watch()
    return_freed_memory()
    with model.outer(embed=True, head=False) as causal:
        for window, back in enumerate(_read(gradient)):
            _add(found, EMBEDDING, embedding_gradient(model, causal, tokens[window : window + 1], back))
    _refuse_infinite(found)
    return {name: part.times(1 / tokens.numel()) for name, part in found.items()}


def _forward(model: StreamedModel, tokens: Tensor, folder: Path, watch: Watch) -> list[Windows]:
    """Hidden states that enter each layer, and those that leave the last one."""
    with model.outer(embed=True, head=False):
        model.prepare(tokens[:1])
        kept = [write_windows(model.embedded(tokens, 1), folder / "0.bin", model.dtype)]
    model.prepare_batch(1, tokens.shape[1])
    for number in range(len(model.layers)):
        with model.layer(number) as layer:
            outputs = in_order(partial(model.call, number, layer), _on(model, kept[-1]))
            kept.append(write_windows(outputs, folder / f"{number + 1}.bin", model.dtype))
        watch()
    return kept


def _head(model: StreamedModel, leaving: Windows, seed: int, folder: Path, found: Found) -> Windows:
    """Adds what is found of the head; gradients at the last layer's outputs."""

    def through(causal: torch.nn.Module) -> Iterator[Tensor]:
        for window, hidden in enumerate(_on(model, leaving)):
            generator = torch.Generator().manual_seed((seed + window) % (1 << 63))
            parts = []
            for piece in torch.split(hidden, _HEAD_TOKENS, dim=1):
                part, gradient = head_gradient(model, causal, piece, generator)
                _add(found, HEAD, part)
                parts.append(gradient)
            yield torch.cat(parts, dim=1)

    with model.outer(embed=False, head=True) as causal:
        return write_windows(through(causal), folder / "gradient-0.bin", model.dtype)


def _layer(
    model: StreamedModel,
    number: int,
    entering: Windows,
    leaving: Windows,
    paths: Sequence[str],
    folder: Path,
    found: Found,
    gathering: Callable[[int], Gathering[Any]],
) -> Windows:
    """Adds what is found of a layer's matrices; gradients at its inputs, from those at its outputs."""
    gathered = gathering(number)
    with model.layer(number) as layer:
        back = LayerGradient(model, number, layer, paths, gathered.part)

        def through() -> Iterator[Tensor]:
            pairs = zip(_on(model, entering), _on(model, leaving), strict=True)
            for parts, gradient in in_order(lambda pair: back(*pair), pairs):
                for path in paths:
                    for part in parts.get(path, []):
                        gathered.add(path, part)
                yield gradient

        other = folder / f"gradient-{1 - int(leaving.file.stem[-1])}.bin"
        with back.watching():
            windows = write_windows(through(), other, model.dtype)
    found |= {(number, path): fisher for path, fisher in gathered.finish().items()}
    entering.file.unlink()
    return windows


def _on(model: StreamedModel, windows: Windows) -> Iterator[Tensor]:
    return (window.to(model.device) for window in _read(windows))


def _read(windows: Windows) -> Iterator[Tensor]:
    """One window at a time [1, length, width]."""
    return (windows.read(slice(number, number + 1)) for number in range(windows.shape[0]))


def _add(found: Found, name: tuple[int, str] | str, part: Fisher) -> None:
    found[name] = found[name].plus(part) if name in found else part


def _refuse_infinite(found: Found) -> None:
    for name, part in found.items():
        if not bool(torch.isfinite(part.outputs.sum() + part.inputs.sum())):
            where = name if isinstance(name, str) else f"{name[1]} of layer {name[0]}"
            raise RunError(f"the gradients of {where} are not finite", "choose types with --type")
