"""The JSON document of what becomes of a model in long text."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from llmcompress import __version__
from llmcompress.engine.write.report_schema import Count, Document, Magnitude, Positive, Share
from llmcompress.validate.evaluation import (
    DTYPE,
    EVALUATION_SCHEMA,
    Evaluated,
    Text,
    TokenFigures,
    evaluated_model,
    text_of,
)
from llmcompress.validate.task_evaluation import Ends, TaskFigures

if TYPE_CHECKING:
    from torch import Tensor

    from llmcompress.validate.request import Request


class PositionFigures(TokenFigures):
    """Figures over all scored tokens of all windows."""

    kl_growth: float | None = Field(None, description="mean KL of the far half of positions less that of the near half")
    kl_growth_ci: Ends | None = None
    kv_cache: str | None = Field(description="how keys and values were rounded")


class Band(TokenFigures):
    """Figures of the tokens before which a window has from `first` to `last` others."""

    first: Positive
    last: Positive


class NeedleFigures(TaskFigures):
    """Figures over needles; `acc`: share whose right word is likelier than nine others."""

    exact: Share = Field(description="share of needles whose right word is what the model writes greedily")
    exact_ci: Ends
    ref_exact: Share | None = None
    ref_exact_ci: Ends | None = None
    exact_drop: float | None = None
    exact_drop_ci: Ends | None = None
    exact_p: Share | None = Field(None, description="McNemar's exact test of exact against ref_exact")


class Needles(Document):
    """Facts planted in text, and asked for."""

    figures: NeedleFigures
    by_depth: dict[str, NeedleFigures] = Field(description="by where the fact stands, as a share of the text")
    by_length: dict[str, NeedleFigures] = Field(description="by the tokens of all that is read")


class RepetitionFigures(Document):
    """Figures over prompts, after each of which `most` tokens were written greedily; `_rise`: less the reference's."""

    most: Positive
    prompts: Positive
    written_tokens: Magnitude = Field(description="mean; fewer than `most` where texts were ended")
    repetition: Share = Field(description="share of sequences of four tokens that occurred before, mean")
    repetition_ci: Ends
    looping: Share = Field(description="share of texts that end in a loop")
    looping_ci: Ends
    ref_written_tokens: Magnitude | None = None
    ref_repetition: Share | None = None
    ref_repetition_ci: Ends | None = None
    ref_looping: Share | None = None
    ref_looping_ci: Ends | None = None
    repetition_rise: float | None = None
    repetition_rise_ci: Ends | None = None
    looping_rise: float | None = None
    looping_rise_ci: Ends | None = None


class LongEvaluation(Document):
    """What `eval --long --output` saves."""

    schema_version: Literal[1]
    llmcompress: str
    model: Evaluated
    reference: Evaluated | None
    text: Text
    context: Count | None = Field(description="the most tokens that the model reads; null where config.json sets none")
    compute_dtype: str
    figures: PositionFigures
    bands: list[Band] = Field(description="by position in the window, each twice as long as the one before")
    needles: Needles
    repetition: RepetitionFigures


def long_evaluation(
    request: "Request", windows: "Tensor", context: int | None, found: Mapping[str, Any]
) -> dict[str, Any]:
    """The document of what `long_document` found. windows: int64 [windows, length]; context: what models read."""
    return {
        "schema_version": EVALUATION_SCHEMA,
        "llmcompress": __version__,
        "model": evaluated_model(request.model),
        "reference": None if request.ref is None else evaluated_model(request.ref),
        "text": text_of(request.text, windows.numpy()),
        "context": context,
        "compute_dtype": request.dtype or DTYPE,
        **found,
    }
