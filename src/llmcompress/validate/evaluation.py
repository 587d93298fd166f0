"""The JSON document of an evaluation: its figures, and their means along the text."""

from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from llmcompress import __version__
from llmcompress.engine.write.report_schema import Count, Document, Magnitude, Positive, Sha256, Share
from llmcompress.significant import significant
from llmcompress.store.output_file import is_single, report_of
from llmcompress.validate.gguf_file import gguf_in
from llmcompress.validate.token_statistics import Array, Tokens

EVALUATION_SCHEMA = 1
DTYPE = "float32"  # that models run in, unless another is asked for

CacheOutcome = Literal["hit", "miss"]
REF_CACHE = Field(
    None,
    description="hit: what the reference's layers give was read from --ref-cache, and they did not run; miss: they "
    "did, and it was written there",
)

Interval = Annotated[list[Magnitude], Field(min_length=2, max_length=2)]


class Products(Document):
    """In which type products were computed, and what the first windows said of it."""

    dtype: Literal["float32", "bfloat16"] = Field(description="that inputs of products were rounded to")
    kl_error: float | None = Field(
        description="what bfloat16 adds to the mean KL divergence of the first windows, as a share of it; null where "
        "that is no number"
    )
    kl_error_se: Magnitude | None = Field(description="standard error of kl_error, over windows")
    windows: Positive = Field(description="how many were run both ways")


PRODUCTS = Field(None, description="where the first windows ran both ways, to see which type products are computed in")


class Evaluated(Document):
    """A checkpoint that was evaluated."""

    name: str = Field(description="what its directory or file is called")
    report_sha256: Sha256 | None = Field(description="of its report.json; null where there is none, as of an original")


class Text(Document):
    """What was evaluated on."""

    name: str = Field(description="'default', or what the file or folder is called")
    tokens_sha256: Sha256
    windows: Positive
    length: Positive = Field(description="tokens per window, of which all but the first are scored")


class TokenFigures(Document):
    """Figures over scored tokens, natural logarithms; `_ci`: 95% interval by bootstrap over windows."""

    perplexity: Magnitude
    perplexity_ci: Interval | None = None
    ref_perplexity: Magnitude | None = None
    ref_perplexity_ci: Interval | None = None
    perplexity_ratio: Magnitude | None = None
    perplexity_ratio_ci: Interval | None = None
    kl: Magnitude | None = Field(None, description="mean KL(reference || model)")
    kl_ci: Interval | None = None
    kl_median: Magnitude | None = None
    kl_median_ci: Interval | None = None
    kl_p99: Magnitude | None = None
    kl_p99_ci: Interval | None = None
    kl_p999: Magnitude | None = None
    kl_p999_ci: Interval | None = None
    kl_max: Magnitude | None = None
    top1: Share | None = Field(None, description="share of tokens whose most likely successor is the same")
    top1_ci: Interval | None = None
    tv: Share | None = Field(None, description="mean total variation distance")
    tv_ci: Interval | None = None
    tokens: Count
    windows: Count


class Figures(TokenFigures):
    """Figures over all scored tokens, natural logarithms; `_ci`: 95% interval by bootstrap over windows."""

    kv_cache: str | None = Field(description="how keys and values were rounded")
    omitted: str | None = Field(None, description="what was left out of the model as it ran, and in how many layers")
    logits_error: Magnitude | None = Field(
        None, description="relative error of logits against the decoded checkpoint in float32, root mean square"
    )
    logits_error_max: Magnitude | None = Field(None, description="the same, of the worst token")
    logits_bound: Magnitude | None = Field(None, description="what rounding alone may make of logits_error")
    kl_expected: float | None = Field(None, description="KL divergence that a budget was expected to cost")


class Series(Document):
    """Means along the text."""

    nll: list[Magnitude] = Field(description="negative log-likelihood")
    ref_nll: list[Magnitude] | None = None
    kl: list[Magnitude] | None = None


