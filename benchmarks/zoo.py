"""Tiny random checkpoints of the decoder-only model types of transformers, from transformers' own classes.

    python benchmarks/zoo.py WORK [TYPE ...]

Writes WORK/TYPE for each type of zoo.yaml: 128 channels, 4 layers (20 of Gemma 3n), weights in bfloat16 and of a size
that makes a wrong matrix show in the logits, and the tokenizer of the tiny model. What is there already is left alone.
"""

import argparse
import shutil
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

HERE = Path(__file__).resolve().parent
TINY = HERE.parent / "tests" / "models" / "tiny-llama"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
SEED = 0


def known_types() -> list[str]:
    """The model types of zoo.yaml."""
    found: list[str] = yaml.safe_load((HERE / "zoo.yaml").read_text())["types"]
    return found


def config_of(kind: str) -> Any:
    """The small config of a model type."""
    small = yaml.safe_load((HERE / "zoo.yaml").read_text())
    known = AutoConfig.for_model(kind).to_dict()
    wanted = {name: group["value"] for group in small["sizes"] for name in group["names"]}
    sizes = {name: value for name, value in wanted.items() if known.get(name) is not None}
    others = [group["config"] for group in small["others"] if kind in group["types"]]
    return AutoConfig.for_model(kind, **{name: value for part in (sizes, *others) for name, value in part.items()})


def enliven(model: Any) -> None:
    """Draw the matrices of a model anew, and give its norms and biases values other than 1 and 0."""
    for name, parameter in model.named_parameters():
        plain = (
            name.endswith((".weight", ".bias", "_proj", "_bias", ".w1", ".v1", ".w2", "_output_scale"))
            and "conv" not in name
            and "dt_" not in name
        )
        if parameter.ndim > 1 and min(parameter.shape) > 1 and plain:
            parameter.normal_(0, 0.5 if "emb" in name or "wte" in name else parameter.shape[-1] ** -0.5)
        elif parameter.ndim == 1 and plain:
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    head: nn.Linear | None = model.get_output_embeddings()
    if head is not None and head.weight is not model.get_input_embeddings().weight:
        head.weight.mul_(3)


def write(kind: str, place: Path) -> None:
    """Write a checkpoint of a model type; ValueError unless it gives finite logits when it is loaded again."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(SEED)
        model: Any = AutoModelForCausalLM.from_config(config_of(kind), dtype=torch.float32)
        enliven(model)
        partial = place.with_name(f"{place.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        model.to(torch.bfloat16).save_pretrained(partial)
        loaded = AutoModelForCausalLM.from_pretrained(partial, dtype=torch.bfloat16)
        if not torch.isfinite(loaded(torch.arange(3, 43).reshape(2, 20)).logits).all():
            raise ValueError(f"the logits of {kind} are not finite")
    for name in TOKENIZER:
        shutil.copy(TINY / name, partial / name)
    partial.rename(place)


def zoo(folder: Path, kinds: Iterable[str]) -> Iterator[tuple[str, Path]]:
    """Every type with its checkpoint, written where it is missing."""
    warnings.filterwarnings("ignore")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    folder.mkdir(parents=True, exist_ok=True)
    for kind in kinds:
        if not (folder / kind).exists():
            write(kind, folder / kind)
        yield kind, folder / kind


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("types", nargs="*", default=known_types())
    given = parser.parse_args()
    for one, checkpoint in zoo(given.work, given.types):
        print(one, checkpoint)
