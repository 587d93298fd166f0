"""How faithful a compressed model is, and gates on it: what `eval` does."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from llmcompress.api.quiet import quiet_libraries
from llmcompress.api.steps import Watch, watched
from llmcompress.engine.process.ranks import refuse_several
from llmcompress.errors import GateError, RecipeError

if TYPE_CHECKING:
    from llmcompress.validate.evaluate import Gate
    from llmcompress.validate.request import Request

NOTHING_KEPT = "nothing is kept of an evaluation; the same command begins again"


@dataclass(frozen=True)
class EvaluationResult:
    """Figures of a model on a text, natural logarithms.

    figures: by name, as `eval --json` prints them; those ending in `_ci` are 95% intervals. document: what
    `eval --output` saves: the figures, and means along the text.
    """

    request: "Request" = field(repr=False)
    document: Mapping[str, Any] = field(repr=False)

    @property
    def figures(self) -> Mapping[str, Any]:
        """The figures by name: `perplexity`, and with a reference `kl`, `kl_p99`, `top1`, `tv` and others."""
        figures: Mapping[str, Any] = self.document["figures"]
        return figures

    @property
    def perplexity(self) -> float:
        """Of the model."""
        return float(self.figures["perplexity"])

    @property
    def kl(self) -> float | None:
        """Mean KL(reference || model) in nats per token; None without a reference."""
        return self.figures.get("kl")

    @property
    def top1(self) -> float | None:
        """Share of tokens whose most likely successor is the reference's; None without a reference."""
        return self.figures.get("top1")

    def fail_if(self, *conditions: str) -> None:
        """GateError for figures that are not finite, or for the first condition that is true.

        RecipeError for a condition on a figure that was not measured.

        >>> evaluation.fail_if("kl > 5", "top1 < 0.01")
        """
        from llmcompress.validate.evaluate import parse_gate

        gates = [parse_gate(text) for text in conditions]
        refuse_unmeasured_gates(self.request, gates)
        refuse_broken(self.figures, gates)

    def with_written(self, prompt: str, continuations: Mapping[str, str]) -> "EvaluationResult":
        """The result with what each model, by its path, writes after a prompt."""
        model, ref = str(self.request.model), self.request.ref
        reference = None if ref is None else continuations[str(ref)]
        written = {"prompt": prompt, "model": continuations[model], "reference": reference}
        return replace(self, document={**self.document, "written": written})

    def save(self, file: str | Path, *, overwrite: bool = False) -> None:
        """Write the document as JSON, for `llmcompress report`. PlanError for a file that exists, without `overwrite`.

        GateError for figures that are not finite, which JSON cannot say.

        >>> evaluation.save("model-w4.eval.json")
        """
        save_document(self.document, file, overwrite)


def refuse_broken(figures: Mapping[str, Any], gates: "Iterable[Gate]") -> None:
    """GateError for figures that are not finite, or for the first gate that fails."""
    from llmcompress.validate.token_statistics import refuse_not_finite

    refuse_not_finite(figures)
    for gate in gates:
        if gate.fails(figures):
            raise GateError(gate.broken(figures))


def save_document(document: Mapping[str, Any], file: str | Path, overwrite: bool) -> None:
    """Write the document of an evaluation; PlanError for a file that exists, GateError for what is not finite."""
    from llmcompress.store.files import refuse_existing
    from llmcompress.store.unfinished import write_whole
    from llmcompress.validate.token_statistics import refuse_not_finite

    refuse_not_finite(document["figures"])
    refuse_existing(Path(file), overwrite)
    write_whole(Path(file), json.dumps(document, indent=1).encode() + b"\n", overwrite)


def refuse_unmeasured_gates(request: "Request", gates: "Iterable[Gate]") -> None:
    """RecipeError for a gate of a figure that an evaluation does not measure."""
    from llmcompress.validate.agreement import FIGURES as AGREEMENT
    from llmcompress.validate.evaluate import refuse_unmeasured
    from llmcompress.validate.token_statistics import ALONE

    refuse_unmeasured(gates, request.ref is not None, (*ALONE, *(AGREEMENT if request.backend is not None else ())))


