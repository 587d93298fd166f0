"""The calibration windows that all runs of a sweep share."""

import hashlib
import json
from contextlib import closing
from pathlib import Path

from torch import Tensor

from llmcompress.engine.plan.plan import Plan
from llmcompress.engine.run.tokens import calibration_tokens
from llmcompress.store.files import make_directory, writing
from llmcompress.store.folder import Folder
from llmcompress.store.tensor_file import read_tokens, write_tokens


def tokens_of_sweep(plan: Plan, folder: Path) -> Tensor:
    """Token ids [samples, length] int64 of a plan's calibration.

    Text that the model writes itself takes minutes to sample, so `folder` keeps it for the next start of the sweep.
    """
    if plan.recipe.calibration.source != "self":
        return calibration_tokens(plan)
    what = [plan.headers.contents, plan.recipe.calibration.model_dump(), plan.dtype]
    with writing(folder):
        if not folder.exists():
            make_directory(folder)
    with closing(Folder(folder)) as held:
        kept = held / f"tokens-{hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]}.safetensors"
        tokens = read_tokens(kept)
        if tokens is None:
            tokens = calibration_tokens(plan)
            write_tokens(kept, tokens)
    return tokens
