"""Codes of all experts in one tensor, behind one another, seen as tensors of one expert each: only headers change."""

from dataclasses import replace

from llmcompress.errors import CheckpointError
from llmcompress.formats.base import Format, TensorSpec
from llmcompress.store.headers import ModelHeaders, Stored

_MOST = 1 << 16  # experts of a block: each gets tensors of its own


def with_experts_apart(stored: ModelHeaders, format_: Format) -> ModelHeaders:
    """The headers of a quantised model with tensors [...] for each expert, where it has [experts, ...] for all.

    CheckpointError for stacks of no experts, and for experts that the model has twice.
    """
    tensors: dict[str, Stored] = {}
    for name, item in stored.tensors.items():
        module, _, part = name.rpartition(".")
        single = format_.experts(module, stored.config)
        if single is None:
            tensors[name] = item
            continue
        count, *shape = item.spec.shape or (0,)
        if not shape or not 0 < count <= _MOST or not item.spec.nbytes:
            raise CheckpointError(f"{item.file}: tensor {name} is {list(item.spec.shape)}, which does not hold experts")
        size = item.spec.nbytes // count
        for number in range(count):
            spec = TensorSpec(f"{single.replace('{e}', str(number))}.{part}", item.spec.dtype, tuple(shape))
            if spec.name in stored.tensors or spec.name in tensors:
                raise CheckpointError(f"{item.file}: {name} holds {spec.name}, which the model has elsewhere too")
            begin = item.begin + number * size
            tensors[spec.name] = Stored(spec, item.file, begin, begin + size)
    return replace(stored, tensors=tensors)
