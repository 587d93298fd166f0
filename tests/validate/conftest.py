"""Draft heads of the tiny model, trained once for all tests of such heads."""

import pytest

from llmcompress.engine.draft.draft_plan import DraftRequest, plan_draft
from llmcompress.engine.draft.head_training import train_draft
from llmcompress.engine.plan.run_options import Options
from llmcompress.recipe import Calibration, build


def _trained(kind, model, out):
    text = build(Calibration, {"samples": 32, "length": 64}, "here")
    options = Options(out=out, compute_dtype="float32", threads=1)
    train_draft(plan_draft(model, DraftRequest(kind, 16, 256, 0, 1e-3), text, options))
    return out


@pytest.fixture(scope="session")
def trained(tiny_model_dir, tmp_path_factory):
    """Read-only: the directory of a head of EAGLE-3."""
    return _trained("eagle3", tiny_model_dir, tmp_path_factory.mktemp("head") / "draft")


@pytest.fixture(scope="session")
def trained_medusa(tiny_model_dir, tmp_path_factory):
    """Read-only: the directory of a head of Medusa."""
    return _trained("medusa", tiny_model_dir, tmp_path_factory.mktemp("head") / "draft")
