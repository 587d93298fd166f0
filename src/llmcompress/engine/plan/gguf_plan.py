"""What a GGUF file will hold: its tensors, their types and its keys, decided from headers."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llmcompress.engine.source.open import open_checkpoint
from llmcompress.errors import PlanError
from llmcompress.formats.front_matter import beginning_of_readme
from llmcompress.formats.gguf.family import find, is_factored
from llmcompress.formats.gguf.file import GgufFile, Placed, gguf_files
from llmcompress.formats.gguf.keys import Key, write
from llmcompress.formats.gguf.metadata import architecture, listed_keys, metadata, notes, vocabulary_rows
from llmcompress.formats.gguf.mixture import TypeChoice, Wishes, mixture
from llmcompress.formats.gguf.names import gguf_tensors
from llmcompress.formats.gguf.rules import Facts
from llmcompress.formats.gguf.tensors import Factors, GGUFTensor
from llmcompress.formats.gguf.tokenizer import GgufTokenizer, read_tokenizer, write_tokenizer
from llmcompress.formats.gguf.types import FACTORED, FileType, factor_name, file_type, tensor_type
from llmcompress.grids.ggml import GgufTypes
from llmcompress.ledger import Ledger
from llmcompress.recipe import Output
from llmcompress.store.headers import ModelHeaders, read_json
from llmcompress.store.output_file import is_single

if TYPE_CHECKING:
    from gguf import GGUFWriter


@dataclass(frozen=True)
class TensorTypes:
    """The GGUF type of every tensor of a model, in the order in which a GGUF file holds the tensors.

    kind: the file type that was asked for. arch: GGUF's name of the architecture. copied: on-disk tensors that the
    source stores in their type already.
    """

    kind: FileType
    tensors: tuple[Placed, ...]
    arch: str
    copied: frozenset[str] = frozenset()

    @property
    def by_source(self) -> dict[str, str]:
        """The type of each on-disk tensor that is not copied, by its name; experts share the type of their stack.

        Without tensors whose rows are not those of the file's, or become tensors of several types: they are rounded as
        they are written.
        """
        types: dict[str, str] = {}
        loose = set(self.copied)
        for placed in self.tensors:
            for source in placed.tensor.sources:
                if not placed.tensor.by_rows or types.setdefault(source, placed.type.name) != placed.type.name:
                    loose.add(source)
        return {source: kind for source, kind in types.items() if source not in loose}

    @property
    def factors(self) -> dict[str, Factors]:
        """What the rows of on-disk tensors are multiplied by, by their names, of those that are."""
        multiplied = [placed.tensor for placed in self.tensors if placed.tensor.factors]
        return {source: tensor.factors for tensor in multiplied for source in tensor.sources}


@dataclass(frozen=True)
class GgufModel:
    """What the files of a model will hold. describe: writes all keys of a header. tokenizer: None where the source is
    a GGUF file, whose keys describe the tokenizer already."""

    types: TensorTypes
    describe: "Callable[[GGUFWriter], None]"
    tokenizer: GgufTokenizer | None = None


def tensors_of(headers: ModelHeaders, vocabulary: int | None = None) -> list[GGUFTensor]:
    """The tensors of a model directory in GGUF's names. vocabulary: rows of the embedding, where they are padded."""
    return gguf_tensors(
        headers.config, [(name, stored.spec.shape) for name, stored in headers.tensors.items()], vocabulary
    )


def tensor_types(
    headers: ModelHeaders, tensors: Sequence[GGUFTensor], asked: GgufTypes, measured: bool, ledger: Ledger
) -> TensorTypes:
    """Types of the tensors of a model directory. measured: whether the run knows what errors in its inputs cost.

    Raises LlmcompressError for what GGUF, or llama.cpp, cannot hold.
    """
    hyper, _ = find(headers.config).read(headers.config)
    facts = Facts(architecture(headers.config), hyper.layers, hyper.heads, hyper.heads_kv, hyper.experts, measured)
    kind = file_type(asked.type)
    chosen = choose_types(tensors, facts, kind, asked, ledger)
    placed = [Placed(tensor, chosen[tensor.name].type) for tensor in tensors]
    return TensorTypes(kind, tuple(with_factors(placed)), facts.arch)


def with_factors(placed: Sequence[Placed], copied: Mapping[str, Sequence[float]] | None = None) -> Iterator[Placed]:
    """Tensors, each followed by the tensor of its factors where its type has such.

    copied: the factors of tensors that are copied, by name; none where the values are not multiplied.
    """
    for item in placed:
        yield item
        if item.type.name not in FACTORED:
            continue
        name, sources = factor_name(item.tensor.name), item.tensor.sources
        if copied is None or item.tensor.name not in copied:
            yield Placed(GGUFTensor(name, (len(sources),), factor_of=sources), tensor_type("F32"))
        elif known := tuple(copied[item.tensor.name]):
            yield Placed(GGUFTensor(name, (len(known),), values=known), tensor_type("F32"))


