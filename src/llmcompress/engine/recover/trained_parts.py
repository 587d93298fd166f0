"""What of a compressed model is trained: scales that are free numbers, weights that nothing has rounded, and gains."""

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from llmcompress.engine.recover.factors import Factors
from llmcompress.engine.recover.recover_plan import RecoverPlan
from llmcompress.engine.recover.recovered_file import holds_gains, trained_matrix
from llmcompress.engine.source.quantised import DecodedHeaders
from llmcompress.engine.train.places import TrainedPlace, norms_of
from llmcompress.engine.train.trained import WEIGHTS, Trained, TrainedMatrix, TrainedNorm, TrainedWeight
from llmcompress.errors import CheckpointError, RunError
from llmcompress.formats.base import Entry, TensorSpec
from llmcompress.grids.base import INPUT_SPECS
from llmcompress.grids.inputs import fixed_for
from llmcompress.model.streamed_model import StreamedModel
from llmcompress.store.checkpoint import DTYPES, Checkpoint

if TYPE_CHECKING:
    from torch import Tensor

    from llmcompress.grids.coded import Coded


class TrainedParts:
    """What is trained of a model. by_name: by the name of the tensor. places: by layer, and last behind the layers."""

    def __init__(self, plan: RecoverPlan, student: StreamedModel) -> None:
        self.plan, self.student = plan, student
        self.stored = Checkpoint(plan.stored) if plan.gguf is None else plan.gguf
        self.by_name: dict[str, Trained] = {}
        self.places: list[list[TrainedPlace]] = [[] for _ in range(len(student.layers) + 1)]
        self._matrices()
        self._norms()
        if not self.by_name:
            raise RunError(f"{plan.path} has no scales and no norms that can be trained")

    def _matrices(self) -> None:
        why = "its scales are no free numbers, or are not stored as they are used"
        for ref in self.plan.opened.matrices.refs:
            name = f"{ref.module}.weight"
            found: Trained | None = None
            if self._runs_as(ref.layer, ref.path, name):
                found = self._matrix(ref.module) or self._weight(ref.module)
            if found is None:
                self.plan.opened.ledger.note("untrained", ref.module, why)
                continue
            self.by_name[name] = found
            self.places[ref.layer].append(TrainedPlace(ref.path, name))

    def _runs_as(self, layer: int, path: str, name: str) -> bool:
        """Whether the tensor of that name is, alone, the weight of the module at `path` of a layer."""
        if f"{path}.weight" in self.student.spec.joined:
            return False
        try:
            self.student.layers[layer].get_submodule(path)
            return self.student.disk_name(layer, f"{path}.weight") == name
        except (AttributeError, CheckpointError):
            return False

    def _matrix(self, module: str) -> TrainedMatrix | None:
        """The matrix of a module, if it is codes whose tensors come back byte for byte."""
        if self.plan.gguf is not None:
            return trained_matrix(self.plan.gguf, module) if module in self.plan.records else None
        headers = self.plan.opened.headers
        if not isinstance(headers, DecodedHeaders) or module not in headers.packed or module in headers.pieces:
            return None
        own = DTYPES[self.plan.own[f"{module}.weight"].spec.dtype]
        found = TrainedMatrix.of(module, partial(self.plan.checkpoint.coded, module), own, module in headers.transposed)
        if found is None:
            return None
        try:
            again = encoded(self.plan, module, found.coded())
        except RunError:
            return None
        return found if all(torch.equal(part, self.stored.read(name)) for name, part in again.items()) else None

    def _weight(self, module: str) -> TrainedWeight | None:
        """The matrix of a module, if it, or the model around it, was pruned, and nothing has rounded it."""
        name = f"{module}.weight"
        if not self.plan.learns_weights_of(module) or name not in self.stored:
            return None
        return WEIGHTS[self.plan.request.weights](self.stored, name, "pruner" in self.plan.records.get(module, {}))

    def _norms(self) -> None:
        factors = Factors(self.plan)
        for number, layer in enumerate(self.student.layers):
            for path in norms_of(layer):
                name = self.student.disk_name(number, f"{path}.weight")
                self._norm(name, factors, TrainedPlace(path, name), number)
        for path in norms_of(self.student.causal):
            name = self.student.outer_name(f"{path}.weight")
            self._norm(name, factors, TrainedPlace(path, name), len(self.student.layers))

    def _norm(self, name: str, factors: Factors, place: TrainedPlace, section: int) -> None:
        if self.plan.gguf is not None and not holds_gains(self.plan.gguf, name):
            self.plan.opened.ledger.note("untrained", name, "the file does not hold it as float32")
            return
        weight = self.stored.read_finite(name)
        dtype = DTYPES[self.plan.opened.headers.tensors[name].spec.dtype]  # a GGUF file holds it as float32
        self.by_name[name] = TrainedNorm(*factors.base(name, weight), dtype, factors.offset(name, place.path))
        self.places[section].append(place)


def encoded(plan: RecoverPlan, module: str, coded: "Coded") -> "dict[str, Tensor]":
    """The tensors of a module that the model's format makes of codes; RunError where it has no place for them."""
    headers = plan.opened.headers
    assert isinstance(headers, DecodedHeaders)  # else there are no codes
    record = plan.records.get(module, {})
    own = plan.own[f"{module}.weight"].spec
    inputs = INPUT_SPECS.get(str(record.get("inputs")))
    if inputs is not None:
        coded = replace(coded, input_scale=fixed_for(plan.checkpoint.inputs(module), inputs))
    entry = Entry(
        TensorSpec(own.name, own.dtype, own.shape),
        coded.grid.spec,
        inputs,
        transposed=module in headers.transposed,
        permuted=bool(record.get("permuted")),
        block=True,
        linear=True,
    )
    return headers.format.encode(entry, coded)
