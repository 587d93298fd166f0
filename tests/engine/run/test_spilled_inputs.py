"""Inputs of experts on disk: the Gram matrix of each is right, and the same however its rows came."""

import pytest
import torch

from llmcompress.engine.run.spilled_inputs import GATHERED, SpilledInputs
from llmcompress.store.folder import Folder
from llmcompress.workers import SERIAL

WIDTH, CPU = 24, torch.device("cpu")


@pytest.fixture
def rows():
    """What three experts saw: more than is added at once, a little, nothing."""
    generator = torch.Generator().manual_seed(0)
    sizes = {"first": 2 * GATHERED + 77, "second": 5, "third": 0}
    return {name: torch.randn(count, WIDTH, generator=generator).bfloat16() for name, count in sizes.items()}


def spilled(folder, rows, batch):
    """All rows, in batches of which each holds at most `batch` rows of an expert."""
    found = SpilledInputs(Folder(folder) / "experts.bin")
    for start in range(0, max(map(len, rows.values())), batch):
        found.append({name: part for name, whole in rows.items() if len(part := whole[start : start + batch])})
    found.finish()
    return found


def test_gram_matrices_are_those_of_all_rows_whatever_the_batches(rows, tmp_path):
    made = {}
    for batch in (7, 64, GATHERED, 3 * GATHERED):
        found = spilled(tmp_path, rows, batch)
        made[batch] = {name: found.gram(name, WIDTH, SERIAL, CPU) for name in rows}
    for name, whole in rows.items():
        exact = whole.double().T @ whole.double() / max(len(whole), 1)
        for grams in made.values():
            assert grams[name].tokens == len(whole)
            torch.testing.assert_close(grams[name].mean().double(), exact, rtol=1e-5, atol=1e-6)
            assert torch.equal(grams[name].mean(), made[7][name].mean()), "to the bit"


def test_a_file_of_an_earlier_stage_leaves_nothing_behind(rows, tmp_path):
    spilled(tmp_path, rows, 64)
    few = {"second": rows["second"][:2]}
    found = spilled(tmp_path, few, 64)
    assert (tmp_path / "experts.bin").stat().st_size == 2 * WIDTH * 2
    assert found.gram("first", WIDTH, SERIAL, CPU).tokens == 0
    assert found.gram("second", WIDTH, SERIAL, CPU).tokens == 2


def test_tokens_that_are_not_finite_are_left_out_and_counted(tmp_path):
    rows = {"first": torch.ones(4, WIDTH)}
    rows["first"][1, 3] = float("inf")
    gram = spilled(tmp_path, rows, 2).gram("first", WIDTH, SERIAL, CPU)
    assert (gram.tokens, gram.dropped) == (3, 1)
    assert torch.equal(gram.mean(), torch.ones(WIDTH, WIDTH))
