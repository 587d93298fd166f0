"""A GGUF file of a run: types and exact size with the plan, its bytes at the end."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llmcompress.engine.uncoded import uncoded
from llmcompress.errors import PlanError
from llmcompress.formats.gguf.family import find
from llmcompress.formats.gguf.file import ENCODED_AT_ONCE, GgufFile, Placed, gguf_files, padded
from llmcompress.formats.gguf.keys import Key, write
from llmcompress.formats.gguf.metadata import architecture, notes, write_metadata
from llmcompress.formats.gguf.mixture import Choice, Wishes, mixture
from llmcompress.formats.gguf.names import gguf_tensors
from llmcompress.formats.gguf.rules import Facts
from llmcompress.formats.gguf.tensors import GGUFTensor, pieces
from llmcompress.formats.gguf.tokenizer import GgufTokenizer, read_tokenizer, write_tokenizer
from llmcompress.formats.gguf.types import FileType, file_type
from llmcompress.grids.base import BLOCK_TYPES
from llmcompress.ledger import Ledger
from llmcompress.methods.base import GgufTypes
from llmcompress.recipe import Output
from llmcompress.store.files import bytes_of
from llmcompress.store.headers import ModelHeaders, read_json
from llmcompress.store.output_file import is_single

if TYPE_CHECKING:
    import numpy as np
    from gguf import GGUFWriter
    from numpy.typing import NDArray
    from torch import Tensor

    from llmcompress.engine.plan import Plan
    from llmcompress.grids.encoders import Search
    from llmcompress.store.checkpoint import Checkpoint
    from llmcompress.store.output import OutputDirectory
    from llmcompress.store.staging import Staging

_README = 1_000_000  # characters in which its front matter is looked for


@dataclass(frozen=True)
class GgufModel:
    """What the weights of a checkpoint become: tensors in the order of the file, each with its type.

    arch: GGUF's name of the architecture. describe: writes all keys. tokenizer: where it had to be converted. copied:
    on-disk tensors that are stored in their type already.
    """

    kind: FileType
    tensors: tuple[Placed, ...]
    arch: str
    describe: "Callable[[GGUFWriter], None]"
    tokenizer: GgufTokenizer | None = None
    copied: frozenset[str] = frozenset()

    @property
    def types(self) -> dict[str, str]:
        """The type of each on-disk tensor, by its name in the checkpoint; experts' share that of their stack."""
        return {source: placed.type.name for placed in self.tensors for source in placed.tensor.sources}


def gguf_model(headers: ModelHeaders, asked: GgufTypes, output: Output, importance: bool, ledger: Ledger) -> GgufModel:
    """Types of all tensors, and the tokenizer where a GGUF file is to be written.

    importance: whether the run knows what errors in its inputs cost. Raises LlmcompressError for what GGUF, or
    llama.cpp, cannot hold.
    """
    source = [(name, stored.spec.shape) for name, stored in headers.tensors.items()]
    tensors, tokenizer = gguf_tensors(headers.config, source), None
    if output.format == "gguf":
        tokenizer = read_tokenizer(headers.path, _rows(tensors), output.pre)
        tensors = gguf_tensors(headers.config, source, tokenizer.size)
        if _rows(tensors) < len(tokenizer.tokens):
            tokenizer = read_tokenizer(headers.path, _rows(tensors), output.pre)
        for note in (*notes(headers.config), *tokenizer.notes):
            ledger.note("engine", "llama.cpp", note)
    hyper, _ = find(headers.config).read(headers.config)
    facts = Facts(architecture(headers.config), hyper.layers, hyper.heads, hyper.heads_kv, hyper.experts, importance)
    kind = file_type(asked.type)
    chosen = choices(tensors, facts, kind, asked, ledger)
    placed = tuple(Placed(tensor, chosen[tensor.name].type) for tensor in tensors)
    return GgufModel(kind, placed, facts.arch, _description(headers, tensors, kind, tokenizer), tokenizer)


def files_of(
    model: GgufModel, headers: ModelHeaders, out: Path, max_bytes: int | None, keys: Sequence[Key] = ()
) -> tuple[GgufFile, ...]:
    """The files that hold a model, with their headers: `out` itself where it is called .gguf, or files in it.

    keys: those that come last.
    """
    stem = out.stem if is_single(out) else f"{headers.name}-{model.kind.name}"

    def describe(writer: "GGUFWriter") -> None:
        model.describe(writer)
        write(writer, keys)

    files = gguf_files(stem, model.arch, model.tensors, describe, max_bytes)
    if len(files) > 1 and is_single(out):
        raise PlanError(f"{len(files)} files are needed, {out} is one", "give a directory: an --output without .gguf")
    return files


def _description(
    headers: ModelHeaders, tensors: Sequence[GGUFTensor], kind: FileType, tokenizer: GgufTokenizer | None
) -> "Callable[[GGUFWriter], None]":
    """Writes the keys of a model directory."""
    readme, generation = headers.path / "README.md", headers.path / "generation_config.json"

    def describe(writer: "GGUFWriter") -> None:
        if tokenizer is None:
            raise PlanError("a GGUF file needs a tokenizer")
        write_metadata(
            writer,
            headers.config,
            tensors,
            kind,
            headers.name,
            _beginning(readme) if readme.is_file() else "",
            read_json(generation) if generation.is_file() else None,
        )
        write_tokenizer(writer, tokenizer)

    return describe


