"""The table of docs/models.md: every fourth model type is planned as it says, and some are run."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from streaming import reference_logits, streamed, streamed_logits

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from zoo import known_types, zoo  # noqa: E402

import models  # noqa: E402

PARTS = 6
RUN = ("llama", "qwen3_next")


def told():
    """The rows of the table by model type."""
    table = (ROOT / "docs" / "models.md").read_text().partition(models.BEGIN)[2].partition(models.END)[0]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line[:1] == "|"]
    names = next(line for line in lines if line[0] == "type")
    return {line[0]: dict(zip(names, line, strict=True)) for line in lines if len(line) == len(names)}


def test_the_table_has_every_type_and_counts_what_it_says():
    rows = {kind: row for kind, row in told().items() if kind not in ("type", "---")}
    assert sorted(rows) == known_types()
    text = (ROOT / "docs" / "models.md").read_text()
    for name, count in {
        "types": len(rows),
        "gptq and verify": sum(row["gptq"] == "ok" for row in rows.values()),
        "loads in transformers": sum(row["loads"] == "yes" for row in rows.values()),
        "awq and verify": sum(row["awq"] == "ok" for row in rows.values()),
        "gguf and verify": sum(row["gguf"] == "ok" for row in rows.values()),
    }.items():
        assert f"| {name} | {count} |" in text


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_plans_say_what_the_table_says(part, tmp_path):
    """Plans of gptq for every fourth type, the others for some of them."""
    rows, found = told(), {}
    for number, (kind, model) in enumerate(zoo(tmp_path / "zoo", known_types()[part :: 4 * PARTS])):
        for column, words in models.PLANNED.items():
            if column != "gptq" and number != part:
                continue
            code, out, _ = models.command(tmp_path, words[0], model, *words[1:], "--dry-run", "--json")
            found[kind, column] = code
            if column == "gptq" and code == 0:
                assert f"{json.loads(out)['decoder_share']:.1%}" == rows[kind]["decoder"], kind
    assert found == {(kind, column): 2 if rows[kind][column] == "refused" else 0 for kind, column in found}


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_every_type_that_is_compressed_is_computed_as_transformers_computes_it(part, tmp_path):
    """Layer by layer, in batches, on texts that are longer than windows and than what sparse attention looks at.

    Logits are computed of some tokens at a time, as those of long texts are.
    """
    tokens = torch.randint(3, 1000, (3, 64), generator=torch.Generator().manual_seed(0))
    rows = told()
    kinds = [kind for kind in known_types() if rows[kind]["gptq"] == "ok" or rows[kind]["gguf"] == "ok"]
    for kind, model in zoo(tmp_path / "zoo", kinds[part::PARTS]):
        truth = reference_logits(model, tokens)
        ours = streamed_logits(streamed(model), tokens, piece=41)
        torch.testing.assert_close(ours, truth, rtol=0, atol=1e-4 * float(truth.abs().max()), msg=kind)
        shutil.rmtree(model)


@pytest.mark.slow
def test_runs_give_what_the_table_says(tmp_path):
    # in a process of its own: those that it forks must not inherit threads that other tests have started
    subprocess.run([sys.executable, models.__file__, tmp_path, "--types", *RUN], check=True, capture_output=True)
    found = json.loads((tmp_path / "models.json").read_text())
    rows = told()
    for kind in RUN:
        assert {column: found[kind][column]["says"] for column in models.COLUMNS} == {
            column: rows[kind][column] for column in models.COLUMNS
        }
        assert models.loads(found[kind]["gptq"]) == (rows[kind]["loads"] == "yes")
        assert found[kind]["gptq"]["kl"] < found[kind]["gptq"]["rtn"]
    assert models.counts(found)["types"] == len(RUN)
