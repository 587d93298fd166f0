"""What a run tells whoever watches it. The engine prints nothing itself."""

from typing import Any


class Progress:
    """Does nothing; the command line shows bars or lines, tests record."""

    def start(self, layers: int, done: int) -> None:
        """A run of `layers` sections begins; `done` of them were found finished."""

    def gradients(self, done: int, of: int) -> None:
        """`done` of so many steps of a pass of gradients are made, which comes before all layers."""

    def layer(self, number: int) -> None:
        """Work on a decoder layer begins."""

    def stage(self, space: str, matrices: int) -> None:
        """Work on the matrices of a layer that read one input begins."""

    def matrix(self, record: dict[str, Any]) -> None:
        """A matrix has been solved; `record` is what the report will hold."""

    def tokens(self, count: int) -> None:
        """`count` calibration tokens have passed a layer."""

    def layer_done(self, number: int, seconds: float) -> None:
        """A decoder layer is finished and on disk."""

    def writing(self, total_bytes: int) -> None:
        """The output is being written."""
