"""What commands print with `--json`, as strict data. Figures that are not finite are printed as null."""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from llmcompress.engine.write.report_schema import (
    Count,
    Document,
    LedgerEntry,
    Magnitude,
    Positive,
    RecipeData,
    Report,
    Sha256,
    Share,
)
from llmcompress.recipe import Expected
from llmcompress.report.schemas.structural import DepthReport, DraftReport, LoraReport, WidthReport
from llmcompress.validate.evaluation import PRODUCTS, REF_CACHE, CacheOutcome, Figures, Products, Runtime
from llmcompress.validate.long_evaluation import LongEvaluation
from llmcompress.validate.task_evaluation import TaskFigures

Shape = list[Count]
Stated = Annotated[
    int | float | str | bool | None, Field(description="as the header states it; null where it does not")
]


class NullForNotFinite(GenerateJsonSchema):
    """Schemas in which any float may be null."""

    def float_schema(self, schema: core_schema.FloatSchema) -> JsonSchemaValue:
        """The schema of a float."""
        return {**super().float_schema(schema), "type": ["number", "null"]}


class Spent(Document):
    """What a run took, beside the content of its report.json."""

    output: str = Field(description="the directory or file that was written, the first of several files")
    seconds: Magnitude
    peak_memory_bytes: Count = Field(description="most memory that the process has held at once")


class PrintedResult(Report, Spent):
    """What a run has done."""

    model_config = ConfigDict(title="result")


class PlannedMatrix(Document):
    """What would happen to one weight matrix."""

    name: str = Field(description="module name on disk")
    shape: Shape = Field(description="[out, in]")
    grid: str | None = Field(description="values a weight may take; null where it keeps any")
    inputs: str | None = Field(description="how its inputs are rounded")
    method: str = Field(description="the step whose values are stored")
    pruner: str | None = Field(description="the step that chooses which weights are zero")
    sparsity: Share | None = Field(description="share of weights that become zero")
    pattern: str | None = Field(description="n:m pattern of the zeros, n kept of m")


class PlannedTensor(Document):
    """A tensor that would be written."""

    name: str
    dtype: str
    shape: Shape


class PrintedPlan(Document):
    """What a run would do."""

    output: str
    format: str
    architecture: str
    recipe: RecipeData
    compute_dtype: str
    output_bytes: Count = Field(description="of the weight files, exactly")
    work_bytes: Count = Field(description="on disk while it runs, about")
    memory_bytes: Count = Field(description="of main memory, about")
    gpu_memory_bytes: Count = Field(description="of tensors on the GPU, about; 0 where none is used")
    batch: Positive = Field(description="windows at once")
    passes: Count = Field(description="forward passes over the text, at most")
    bits_per_weight: Magnitude = Field(description="of all tensors")
    bits_per_quantised_weight: Magnitude | None = Field(description="of what is quantised, scales included")
    decoder_share: Share = Field(description="share of the decoder's weights that change")
    matrices: list[PlannedMatrix]
    tensors: list[PlannedTensor]
    targets: dict[str, Literal["ok"] | list[str]] = Field(description="by target, what is in its way")
    ledger: list[LedgerEntry]


class _StructuralPlan(Document):
    output: str
    memory_bytes: Count
    passes: Magnitude = Field(description="forward passes over the text")


class PrintedDepthPlan(_StructuralPlan):
    """What `depth` would do."""

    layers: Positive
    drop: Positive
    by: str
    scratch_bytes: Count = Field(description="on disk while it runs")


class PrintedWidthPlan(_StructuralPlan):
    """What `width` would do."""

    channels: Positive
    left: Positive
    output_bytes: Count


class PrintedLoraPlan(_StructuralPlan):
    """What `lora` would do."""

    matrices: Positive
    rank: Positive
    by: str
    bits_per_weight_added: Magnitude
    output_bytes: Count


class PrintedRecoverPlan(_StructuralPlan):
    """What `recover` would do."""

    steps: Positive
    rate: Magnitude = Field(description="share by which a step changes a scale at most")
    output_bytes: Count
    scratch_bytes: Count = Field(description="on disk while it runs")


class PrintedDraftPlan(_StructuralPlan):
    """What `draft` would do for a head."""

    steps: Positive
    vocabulary: Positive = Field(description="tokens that can be drafted")
    states: list[Count] = Field(
        description="numbers of the hidden states that it reads; none for what the model's head reads"
    )
    share_of_weights: Magnitude = Field(description="of the head, as a share of the model's")
    output_bytes: Count
    scratch_bytes: Count = Field(description="on disk while it runs")


class PrintedPrunedDraftPlan(_StructuralPlan):
    """What `draft --kind prune` would do."""

    layers: Positive = Field(description="the first ones of the model, which stay")
    steps: Positive
    rate: Magnitude = Field(description="share of their root mean square by which a step moves weights at most")
    share_of_weights: Magnitude = Field(description="of the draft, as a share of the model's")
    output_bytes: Count
    scratch_bytes: Count = Field(description="on disk while it runs")


class DepthDone(DepthReport, Spent):
    """What `depth` has done."""


