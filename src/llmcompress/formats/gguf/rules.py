"""The tables of llama.cpp's mixtures: which matrices get another type than the default one, and on which layers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

# substrings in the order in which they are looked for
_ROLES = {
    "attn_qkv.weight": "value",
    "attn_kv_b.weight": "value",
    "attn_v.weight": "value",
    "attn_k.weight": "key",
    "attn_q.weight": "query",
    "attn_output.weight": "attention output",
    "ffn_up": "up",
    "ffn_gate": "gate",
    "ffn_down": "down",
}


@dataclass(frozen=True)
class Facts:
    """What a mixture looks at besides names and shapes.

    arch: GGUF's name of the architecture. heads_kv: heads of keys and values. experts: per layer, 0 if dense.
    importance: whether the importance of inputs is known (an imatrix).
    """

    arch: str
    layers: int
    heads: int
    heads_kv: int
    experts: int = 0
    importance: bool = False

    @property
    def grouped(self) -> bool:
        """Whether four heads or more share their keys and values."""
        return self.heads // max(1, self.heads_kv) >= 4

    @property
    def seventy(self) -> bool:
        """Whether llama.cpp takes it for a model of 70B parameters."""
        if self.layers != 80 or self.experts == 8:
            return False
        return self.arch == "qwen2" or (self.arch == "llama" and self.heads != self.heads_kv)


@dataclass(frozen=True)
class Place:
    """Where a matrix stands among those of its role: number `i` of `n`. Its methods are the conditions of the rules."""

    i: int
    n: int
    facts: Facts

    def always(self) -> bool:
        return True

    def shared(self) -> bool:
        return self.facts.grouped

    def first_two(self) -> bool:
        return self.i < 2

    def first_four(self) -> bool:
        return self.i < 4

    def unweighted(self) -> bool:
        return not self.facts.importance

    def first_sixteenth(self) -> bool:
        return self.i < self.n // 16

    def early(self) -> bool:
        return self.i < self.n // 8

    def early_weighted(self) -> bool:
        return self.early() and self.facts.importance

    def early_unweighted(self) -> bool:
        return self.early() and not self.facts.importance

    def eight_early(self) -> bool:
        """Early, or one of the outer ones of eight experts."""
        return self.early() or (self.facts.experts == 8 and self.outer())

    def inner(self) -> bool:
        """In none of the first and last eighths."""
        return self.n // 8 <= self.i < 7 * self.n // 8

    def worth(self) -> bool:
        """Whether the matrix serves four heads of queries or experts, or more."""
        return self.facts.grouped or self.facts.experts >= 4

    def outer(self) -> bool:
        """In the first or last eighth, or every third between them."""
        return self.early() or self.i >= 7 * self.n // 8 or (self.i - self.n // 8) % 3 == 2


Rules = Mapping[str, Sequence[tuple[str, Callable[[Place], bool]]]]
"""By file type: types with conditions, the first that holds counts; the default type where none does."""

VALUE: Rules = {
    "Q2_K": (("Q4_K", Place.shared), ("Q3_K", Place.always)),
    "Q2_K_S": (("Q4_K", Place.shared),),
    **dict.fromkeys(("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS"), (("Q4_K", Place.worth), ("Q2_K", Place.always))),
    "IQ2_S": (("Q4_K", Place.worth), ("IQ3_S", Place.always)),
    "IQ2_M": (("Q4_K", Place.worth), ("IQ3_S", Place.always)),
    "IQ3_XXS": (("Q4_K", Place.shared), ("IQ3_S", Place.unweighted)),
    "IQ3_XS": (("Q4_K", Place.shared),),
    "IQ3_S": (("Q4_K", Place.shared),),
    "IQ3_M": (("Q4_K", Place.always),),
    "Q3_K_M": (("Q5_K", Place.first_two), ("Q4_K", Place.always)),
    "Q3_K_L": (("Q5_K", Place.always),),
    "Q4_K_S": (("Q5_K", Place.first_four),),
    "Q4_K_M": (("Q6_K", Place.outer),),
    "Q5_K_M": (("Q6_K", Place.outer),),
    "IQ4_NL": (("Q5_K", Place.shared),),
    "IQ4_XS": (("Q5_K", Place.shared),),
}
DOWN: Rules = {
    "Q2_K": (("Q3_K", Place.always),),
    "Q2_K_S": (("Q4_K", Place.early),),
    **dict.fromkeys(("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS"), (("Q2_K", Place.early),)),
    "IQ2_S": (("IQ3_S", Place.early),),
    "IQ2_M": (("IQ3_S", Place.early),),
    "IQ3_XXS": (("Q4_K", Place.early_unweighted), ("Q3_K", Place.unweighted)),
    "IQ3_M": (("Q4_K", Place.eight_early),),
    "Q3_K_M": (("Q5_K", Place.first_sixteenth), ("Q4_K", Place.always)),
    "Q3_K_L": (("Q5_K", Place.always),),
    "Q4_0": (("Q4_1", Place.early_weighted),),
    "Q5_0": (("Q5_1", Place.early_weighted),),
    "Q4_K_S": (("Q5_K", Place.early),),
    "Q4_K_M": (("Q6_K", Place.outer),),
    "Q5_K_M": (("Q6_K", Place.outer),),
    "IQ4_NL": (("Q5_K", Place.early_unweighted),),
    "IQ4_XS": (("Q5_K", Place.early_unweighted),),
}
UP: Rules = {"IQ3_XS": (("IQ3_XXS", Place.inner),)}
"""Of the matrices of feed-forward blocks other than the last."""
LOW = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ2_M")
"""Mixtures whose eight experts do not get what those of all others do."""
QUERY = {"IQ3_XS": "IQ3_XXS", "IQ3_XXS": "IQ2_S"}
"""Of queries and keys."""
ATTENTION_OUTPUT = {
    "Q2_K": "Q3_K", "Q3_K_M": "Q4_K", "Q3_K_L": "Q5_K", "IQ2_S": "IQ3_S", "IQ2_M": "IQ3_S", "IQ3_XXS": "IQ3_S",
    "IQ3_M": "Q4_K", "IQ1_S": "IQ2_XXS", "IQ1_M": "IQ2_XXS",
}  # fmt: skip
ATTENTION_OUTPUT_OF_8_EXPERTS = dict.fromkeys(
    (
        *LOW, "IQ3_XXS", "IQ3_XS", "IQ3_S", "IQ3_M",
        "Q2_K", "Q3_K_S", "Q3_K_M", "Q4_K_S", "Q4_K_M", "IQ4_NL", "IQ4_XS",
    ),
    "Q5_K",
)  # fmt: skip


def role_of(name: str) -> str:
    """What a matrix is to a mixture: "value", "key", "query", "attention output", "down", "up", "gate" or "other"."""
    return next((role for part, role in _ROLES.items() if part in name), "other")
