"""A model that runs text, opened as the engine runs every model: one section of it in memory at a time."""

import torch

from llmcompress.arch.spec import ArchSpec
from llmcompress.engine.plan.run_options import Options
from llmcompress.engine.process.ranks import device_of
from llmcompress.engine.source.open import config_of
from llmcompress.model.rehearsal import rehearse
from llmcompress.model.streamed_model import StreamedModel
from llmcompress.store.checkpoint import Checkpoint
from llmcompress.store.headers import ModelHeaders


def check_model(
    headers: ModelHeaders, spec: ArchSpec, options: Options, dtype: str, tiled_attention: bool = True
) -> None:
    """CheckpointError unless the tensors that headers tell of are those of a model that runs in `dtype`.

    No tensor is read.
    """
    shapes = {name: stored.spec.shape for name, stored in headers.tensors.items()}
    trusted = options.trust_remote_code
    rehearse(
        shapes,
        config_of(headers, trusted),
        spec,
        dtype=getattr(torch, dtype),
        trust_remote_code=trusted,
        tiled_attention=tiled_attention,
    )


def opened_model(
    checkpoint: Checkpoint, spec: ArchSpec, dtype: str, options: Options, tiled_attention: bool = True
) -> StreamedModel:
    """The model of a checkpoint, its layers in `dtype` on the device that the options name.

    tiled_attention: whether layers may use the faster attention of model/attention.py.
    """
    device = device_of(options.device)
    if device.type == "cuda":
        torch.linalg.cholesky(torch.eye(1, device=device))  # loads the library now: two threads at once would fail to
    return StreamedModel(
        checkpoint,
        config_of(checkpoint.headers, options.trust_remote_code),
        spec,
        dtype=getattr(torch, dtype),
        device=device,
        trust_remote_code=options.trust_remote_code,
        tiled_attention=tiled_attention,
    )
