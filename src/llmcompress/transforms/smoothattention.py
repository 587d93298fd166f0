"""SmoothAttention (QServe, Lin et al., 2024, arXiv:2405.04532, section 4.2): keys that are easy to keep in few bits."""

from typing import ClassVar

from pydantic import Field

from llmcompress.transforms.base import Transform


class SmoothAttention(Transform):
    """Divide every channel of the keys by max|k|^alpha, and multiply the queries, for a quantised KV cache."""

    name: ClassVar[str] = "smoothattention"
    summary: ClassVar[str] = "SmoothAttention: move outliers of keys into queries, for KV caches of few bits."
    needs_calibration: ClassVar[bool] = True

    alpha: float = Field(0.5, ge=0, le=1, description="how much of a channel's size goes into the queries")


TRANSFORM = SmoothAttention