def evaluate(
    model: str | Path,
    ref: str | Path | None = None,
    *,
    text: str | Path = "default",
    length: int = 512,
    windows: int | None = None,
    batch: int = 4,
    device: str = "auto",
    compute_dtype: Literal["float32", "bfloat16", "float16"] | None = None,
    backend: Literal["auto", "kernels", "torch"] | None = None,
    adapter: str | Path | None = None,
    ref_adapter: str | Path | None = None,
    ref_cache: str | Path | None = None,
    kv_bits: int | None = None,
    kv_type: Literal["int", "fp8", "nvfp4"] | None = None,
    kv: str | None = None,
    mlp_sparsity: float | None = None,
    attention_sparsity: float | None = None,
    trust_remote_code: bool = False,
    progress: Watch | None = None,
    stop: Callable[[int], bool] | None = None,
) -> EvaluationResult:
    """Perplexity of a model, and its divergence from the original `ref`, with 95% intervals.

    model: a directory or GGUF file that llmcompress wrote, or an original; a GGUF file needs `ref`. text: "default"
    (shipped with llmcompress), a file or a folder. It is cut into disjoint windows of `length` tokens; the first
    `windows` of them are scored (80, or all of the shipped text). batch: windows run at once. compute_dtype: float32
    unless a backend runs; by default with products in bfloat16 where the processor has instructions for them and the
    first windows of 16 or more say that KL stays within 1% (`document["products"]`), for which no other thread may
    multiply meanwhile. backend: runs the whole model on packed weights by CUDA kernels or torch, instead of one
    decoded layer at a time. adapter: a LoRA adapter of the model; ref_adapter: one of `ref`, without a backend.
    ref_cache: a folder in which what the layers of `ref` give is kept, so that they run once for many models; same
    figures. kv_bits, kv_type: simulate cached keys and values of so many bits. kv: evict a share of them, "snapkv:0.5"
    for example; mlp_sparsity, attention_sparsity: leave out a share of neurons or attention weights. Of these three one
    at a time; without `ref` the model is compared with itself. progress: told after every layer how many of all are
    done; stop: asked then, with the number of layers; StoppedError when it returns true. Raises LlmcompressError.

        >>> evaluation = llmcompress.evaluate("model-w4", "model", windows=2, length=128)
        >>> evaluation.kl < 1
        True
    """
    from llmcompress.validate.omission import omissions_of
    from llmcompress.validate.request import Request, with_omission

    refuse_several("evaluate() of Python")
    shares = (None if share is None else str(share) for share in (mlp_sparsity, attention_sparsity))
    omissions = omissions_of(kv, *shares)
    if len(omissions) > 1 or (omissions and backend is not None):
        raise RecipeError("evaluate() leaves out one thing at a time, and without a backend", "call it once for each")
    request = Request.given(
        model,
        ref,
        text=text,
        length=length,
        windows=windows,
        backend=backend,
        batch=batch,
        device=device,
        compute_dtype=compute_dtype,
        adapter=adapter,
        ref_adapter=ref_adapter,
        kv_bits=kv_bits,
        kv_type=kv_type,
        trust_remote_code=trust_remote_code,
        ref_cache=ref_cache,
    )
    return evaluated(with_omission(request, *omissions), progress, stop)


def evaluated(
    request: "Request",
    progress: Watch | None = None,
    stop: Callable[[int], bool] | None = None,
    say: Callable[[str], None] = lambda line: None,
    tell: Callable[[str], None] = lambda line: None,
) -> EvaluationResult:
    """The result of an evaluation. say, tell: as in `evaluate_whole`."""
    from llmcompress.validate.session import evaluate_whole

    with quiet_libraries():
        return EvaluationResult(request, evaluate_whole(request, watched(progress, stop, NOTHING_KEPT), say, tell))


def evaluated_together(
    requests: "Sequence[Request]",
    progress: Watch | None = None,
    stop: Callable[[int], bool] | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> list[EvaluationResult]:
    """The results of several models of one reference, which runs once. tell: as in `evaluate_whole`."""
    from llmcompress.validate.session import evaluate_together

    with quiet_libraries():
        found = evaluate_together(requests, watched(progress, stop, NOTHING_KEPT), tell)
    return [EvaluationResult(request, document) for request, document in zip(requests, found, strict=True)]
