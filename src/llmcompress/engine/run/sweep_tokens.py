"""The calibration windows that all runs of a sweep share."""

import hashlib
import json
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from llmcompress.calib.pack import save
from llmcompress.engine.plan.plan import Plan
from llmcompress.engine.run.tokens import calibration_tokens
from llmcompress.store.files import make_directory, writing


def tokens_of_sweep(plan: Plan, folder: Path) -> Tensor:
    """Token ids [samples, length] int64 of a plan's calibration.

    Text that the model writes itself takes minutes to sample, so `folder` keeps it for the next start of the sweep.
    """
    if plan.recipe.calibration.source != "self":
        return calibration_tokens(plan)
    what = [plan.headers.contents, plan.recipe.calibration.model_dump(), plan.dtype]
    kept = folder / f"tokens-{hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]}.safetensors"
    if kept.exists():
        return load_file(kept)["input_ids"]
    tokens = calibration_tokens(plan)
    with writing(folder):
        if not folder.exists():
            make_directory(folder)
    save(tokens, kept)
    return tokens
