"""What becomes of a compressed model in long text: what `eval --long` does."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from llmcompress.api.evaluation import NOTHING_KEPT, refuse_broken, save_document
from llmcompress.api.quiet import quiet_libraries
from llmcompress.api.steps import Watch, watched
from llmcompress.engine.process.ranks import refuse_several

if TYPE_CHECKING:
    from llmcompress.validate.evaluate import Gate
    from llmcompress.validate.request import Request


@dataclass(frozen=True)
class LongResult:
    """Figures of a model in long text, natural logarithms.

    document: what `eval --long --output` saves: figures by position, by depth and length of needles, and of what was
    written.
    """

    document: Mapping[str, Any] = field(repr=False)

    @property
    def figures(self) -> Mapping[str, Any]:
        """Over all of it by name: `kl`, `kl_growth`, `needle_exact_drop`, `repetition_rise` and others."""
        from llmcompress.validate.long_text import flat_figures

        return flat_figures(self.document)

    @property
    def bands(self) -> Sequence[Mapping[str, Any]]:
        """The figures of tokens that have from `first` to `last` others before them, nearest first."""
        bands: Sequence[Mapping[str, Any]] = self.document["bands"]
        return bands

    def fail_if(self, *conditions: str) -> None:
        """GateError for figures that are not finite, or for the first condition that is true.

        RecipeError for a condition on a figure that was not measured.

        >>> long.fail_if("needle_acc_drop > 0.9", "looping_rise > 0.9")
        """
        from llmcompress.validate.evaluate import parse_gate

        gates = [parse_gate(text) for text in conditions]
        refuse_unmeasured_long(gates, self.document["reference"] is not None)
        refuse_broken(self.figures, gates)

    def save(self, file: str | Path, *, overwrite: bool = False) -> None:
        """Write the document as JSON. PlanError for a file that exists, without `overwrite`.

        GateError for figures that are not finite, which JSON cannot say.

        >>> long.save("model-w4.long.json")
        """
        from llmcompress.validate.token_statistics import refuse_not_finite

        refuse_not_finite(self.figures)
        save_document(self.document, file, overwrite)


def refuse_unmeasured_long(gates: "Iterable[Gate]", compared: bool) -> None:
    """RecipeError for a gate of a figure that is not measured. compared: whether there is a reference."""
    from llmcompress.validate.evaluate import refuse_unmeasured
    from llmcompress.validate.long_text import ALONE, COMPARED

    refuse_unmeasured(gates, compared, ALONE, COMPARED)


def evaluate_long(
    model: str | Path,
    ref: str | Path | None = None,
    *,
    text: str | Path = "default",
    length: int | None = None,
    windows: int | None = None,
    items: int = 2,
    batch: int = 1,
    device: str = "auto",
    compute_dtype: Literal["float32", "bfloat16", "float16"] | None = None,
    adapter: str | Path | None = None,
    ref_adapter: str | Path | None = None,
    kv_bits: int | None = None,
    kv_type: Literal["int", "fp8", "nvfp4"] | None = None,
    trust_remote_code: bool = False,
    progress: Watch | None = None,
    stop: Callable[[int], bool] | None = None,
) -> LongResult:
    """What becomes of a model, and of its original `ref`, in long text: by position, with needles, and writing.

    length: tokens of a window; by default the model's context, at most 4096 and no more than the text has. windows: the
    first so many are scored (16, or all that the text has). items: facts asked for at each depth of each length. The
    others are those of `evaluate`. Raises LlmcompressError.

        >>> long = llmcompress.evaluate_long("model-w4", "model", length=256, windows=2, items=1)
        >>> [band["last"] for band in long.bands]
        [127, 255]
    """
    from llmcompress.validate.request import Request

    refuse_several("evaluate_long() of Python")
    request = Request.given(
        model,
        ref,
        text=text,
        windows=windows,
        batch=batch,
        device=device,
        compute_dtype=compute_dtype,
        adapter=adapter,
        ref_adapter=ref_adapter,
        kv_bits=kv_bits,
        kv_type=kv_type,
        trust_remote_code=trust_remote_code,
    )
    return evaluated_long(request, length, items, progress, stop)


def evaluated_long(
    request: "Request",
    length: int | None,
    items: int,
    progress: Watch | None = None,
    stop: Callable[[int], bool] | None = None,
) -> LongResult:
    """The result of an evaluation in long text."""
    from llmcompress.validate.long_text import long_document

    with quiet_libraries():
        return LongResult(long_document(request, length, items, watched(progress, stop, NOTHING_KEPT)))
