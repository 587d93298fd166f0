"""Small models that are compressed and then recovered, for the tests of this folder."""

import torch
from safetensors.torch import save_file

from llmcompress.engine.execute import run
from llmcompress.engine.plan.make_plan import make_plan
from llmcompress.engine.plan.run_options import Options
from llmcompress.engine.recover.recover_plan import RecoverRequest, plan_recover
from llmcompress.engine.recover.recovery import recover
from llmcompress.recipe import Calibration, build, parse

SAMPLES, LENGTH = 32, 24


def write_ids(path, vocabulary=90, samples=SAMPLES, length=LENGTH):
    tokens = torch.randint(2, vocabulary, (samples, length), generator=torch.Generator().manual_seed(1))
    save_file({"input_ids": tokens}, path)
    return path


def compressed(model, out, *steps, form="compressed-tensors", source="default"):
    text = {"source": str(source), "samples": 4, "length": LENGTH}
    steps = steps or ({"method": "rtn", "bits": 3, "group_size": 16},)
    recipe = parse({"steps": list(steps), "calibration": text, "output": {"format": form}})
    run(make_plan(recipe, model, Options(out=out, compute_dtype="float32")))
    return out


def planned(
    out,
    model,
    to,
    ids,
    steps=8,
    rate=None,
    threads=1,
    samples=SAMPLES,
    length=LENGTH,
    weights="low-rank",
    max_memory=None,
    batch=None,
):
    text = build(Calibration, {"source": str(ids), "samples": samples, "length": length}, "here")
    options = Options(out=to, compute_dtype="float32", threads=threads, max_memory=max_memory, batch=batch)
    return plan_recover(out, model, RecoverRequest(steps, rate, weights), text, options)


def recovered(*arguments, **settings):
    return recover(planned(*arguments, **settings))