class WidthDone(WidthReport, Spent):
    """What `width` has done."""


class LoraDone(LoraReport, Spent):
    """What `lora` has done."""


class DraftDone(DraftReport, Spent):
    """What `draft` has done."""


class ExportedOutput(Document):
    """An output of `export`."""

    format: str
    output: str
    bytes: Count


class LossOnGrid(Document):
    """Matrices that share a grid, and what they are expected to lose on it."""

    names: list[str]
    grid: str
    kl: float = Field(description="KL divergence, nats per token")


class Fitted(Document):
    """The recipe of `fit`."""

    recipe: RecipeData
    output: str | None = Field(description="the file that was written")
    expected: Expected
    matrices: list[LossOnGrid]
    ledger: list[LedgerEntry]
    peak_memory_bytes: Count


class PrintedEvaluation(Figures):
    """What `eval` has found on text."""

    runtime: Runtime | None = Field(None, description="how it was run, where that was as a whole")
    generated: dict[str, str] | None = Field(None, description="continuations of the prompt, by model")
    ref_cache: CacheOutcome | None = REF_CACHE
    products: Products | None = PRODUCTS


class Answered(TaskFigures):
    """What `eval --tasks` has found."""

    omitted: str | None = Field(None, description="what was left out of the model as it ran, and in how many layers")
    tasks: dict[str, TaskFigures] = Field(description="by name of the task")


class Speeds(Document):
    """Tokens per second."""

    drafted: Magnitude
    alone: Magnitude


class PrintedDraft(Document):
    """What `eval --draft` has found; `_se`: standard error, `_expected`: by total variation."""

    new_tokens: Count
    steps: Count
    draft_tokens: Count = Field(description="tokens that are drafted at a time")
    accepted_per_step: Magnitude
    accepted_per_step_se: Magnitude
    accepted_per_step_expected: Magnitude
    acceptance: Share = Field(description="share of judged tokens that were accepted")
    acceptance_se: Magnitude
    acceptance_expected: Share
    acceptance_expected_se: Magnitude
    tokens_per_step_expected: dict[str, Magnitude] = Field(description="by how many tokens are drafted")
    generated: str
    speed: Speeds


class Compared(Figures):
    """A model that `compare` has measured."""

    model: str
    bytes: Count
    ref_cache: CacheOutcome | None = REF_CACHE


class PrintedCheck(Document):
    """A property that `verify` has checked."""

    name: str
    ok: bool
    detail: str
    warning: bool = Field(description="whether the output is good all the same where it is not ok")


class Verified(Document):
    """What `verify` has found."""

    ok: bool
    checks: list[PrintedCheck]


class InspectedTensor(Document):
    """A tensor of a checkpoint."""

    name: str
    dtype: str
    shape: Shape
    file: str


class InspectedDirectory(Document):
    """What a model directory holds."""

    path: str
    model_type: Stated
    architecture: Stated
    layers: Stated
    hidden_size: Stated
    vocab_size: Stated
    tied_embeddings: bool
    files: Count
    tensors: Count
    bytes: Count
    bits_per_weight: Magnitude | None = Field(
        description="of all tensors; of packed codes as report.json says, null without it"
    )
    bytes_by_type: dict[str, Count]
    quantization: Any = Field(description="config.json's quantization_config; null where there is none")
    tensor_list: list[InspectedTensor] | None = Field(None, description="with --tensors")


class TensorsOfType(Document):
    """The tensors of one type."""

    tensors: Count
    bytes: Count


class InspectedTokenizer(Document):
    """The tokenizer of a GGUF file."""

    model: Stated
    pre: Stated
    special_ids: dict[str, Stated]
    add_bos: Stated
    add_eos: Stated
    chat_template: bool


class InspectedGguf(Document):
    """What a GGUF file holds, with all its shards."""

    path: str
    gguf_version: Count
    architecture: Stated
    name: Stated
    file_type: str | None
    layers: Stated
    hidden_size: Stated
    context_length: Stated
    vocab_size: Count | None
    tied_embeddings: bool
    files: Count
    bytes: Count
    tensors: Count
    parameters: Count
    bits_per_weight: Magnitude | None = Field(description="of all tensors")
    types: dict[str, TensorsOfType]
    tokenizer: InspectedTokenizer
    imatrix: dict[str, Stated]
    alignment: Count
    tensor_list: list[InspectedTensor] | None = Field(None, description="with --tensors")


class MeasuredImatrix(Document):
    """An importance matrix that was written."""

    output: str
    entries: Count = Field(description="tensors")
    chunks: Count = Field(description="windows")
    chunk_size: Count = Field(description="tokens of a window")
    ledger: list[LedgerEntry] | None = Field(None, description="of `imatrix`, not of `imatrix-merge`")


class Packed(Document):
    """Windows that `calib pack` has written."""

    path: str
    samples: Positive
    length: Positive
    sha256: Sha256 = Field(description="of the tokens")


class KeptStatistics(Document):
    """Statistics that runs kept with --stats."""

    key: str
    steps: list[str] = Field(description="methods that they were gathered during")
    transforms: list[str]
    tokens_sha256: Sha256
    layers: Count
    complete: bool = Field(description="whether there are those of all layers")
    bytes: Count


