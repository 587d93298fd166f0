"""The request of an evaluation: models, text, windows and how to run."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from llmcompress.validate.backend import BackendChoice
from llmcompress.validate.key_value_cache import CacheOptions
from llmcompress.validate.omission import Omission


@dataclass(frozen=True)
class Timing:
    """How speed is measured. batches: sequences at once; prompt, new: tokens read and generated in each sequence.

    repeats: how often the prompt is read; the median counts.
    """

    batches: tuple[int, ...] = (1, 8)
    prompt: int = 512
    new: int = 64
    repeats: int = 3


@dataclass(frozen=True)
class Request:
    """What to evaluate: directories, text ('default' or a path), windows [windows, length] and how to run.

    model may be a GGUF file; ref is then the directory it was made from.
    """

    model: Path
    ref: Path | None
    text: str
    length: int
    windows: int | None
    batch: int
    device: str
    dtype: str | None  # None for the backend's default
    trust_remote_code: bool = False
    adapter: Path | None = None  # of the model
    cache: CacheOptions = field(default_factory=CacheOptions)  # of the model; the reference has none that is quantised
    backend: BackendChoice | None = None  # runs the whole model; None for one section at a time, decoded
    ref_adapter: Path | None = None  # of the reference, merged while that is read
    timing: Timing = field(default_factory=Timing)  # with a backend, which measures speed as well
    omission: Omission | None = None  # what is left out of the model, not of the reference
    ref_cache: Path | None = None  # folder in which what the reference's layers give is kept

    @classmethod
    def given(
        cls,
        model: str | Path,
        ref: str | Path | None,
        *,
        batch: int,
        device: str,
        compute_dtype: str | None,
        adapter: str | Path | None,
        ref_adapter: str | Path | None,
        kv_bits: int | None,
        kv_type: Literal["int", "fp8", "nvfp4"] | None,
        trust_remote_code: bool,
        text: str | Path = "default",
        length: int = 2,
        windows: int | None = None,
        backend: BackendChoice | None = None,
        ref_cache: str | Path | None = None,
    ) -> "Request":
        """The request that arguments of Python's functions make. length, windows: of text, where that is cut so."""
        ref, adapter, ref_adapter = (None if place is None else Path(place) for place in (ref, adapter, ref_adapter))
        return cls(
            Path(model),
            ref,
            str(text),
            length,
            windows,
            batch,
            device,
            compute_dtype,
            trust_remote_code,
            adapter,
            CacheOptions(kv_bits, kv_type),
            backend,
            ref_adapter,
            ref_cache=None if ref_cache is None else Path(ref_cache),
        )


def with_omission(request: Request, omission: Omission | None = None) -> Request:
    """The request with something left out of its model, which without a reference is then compared with itself."""
    if omission is None or request.ref is not None:
        return replace(request, omission=omission)
    return replace(request, omission=omission, ref=request.model, ref_adapter=request.adapter)
