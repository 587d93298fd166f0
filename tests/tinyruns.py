"""Short runs on the tiny model that comes with the tests: a recipe, a run, what it wrote, and how to stop it."""

import hashlib
from pathlib import Path

import torch

from llmcompress.engine.execute import run
from llmcompress.engine.plan.make_plan import make_plan
from llmcompress.engine.plan.run_options import Options
from llmcompress.recipe import parse
from llmcompress.validate.evaluate import measure
from llmcompress.validate.load import open_streamed

LAYERS = 4  # of the tiny model
FEW = 2  # layers of `shallow_model_dir`
CALIBRATION = {"source": "default", "samples": 8, "length": 64}


def recipe(method="gptq", format_="compressed-tensors", calibration=None, **options):
    """A recipe of one step: 4 bits in groups of 64 unless `options` say otherwise, few short windows."""
    options = {"bits": 4, "group_size": 64, **options}
    calibration = CALIBRATION | (calibration or {})
    return parse({"calibration": calibration, "steps": [{"method": method, **options}], "output": {"format": format_}})


def compress(model, out, made=None, stop=lambda finished: False, progress=None, **options):
    """Plans and runs a recipe (`recipe()` unless another is given); its report."""
    return run(make_plan(made or recipe(), model, Options(out=out, **options)), progress, stop)


def steps_recipe(steps, format_="dense", calibration=None):
    """A recipe of several steps, few short windows."""
    calibration = CALIBRATION | (calibration or {})
    return parse({"calibration": calibration, "steps": steps, "output": {"format": format_}})


def carry_out(model, out, steps, format_="dense", **options):
    """Plans and runs steps; the report."""
    return compress(model, out, steps_recipe(steps, format_), **options)


def kl(path, model, windows):
    """Mean divergence of a result from its source on windows [n, length]."""
    models = [open_streamed(place, dtype=torch.float32) for place in (path, model)]
    return float(measure(*models, windows).kl.mean())


def digest(folder: Path) -> dict[str, str]:
    """SHA-256 of every file of a directory, by name."""
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.iterdir())}


def after(layers):
    """Asks a run to stop once a start has finished a number of layers."""
    return lambda finished: finished >= layers
