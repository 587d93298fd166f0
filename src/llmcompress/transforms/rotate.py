"""Rotations folded into the weights (QuaRot, Ashkboos et al., 2024, arXiv:2404.00456; SpinQuant, arXiv:2405.16406)."""

from typing import ClassVar

from pydantic import Field, model_validator

from llmcompress.transforms.base import Transform


class Rotate(Transform):
    """Turn the hidden states, and the values of every head, by random-sign Hadamard matrices: no channel stands out.

    Norms are folded into the matrices behind them first. A tied head becomes a tensor of its own.
    """

    name: ClassVar[str] = "rotate"
    summary: ClassVar[str] = "Rotations: spread outliers evenly over all channels, folded into the weights."
    needs_calibration: ClassVar[bool] = False

    residual: bool = Field(True, description="turn the hidden states")
    values: bool = Field(True, description="turn the values of every head")
    seed: int = Field(0, ge=0, lt=1 << 62, description="of the random signs")

    @model_validator(mode="after")
    def _turns(self) -> "Rotate":
        """ValueError for a rotation of nothing, which would write the model as it was."""
        if not (self.residual or self.values):
            raise ValueError("with residual and values both false nothing is turned; leave the step out")
        return self


TRANSFORM = Rotate
