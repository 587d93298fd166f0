"""What report.json and a run's timings hold, as strict data: their published JSON schemas are made from this."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from llmcompress.recipe import Calibration, Expected, KvCache, Output

REPORT_SCHEMA = 1  # raised when a field changes its meaning or goes; new fields that may be missing do not count
TIMINGS_SCHEMA = 1

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Magnitude = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]


class Document(BaseModel):
    """Data of a fixed shape: an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Step(BaseModel):
    """A step of a recipe: its method, and that method's options."""

    model_config = ConfigDict(extra="allow", frozen=True)

    method: str


class RecipeData(Document):
    """The recipe as it was carried out, defaults written out."""

    calibration: Calibration
    steps: list[Step]
    output: Output
    kv_cache: KvCache | None
    expected: Expected | None = None


class Source(Document):
    """The model that was compressed."""

    headers_sha256: Sha256 = Field(description="of config.json and the headers of the weight files")
    config_sha256: Sha256 | None = Field(description="of config.json; null where there is none, as beside a GGUF file")
    files_sha256: dict[str, Sha256] = Field(description="of each weight file, by name")
    bytes: Count = Field(description="of all its tensors")


class MergedAdapter(Document):
    """An adapter that was merged into the source's weights."""

    sha256: Sha256 = Field(description="of its config and its tensors, one after the other")


class UnstackedTensor(Document):
    """A tensor of the source that holds something of every expert, and how it was cut."""

    experts: Positive
    parts: list[str] = Field(description="what each expert has of it, in order of rows; {e}: its number")
    flat: bool = Field(description="its first axis is that of experts and of the rows of each in one")
    turned: bool = Field(description="its matrices are [in, out]")
    interleaved: bool = Field(description="rows of the parts take turns")


class Tokens(Document):
    """The calibration tokens."""

    sha256: Sha256
    samples: Positive = Field(description="windows")
    length: Positive = Field(description="tokens per window")


class GivenImatrix(Document):
    """The importance matrix that was given."""

    file: str
    sha256: Sha256


class LargestKeysValues(Document):
    """Largest magnitudes that a layer's cache saw."""

    key: Magnitude
    value: Magnitude


class KvCacheRanges(Document):
    """What the scales of cached keys and values were made of."""

    code: Literal["fp8", "int8", "nvfp4"]
    largest: list[LargestKeysValues] = Field(description="by layer")


class Linear(Document):
    """What was done to one weight matrix."""

    name: str = Field(description="module name on disk")
    method: str = Field(description="method that chose its codes; 'recoded' where those of the source were kept")
    grid: str | None = Field(description="values a weight may take; see `llmcompress list grids`")
    shape: tuple[Positive, Positive] = Field(description="[out, in]")
    permuted: bool = Field(description="whether groups follow the order of rounding, not that of the channels")
    transposed: bool = Field(description="whether it is stored as [in, out]")
    relative_error: Magnitude = Field(description="||W' - W|| / ||W|| (Frobenius)")
    rtn_ratio: Magnitude | None = Field(
        None,
        description="its loss as a share of the loss of plain rounding to nearest on the same grid (of the squared "
        "error where no loss was measured), on 256 rows at most; null where that is not known",
    )
    inputs: str | None = Field(None, description="how its inputs are rounded")
    input_scale: Magnitude | None = Field(None, description="fixed scale of its inputs")
    loss: Magnitude | None = Field(
        None, description="squared error of its output on the calibration inputs, as a share of the output's energy"
    )
    tokens: Count | None = Field(None, description="tokens its statistics come from")
    percdamp: Magnitude | None = Field(None, description="damping that was used, as a share of the mean diagonal")
    shrinkage: Magnitude | None = Field(None, description="share of itself by which the diagonal was let grow")
    pruner: str | None = Field(None, description="method that chose which weights are zero")
    pattern: str | None = Field(None, description="n:m pattern of the zeros, n kept of m")
    sparsity: Share | None = Field(None, description="share of weights that are exactly zero, where many are")
    recovered: bool = Field(
        False,
        description="whether its scales or weights were trained; then relative_error, but for a rotated model, is that "
        "of now",
    )


class HeldBack(Document):
    """What training did to the KL divergence from the original on text that was held back."""

    windows: Positive
    kl_before: Magnitude
    kl: Magnitude


class Recovery(Document):
    """How an output was trained after it was made."""

    steps: Positive
    windows_at_once: Positive = Field(description="windows of a step")
    rate: Magnitude = Field(description="share by which a step changes a scale at most")
    best_step: Positive = Field(description="the step whose result was kept")
    matrices: Count = Field(description="matrices whose scales were trained")
    pruned: Count = Field(0, description="matrices without codes whose weights, but zeros of pruning, were trained")
    weights: Literal["full", "low-rank"] | None = Field(None, description="how these were trained")
    norms: Count = Field(description="norms whose gains were trained")
    calibration: Tokens
    held_back: dict[str, HeldBack] = Field(description="by text")


