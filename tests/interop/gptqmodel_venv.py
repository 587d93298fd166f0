"""GPTQModel and its transformers, in an environment of their own: they clash with our dependencies."""

import torch
from other_environment import asked

IDS = torch.randint(0, 96, (2, 24), generator=torch.Generator().manual_seed(0))
TOLERANCE = {"float16": 2**-9, "bfloat16": 2**-6}  # of the largest logit: products are rounded in another order


def logits_of(paths, folder, loader="gptqmodel"):
    """Logits of `loader` by checkpoint, from one process for all; for those it could not load, the error as text."""
    errors, logits = asked("gptqmodel", IDS, folder, paths, ["--loader", loader])
    return {path: errors.get(str(path), logits.get(str(path))) for path in paths}


def logits_of_dense(path):
    """Logits of a model directory of plain weights, here."""
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(path).eval()(IDS).logits.float()
