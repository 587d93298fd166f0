"""Figures from per-token measurements, each with a confidence interval over windows.

Tokens of one window are correlated, so windows, not tokens, are resampled: 95% percentile bootstrap with a generator of
its own. Two models are measured on the same windows, so their figures are paired.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any

import numpy as np
import numpy.typing as npt

from llmcompress.errors import GateError
from llmcompress.significant import significant

Array = npt.NDArray[np.float64]

_RESAMPLES = 500


@dataclass(frozen=True)
class Tokens:
    """Measurements of each scored token, all [windows, length - 1].

    nll, ref_nll: negative log-likelihood of the true token, in nats. kl: KL(reference || subject). tv: total variation.
    top1: 1 where both models rank the same token first. The last four are None without a reference.
    """

    nll: Array
    ref_nll: Array | None = None
    kl: Array | None = None
    tv: Array | None = None
    top1: Array | None = None

    def followed_by(self, more: "Tokens") -> "Tokens":
        """Those of these windows, and of more windows that were measured likewise."""
        return replace(
            self,
            **{
                name: np.concatenate([values, getattr(more, name)])
                for name, values in vars(self).items()
                if values is not None
            },
        )

    def after(self, position: int) -> "Tokens":
        """Those that are predicted at `position` of each window or behind it."""
        return replace(
            self, **{name: values[:, position:] for name, values in vars(self).items() if values is not None}
        )


@np.errstate(over="ignore", invalid="ignore")  # what is not finite is said as a figure, not as a warning
def token_figures(tokens: Tokens, seed: int = 0) -> dict[str, float | int | list[float]]:
    """All figures by their published names, each with its `_ci` companion [low, high] where it applies."""
    windows = tokens.nll.shape[0]
    draws = np.random.default_rng(seed).integers(0, windows, size=(_RESAMPLES, windows))
    result: dict[str, float | int | list[float]] = {}

    def add(name: str, values: Array, figure: Callable[[Array], Array]) -> None:
        result[name] = significant(figure(values[None])[0])
        if windows > 1:
            spread = np.concatenate([figure(values[draws[start : start + 50]]) for start in range(0, _RESAMPLES, 50)])
            low, high = np.percentile(spread, [2.5, 97.5])
            result[f"{name}_ci"] = [significant(low), significant(high)]

    def mean(values: Array) -> Array:
        return np.asarray(values.mean(axis=(1, 2)))

    def quantile(share: float) -> Callable[[Array], Array]:
        return lambda values: np.quantile(values.reshape(len(values), -1), share, axis=1)

    add("perplexity", tokens.nll, lambda values: np.exp(mean(values)))
    if tokens.ref_nll is not None and tokens.kl is not None and tokens.tv is not None and tokens.top1 is not None:
        add("ref_perplexity", tokens.ref_nll, lambda values: np.exp(mean(values)))
        add("perplexity_ratio", tokens.nll - tokens.ref_nll, lambda values: np.exp(mean(values)))
        add("kl", tokens.kl, mean)
        add("kl_median", tokens.kl, quantile(0.5))
        add("kl_p99", tokens.kl, quantile(0.99))
        add("kl_p999", tokens.kl, quantile(0.999))
        result["kl_max"] = significant(tokens.kl.max())
        add("top1", tokens.top1, mean)
        add("tv", tokens.tv, mean)
    result["tokens"] = int(tokens.nll.size)
    result["windows"] = windows
    return result


def shown(value: float, digits: int = 5) -> str:
    """A figure for people."""
    return f"{value:.{digits}g}" if isfinite(value) else "not finite"


def not_finite(figures: Mapping[str, Any]) -> str | None:
    """What is to be said of figures that are not finite, and whose they are; None where all are finite."""
    broken = [name for name, value in figures.items() if isinstance(value, float) and not isfinite(value)]
    owners = [who for name, who in _OWNERS.items() if name in broken]
    if not broken:
        return None
    return f"figures of {' and of '.join(owners)} are not finite" if owners else f"{', '.join(broken)}: not finite"


def refuse_not_finite(figures: Mapping[str, Any]) -> None:
    """GateError for figures that are not finite."""
    if (said := not_finite(figures)) is not None:
        raise GateError(said, NOT_FINITE_HINT)


_OWNERS = {"perplexity": "the model", "ref_perplexity": "the reference"}

NOT_FINITE_HINT = "nothing was measured: try --compute-dtype float32, and look at the weights and config.json"
ALONE = ("perplexity", "tokens", "windows")  # figures that need no reference
COMPARED = ("ref_perplexity", "perplexity_ratio", "kl", "kl_median", "kl_p99", "kl_p999", "kl_max", "top1", "tv")

OPERATORS: Mapping[str, Callable[[float, float], bool]] = {
    ">": lambda left, right: left > right,
    ">=": lambda left, right: left >= right,
    "<": lambda left, right: left < right,
    "<=": lambda left, right: left <= right,
}
