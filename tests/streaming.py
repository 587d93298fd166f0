"""A model run section by section, and the same model as transformers runs it."""

import torch
from transformers import AutoModelForCausalLM

from llmcompress import arch
from llmcompress.model.observe import observe
from llmcompress.model.skeleton import load_config
from llmcompress.model.streamed_model import StreamedModel
from llmcompress.store.checkpoint import Checkpoint

LENGTH = 24


def ids(samples=3):
    return torch.randint(3, 96, (samples, LENGTH), generator=torch.Generator().manual_seed(7))


def streamed(path, **options):
    config = load_config(path)
    spec = arch.find(config.model_type) or observed(path)
    return StreamedModel(Checkpoint(path), config, spec, **{"dtype": torch.float32, **options})


def observed(path):
    """What is seen of the model at `path`, whether its family is declared or not."""
    return observe(load_config(path), Checkpoint(path).names())


@torch.no_grad()
def streamed_logits(model, tokens, batch=2, piece=None):
    """piece: tokens whose logits are computed at once; all of them by default."""
    hidden = model.embed(tokens)
    for number in range(len(model.layers)):
        with model.layer(number) as layer:
            hidden = torch.cat([model.call(number, layer, part) for part in hidden.split(batch)])
    with model.outer(embed=False, head=True) as causal:
        parts = hidden.split(piece or tokens.shape[1], dim=1)
        return torch.cat([model.logits(causal, part) for part in parts], dim=1)


@torch.no_grad()
def reference_logits(path, tokens, attention=None, dtype=torch.float32):
    options = {} if attention is None else {"attn_implementation": attention}
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **options)(input_ids=tokens).logits


def parameters(model):
    """All parameters of a streamed model, those of its layers included."""
    return [p for module in (model.causal, *model.layers) for p in module.parameters()]