class PrunedStatistics(Document):
    """What `stats prune` has removed."""

    removed: list[str]
    bytes: Count


class ListedRecipe(Document):
    """A recipe that comes with llmcompress."""

    recipe: str
    comment: str


class NamedRecipe(RecipeData):
    """A recipe with its name or file."""

    recipe: str


class FoundProblem(Document):
    """What is wrong with a recipe."""

    step: Positive | None = Field(description="number of the step, from 1")
    message: str
    hint: str | None


class CheckedRecipe(Document):
    """What `recipe check` has found."""

    recipe: str
    ok: bool
    problems: list[FoundProblem]


class SweptRun(Document):
    """A run of a sweep."""

    run: str
    output: str
    state: Literal["not begun", "done", "failed", "stopped"]
    finished_before: bool = Field(description="whether an earlier start has finished it")
    error: str | None
    method: str
    bits: Positive | None = Field(description="null where the type alone says it")
    group_size: int | None = Field(description="-1: whole rows")
    output_bytes: Count
    bits_per_weight: Magnitude = Field(description="of all tensors")
    bits_per_quantised_weight: Magnitude | None = Field(description="of what is quantised, scales included")
    seconds: Magnitude | None
    figures: Figures | None


class Swept(Document):
    """What a sweep has done."""

    model: str
    runs: list[SweptRun]


class Page(Document):
    """The page that `report` has written."""

    output: str
    outputs: list[str] = Field(description="names of the outputs that it is about")


class Gpu(Document):
    """The GPU at hand, and what compiles for it."""

    name: str
    architecture: str
    multiprocessors: Count
    compiler: str
    compiled: Count = Field(description="kernels that were compiled now")
    cached: Count = Field(description="kernels that the cache held")


class CheckedCase(Document):
    """A product that was compared with float64."""

    grid: str
    inputs: str | None = Field(description="how inputs are rounded")
    dtype: str
    tokens: Positive
    error: Magnitude = Field(description="the largest, as a share of its bound")
    launches: list[str] = Field(description="names of the kernels that ran")
    failed: str | None
    ok: bool


class CheckedKernels(Document):
    """What `kernels check` has found."""

    ok: bool
    device: Gpu
    built: dict[str, Count] = Field(description="variants by family")
    cases: list[CheckedCase]


class BenchedProduct(Document):
    """A product that was timed, its weight in no cache."""

    name: str
    shape: Shape = Field(description="of the weight, [out, in]")
    tokens: Positive
    microseconds: Magnitude
    bytes: Count = Field(description="that it must read")
    of_copy: Magnitude = Field(description="rate of those bytes as a share of a copy's")
    of_datasheet: Magnitude | None = Field(description="the same, of what the GPU's maker states")
    times_bf16: Magnitude = Field(description="how many times as fast as cuBLAS in bfloat16")


class TimedKernels(Document):
    """What `kernels bench` has measured."""

    device: Gpu
    products: list[BenchedProduct]


class CompiledKernel(Document):
    """A file of compiled kernels."""

    file: str
    bytes: Count
    about: dict[str, Any] | None = Field(description="what it was compiled from; null where it is damaged")


class CompiledKernels(Document):
    """What `kernels cache` holds."""

    directory: str
    bytes: Count
    files: list[CompiledKernel]


class ClearedKernels(Document):
    """What `kernels cache --clear` has removed."""

    directory: str
    removed: Count
    bytes: Count


# a recipe with --print-recipe; a list for several types of GGUF
_PLANNED = PrintedPlan | list[PrintedPlan] | RecipeData | list[RecipeData]

PRINTED: dict[str, Any] = {
    "run": PrintedResult | list[PrintedResult] | _PLANNED,
    "plan": _PLANNED,
    "export": list[ExportedOutput],
    "fit": Fitted,
    "eval": PrintedEvaluation | list[PrintedEvaluation] | Answered | LongEvaluation | PrintedDraft,
    "compare": list[Compared],
    "verify": Verified,
    "inspect": InspectedDirectory | InspectedGguf,
    "list": list[dict[str, str]],
    "imatrix": MeasuredImatrix,
    "imatrix-merge": MeasuredImatrix,
    "depth": DepthDone | PrintedDepthPlan,
    "width": WidthDone | PrintedWidthPlan,
    "lora": LoraDone | PrintedLoraPlan,
    "recover": PrintedResult | PrintedRecoverPlan,
    "draft": DraftDone | DepthDone | PrintedDraftPlan | PrintedPrunedDraftPlan,
    "page": Page,
    "sweep": Swept | PrintedPlan | list[PrintedPlan],
    "kernels check": CheckedKernels,
    "kernels bench": TimedKernels,
    "kernels cache": CompiledKernels | ClearedKernels,
    "calib pack": Packed,
    "stats list": list[KeptStatistics],
    "stats prune": PrunedStatistics,
    "recipe list": list[ListedRecipe],
    "recipe show": NamedRecipe,
    "recipe check": CheckedRecipe,
}
"""By command. "run": every command that compresses; "page": `report`, whose name is that of report.json."""