class RecoveredLayer(Document):
    """How scales and gains of a layer were fitted to what the original layer gives."""

    layer: Count
    error_before: Magnitude = Field(
        description="mean over tokens held back of the squared error of what leaves the layer, as a share of its "
        "energy; where gradients are known, tokens and channels count by them"
    )
    error: Magnitude = Field(description="the same afterwards")
    best_step: Count = Field(description="the step whose result was kept; 0 where nothing was gained")


class ScaledSite(Document):
    """Channels that a transform scaled."""

    layer: Count
    space: str
    transform: str
    smallest: float
    largest: float


class LedgerEntry(Document):
    """A decision that was taken without being told to."""

    kind: str = Field(description="see `llmcompress list ledger`")
    subject: str
    why: str


class WrittenFile(Document):
    """One file of the output: its size, and one hash."""

    bytes: Count
    sha256: Sha256 | None = Field(None, description="of the whole file")
    header_sha256: Sha256 | None = Field(
        None, description="of a safetensors file of weights: of all that comes before the data; tensors have their own"
    )


class Report(Document):
    """report.json: what was done, to what, with what result. No times and no paths: same inputs, same bytes."""

    model_config = ConfigDict(title="report")

    schema_version: Literal[1] = Field(description="of this document; new optional fields leave it as it is")
    llmcompress: str = Field(description="version that wrote it")
    format: str
    recipe: RecipeData
    source: Source
    calibration: Tokens | None
    imatrix: GivenImatrix | None
    kv_cache: KvCacheRanges | None
    compute_dtype: str
    output_bytes: Count = Field(description="of the weight files")
    bits_per_weight: Magnitude = Field(description="of all tensors")
    bits_per_quantised_weight: Magnitude | None = Field(
        description="of quantised weights, scales and zero points included; null where none is quantised"
    )
    linears: list[Linear] = Field(description="in order of execution")
    sites: list[ScaledSite]
    ledger: list[LedgerEntry]
    tensors: dict[str, Sha256] = Field(description="SHA-256 of each tensor's bytes, by its name in the output")
    files: dict[str, WrittenFile] = Field(
        default_factory=dict,
        description="every file of the output but this one, by name; a single GGUF file is called model.gguf",
    )
    adapter: MergedAdapter | None = Field(None, description="the adapter that was merged into the source's weights")
    unstacked: dict[str, UnstackedTensor] | None = Field(
        None, description="tensors of the source that hold something of every expert, which the output has one by one"
    )
    recovered_layers: list[RecoveredLayer] | None = Field(
        None, description="how scales and gains were fitted layer by layer, in order"
    )
    recovery: Recovery | None = Field(None, description="how it was trained afterwards")
    sha256: Sha256 | None = Field(None, description="of the text of this document without this key")


Run = Annotated[Sha256, Field(description="SHA-256 of the headers of the model, the recipe and the compute type")]


class Start(Document):
    """A line of timings: a run starts, or goes on."""

    event: Literal["start"]
    schema_version: Literal[1]
    llmcompress: str
    run: Run
    layers: Positive
    done: Count = Field(description="layers found finished")
    threads: Positive
    device: str


class GradientsDone(Document):
    """A line of timings: the pass of gradients that comes before the layers is finished."""

    event: Literal["gradients"]
    run: Run
    seconds: Magnitude = Field(description="since the run started")
    peak_memory_bytes: Count
    device_peak_bytes: Count | None = None


class LayerDone(Document):
    """A line of timings: a layer is finished."""

    event: Literal["layer"]
    run: Run
    layer: Count
    seconds: Magnitude = Field(description="since the layer before was finished, or the run started")
    solving: Magnitude = Field(description="of these, for statistics and codes")
    peak_memory_bytes: Count = Field(description="most memory the process has had so far")
    device_peak_bytes: Count | None = Field(None, description="most memory on the accelerator so far")


class Finished(Document):
    """A line of timings: the output is written."""

    event: Literal["end"]
    run: Run
    seconds: Magnitude = Field(description="since the run started, or went on")
    writing: Magnitude = Field(description="of these, for writing the output")
    peak_memory_bytes: Count
    device_peak_bytes: Count | None = None


TimingLine = Start | GradientsDone | LayerDone | Finished
Timing = Annotated[TimingLine, Field(discriminator="event")]
"""One line of the file that --timings appends to."""
