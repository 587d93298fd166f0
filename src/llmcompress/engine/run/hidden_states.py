"""Hidden states between the layers of a run: computed by all of its ranks, kept by rank 0."""

from collections import deque
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from llmcompress.engine.plan.plan import Plan
from llmcompress.model.streamed_model import StreamedModel
from llmcompress.store.staging import Hidden, Staging
from llmcompress.workers import Workers

COMPRESSED, ORIGINAL = "compressed", "original"  # the streams: the model as compressed so far, and as it was


def starting_hidden_states(
    plan: Plan,
    model: StreamedModel,
    tokens: Tensor,
    staged: Staging,
    missing: int,
    dtype: torch.dtype,
    workers: Workers,
) -> Hidden:
    """Hidden states that the loop starts from: the newest ones on disk that help, or else the embedded tokens.

    missing: number of the first section that is not on disk.
    """
    samples = {COMPRESSED: tokens.shape[0]}
    if plan.original_samples:
        samples[ORIGINAL] = plan.original_samples
    with model.outer(embed=True, head=False):
        width = model.prepare(tokens[:1])
        if workers.rank > 0:
            return _from_rank_0(staged, dtype, None, workers)
        shapes = {name: (rows, tokens.shape[1], width) for name, rows in samples.items()}
        found = staged.hidden(shapes, dtype, missing) or staged.keep_hidden(
            0, dtype, {name: model.embedded(tokens[:rows], plan.batch) for name, rows in samples.items()}
        )
        return _from_rank_0(staged, dtype, found, workers)


def keep_hidden_states(
    staged: Staging, position: int, dtype: torch.dtype, streams: Mapping[str, Iterator[Tensor]], workers: Workers
) -> Hidden:
    """Write the hidden states that enter section `position`, batch by batch; rank 0 writes."""
    hidden = None
    if workers.rank == 0:
        hidden = staged.keep_hidden(position, dtype, streams)
    else:
        for batches in streams.values():
            deque(batches, maxlen=0)
    return _from_rank_0(staged, dtype, hidden, workers)


def _from_rank_0(staged: Staging, dtype: torch.dtype, hidden: Hidden | None, workers: Workers) -> Hidden:
    """Open in every rank the hidden states whose files rank 0 has written."""
    places = workers.all_gather(None if hidden is None else hidden.places())[0]
    assert places is not None  # it has them
    return hidden or staged.open_hidden(places[0], dtype, places[1])
