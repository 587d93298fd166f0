"""What a GGUF file will hold: its tensors, their types and its keys, decided from headers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llmcompress.errors import PlanError
from llmcompress.formats.gguf.family import find
from llmcompress.formats.gguf.file import GgufFile, Placed, gguf_files
from llmcompress.formats.gguf.keys import Key, write
from llmcompress.formats.gguf.metadata import architecture, notes, write_metadata
from llmcompress.formats.gguf.mixture import Choice, Wishes, mixture
from llmcompress.formats.gguf.names import gguf_tensors
from llmcompress.formats.gguf.rules import Facts
from llmcompress.formats.gguf.tensors import GGUFTensor
from llmcompress.formats.gguf.tokenizer import GgufTokenizer, read_tokenizer, write_tokenizer
from llmcompress.formats.gguf.types import FileType, file_type
from llmcompress.ledger import Ledger
from llmcompress.methods.base import GgufTypes
from llmcompress.recipe import Output
from llmcompress.store.headers import ModelHeaders, read_json
from llmcompress.store.output_file import is_single

if TYPE_CHECKING:
    from gguf import GGUFWriter


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
