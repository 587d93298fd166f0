"""Planning an adapter of low rank: which matrices of a compressed model differ from the original."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from llmcompress.engine.plan.pass_memory import lora_memory
from llmcompress.engine.plan.run_options import Options
from llmcompress.engine.source.matrix_refs import matrices_of
from llmcompress.engine.source.open import open_checkpoint
from llmcompress.engine.source.quantised import DecodedHeaders, decoded_headers
from llmcompress.engine.source.stacked import unstacked_headers
from llmcompress.engine.structure.source_model import OpenModel, open_model
from llmcompress.errors import CheckpointError, PlanError
from llmcompress.formats.base import TensorSpec
from llmcompress.ledger import Ledger
from llmcompress.recipe import Calibration, transforms
from llmcompress.store.adapter import AdapterDirectory, adapter_specs
from llmcompress.store.headers import ModelHeaders, read_headers, read_json


@dataclass(frozen=True)
class RepairTarget:
    """A matrix that may be repaired. name: on disk. module: in transformers' model. path: below its layer."""

    layer: int
    name: str
    module: str
    path: str
    space: str
    conv1d: bool
    shape: tuple[int, int]
    dtype: str


@dataclass(frozen=True)
class LoraPlan:
    """What a run will do. opened: the compressed model. original: headers of the model it was made from.

    by: the error that is made least.

    memory_bytes: an estimate.
    """

    opened: OpenModel
    original: ModelHeaders
    targets: tuple[RepairTarget, ...]
    rank: int
    by: Literal["outputs", "weights"]
    memory_bytes: int

    @property
    def specs(self) -> list[TensorSpec]:
        return factors(self.targets, self.rank)

    @property
    def nbytes(self) -> int:
        """Bytes of the adapter's tensors, if all matrices are repaired."""
        return sum(spec.nbytes for spec in self.specs)

    @property
    def added_bits(self) -> float:
        """Bits per weight that the adapter adds to the matrices."""
        return bits_added(self.targets, self.rank)


def bits_added(targets: Sequence[RepairTarget], rank: int) -> float:
    """Bits of both factors of all `targets`, in the types of their weights, for each weight."""
    weights = sum(rows * columns for rows, columns in (item.shape for item in targets))
    return 8 * sum(spec.nbytes for spec in factors(targets, rank)) / max(weights, 1)


def factors(targets: Sequence[RepairTarget], rank: int) -> list[TensorSpec]:
    """The tensors of an adapter of `targets`."""
    return adapter_specs([(item.module, item.shape, item.dtype) for item in targets], rank)


def plan_lora(
    original: Path,
    compressed: Path,
    rank: int,
    by: Literal["outputs", "weights"],
    text: Calibration,
    options: Options | None = None,
) -> LoraPlan:
    """Check from headers that both models have the same matrices. Raises LlmcompressError."""
    options = options or Options()
    report = _report(compressed)
    source = read_headers(original)
    source = unstacked_headers(source, Ledger()) if report.get("unstacked") else source
    matrices_of(source, options.trust_remote_code, Ledger())  # refuses what is no original
    headers = decoded_headers(read_headers(compressed))
    opened = open_model(headers, text, options, f"lora{rank}", AdapterDirectory, runs_text=by == "outputs")
    _refuse_transformed(compressed, report)
    targets = _targets(opened, source)
    narrow = min(targets, key=lambda item: min(item.shape))
    if not 1 <= rank < min(narrow.shape):
        rows, columns = narrow.shape
        raise PlanError(f"--rank {rank} is no low rank for {narrow.name}, which is {rows} x {columns}")
    memory = partial(lora_memory, opened.sizes, by_outputs=by == "outputs")
    opened = opened.within_memory(memory)
    return LoraPlan(opened, source, targets, rank, by, memory(opened.resources).peak("host"))


def _targets(opened: OpenModel, source: ModelHeaders) -> tuple[RepairTarget, ...]:
    """The matrices of the layers; CheckpointError unless the original has the same matrices."""
    spec, headers = opened.matrices.spec, opened.headers
    within = f"{opened.matrices.prefix}."
    there = {name for name in source.tensors if name not in headers.tensors and name.startswith(within)}
    if there:
        raise _unlike(headers, source, f"the one has no {min(there)}, the other has")
    found = []
    for ref in opened.matrices.refs:
        name = f"{ref.module}.weight"
        if name not in source.tensors or source.tensors[name].spec.shape != headers.tensors[name].spec.shape:
            raise _unlike(headers, source, f"{name} is not the same size in both")
        if ref.expert is not None:
            why = "transformers keeps experts in 3-D parameters, which an adapter of linears does not fit"
            opened.ledger.note("unrepaired", ref.module, why)
            continue
        stored = source.tensors[name].spec
        shape = stored.shape[::-1] if ref.linear.conv1d else stored.shape
        runtime, size = f"{spec.layers}.{ref.layer}.{ref.path}", (shape[0], shape[1])
        found.append(
            RepairTarget(ref.layer, ref.module, runtime, ref.path, ref.space, ref.linear.conv1d, size, stored.dtype)
        )
    return tuple(found)


def changed_targets(plan: LoraPlan) -> list[RepairTarget]:
    """The matrices that differ from the original. CheckpointError if norms differ, PlanError if nothing does."""
    original, compressed, headers = open_checkpoint(plan.original), plan.opened.checkpoint, plan.opened.headers
    for name, stored in plan.original.tensors.items():
        kept = name.endswith("norm.weight") or name.startswith(f"{plan.opened.matrices.prefix}.")
        norm = len(stored.spec.shape) == 1 and kept and name in headers.tensors
        if norm and not torch.equal(original.read(name).to(torch.float32), compressed.read(name).to(torch.float32)):
            raise _unlike(headers, plan.original, f"{name} differs, so more was done than to round matrices")
    packed = headers.packed if isinstance(headers, DecodedHeaders) else frozenset()
    found = []
    for target in plan.targets:
        name = f"{target.name}.weight"
        if target.name in packed or not torch.equal(original.read(name), compressed.read(name)):
            found.append(target)
        else:
            plan.opened.ledger.note("unrepaired", target.name, "it is as it was")
    if not found:
        raise PlanError(f"{headers.path} has the matrices of {plan.original.path}: there is nothing to repair")
    return found


def _report(compressed: Path) -> Mapping[str, Any]:
    """The report of the compressed model; empty where it has none."""
    file = compressed / "report.json"
    return read_json(file) if file.is_file() else {}


def _refuse_transformed(compressed: Path, report: Mapping[str, Any]) -> None:
    """PlanError for a model whose channels were scaled or rotated: its matrices are not near the original's."""
    recipe = report.get("recipe")
    steps = recipe.get("steps") if isinstance(recipe, Mapping) else None
    for step in steps if isinstance(steps, list) else []:
        method = step.get("method") if isinstance(step, Mapping) else None
        if method in transforms():
            raise PlanError(
                f"{compressed} was transformed by {method}, so it is not the original's matrices that it rounds",
                "write the transformed model in format dense first, and give that as the original",
            )


def _unlike(headers: ModelHeaders, source: ModelHeaders, why: str) -> CheckpointError:
    return CheckpointError(f"{headers.path} was not made from {source.path}: {why}", "give the model it was made from")
