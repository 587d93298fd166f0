"""What formats have in common that store the codes of a matrix beside its scales and name themselves in config.json."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from llmcompress.errors import CheckpointError
from llmcompress.formats.base import Config, Entry, Format, Reader, Specs, TensorSpec
from llmcompress.formats.entry_checks import Refusal, check_codes, common_refusal, rounded_inputs
from llmcompress.grids.base import Spec

if TYPE_CHECKING:
    from torch import Tensor

    from llmcompress.grids.coded import Coded

Part = tuple[str, str, tuple[int, ...]]
"""A tensor of a module: its name behind the module's, its type in safetensors, its shape."""


class PackedFormat(Format):
    """Answers what is the same for all of them; a format says what its tensors and its settings are.

    quant_method: what config.json calls it. required: names, behind the module's, of the tensors that every quantised
    module has. tells_inputs: whether it can say that inputs are rounded.
    """

    quant_method: str
    required: tuple[str, ...]
    tells_inputs: bool = False

    def refuses(self, entries: Sequence[Entry], config: Config) -> Refusal | None:
        refusal = common_refusal(self.name, entries, config, self.holds or ())
        if refusal is None and not self.tells_inputs:
            refusal = rounded_inputs(self.name, entries)
        if refusal is not None:
            return refusal
        misfits = (self.misfit(entry, entry.grid) for entry in entries if entry.grid is not None)
        return next((misfit for misfit in misfits if misfit is not None), None)

    def misfit(self, entry: Entry, grid: Spec) -> Refusal | None:
        """What of one quantised matrix has no place in the format, and the way out."""
        return None

    def layout(self, entry: Entry) -> list[TensorSpec]:
        if entry.grid is None:
            return [entry.source]
        parts = self.parts(entry, entry.grid)
        return [TensorSpec(f"{entry.module}.{name}", dtype, shape) for name, dtype, shape in parts]

    @abstractmethod
    def parts(self, entry: Entry, grid: Spec) -> list[Part]:
        """The tensors of a quantised matrix."""

    def encode(self, entry: Entry, coded: "Coded") -> "dict[str, Tensor]":
        check_codes(entry, coded)
        return {f"{entry.module}.{name}": part.contiguous() for name, part in self.packed(entry, coded).items()}

    @abstractmethod
    def packed(self, entry: Entry, coded: "Coded") -> "dict[str, Tensor]":
        """The tensors of `parts` by name, of codes that were checked."""

    def config(self, entries: Sequence[Entry], config: Config) -> dict[str, dict[str, Any]]:
        settings = {"quant_method": self.quant_method, **self.settings(entries, config)}
        return {"config.json": {"quantization_config": settings}}

    @abstractmethod
    def settings(self, entries: Sequence[Entry], config: Config) -> dict[str, Any]:
        """What quantization_config says besides the quant_method."""

    def recognises(self, config: Config) -> bool:
        settings = config.get("quantization_config")
        return isinstance(settings, Mapping) and settings.get("quant_method") == self.quant_method

    def decode(self, module: str, read: Reader, config: Config) -> "Coded | None":
        try:
            tensors = [read(f"{module}.{name}") for name in self.required]
        except KeyError:
            return None
        return self.unpacked(module, tensors, read, config["quantization_config"])

    def unpacked(self, module: str, tensors: "list[Tensor]", read: Reader, settings: Config) -> "Coded":
        """The matrix whose `required` tensors these are; CheckpointError if they do not fit together.

        A format that decodes by itself has none: TypeError.
        """
        raise TypeError(f"format {self.name} does not decode by its required tensors")


def matrix_shape(specs: Specs, name: str) -> tuple[int, int] | None:
    """The shape of the tensor called `name`; None if it is missing or no matrix."""
    spec = specs.get(name)
    return (spec.shape[0], spec.shape[1]) if spec is not None and len(spec.shape) == 2 else None


def stored_extents(module: str, specs: Specs, read: Reader) -> tuple[int, int]:
    """[out, in] as M.weight_shape holds them."""
    stored = specs.get(f"{module}.weight_shape")
    if stored is None or stored.shape != (2,):
        raise CheckpointError(f"{module}.weight_shape does not hold the two extents of a matrix")
    rows, width = (int(extent) for extent in read(f"{module}.weight_shape"))
    return rows, width
