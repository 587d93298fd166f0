"""`verify` and `report` on a draft head: a whole one passes, and each kind of damage fails the check that it is for."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from llmcompress.validate.verify import passed, verify

WEIGHTS = "model.safetensors"


@pytest.mark.parametrize("kind", ["trained", "trained_medusa"])
def test_a_whole_head_of_its_model_passes(kind, request, tiny_model_dir):
    checks = verify(request.getfixturevalue(kind), tiny_model_dir)
    assert passed(checks), checks
    assert {"config", "ids", "source", "hashes", "report"} <= {check.name for check in checks}


def test_another_model_is_not_the_one_it_was_made_for(trained, random_model_dir):
    (failed,) = (check for check in verify(trained, random_model_dir("llama")) if not check.ok)
    assert failed.name == "source"


def _doubled(tensors):
    tensors["d2t"][1] = tensors["d2t"][0] - 1


def _beyond(tensors):
    tensors["d2t"][-1] += 1 << 20


def _unknown(tensors):
    tensors["t2d"][:] = True


def _narrow(tensors):
    tensors["fc.weight"] = tensors["fc.weight"][:, 1:].clone()


def _without(tensors):
    del tensors["norm.weight"]


def _further(tensors):
    tensors["layers.1.mlp.up_proj.weight"] = torch.zeros(1)


def _doubled_token(tensors):
    tensors["token_map"][1] = tensors["token_map"][0]


def _token_beyond(tensors):
    tensors["token_map"][-1] += 1 << 20


def _no_map(tensors):
    del tensors["token_map"]


def _fifth_block(tensors):
    tensors["blocks.4.layers.0.weight"] = tensors["blocks.3.layers.0.weight"].clone()


@pytest.mark.parametrize(
    ("damage", "name"),
    [(_doubled_token, "ids"), (_token_beyond, "ids"), (_no_map, "config"), (_fifth_block, "config")],
)
def test_damage_of_medusa_is_found(damage, name, trained_medusa, tmp_path):
    test_damage_is_found(damage, name, trained_medusa, tmp_path)


@pytest.mark.parametrize(
    ("damage", "name"),
    [
        (_doubled, "ids"),
        (_beyond, "ids"),
        (_unknown, "ids"),
        (_narrow, "config"),
        (_without, "config"),
        (_further, "config"),
    ],
)
def test_damage_is_found(damage, name, trained, tmp_path):
    out = shutil.copytree(trained, tmp_path / "head")
    tensors = load_file(out / WEIGHTS)
    damage(tensors)
    save_file(tensors, out / WEIGHTS)
    assert name in {check.name for check in verify(out) if not check.ok}


def test_the_page_says_how_it_was_trained(trained, main, tmp_path):
    page = tmp_path / "page.html"
    assert main("report", trained, "-o", page) == 0
    text, made = page.read_text(), json.loads((trained / "report.json").read_text())["draft"]
    assert f"{made['steps']} steps of 4 windows" in text
    for held in made["held_back"].values():
        assert all(f"<td>{share:.1%}</td>" in text for share in held["acceptance"])
