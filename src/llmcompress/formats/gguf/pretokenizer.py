"""`tokenizer.ggml.pre`: the name by which llama.cpp knows how a byte-level tokenizer cuts text into words.

The name is found by what the pre-tokenizer does, not by how its regular expression is spelt: it cuts one probe text,
and the pre-tokenizers of the known families cut the same text. No vocabulary is involved, so extended ones are known.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from string import punctuation
from typing import Any

_ASCII_PUNCTUATION = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
_ANY_CASE = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ASCII_CASE = "llama.cpp cuts words at combining marks, and tells capitals only from a to z, unlike this tokenizer"
_PASCAL = r"[^\r\n\p{L}\p{N}]?" + _UPPER


@dataclass(frozen=True)
class WordCutter:
    """A way of cutting words that llama.cpp knows as `name`: steps in order, each a regular expression or a keyword.

    Keywords: "bytes" is GPT-2's own expression, "digits" cuts out each digit. ignore_merges: a word that is a token is
    taken whole, whatever the merges say. note: what llama.cpp does otherwise than the family's models, if anything.
    """

    name: str
    steps: tuple[str, ...]
    ignore_merges: bool = False
    note: str | None = None


FAMILIES = (
    WordCutter("gpt-2", ("bytes",)),
    WordCutter("smollm", ("digits", "bytes")),
    WordCutter("llama-bpe", (rf"{_ANY_CASE}|{_LETTERS}|\p{{N}}{{1,3}}|{_REST}|{_SPACES}",), ignore_merges=True),
    WordCutter("smaug-bpe", (rf"{_ANY_CASE}|{_LETTERS}|\p{{N}}{{1,3}}|{_REST}|{_SPACES}",)),
    WordCutter("qwen2", (rf"{_ANY_CASE}|{_LETTERS}|\p{{N}}|{_REST}|{_SPACES}",)),
    WordCutter(
        "qwen35",
        (
            rf"{_ANY_CASE}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
            rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",
        ),
    ),
    WordCutter(
        "tekken",
        (rf"{_PASCAL}*{_LOWER}+|{_PASCAL}+{_LOWER}*|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}",),
        ignore_merges=True,
        note=_ASCII_CASE,
    ),
    WordCutter(
        "gpt-4o",
        (
            rf"{_PASCAL}*{_LOWER}+{_ANY_CASE}?|{_PASCAL}+{_LOWER}*{_ANY_CASE}?|\p{{N}}{{1,3}}"
            rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}",
        ),
        note=_ASCII_CASE,
    ),
    WordCutter("deepseek-coder", ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", "digits")),
    WordCutter(
        "deepseek-v3",
        (
            r"\p{N}{1,3}",
            "[一-龥\u3040-ゟ゠-ヿ]+",
            rf"{_ASCII_PUNCTUATION}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
            rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
        ),
    ),
    WordCutter(
        "seed-coder",
        (rf"{_ANY_CASE}|{_LETTERS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",),
    ),
)

_KINDS = "aZéÉ漢ǅʰ\u03011²'!/€😀 \t\n\r\u00a0\u200b"
PROBE = (
    "Don't we'LL I'M they'Re it'S 'tis O'Neil's 1's "
    "a'sx a'tx a'rex a'vex a'mx a'llx a'dx a'Sx a'Tx a'Rex a'vEx a'Mx a'LLx a'Dx "
    "A's A't A're A've A'm A'll A'd ZA'S ZA'T ZA'RE ZA'VE ZA'M ZA'LL ZA'D "
    "A'Sx A'Tx A'REx A'VEx A'Mx A'LLx A'Dx 漢's ǅ'll "
    "aZ's aZ't aZ're aZ've aZ'm aZ'll aZ'd 1aZa2aZZa1ÄǅaaZ2Zǅz1жÄǅd 漢Z漢z "
    "CamelCaseWORDS McDonald ÀÉîÖ naïve Ωmega ПриветМИР straße ªº "
    "0 12 345 6789 01234 567890 1234567 89012345678901 3.14 1,000,000 x86 v2beta ½ Ⅻ ٣٤٥٦ १२३४ "
    "e\u0301\u0302le\u0300ve हिन्दी ภาษาไทย עִבְרִית العَرَبِيَّة "
    "漢字かなカナ한글 中文，标点。「引用」！ １２３４ ｆｕｌｌ "
    "a  b   c    d\te\t\tf \u3000h !!!??? ... -- == => 👍🏽👩\u200d👧 "
    "x\r  ! \n  x \r\n  / 's 'S "
    "line\nline\r\n\r\n  indented\n\n\n\tdeep  \n   \n"
    + "".join(f"{mark}a{mark}É{mark}{mark}r{mark}1 {mark}Z\n" for mark in punctuation)
    + "".join("".join(three) for three in product(_KINDS, repeat=3))
    + "end   "
)
"""A text in which every family above, and every variant of one that llama.cpp does not know, shows itself.

Contractions, numbers, scripts and runs of spaces; every ASCII punctuation mark before letters, digits and its like; and
every three of the kinds of characters that expressions tell apart, one after the other.
"""


def families_like(pre_tokenizer: Any) -> Sequence[WordCutter]:
    """The known families that cut the probe text as `pre_tokenizer` does (of the tokenizers library; None: no cuts)."""
    if pre_tokenizer is None:
        return ()
    words = _words(pre_tokenizer)
    return [family for family in FAMILIES if _words_of(family) == words]


def build(family: WordCutter) -> Any:
    """The pre-tokenizer of a family, as its models have it in tokenizer.json."""
    from tokenizers.pre_tokenizers import ByteLevel
    from tokenizers.pre_tokenizers import Sequence as Steps

    steps = [_step(step) for step in family.steps]
    if "bytes" not in family.steps:
        steps.append(ByteLevel(add_prefix_space=False, use_regex=False))
    return Steps(steps)


def _step(step: str) -> Any:
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Split

    if step == "bytes":
        return ByteLevel(add_prefix_space=False, use_regex=True)
    if step == "digits":
        return Digits(individual_digits=True)
    return Split(Regex(step), "isolated")


def _words(pre_tokenizer: Any) -> list[str]:
    return [word for word, _ in pre_tokenizer.pre_tokenize_str(PROBE)]


@cache
def _words_of(family: WordCutter) -> list[str]:
    return _words(build(family))
