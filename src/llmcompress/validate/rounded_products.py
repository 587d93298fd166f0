"""An evaluation whose products of float32 round their inputs to bfloat16, where that hardly changes what it finds.

Only products are rounded: hidden states, attention and what is between matrices stay float32, so that the error of a
KL divergence is some forty times smaller than of models that run in bfloat16. Whether that is small beside the
divergence itself is measured: the first windows run both ways.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import numpy as np
from torch import Tensor

from llmcompress.hardware import rounded_float32, rounds_float32
from llmcompress.model.streamed_model import StreamedModel
from llmcompress.significant import significant
from llmcompress.validate.evaluate import Watch, measure_several
from llmcompress.validate.evaluation import Products
from llmcompress.validate.reference_cache import ReferenceCache
from llmcompress.validate.token_statistics import Tokens

BOUND = 0.01  # share of the KL divergence that its error stays below
CHECKED = 4  # windows at least that run both ways
TIMES = 4  # as many windows as that, or running the first ones twice does not pay

Kept = Callable[[Tensor, bool], ReferenceCache | None]
"""What keeps the reference's part for windows, and for rounded products or exact ones."""


def windows_to_check(windows: Tensor, batch: int, reference: StreamedModel | None) -> int:
    """How many windows [windows, length] run both ways: whole batches, or 0 where products are not rounded."""
    count = batch * -(-CHECKED // batch)
    usable = reference is not None and rounds_float32(reference.device)
    return count if usable and len(windows) >= TIMES * count else 0


def measure_checked(
    subject: StreamedModel,
    reference: StreamedModel,
    windows: Tensor,
    checked: int,
    batch: int,
    watch: Watch,
    kept: Kept,
) -> tuple[Tokens, dict[str, Any]]:
    """What `measure` gives, with rounded products unless the first `checked` ones speak against it; `Products`.

    Not beside other threads that multiply: the precision of products is a setting of the process.
    """
    first, rest = windows[:checked], windows[checked:]
    whole = len(windows) + checked

    def found(part: Tensor, quick: bool, before: int) -> Tokens:
        def shared(done: int, of: int) -> None:
            watch((before * of + len(part) * done) // whole, of)

        cache = kept(part, quick)  # before products are rounded, since its name says how precise they were
        with rounded_float32() if quick else nullcontext():
            return measure_several([subject], reference, part, batch, shared, cache)[0]

    exact, quick = found(first, False, 0), found(first, True, checked)
    products = compared(exact, quick)
    rounds = products.dtype == "bfloat16"
    return (quick if rounds else exact).followed_by(found(rest, rounds, 2 * checked)), products.model_dump()


def compared(exact: Tokens, quick: Tokens) -> Products:
    """What the same windows say of rounded products: to be used where KL's error is below the bound.

    That is where the error, and twice its standard error on top, are below. Windows count, not tokens, since tokens of
    one window err together.
    """
    assert exact.kl is not None
    assert quick.kl is not None
    with np.errstate(invalid="ignore", divide="ignore"):
        shares = (quick.kl - exact.kl).mean(axis=1) / exact.kl.mean()
        error, spread = float(shares.mean()), float(shares.std(ddof=1) / len(shares) ** 0.5)
    finite = bool(np.isfinite([error, spread]).all())
    safe = finite and abs(error) + 2 * spread < BOUND
    return Products(
        dtype="bfloat16" if safe else "float32",
        kl_error=significant(error) if finite else None,
        kl_error_se=significant(spread) if finite else None,
        windows=len(shares),
    )


def products_row(products: Mapping[str, Any]) -> tuple[str, str, str]:
    """What was measured, its value and its 95% interval. products: as an evaluation's document has them."""
    label = "change of KL by products in bfloat16" + ("" if products["dtype"] == "bfloat16" else ", not used")
    if products["kl_error"] is None:
        return label, "no number", ""
    low, high = (products["kl_error"] + 2 * side * products["kl_error_se"] for side in (-1, 1))
    return label, f"{products['kl_error']:+.2%}", f"{low:+.2%} ... {high:+.2%}"