def gguf_model(headers: ModelHeaders, asked: GgufTypes, output: Output, measured: bool, ledger: Ledger) -> GgufModel:
    """What GGUF files of a model directory hold: its tensors with their types, its keys and its tokenizer.

    output: may name the pre-tokenizer, where the tokenizer's files do not tell it, and say what a README leaves out.
    Otherwise as `tensor_types`.
    """
    tensors = tensors_of(headers)
    tokenizer = read_tokenizer(headers.path, vocabulary_rows(tensors), output.pre)
    tensors = tensors_of(headers, tokenizer.size)
    if vocabulary_rows(tensors) < len(tokenizer.tokens):
        tokenizer = read_tokenizer(headers.path, vocabulary_rows(tensors), output.pre)
    for note in (*notes(headers.config), *tokenizer.notes):
        ledger.note("engine", "llama.cpp", note)
    types = tensor_types(headers, tensors, asked, measured, ledger)
    return GgufModel(types, _description(headers, types, tokenizer, output), tokenizer)


def gguf_files_of(
    model: GgufModel, headers: ModelHeaders, out: Path, max_bytes: int | None, keys: Sequence[Key] = ()
) -> tuple[GgufFile, ...]:
    """The files that hold a model, with their headers: `out` itself where its name ends in .gguf, else files in `out`.

    max_bytes: of one file. keys: are written after all other keys. PlanError where one file cannot hold the model.
    """
    stem = out.stem if is_single(out) else f"{headers.name}-{model.types.kind.name}"

    def describe(writer: "GGUFWriter") -> None:
        model.describe(writer)
        write(writer, keys)

    files = gguf_files(stem, model.types.arch, model.types.tensors, describe, max_bytes)
    if len(files) > 1 and is_single(out):
        raise PlanError(f"{len(files)} files are needed, {out} is one", "give a directory: an --output without .gguf")
    return files


def _description(
    headers: ModelHeaders, types: TensorTypes, tokenizer: GgufTokenizer, output: Output
) -> "Callable[[GGUFWriter], None]":
    """A function that writes the keys of a model directory."""
    generation = headers.path / "generation_config.json"

    def describe(writer: "GGUFWriter") -> None:
        keys = metadata(
            headers.config,
            [placed.tensor for placed in types.tensors],
            types.kind,
            headers.name,
            beginning_of_readme(headers.path / "README.md"),
            read_json(generation) if generation.is_file() else None,
            output.base_model,
            output.license,
        )
        write(writer, keys)
        family = find(headers.config)
        if family.listed or family.lists:
            write(writer, listed_keys(headers.config, headers.tensors, open_checkpoint(headers).read))
        write_tokenizer(writer, tokenizer)

    return describe


def choose_types(
    tensors: Sequence[GGUFTensor], facts: Facts, kind: FileType, asked: GgufTypes, ledger: Ledger
) -> dict[str, TypeChoice]:
    """The type of every tensor, in llama.cpp's order; the ledger names tensors that are too narrow for their type.

    Raises LlmcompressError as `mixture` does.
    """
    wishes = Wishes(asked.pure, asked.output, asked.embedding, asked.tensors)
    chosen = mixture([(tensor.name, tensor.shape) for tensor in tensors], facts, kind, wishes)
    _refuse_factors(chosen, facts.arch)
    _note_narrow(chosen, tensors, ledger)
    return chosen


def _refuse_factors(chosen: Mapping[str, TypeChoice], arch: str) -> None:
    """PlanError for types whose factors llama.cpp would leave out."""
    factored = [(name, choice.type.name) for name, choice in chosen.items() if choice.type.name in FACTORED]
    for name, kind in factored:
        if not is_factored(arch):
            raise PlanError(
                f"llama.cpp leaves out the factors of {kind} in models of architecture {arch}",
                "use --type MXFP4 or IQ4_NL",
            )
        if not name.startswith("blk."):
            raise PlanError(
                f"{name} cannot be {kind}, whose factors llama.cpp applies in layers alone",
                "give it a type such as Q6_K: leave --pure out, or use --embedding-type and --output-type",
            )


def _note_narrow(chosen: Mapping[str, TypeChoice], tensors: Sequence[GGUFTensor], ledger: Ledger) -> None:
    found: dict[tuple[str, str, int], list[str]] = {}
    for tensor in tensors:
        choice = chosen[tensor.name]
        if choice.type != choice.wanted:
            found.setdefault((choice.wanted.name, choice.type.name, tensor.shape[-1]), []).append(tensor.name)
    for (wanted, got, width), names in found.items():
        ledger.note(
            "group_size", f"{len(names)} tensors", f"{got} instead of {wanted}, whose blocks do not divide {width}"
        )
