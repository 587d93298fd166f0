"""Hidden states between the layers of a run: computed by all of its processes, kept by the first."""

from collections import deque
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from llmcompress.engine.plan.plan import Plan
from llmcompress.model.build import StreamedModel
from llmcompress.processes import gathered, rank
from llmcompress.store.staging import Hidden, Staging

COMPRESSED, ORIGINAL = "compressed", "original"  # the streams: the model as compressed so far, and as it was


def entering(
    plan: Plan, model: StreamedModel, tokens: Tensor, staged: Staging, missing: int, dtype: torch.dtype
) -> Hidden:
    """Hidden states to go on from: the newest kept ones, or the embedded tokens. missing: the first such section."""
    samples = {COMPRESSED: tokens.shape[0]}
    if plan.original_samples:
        samples[ORIGINAL] = plan.original_samples
    with model.outer(embed=True, head=False):
        width = model.prepare(tokens[:1])
        if rank() > 0:
            return _of_the_first(staged, dtype, None)
        shapes = {name: (rows, tokens.shape[1], width) for name, rows in samples.items()}
        found = staged.hidden(shapes, dtype, missing) or staged.keep_hidden(
            0, dtype, {name: model.embedded(tokens[:rows], plan.batch) for name, rows in samples.items()}
        )
        return _of_the_first(staged, dtype, found)


def kept(staged: Staging, position: int, dtype: torch.dtype, streams: Mapping[str, Iterator[Tensor]]) -> Hidden:
    """Hidden states that enter section `position`, from batches of all processes."""
    hidden = None
    if rank() == 0:
        hidden = staged.keep_hidden(position, dtype, streams)
    else:
        for batches in streams.values():
            deque(batches, maxlen=0)
    return _of_the_first(staged, dtype, hidden)


def _of_the_first(staged: Staging, dtype: torch.dtype, hidden: Hidden | None) -> Hidden:
    """Hidden states that the first process has, for all."""
    places = gathered(None if hidden is None else hidden.places())[0]
    assert places is not None  # it has them
    return hidden or staged.open_hidden(places[0], dtype, places[1])
