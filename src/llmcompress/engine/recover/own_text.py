"""Text that a model writes itself, beside the text that others are trained on; it is kept in the work directory."""

import gc
from collections.abc import Callable

from torch import Tensor

from llmcompress.calib.base import TokenRequest
from llmcompress.calib.sampled import Sampled
from llmcompress.engine.process.process_memory import return_freed_memory
from llmcompress.engine.source.header_checks import vocabulary_size
from llmcompress.engine.source.text_tokenizer import load_tokenizer
from llmcompress.model.streamed_model import StreamedModel
from llmcompress.model.whole import whole_model
from llmcompress.recipe import Calibration
from llmcompress.store.headers import ModelHeaders
from llmcompress.store.staging import Staging, kept_tokens


def own_text(
    headers: ModelHeaders,
    text: Calibration,
    trust_remote_code: bool,
    model: Callable[[], StreamedModel],
    staged: Staging,
) -> Tensor:
    """Windows [text.samples, text.length] int64 that a model samples, with all its layers in memory, or that an earlier
    start kept. model: opens it, as it is served."""
    found = kept_tokens(staged.path)
    if found is not None:
        return found
    request = TokenRequest(
        tokenizer=load_tokenizer(headers.path, trust_remote_code),
        samples=text.samples,
        length=text.length,
        seed=text.seed,
        vocab_size=vocabulary_size(headers),
        model=lambda: whole_model(model()),
    )
    tokens = Sampled().tokens(request)
    gc.collect()  # the whole model and what holds it open refer to each other
    return_freed_memory()
    staged.keep_tokens(tokens)
    return tokens
