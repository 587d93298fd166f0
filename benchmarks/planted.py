"""A copy of a model with outlier channels planted by exact rescaling: the same function, harder to round.

    python benchmarks/planted.py MODEL OUT --channels 2 --factor 100

Of every norm that feeds matrices, `--channels` gains become `--factor` times as large, and the weights behind them as
much smaller. Then compare, as benchmarks/methods.py does, recipes w8a8 and smoothquant-w8a8 on OUT.
"""

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from llmcompress.engine.source.folding import scaling_folds
from llmcompress.engine.source.matrix_refs import matrices_of
from llmcompress.engine.source.tensor_names import Anatomy
from llmcompress.ledger import Ledger
from llmcompress.store.checkpoint import Checkpoint
from llmcompress.store.folds import FoldedCheckpoint
from llmcompress.store.headers import read_headers


def plant(model: Path, out: Path, channels: int, factor: float) -> None:
    """Write `out`, in float32 so that nothing is rounded."""
    headers = read_headers(model)
    found = matrices_of(headers, False, Ledger())
    anatomy = Anatomy(headers, found.spec, found.prefix, found.layers)
    checkpoint = FoldedCheckpoint(Checkpoint(headers), frozenset(headers.tensors))
    for layer in range(found.layers):
        for site in anatomy.sites(layer):
            if site.norm is not None:
                factors = torch.ones(site.channels, dtype=torch.float64)
                factors[torch.arange(channels) * (site.channels // channels) + 5] = 1 / factor
                checkpoint.fold(scaling_folds(anatomy, layer, site.parts, factors))
    out.mkdir(parents=True)
    tensors = {name: checkpoint.read(name).float().contiguous() for name in headers.tensors}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config = {**headers.config, "dtype": "float32"}
    config.pop("torch_dtype", None)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for pattern in ("tokenizer*", "special_tokens_map.json", "vocab.json", "merges.txt"):
        for file in model.glob(pattern):
            shutil.copy2(file, out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--channels", type=int, default=2)
    parser.add_argument("--factor", type=float, default=100.0)
    args = parser.parse_args()
    plant(args.model, args.out, args.channels, args.factor)


if __name__ == "__main__":
    main()
