"""The tokenizer of a GGUF file, from a Hugging Face model directory.

What transformers does is the truth: the tokenizer is loaded by it and asked which ids it puts around a text. Only a
directory with nothing but tokenizer.model is read without it.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmcompress.errors import CheckpointError
from llmcompress.formats.gguf.bpe import read_vocabulary
from llmcompress.formats.gguf.chattemplates import DEFAULT, read_templates
from llmcompress.formats.gguf.sentencepiece import MODEL, read_model, true_scores, vocabulary_of
from llmcompress.formats.gguf.vocabulary import UNUSED, Vocabulary, refuse_pre
from llmcompress.isolation import probe
from llmcompress.store.headers import read_json, refuse_links
from llmcompress.store.side_files import tokenizer_size

if TYPE_CHECKING:
    from gguf import GGUFWriter

SPECIAL = ("bos", "eos", "unk", "sep", "pad", "mask")
"""Special tokens that transformers names and GGUF has a key for; cls has none, llama.cpp takes bos for it."""

END_OF_TURN = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<EOT>", "_<EOT>",
    "[EOT]", "<｜end▁of▁sentence｜>", "<end_of_utterance>",
)  # fmt: skip
"""Texts by which llama.cpp finds the end of a turn; it takes any that is there, we the first of these."""

_UNUSED_SCORE = -10000.0
_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "config.json")


@dataclass(frozen=True)
class GgufTokenizer:
    """What a GGUF file says of a tokenizer.

    model: "gpt2" for byte-level BPE, "llama" for SentencePiece-like. pre: llama.cpp's name of the pre-tokenizer.
    tokens, types (GGUF's token types), scores (the highest is joined first; None for byte-level): one per row of the
    embedding. merges: "left right", best first; None for SentencePiece-like. special: ids of bos, eos, and of unk, sep,
    pad, mask and eot where there are such. add_bos, add_eos: put around a text. add_space_prefix: a text gets a space
    in front. templates: chat templates by name, the usual one under "default". size: number of real tokens; the rest
    fill up rows. notes: what llama.cpp does otherwise than transformers with this tokenizer.
    """

    model: str
    pre: str
    tokens: list[str]
    types: list[int]
    scores: list[float] | None
    merges: list[str] | None
    special: dict[str, int]
    add_bos: bool
    add_eos: bool
    add_space_prefix: bool
    templates: dict[str, str]
    size: int
    notes: tuple[str, ...]


def read_tokenizer(model_dir: Path, rows: int, pre: str | None = None) -> GgufTokenizer:
    """The tokenizer of `model_dir`, filled up with unused tokens to the `rows` of the embedding.

    pre: llama.cpp's name of the pre-tokenizer, instead of finding it. CheckpointError, naming the file, for a damaged
    tokenizer, one with more tokens than rows, and one that llama.cpp cannot run as transformers does.
    """
    refuse_links(model_dir)
    parsed = {name: read_json(model_dir / name) for name in _FILES if (model_dir / name).exists()}
    config = parsed.get("tokenizer_config.json", {})
    file = model_dir / "tokenizer.json"
    if not file.exists() and (model_dir / MODEL).exists():
        file = model_dir / MODEL
        refuse_pre(pre, file)
        vocabulary, special = vocabulary_of(read_model(file), model_dir, config, rows)
        add_bos, add_eos = config.get("add_bos_token") is not False, config.get("add_eos_token") is True
    else:
        vocabulary, special, add_bos, add_eos = _from_transformers(model_dir, file, rows, pre)
    tokens = _filled(vocabulary.texts, rows, file)
    missing = rows - len(vocabulary.texts)
    return GgufTokenizer(
        model=vocabulary.model,
        pre=vocabulary.pre,
        tokens=tokens,
        types=[kind if text else UNUSED for kind, text in zip(vocabulary.types, vocabulary.texts, strict=True)]
        + [UNUSED] * missing,
        scores=None if vocabulary.scores is None else vocabulary.scores + [_UNUSED_SCORE] * missing,
        merges=vocabulary.merges,
        special=_completed(special, parsed.get("config.json", {}), vocabulary, file),
        add_bos=add_bos,
        add_eos=add_eos,
        add_space_prefix=vocabulary.add_space_prefix,
        templates=read_templates(model_dir, config),
        size=len(vocabulary.texts),
        notes=tuple(vocabulary.notes),
    )


def write_tokenizer(writer: "GGUFWriter", tokenizer: GgufTokenizer) -> None:
    """Add all keys of `tokenizer` to a `gguf.GGUFWriter`, in a fixed order."""
    from gguf import Keys

    writer.add_tokenizer_model(tokenizer.model)
    writer.add_tokenizer_pre(tokenizer.pre)
    writer.add_token_list(tokenizer.tokens)
    if tokenizer.scores is not None:
        writer.add_token_scores(tokenizer.scores)
    writer.add_token_types(tokenizer.types)
    if tokenizer.merges is not None:
        writer.add_token_merges(tokenizer.merges)
    for name, number in tokenizer.special.items():
        getattr(writer, f"add_{name}_token_id")(number)
    writer.add_add_bos_token(tokenizer.add_bos)
    writer.add_add_eos_token(tokenizer.add_eos)
    writer.add_add_space_prefix(tokenizer.add_space_prefix)
    if DEFAULT in tokenizer.templates:
        writer.add_chat_template(tokenizer.templates[DEFAULT])
    # the writer's own method for named templates puts their names in the order of a set
    named = [name for name in tokenizer.templates if name != DEFAULT]
    for name in named:
        writer.add_string(Keys.Tokenizer.CHAT_TEMPLATE_N.format(name=name), tokenizer.templates[name])
    if named:
        writer.add_array(Keys.Tokenizer.CHAT_TEMPLATES, named)


@contextmanager
def _judged(model_dir: Path) -> Iterator[None]:
    """CheckpointError in place of whatever transformers and the tokenizers library raise on files they cannot use."""
    try:
        yield
    except BaseException as error:
        # a panic of the tokenizers library is no Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        line = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise _unusable(model_dir, line) from None


def _unusable(model_dir: Path, reason: str) -> CheckpointError:
    file = model_dir / "tokenizer.json"
    return CheckpointError(
        f"{file if file.exists() else model_dir} is no usable tokenizer: {reason}",
        "copy the tokenizer files of the original model",
    )


def _from_transformers(
    model_dir: Path, file: Path, rows: int, pre: str | None
) -> tuple[Vocabulary, dict[str, int], bool, bool]:
    """Vocabulary, special ids, and whether bos and eos are put around a text."""
    from transformers import AutoTokenizer

    def load() -> Any:
        return AutoTokenizer.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False)

    probe(lambda: load()("a"), partial(_unusable, model_dir), tokenizer_size(model_dir))
    with _judged(model_dir):
        loaded = load()
        named = {name: getattr(loaded, f"{name}_token_id") for name in SPECIAL}
    if not hasattr(loaded, "backend_tokenizer"):
        raise CheckpointError(
            f"{model_dir} has a tokenizer that only Python code can run ({type(loaded).__name__}), no tokenizer.json"
        )
    vocabulary = read_vocabulary(loaded.backend_tokenizer, file, rows, pre)
    if vocabulary.scores is not None and (model_dir / MODEL).exists():
        vocabulary = true_scores(vocabulary, read_model(model_dir / MODEL))
    before, after = _around(loaded, model_dir)
    special = {name: number for name, number in named.items() if number is not None}
    return vocabulary, _known_ends(special, before, after, file), bool(before), bool(after)


def _around(loaded: Any, model_dir: Path) -> tuple[list[int], list[int]]:
    """The ids that transformers puts before and after a text."""
    with _judged(model_dir):
        plain = loaded("a", add_special_tokens=False)["input_ids"]
        whole = loaded("a")["input_ids"]
    for at in range(len(whole)):
        if plain and whole[at : at + len(plain)] == plain:
            return whole[:at], whole[at + len(plain) :]
    raise CheckpointError(f"the tokenizer of {model_dir} cannot encode the letter a")


def _known_ends(special: Mapping[str, int], before: list[int], after: list[int], file: Path) -> dict[str, int]:
    """`special` with what stands before a text as bos, after it as eos; llama.cpp knows one token for each."""
    ends = dict(special)
    if before:
        ends["bos"] = before[0]
    if after:
        ends.setdefault("eos", after[0])
    if len(before) > 1 or (after and after != [ends["eos"]]):
        raise CheckpointError(
            f"{file} puts tokens {before} before and {after} after a text; llama.cpp knows one before and eos after",
            "change the post_processor in tokenizer.json",
        )
    return ends


def _completed(
    special: Mapping[str, int], config: Mapping[str, Any], vocabulary: Vocabulary, file: Path
) -> dict[str, int]:
    """All special ids in the order of their keys: those that the tokenizer does not name from config.json."""
    found = dict(special)
    for name in SPECIAL:
        stated = config.get(f"{name}_token_id")
        number = stated[0] if isinstance(stated, list) and stated else stated
        if type(number) is int and 0 <= number < len(vocabulary.texts):
            found.setdefault(name, number)
    if "eos" not in found:
        raise CheckpointError(
            f"{file} names no token that ends a text, and llama.cpp would take another",
            "set eos_token in tokenizer_config.json",
        )
    found.setdefault("bos", found["eos"])  # llama.cpp would take token 11; it is not put before texts
    known = {text: number for number, text in enumerate(vocabulary.texts)}
    eot = next((known[text] for text in END_OF_TURN if text in known), None)
    if eot is not None:
        found["eot"] = eot
    return {name: found[name] for name in (*SPECIAL, "eot") if name in found}


def _filled(texts: list[str], rows: int, file: Path) -> list[str]:
    """One distinct text per row: ids without a token get one that no text can hold by chance."""
    tokens = [text or f"[PAD{number}]" for number, text in enumerate(texts)]
    tokens += [f"[PAD{number}]" for number in range(len(texts), rows)]
    if len(set(tokens)) != rows:
        twice = next(token for number, token in enumerate(tokens) if token in tokens[:number])
        raise CheckpointError(f"{file} gives the text {twice!r} to two ids, which llama.cpp refuses")
    if any("\0" in token for token in tokens):
        raise CheckpointError(f"{file} has a token with a zero byte, at which llama.cpp would cut it off")
    return tokens