def write_gguf(plan: "Plan", checkpoint: "Checkpoint", staged: "Staging", out: "OutputDirectory") -> dict[str, str]:
    """Write the files of a plan; SHA-256 (hex) of each tensor's bytes by its name."""
    hashes: dict[str, str] = {}
    data = _Data(plan, checkpoint, staged)
    for file in plan.files:
        out.write_pieces(file.name, _file_pieces(file, data, hashes))
    return hashes


def _file_pieces(file: GgufFile, data: "_Data", hashes: dict[str, str]) -> Iterator[bytes | memoryview]:
    yield file.header
    for placed in file.tensors:
        total = hashlib.sha256()
        for piece in data.of(placed):
            total.update(piece)
            yield piece
        yield bytes(padded(placed.nbytes) - placed.nbytes)
        hashes[placed.tensor.name] = total.hexdigest()


class _Data:
    """The bytes of tensors: codes from the work directory, all else from the checkpoint."""

    def __init__(self, plan: "Plan", checkpoint: "Checkpoint", staged: "Staging") -> None:
        self.plan, self.checkpoint, self.staged = plan, checkpoint, staged
        assert plan.recipe.method is not None  # a GGUF file holds what a step rounds
        self.search = plan.recipe.method.search
        self.matrices = {
            matrix.entry.source.name: matrix for layer in plan.layers for matrix in layer if matrix.entry.grid
        }
        self.read = uncoded(plan, checkpoint, staged)

    def of(self, placed: Placed) -> Iterator[memoryview]:
        """The bytes of a tensor, piece by piece."""
        tensor = placed.tensor
        stored = self.checkpoint.stored(tensor.name, placed.type.name)
        if stored is not None:
            yield from stored
            return
        if not tensor.sources or any(name not in self.matrices for name in tensor.sources):
            yield from self._encoded(placed)
            return
        index = None if tensor.rows is None else tensor.rows.index()
        for name in tensor.sources:
            matrix = self.matrices[name]
            coded = self.staged.read_coded(matrix.layer, matrix.module)
            coded = coded if index is None else coded.rows(index)
            yield from (bytes_of(part) for part in self.plan.format.encode(matrix.entry, coded).values())

    def _encoded(self, placed: Placed) -> Iterator[memoryview]:
        """A tensor that no method was asked to round: norms, biases, the embedding, the head."""
        costs = None if self.plan.importance is None else self.plan.importance.tensors.get(placed.tensor.name)
        for number, piece in enumerate(pieces(placed.tensor, self.read)):
            importance = None if costs is None else costs[number]
            step = max(1, ENCODED_AT_ONCE // piece.shape[-1]) if len(piece.shape) > 1 else len(piece)
            for start in range(0, len(piece), step):
                values = piece.rows(start, start + step)
                yield bytes_of(encoded(values, placed.type.name, self.search, importance))


def encoded(values: "Tensor", kind: str, search: "Search", importance: "NDArray[np.float32] | None" = None) -> "Tensor":
    """Rows float32 [rows, width] in a type of GGML: uint8 [rows, bytes]. importance: of the inputs [width]."""
    import torch

    from llmcompress.grids.encoders import encode
    from llmcompress.packing.ggml import pack
    from llmcompress.packing.plain import plain

    if kind in BLOCK_TYPES:
        costs = None if importance is None else torch.from_numpy(importance)
        return pack(encode(values, BLOCK_TYPES[kind], search, costs))
    return plain(values, kind)


def _rows(tensors: list[GGUFTensor]) -> int:
    return next(tensor.shape[0] for tensor in tensors if tensor.name == "token_embd.weight")


def choices(
    tensors: Sequence[GGUFTensor], facts: Facts, kind: FileType, asked: GgufTypes, ledger: Ledger
) -> dict[str, Choice]:
    """The type of every tensor, in llama.cpp's order; the ledger says where rows are too narrow for one's blocks.

    Raises LlmcompressError as `mixture` does.
    """
    wishes = Wishes(asked.pure, asked.output, asked.embedding, asked.tensors)
    chosen = mixture([(tensor.name, tensor.shape) for tensor in tensors], facts, kind, wishes)
    _note_narrow(chosen, tensors, ledger)
    return chosen


def _note_narrow(chosen: Mapping[str, Choice], tensors: Sequence[GGUFTensor], ledger: Ledger) -> None:
    found: dict[tuple[str, str, int], list[str]] = {}
    for tensor in tensors:
        choice = chosen[tensor.name]
        if choice.type != choice.wanted:
            found.setdefault((choice.wanted.name, choice.type.name, tensor.shape[-1]), []).append(tensor.name)
    for (wanted, got, width), names in found.items():
        ledger.note(
            "group_size", f"{len(names)} tensors", f"{got} instead of {wanted}, whose blocks do not divide {width}"
        )


def _beginning(file: Path) -> str:
    with file.open(encoding="utf-8", errors="replace") as handle:
        return handle.read(_README)
