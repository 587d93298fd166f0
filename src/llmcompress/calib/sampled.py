"""Text sampled from the model itself ("self-calibration", Williams et al., NAACL 2025, arXiv:2410.17170)."""

from typing import TYPE_CHECKING, Any

from pydantic import Field

from llmcompress.calib.base import Source, TokenRequest
from llmcompress.errors import CalibrationError

if TYPE_CHECKING:
    from torch import Tensor

HOT_TOKENS = 10
KEEP_OF_TEN = 9


class Sampled(Source):
    """Token by token from the model's own distribution, so that no data is needed and none is out of distribution.

    Rows begin with the beginning-of-sequence token (or the end-of-sequence token, or a random one, where the model has
    none). The first tokens are drawn at `temperature`, falling to 1 over HOT_TOKENS, so that rows part ways; the rest
    at 1 without top-k or top-p: greedy or cooler text runs in circles and its Gram matrices lack rank. The end of a
    text is sampled like any token and the row goes on after it, as in training on packed text. Special tokens are
    allowed, since chat models need them, up to one token in eight and four more. Of ten rows the one that the model
    itself finds least likely is left out.
    """

    name = "self"
    accepts = "'self' (text sampled from the model)"

    temperature: float = Field(1.5, ge=1, le=10, description="temperature of the first token; it falls to 1")
    batch_size: int = Field(32, ge=1, le=65_536, description="rows sampled at once; speed and memory only")

    def tokens(self, request: TokenRequest) -> "Tensor":
        import torch

        if request.model is None:
            raise CalibrationError("calibration source self needs a model to sample from", "give a text instead")
        model = request.model()
        limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        if limit is not None and request.length > limit:
            raise CalibrationError(
                f"the model has {limit} positions, {request.length} tokens were asked for", f"use --length {limit}"
            )
        rows = -(-request.samples * 10 // KEEP_OF_TEN)
        generator = torch.Generator().manual_seed(request.seed)
        ordinary, special = _vocabulary(request)
        first = _first(request, ordinary, rows, generator)
        # float32: times a float64 total it stays below it, so no draw falls off the end of the distribution
        draws = torch.rand(rows, request.length - 1, generator=generator)
        batches = [slice(start, start + self.batch_size) for start in range(0, rows, self.batch_size)]
        parts = [sample(model, first[batch], draws[batch], ordinary, special, self.temperature) for batch in batches]
        ids, surprise = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        kept = surprise.argsort(stable=True)[: request.samples].sort().values
        return ids[kept]


def sample(
    model: Any, first: "Tensor", draws: "Tensor", ordinary: "Tensor", special: "Tensor", temperature: float
) -> "tuple[Tensor, Tensor]":
    """Continue `first` [rows] by as many tokens as `draws` [rows, tokens] (uniform in [0, 1)) has columns.

    ordinary, special [vocabulary]: True for the tokens of that kind. Returns ids [rows, 1 + tokens] int64 and the mean
    negative log-likelihood [rows] float64 of the sampled tokens, without mask and temperature.
    """
    import torch

    rows, steps = draws.shape
    ids = torch.empty(rows, steps + 1, dtype=torch.int64)
    ids[:, 0] = first
    surprise = torch.zeros(rows, dtype=torch.float64)
    specials = torch.zeros(rows, dtype=torch.int64)
    cache = None
    with torch.inference_mode():
        for step in range(steps):
            output = model(input_ids=ids[:, step : step + 1].to(model.device), past_key_values=cache, use_cache=True)
            cache = getattr(output, "past_key_values", None)
            logits = output.logits[:, -1, : ordinary.numel()].to("cpu", torch.float32)
            total = logits.logsumexp(-1)
            if cache is None or not total.isfinite().all():
                what = (
                    "keeps no key/value cache" if cache is None else f"gives logits that are not finite at token {step}"
                )
                raise CalibrationError(f"the model {what}, so no text can be sampled from it", "give a text instead")
            allowed = ordinary | (special & (specials < 4 + step // 8)[:, None])
            hot = 1 + (temperature - 1) * max(0.0, 1 - step / HOT_TOKENS)
            weights = (logits / hot).masked_fill(~allowed, float("-inf")).softmax(-1)
            # one uniform number a token through the inverse distribution: rows do not depend on their batch
            ladder = weights.double().cumsum(-1)
            chosen = torch.searchsorted(ladder, draws[:, step : step + 1] * ladder[:, -1:], right=True)
            ids[:, step + 1] = chosen[:, 0]
            specials += special[chosen[:, 0]]
            surprise += (total - logits.gather(-1, chosen)[:, 0]).double()
    return ids, surprise / steps


def _vocabulary(request: TokenRequest) -> "tuple[Tensor, Tensor]":
    """Which ids are ordinary tokens and which special ones, bool [vocabulary] each.

    Ids that the tokenizer does not know are neither: rows of padding in the embedding, never trained.
    """
    import torch

    tokenizer = request.tokenizer
    known = min(len(tokenizer), request.vocab_size)
    added = tokenizer.added_tokens_decoder.items()
    special = {*tokenizer.all_special_ids, *(token for token, entry in added if entry.special)}
    is_special = torch.zeros(known, dtype=torch.bool)
    is_special[[token for token in special if token < known]] = True
    return ~is_special, is_special


def _first(request: TokenRequest, ordinary: "Tensor", rows: int, generator: Any) -> "Tensor":
    """The token that each row begins with, int64 [rows]."""
    import torch

    for token in (request.tokenizer.bos_token_id, request.tokenizer.eos_token_id):
        if token is not None and token < request.vocab_size:
            return torch.full((rows,), token)
    choices = ordinary.nonzero()[:, 0]
    return choices[torch.randint(choices.numel(), (rows,), generator=generator)]


SOURCE = Sampled