class Speed(Document):
    """How fast a model is, in tokens of all sequences together."""

    batch: Positive = Field(description="sequences at once")
    prompt: Positive = Field(description="tokens of each that are read")
    new: Positive = Field(description="tokens that are added to each")
    prefill_tokens_per_second: Magnitude
    decode_tokens_per_second: Magnitude
    cuda_graph: bool = Field(description="whether a step of decoding was one CUDA graph")


class Runtime(Document):
    """How a model was run as a whole. Of one machine and one moment: no part of any hash or comparison."""

    backend: Literal["kernels", "torch"]
    device: str
    linears: dict[str, Count] = Field(description="how many linears on codes each way of multiplying served")
    launches: dict[str, Count] = Field(description="how often each kernel ran")
    weights_bytes: Count = Field(description="of the whole model as it lay in memory")
    peak_bytes: Count | None = Field(description="most GPU memory at once; null without a GPU")
    speed: list[Speed]
    reference_weights_bytes: Count | None = None
    reference_speed: list[Speed] | None = Field(None, description="of the original in bfloat16")


class Written(Document):
    """What both models write greedily after a prompt."""

    prompt: str
    model: str = Field(description="what the model goes on with")
    reference: str | None = Field(description="what the original goes on with; null without an original")


class Evaluation(Document):
    """What `eval --output` saves."""

    schema_version: Literal[1]
    llmcompress: str
    model: Evaluated
    reference: Evaluated | None
    text: Text
    compute_dtype: str
    figures: Figures
    by_window: Series = Field(description="means over each window, in order of the text")
    by_position: Series = Field(description="means over all windows at each scored position of a window")
    runtime: Runtime | None = Field(None, description="how it was run, where that was as a whole")
    written: Written | None = Field(None, description="with --generate")
    ref_cache: CacheOutcome | None = REF_CACHE
    products: Products | None = PRODUCTS


def evaluation(
    model: Path,
    ref: Path | None,
    text: str,
    ids: Array,
    compute_dtype: str,
    found: dict[str, Any],
    tokens: Tokens,
    runtime: dict[str, Any] | None = None,
    ref_cache: CacheOutcome | None = None,
    products: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The document of an evaluation. ids [windows, length]: the tokens; found: its figures; tokens: per token.

    runtime: how the model was run, if as a whole. ref_cache: what came of a cache of the reference, if there was one.
    products: in which type they were computed, if that was chosen.
    """
    return {
        "schema_version": EVALUATION_SCHEMA,
        "llmcompress": __version__,
        "model": evaluated_model(model),
        "reference": None if ref is None else evaluated_model(ref),
        "text": text_of(text, ids),
        "compute_dtype": compute_dtype,
        "figures": found,
        "by_window": _means(tokens, axis=1),
        "by_position": _means(tokens, axis=0),
        **({} if runtime is None else {"runtime": runtime}),
        **({} if ref_cache is None else {"ref_cache": ref_cache}),
        **({} if products is None else {"products": products}),
    }


def text_of(text: str, ids: Array) -> dict[str, Any]:
    """What says which windows [windows, length] of a text were evaluated on."""
    windows, length = ids.shape
    return {
        "name": text if text == "default" else Path(text).resolve().name,
        "tokens_sha256": sha256(np.ascontiguousarray(ids, dtype="<i8").tobytes()).hexdigest(),
        "windows": windows,
        "length": length,
    }


def report_beside(path: Path) -> Path:
    """Where the report of an output lies, a directory or a GGUF file."""
    if not is_single(path):
        return path / "report.json"
    own = report_of(path)
    return own if own.exists() else path.with_name("report.json")


def evaluated_model(path: Path) -> dict[str, Any]:
    """What says which checkpoint was evaluated."""
    report = report_beside(gguf_in(path) or path)
    known = sha256(report.read_bytes()).hexdigest() if report.is_file() else None
    return {"name": path.resolve().name, "report_sha256": known}


def _means(tokens: Tokens, axis: int) -> dict[str, list[float]]:
    parts = {"nll": tokens.nll, "ref_nll": tokens.ref_nll, "kl": tokens.kl}
    return {
        name: [significant(value, 5) for value in values.mean(axis=axis)]
        for name, values in parts.items()
        if values is not None
    }
