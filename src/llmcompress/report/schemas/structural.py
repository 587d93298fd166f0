"""What report.json holds of a model that lost layers or channels, and of an adapter, as strict data."""

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from llmcompress.engine.write.report_schema import (
    Count,
    Document,
    LedgerEntry,
    Linear,
    Magnitude,
    Positive,
    Recovery,
    Sha256,
    Source,
    Tokens,
    WrittenFile,
)

Loss = Annotated[float, Field(description="squared error as a share of the energy")]


class Round(Document):
    """Layers that were removed at once, and by what they were chosen."""

    measure: Literal["cosine", "kl"] = Field(
        description="similarity of what enters and leaves a layer, or KL divergence of the model without it in nats"
    )
    scores: dict[str, float] = Field(description="by the first layer that would be removed")
    removed: list[Count]


class Depth(Document):
    """Which layers were removed."""

    by: str
    contiguous: bool
    keep_first: Count
    keep_last: Count
    layers: Positive = Field(description="of the original")
    removed: list[Count] = Field(description="their numbers in the original, from 0")
    scores: list[Round]


class Narrowed(Document):
    """A feed-forward that lost channels."""

    layer: Count
    cut: Loss = Field(description="of its output, once the channels are gone")
    loss: Loss = Field(description="of its output, as written")


class Width(Document):
    """How many channels of the feed-forwards stayed."""

    before: Positive
    after: Positive
    by: str
    repair: bool = Field(description="whether what reads the channels was fitted to those that stay")
    layers: list[Narrowed]


class Repaired(Document):
    """A matrix whose error an adapter makes smaller."""

    name: str
    shape: list[Positive] = Field(description="[out, in]")
    before: Loss = Field(description="of outputs or of weights, as compressed")
    after: Loss = Field(description="the same, with the adapter")


class Lora(Document):
    """What an adapter holds."""

    rank: Positive
    by: Literal["outputs", "weights"] = Field(description="of what the error was made least")
    bits_per_weight_added: Magnitude
    matrices: list[Repaired]


class HeldFromDraft(Document):
    """What training did to a draft head on text that was held back."""

    windows: Positive
    loss_before: Magnitude
    loss: Magnitude = Field(description="KL divergence of the head from its target, of tokens it can draft")
    acceptance: list[Magnitude] = Field(description="1 - total variation, by how many tokens before were drafted")
    accepted_per_step: Magnitude = Field(description="tokens of four that are accepted, by these")


class Draft(Document):
    """A draft head, and how it was trained."""

    steps: Positive
    windows_at_once: Positive = Field(description="windows of a step")
    rate: Magnitude
    best_step: Positive = Field(description="the step whose result was kept")
    vocabulary: Positive = Field(description="tokens that can be drafted")
    states: list[Count] = Field(
        description="numbers of the hidden states that it reads; none for what the target's head reads"
    )
    share_of_weights: Magnitude = Field(description="its weights as a share of its target's")
    written: Count = Field(description="windows that the target wrote")
    held_back: dict[str, HeldFromDraft] = Field(description="by text")


class _Changed(Document):
    llmcompress: str = Field(description="version that wrote it")
    source: Source
    compute_dtype: str
    output_bytes: Count = Field(description="of the weight files")
    ledger: list[LedgerEntry]
    tensors: dict[str, Sha256] = Field(description="SHA-256 of each tensor's bytes, by its name in the output")
    files: dict[str, WrittenFile] = Field(description="every file of the output but this one, by name")
    sha256: Sha256 = Field(description="of the text of this document without this key")


class _Smaller(_Changed):
    format: Literal["dense"]
    linears: list[Linear] = Field(description="those whose weights were trained afterwards: nothing is rounded")
    recovery: Recovery | None = Field(None, description="how it was trained afterwards")


class DepthReport(_Smaller):
    """report.json of a model that lost layers."""

    model_config = ConfigDict(title="depth")

    calibration: Tokens | None = Field(description="null where nothing was left to choose, without text")
    depth: Depth


class WidthReport(_Smaller):
    """report.json of a model that lost channels."""

    model_config = ConfigDict(title="width")

    calibration: Tokens
    width: Width


class AdaptedCheckpoint(Source):
    """A checkpoint that an adapter or a draft head was made from."""

    contents_sha256: Sha256 = Field(description="of the headers and of samples of the data")


class LoraReport(_Changed):
    """report.json of an adapter."""

    model_config = ConfigDict(title="lora")

    format: Literal["lora"]
    source: AdaptedCheckpoint = Field(description="the original")
    base: AdaptedCheckpoint = Field(description="the compressed model that it is for")
    calibration: Tokens | None = Field(description="null where errors of weights were made least, without text")
    lora: Lora


class DraftReport(_Changed):
    """report.json of a draft head."""

    model_config = ConfigDict(title="draft")

    format: Literal["eagle3", "medusa"]
    source: AdaptedCheckpoint = Field(description="the target")
    calibration: Tokens
    draft: Draft
