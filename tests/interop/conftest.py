"""Small random models, compressed by the engine, for other projects' loaders to read."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from llmcompress.engine.execute import run
from llmcompress.engine.plan.make_plan import make_plan
from llmcompress.engine.plan.run_options import Options
from llmcompress.errors import PlanError
from llmcompress.recipe import Recipe, parse

ModelAndRecipe = Callable[..., tuple[Path, Recipe]]
Compress = Callable[..., Path]

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 96,
}


@pytest.fixture(scope="session")
def model_and_recipe(random_model_dir: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> ModelAndRecipe:
    """model_and_recipe(family, dtype, format, method="rtn", **options): a model, and how to compress it."""
    root = tmp_path_factory.mktemp("interop")
    ids = root / "ids.safetensors"
    tokens = torch.randint(0, 96, (16, 32), generator=torch.Generator().manual_seed(1))
    save_file({"input_ids": tokens}, ids)

    def make(family: str, dtype: str, format_: str, method: str = "rtn", **options: Any) -> tuple[Path, Recipe]:
        source = root / f"{family}-{dtype}"
        if not source.exists():
            shutil.copytree(random_model_dir(family, dtype=dtype, **(SIZES if family != "gpt2" else {})), source)
            save_tokenizer(source)
        recipe = {
            "calibration": {"source": str(ids), "samples": 16, "length": 32},
            "steps": [{"method": method, **options}],
            "output": {"format": format_},
        }
        return source, parse(recipe)

    return make


@pytest.fixture(scope="session")
def compress(model_and_recipe: ModelAndRecipe) -> Compress:
    """compress(family, dtype, format, method="rtn", **options): that model, compressed. Both are read-only."""
    made: dict[str, Path] = {}

    def make(*of: str, **options: Any) -> Path:
        source, recipe = model_and_recipe(*of, **options)
        key = repr((source.name, recipe))
        if key not in made:
            made[key] = source.with_name(f"out-{len(made)}")
            run(make_plan(recipe, source, Options(out=made[key])))
        return made[key]

    return make


@pytest.fixture(scope="session")
def refusal(model_and_recipe: ModelAndRecipe) -> Callable[..., str]:
    """refusal(target, family, dtype, format, ...): what a plan for the target says against it; else nothing."""

    def said(target: str, *of: str, **options: Any) -> str:
        source, recipe = model_and_recipe(*of, **options)
        try:
            make_plan(recipe, source, Options(out=source.with_name("planned"), target=target))
        except PlanError as error:
            return error.message
        return ""

    return said


def save_tokenizer(path: Path) -> None:
    """A tokenizer of whole words: some loaders refuse a directory without one."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(WordLevel({f"t{number}": number for number in range(96)}, unk_token="t0"))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="t0", eos_token="t1", pad_token="t1")
    fast.save_pretrained(path)
