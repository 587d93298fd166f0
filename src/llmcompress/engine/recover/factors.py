"""What multiplied the source's tensors before they were written, as the output's transforms.npz records it."""

from itertools import count, islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from llmcompress.engine.recover.recover_plan import RecoverPlan, paper
from llmcompress.engine.source.header_checks import numbered
from llmcompress.engine.source.open import open_checkpoint
from llmcompress.engine.train.places import norm_offsets
from llmcompress.errors import CheckpointError
from llmcompress.npzfile import read_arrays

FACTORS = "transforms.npz"


class Factors:
    """The recorded factors of a compressed model. rotated: whether its channels were mixed, which none record."""

    def __init__(self, plan: RecoverPlan) -> None:
        self.plan, self.original = plan, open_checkpoint(plan.original)
        self.arrays = _read(plan)
        steps = plan.report.get("recipe", {}).get("steps")
        self.rotated = any(isinstance(step, dict) and step.get("method") == "rotate" for step in steps or ())
        self._offsets = norm_offsets(plan.opened.matrices.spec)

    def offset(self, name: str, path: str) -> float:
        """What the weight of the norm at a module path is smaller by than its gain."""
        recorded = self.arrays.get(f"{name}/offset")
        return self._offsets.get(path, 0.0) if recorded is None else float(recorded)

    def source(self, name: str) -> Tensor | None:
        """The tensor of the source times its factors, float32.

        None where it is not known, as after a rotation, or has lost channels.
        """
        plain = self._plain(name)
        if plain is None:
            return None
        work = plain.to(torch.float64)
        offset = float(self.arrays.get(f"{name}/offset", np.float64(0)))
        for axis in range(work.dim()):
            factor = self.arrays.get(f"{name}/{axis}")
            if factor is not None:
                shape = [-1 if dim == axis else 1 for dim in range(work.dim())]
                work = (work + offset) * torch.from_numpy(factor.astype(np.float64)).view(shape) - offset
        return work.to(torch.float32)

    def _plain(self, name: str) -> Tensor | None:
        """The tensor of the source as it is there; None as in `source`."""
        there = self._name_in_source(name)
        stored = self.plan.original.tensors.get(there)
        if self.rotated or stored is None or stored.spec.shape != self.plan.opened.headers.tensors[name].spec.shape:
            return None
        return self.original.read_finite(there)

    def _name_in_source(self, name: str) -> str:
        """What a tensor is called in the source, where layers may have other numbers."""
        prefix, removed = self.plan.opened.matrices.prefix, self.plan.removed_layers
        found = numbered(prefix).match(name)
        if found is None or not removed:
            return name
        kept = (number for number in count() if number not in removed)
        return f"{prefix}.{next(islice(kept, int(found[1]), None))}.{name[found.end() :]}"

    def base(self, name: str, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The weight of a norm in the source, float32, and what its gains were multiplied by since, float64.

        Where that is not known, the weight as it is stored.
        """
        plain = self._plain(name)
        if plain is None:
            return weight.to(torch.float32), torch.ones(weight.shape, dtype=torch.float64)
        factors = self.arrays.get(f"{name}/0", np.ones(plain.shape))
        return plain.to(torch.float32), torch.from_numpy(factors.astype(np.float64))

    def with_gains(self, name: str, gains: Tensor, offset: float) -> None:
        """Record that a norm's gains were multiplied once more."""
        if self.rotated:
            return
        self.arrays[f"{name}/0"] = self.arrays.get(f"{name}/0", 1.0) * gains.to(torch.float64).numpy()
        if offset:
            self.arrays[f"{name}/offset"] = np.array(offset)


def _read(plan: RecoverPlan) -> dict[str, NDArray[Any]]:
    file = paper(plan.path, FACTORS)
    try:
        return read_arrays(file) if file.exists() else {}
    except ValueError as error:
        raise CheckpointError(str(error), "compress the model again") from None
