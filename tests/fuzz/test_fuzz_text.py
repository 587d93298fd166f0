"""Damaged recipes and jsonl rows: taken as what they say, or refused in one line."""

import json

from llmcompress.calib.base import TokenRequest
from llmcompress.calib.jsonl import Jsonl
from llmcompress.cli.options import parse_set
from llmcompress.engine.plan.make_plan import make_plan
from llmcompress.engine.plan.run_options import Options
from llmcompress.recipe import load, parse
from mutations import FEWER_INPUTS, SCALARS, YAML, damaged, fuzz, measured, mutated, spoilt

RECIPE = {
    "calibration": {"source": "default", "options": {"field": "text"}, "samples": 8, "length": 64, "seed": 0},
    "steps": [{"method": "gptq", "bits": 4, "group_size": 64, "set": {"mlp.down_proj": {"bits": 8}}}],
    "output": {"format": "compressed-tensors", "shard_size": 5000000000},
}
BLOCK = b"""# a comment
calibration: &c {source: default, samples: 8}
steps:
  - method: gptq
    bits: 4
    set: &s
      mlp.down_proj: {bits: 8}
      layers.0.*: {<<: {bits: 8}, skip: true}
output:
  format: gptq
"""
KEYS = [*RECIPE, *RECIPE["calibration"], *RECIPE["output"], *RECIPE["steps"][0], "percdamp", "actorder", "block_size",
        "qep_alpha", "descent", "skip", "sym", "<<", "model_config", "self"]  # fmt: skip
VALUES = [
    "~", "&a [*a]", "*a", "&a 1", "[&a [1, 2], [*a, *a, *a]]", "!!int ''", "!!float ''", "!!bool x", "!!timestamp x",
    "!!binary x", "!!set {a, b}", "!!omap [a: 1]", "!!python/object/apply:os.system [true]", "!!python/name:os.system",
    "!x y", "2001-01-01", "2001-99-99", "9999999:59:59", "1:30:30", "0b11", "0o7", ".inf", ".nan", "-.inf", "yes", "=",
    "<<", "{<<: *a}", "{<<: 1}", "{? [a] : b}", "{? {a: b} : c}", '"\\ud800"', '"\\x07"', "'gptq'", "rtn", "dense",
    "self", "[z-a]", "'*'", "'[!'", *SCALARS,
]  # fmt: skip


@FEWER_INPUTS
def test_damaged_recipes(inputs, hollow_model, tmp_path):
    file, options = tmp_path / "recipe.yaml", Options(out=tmp_path / "out")
    make_plan(parse(RECIPE), hollow_model, options)  # what is built once

    def check(dice):
        kind = dice.below(4)
        if kind == 0:
            raw = damaged(BLOCK, dice)
        elif kind == 1:
            raw = damaged(json.dumps(RECIPE).encode(), dice)
        else:
            raw = mutated(RECIPE, dice, KEYS, VALUES).encode("utf-8", "surrogatepass")
        file.write_bytes(raw)
        recipe = measured(lambda: load(file), len(raw), factor=YAML)
        if recipe is not None:
            assert parse(recipe.as_data()) == recipe
            json.dumps(recipe.as_data(), allow_nan=False)
            recipe.as_yaml().encode()
            measured(lambda: make_plan(recipe, hollow_model, options), len(raw), factor=YAML)
        line = raw.decode("utf-8", "surrogateescape").replace("\0", "")  # as an argument of a command
        measured(lambda: parse_set([line]), len(raw), factor=YAML)

    fuzz(inputs, check)


ROWS = [
    {"text": "The kettle sang, and nobody in the house admitted to having put it on."},
    {"messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Steam.", "tool": None}]},
]


@FEWER_INPUTS
def test_damaged_rows(inputs, tmp_path, tokenizer_of_bytes):
    file = tmp_path / "rows.jsonl"
    request = TokenRequest(tokenizer=tokenizer_of_bytes, samples=2, length=8, seed=0, vocab_size=300)
    keys = ["text", "messages", "role", "content", "tool", "x"]

    def check(dice):
        field = ("text", "messages", "x")[dice.below(3)]
        rows = [json.dumps(row).encode() for row in ROWS]
        kind = dice.below(4)
        if kind == 3:
            rows = [damaged(b"\n".join(rows), dice)]
        elif kind < 2:
            rows[kind] = spoilt(ROWS[kind], dice, keys)
        else:
            rows.insert(0, mutated(ROWS[1], dice, keys).encode("utf-8", "surrogatepass"))
        file.write_bytes(b"\n".join(rows))
        size = file.stat().st_size
        found = measured(lambda: Jsonl(path=file, field=field).tokens(request), size)
        assert found is None or found.shape == (2, 8)

    fuzz(inputs, check)
