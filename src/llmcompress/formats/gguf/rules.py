"""The tables of llama.cpp's mixtures: which matrices get another type than the default one, and on which layers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

# substrings in the order in which they are looked for
_ROLES = {
    "attn_qkv.weight": "value",
    "attn_kv_b.weight": "value",
    "attn_v.weight": "value",
    "attn_k.weight": "key",
    "attn_q.weight": "other",
    "attn_output.weight": "attention output",
    "ffn_up": "other",
    "ffn_gate": "other",
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

    def first_sixteenth(self) -> bool:
        return self.i < self.n // 16

    def early(self) -> bool:
        return self.i < self.n // 8

    def early_weighted(self) -> bool:
        return self.early() and self.facts.importance

    def early_unweighted(self) -> bool:
        return self.early() and not self.facts.importance

    def outer(self) -> bool:
        """In the first or last eighth, or every third between them."""
        return self.early() or self.i >= 7 * self.n // 8 or (self.i - self.n // 8) % 3 == 2


Rules = Mapping[str, Sequence[tuple[str, Callable[[Place], bool]]]]
"""By file type: types with conditions, the first that holds counts; the default type where none does."""

VALUE: Rules = {
    "Q2_K": (("Q4_K", Place.shared), ("Q3_K", Place.always)),
    "Q2_K_S": (("Q4_K", Place.shared),),
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
ATTENTION_OUTPUT = {"Q2_K": "Q3_K", "Q3_K_M": "Q4_K", "Q3_K_L": "Q5_K"}
ATTENTION_OUTPUT_OF_8_EXPERTS = dict.fromkeys(
    ("Q2_K", "Q3_K_S", "Q3_K_M", "Q4_K_S", "Q4_K_M", "IQ4_NL", "IQ4_XS"), "Q5_K"
)


def role_of(name: str) -> str:
    """What a matrix is to a mixture: "value", "key", "attention output", "down" or "other"."""
    return next((role for part, role in _ROLES.items() if part in name), "other")
