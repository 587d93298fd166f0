"""Small tokenizers of every kind, saved as transformers saves them, and texts that show how they cut."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors, trainers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

_PARTS = (
    "hello", "World", "don't", "WE'LL", "it's 5", "123", "4567890", "3.14", "  ", "   ", "\t", "\n", "\n\n", "\r\n",
    " ", "def f(x):", "return x**2;", "{'a': [1]}", "naïve", "Straße", "ПРИВЕТ мир", "漢字", "カナ", "한국어", "😀",
    "👩\u200d👧", "e\u0301", "हिन्दी", "العربية", "…", "!!!", "//", "<tag>", "_x", "CamelCase", "\u00a0", "½", "٣٤", "ª",
    "ǅ", "\u200b", "$9", "a+b", "'", '"q"', "—", "<|eot|>", "<tool>", "</s>", "tHe're", "x\n y", "100,000.5",
)  # fmt: skip
UNUSUAL = ("e\u0301", "हिन्दी", "ǅ")
"""Those of the parts that hold combining marks, or a capital letter outside of ASCII that can follow a small one."""

SPECIAL = ["<s>", "</s>", "<|eot|>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def texts(count: int = 250, seed: int = 0) -> list[str]:
    """Texts of one to nine parts, the same for the same seed."""
    dice = random.Random(seed)
    found = list(_PARTS)
    while len(found) < count:
        found.append(dice.choice(["", "", " "]).join(dice.choices(_PARTS, k=dice.randint(2, 9))))
    return found


def trained(ignore_merges: bool = False) -> Tokenizer:
    """Byte-level BPE whose merges run across all borders of words, so that every cut shows in the ids."""
    tokenizer = Tokenizer(BPE(ignore_merges=ignore_merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=5000,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIAL,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(600, seed=1), trainer)
    tokenizer.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    return tokenizer


def byte_level(merges: Sequence[tuple[str, str]] = (("t", "h"), ("th", "e")), **options: Any) -> Tokenizer:
    """Byte-level BPE: <s>, </s>, the 256 bytes, and what the merges make."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {text: number for number, text in enumerate(["<s>", "</s>", *alphabet, *(a + b for a, b in merges)])}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=list(merges), **options))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


def cut_by(expression: str) -> pre_tokenizers.PreTokenizer:
    """A byte-level pre-tokenizer that cuts by a regular expression."""
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(expression), "isolated"), bytes_])


def sentencepiece_model() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary and merges as they follow from a SentencePiece model: every way to make a piece is a merge."""
    tokenizer = Tokenizer(BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    special = ["<unk>", *SPECIAL, *BYTES]
    trainer = trainers.BpeTrainer(
        vocab_size=2000, special_tokens=special, limit_alphabet=70, show_progress=False, max_token_length=16
    )
    tokenizer.train_from_iterator([text.replace("<tool>", "") for text in texts(600, seed=1)], trainer)
    model = json.loads(tokenizer.to_str())["model"]
    vocabulary = model["vocab"]
    merges = []
    for piece in dict.fromkeys(a + b for a, b in model["merges"]):
        ways = [(piece[:at], piece[at:]) for at in range(1, len(piece))]
        merges += [(a, b) for a, b in ways if a in vocabulary and b in vocabulary]
    return vocabulary, merges


def sentencepiece_like(kind: str, vocabulary: dict[str, int], merges: Sequence[tuple[str, str]]) -> Tokenizer:
    """BPE with byte_fallback; kind: "legacy" as in Llama 2, "gemma", or the scheme by which Metaspace prepends."""
    tokenizer = Tokenizer(
        BPE(vocab=vocabulary, merges=list(merges), byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    )
    spaces = normalizers.Replace(" ", "▁")
    if kind == "legacy":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
    elif kind == "gemma":
        tokenizer.normalizer = spaces
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=kind, split=False)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken("<|eot|>", special=True, normalized=False)])
    tokenizer.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    return tokenizer


def around(tokenizer: Tokenizer, template: str) -> Tokenizer:
    """`tokenizer` with a template such as "<s> $A </s>" around texts."""
    used = {text for text in template.split() if text != "$A"}
    tokenizer.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=[(text, tokenizer.token_to_id(text)) for text in sorted(used)]
    )
    return tokenizer


def save(tokenizer: Tokenizer, path: Path, **config: Any) -> Path:
    """Write tokenizer.json and tokenizer_config.json; `config` are entries of the latter."""
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, **{"bos_token": "<s>", "eos_token": "</s>", **config}
    ).save_pretrained(path)
    return path


def sentencepiece_file(
    pieces: Sequence[tuple[str, float, int]], model_type: int = 2, prefix: bool = True, charsmap: bytes = b""
) -> bytes:
    """tokenizer.model: the bytes of a ModelProto with pieces (text, score, type)."""
    import struct

    def number(value: int) -> bytes:
        out = b""
        while value > 127:
            out += bytes([value & 127 | 128])
            value >>= 7
        return out + bytes([value])

    def text(field: int, value: bytes) -> bytes:
        return number(field << 3 | 2) + number(len(value)) + value

    raw = b""
    for piece, score, kind in pieces:
        inner = text(1, piece.encode()) + number(2 << 3 | 5) + struct.pack("<f", score)
        raw += text(1, inner + (number(3 << 3) + number(kind) if kind != 1 else b""))
    raw += text(2, number(3 << 3) + number(model_type) + number(43 << 3) + number(2**64 - 1))
    return raw + text(
        3, text(1, b"identity") + (text(2, charsmap) if charsmap else b"") + number(3 << 3) + number(prefix)
    )
