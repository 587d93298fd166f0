"""An adapter merged into a model while it is read: its modules found among the tensors, and checked by shapes alone."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from llmcompress.engine.source.header_checks import numbered
from llmcompress.engine.source.matrix_refs import Matrices, matrices_of
from llmcompress.engine.source.multimodal import in_text_part
from llmcompress.engine.source.tensor_names import Anatomy
from llmcompress.errors import CheckpointError
from llmcompress.isolation import probe
from llmcompress.ledger import Ledger
from llmcompress.store.adapter import Adapter, Correction
from llmcompress.store.folds import Fold
from llmcompress.store.headers import Merged, ModelHeaders

_HINT = "an adapter serves only the model it was made for"


@dataclass(frozen=True)
class _LowRank:
    """A matrix plus its correction; stored [out, in], or [in, out] where it is transposed."""

    adapter: Adapter
    item: Correction
    transposed: bool

    def __call__(self, x: Tensor) -> Tensor:
        b, a = (self.adapter.value(name).to(x.dtype) for name in (self.item.b, self.item.a))
        matrix = x.t() if self.transposed else x
        matrix.addmm_(b, a, alpha=self.item.scale)
        if self.item.magnitude is not None:  # DoRA, section 4: the norm of every output's weights
            norm = torch.linalg.vector_norm(matrix, dim=1)
            matrix.mul_((self.adapter.value(self.item.magnitude).to(x.dtype) / norm)[:, None])
        return x


@dataclass(frozen=True)
class _Added:
    """A bias plus scale times that of a correction."""

    adapter: Adapter
    name: str
    scale: float

    def __call__(self, x: Tensor) -> Tensor:
        return x.add_(self.adapter.value(self.name).to(x.dtype), alpha=self.scale)


@dataclass(frozen=True)
class _Replaced:
    """A tensor that the adapter holds as a whole."""

    adapter: Adapter
    name: str

    def __call__(self, x: Tensor) -> Tensor:
        return x.copy_(self.adapter.value(self.name))


def with_adapter(headers: ModelHeaders, matrices: Matrices, path: Path, ledger: Ledger) -> ModelHeaders:
    """The same headers, of a model into which an adapter is merged while it is read; the ledger notes it.

    CheckpointError for an adapter that is damaged, of another model, or of a kind that is not known here.
    """
    adapter = Adapter(path)
    places = _Places(headers, matrices, path)
    changes: dict[str, list[Fold]] = {}
    for parameter, name in adapter.saved.items():
        place = places.parameter(parameter, adapter.shape_of(name))
        changes.setdefault(place, []).append(_Replaced(adapter, name))
    for item in adapter.corrections:
        transposed = item.table or places.conv1d(item.module)
        shape = adapter.shape(item)
        place = places.parameter(f"{item.module}.weight", shape[::-1] if transposed else shape)
        changes.setdefault(place, []).append(_LowRank(adapter, item, transposed))
        if item.bias is not None:
            place = places.parameter(f"{item.module}.bias", shape[:1])
            changes.setdefault(place, []).append(_Added(adapter, item.bias, item.scale))
    places.refuse_tied(changes)
    _refuse_lacking(adapter, matrices)
    whole = f", {len(adapter.saved)} tensors replaced" if adapter.saved else ""
    kind = "DoRA" if adapter.config.get("use_dora") else "LoRA"
    why = f"{kind}, {len(adapter.corrections)} matrices corrected{whole}; adapter of SHA-256 {adapter.sha256}"
    ledger.note("adapter", f"rank {adapter.config['r']}", why)
    return replace(headers, merged=Merged(adapter.sha256, changes))


def as_merged(headers: ModelHeaders, path: Path | None) -> ModelHeaders:
    """The same as `with_adapter` for who only reads the model; without an adapter the headers themselves."""
    if path is None:
        return headers
    return with_adapter(headers, matrices_of(headers, False, Ledger()), path, Ledger())


@dataclass(frozen=True)
class _Places:
    """Where the parameters of transformers' model are on disk. path: of the adapter."""

    headers: ModelHeaders
    matrices: Matrices
    path: Path

    @property
    def _anatomy(self) -> Anatomy:
        return self.matrices.anatomy(self.headers)

    def parameter(self, name: str, shape: tuple[int, ...]) -> str:
        """The tensor that is a parameter; CheckpointError unless there is one of that shape."""
        found = next((place for place in self._candidates(name) if place in self.headers.tensors), None)
        if found is None:
            raise CheckpointError(f"adapter {self.path} is of another model: {self.headers.path} has no {name}", _HINT)
        theirs = self.headers.tensors[found].spec.shape
        if theirs != shape:
            raise CheckpointError(
                f"adapter {self.path} is of another model: {name} of {self.headers.path} is {list(theirs)}, "
                f"not {list(shape)}",
                _HINT,
            )
        return found

    def _candidates(self, name: str) -> Iterator[str]:
        """Names on disk that a parameter may have, the likeliest first."""
        module, _, leaf = name.rpartition(".")
        linears = {path: disk for disk, path in self.matrices.linears.items()}
        if module in linears:
            yield f"{linears[module]}.{leaf}"
        for path in dict.fromkeys((module, in_text_part(module) or module)):
            below = numbered(self.matrices.spec.layers).match(f"{path}.")
            if below is not None:
                found = self._anatomy.tensor(int(below[1]), path[below.end() :], leaf)
            else:
                found = self._anatomy.outer(path, leaf)
            if found is not None:
                yield found
        yield name

    def conv1d(self, module: str) -> bool:
        """Whether a module of transformers' model stores its weight [in, out]."""
        below = numbered(self.matrices.spec.layers).match(f"{module}.")
        return below is not None and self._anatomy.transposed(module[below.end() :])

    def refuse_tied(self, changes: dict[str, list[Fold]]) -> None:
        """CheckpointError where an embedding that is the head too would change, which makes two of it."""
        anatomy, spec = self._anatomy, self.matrices.spec
        embedding, head = anatomy.outer(spec.embed), anatomy.outer(spec.head)
        tied = head is None or embedding is None or self.headers.whole_config.get("tie_word_embeddings") is True
        if tied and {embedding, head} & changes.keys():
            raise CheckpointError(
                f"adapter {self.path} changes the embedding or the head, which are one tensor in {self.headers.path}",
                "merge it with PEFT into a model whose config.json has tie_word_embeddings false",
            )


def _refuse_lacking(adapter: Adapter, matrices: Matrices) -> None:
    """CheckpointError where the config names a linear of which the adapter has no correction."""
    held = {item.module for item in adapter.corrections} | {name.rpartition(".")[0] for name in adapter.saved}
    spec = matrices.spec
    linears = {f"{spec.layers}.{ref.layer}.{ref.path}": ref.layer for ref in matrices.refs if ref.expert is None}

    def lacking() -> str | None:
        return next(
            (name for name, layer in linears.items() if name not in held and adapter.targets(name, layer)), None
        )

    def failed(reason: str) -> CheckpointError:
        return CheckpointError(f"{adapter.path}: patterns of target_modules cannot be used: {reason}")

    if any(name.startswith(f"{spec.layers}.") for name in held):
        probe(lacking, failed, 100 * len(linears))
        if (name := lacking()) is not None:
            raise CheckpointError(f"adapter {adapter.path} lacks the tensors of {name}, a target by its config", _HINT)
