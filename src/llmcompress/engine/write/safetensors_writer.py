"""The weights of safetensors files: codes from the work directory, all other tensors from the checkpoint."""

from collections.abc import Iterator

from torch import Tensor

from llmcompress.engine.plan.plan import Plan
from llmcompress.engine.write.kv_scales import kv_scale_tensors
from llmcompress.engine.write.unquantised import unquantised_reader
from llmcompress.store.checkpoint import DTYPES, Checkpoint
from llmcompress.store.output import OutputDirectory
from llmcompress.store.staging import Staging
from llmcompress.workers import Workers


def write_safetensors(
    plan: Plan, checkpoint: Checkpoint, staged: Staging, out: OutputDirectory, workers: Workers
) -> dict[str, str]:
    """Write the weights of a plan, and copy tokenizer and configs; SHA-256 (hex) of each tensor's bytes by its name.

    workers: threads for what has to be encoded, which is nothing here: all codes are staged.
    """
    hashes = out.write_weights(plan.tensors, _tensors(plan, checkpoint, staged), plan.recipe.output.shard_size)
    out.copy_side_files(plan.headers.path)
    return hashes


def _tensors(plan: Plan, checkpoint: Checkpoint, staged: Staging) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the output in its planned order, one at a time."""
    matrices = {matrix.entry.source.name: matrix for matrix in plan.matrices}
    kv_scales = kv_scale_tensors(plan, staged)
    read = unquantised_reader(plan, checkpoint, staged)
    for entry in plan.entries:
        name = entry.source.name
        if name in kv_scales:
            yield name, kv_scales[name]
        elif entry.grid is None:
            yield name, read(name).to(DTYPES[entry.source.dtype])
        else:
            coded = staged.read_coded(matrices[name].layer, matrices[name].module)
            yield from plan.format.encode(entry, coded).items()
