"""How fast GGML's block types are encoded and how much error is left, on Gaussian weights, one thread.

    python benchmarks/gguf_encoders.py [--types Q4_K Q6_K] [--rows 1024] [--weighted] [--llama-quantize PATH]

Speed is megabytes of float16 input, two bytes for each weight, per second of CPU time: the best of three. Error is the
relative root mean square, weighted where an importance is given. With llama-quantize the same weights go through it,
and what it writes is read back; its time is that of the whole process, once.
"""

import argparse
import subprocess
import tempfile
import time
from pathlib import Path

import gguf
import numpy as np
import torch
from torch import Tensor

from llmcompress.grids import compat, search
from llmcompress.grids.blocks import BLOCK_TYPES, BlockSpec
from llmcompress.packing.ggml import pack, unpack
from llmcompress.workers import SERIAL

WIDTH = 2048
NAME = "blk.0.ffn_up.weight"
LEVELS = {"compat": compat.encode, "fast": search.fast, "best": search.best}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--types", nargs="+", default=list(BLOCK_TYPES), choices=list(BLOCK_TYPES))
    parser.add_argument("--levels", nargs="+", default=list(LEVELS), choices=list(LEVELS))
    parser.add_argument("--rows", type=int, default=1024, help=f"rows of {WIDTH} weights")
    parser.add_argument("--weighted", action="store_true", help="give an importance, log-normal over channels")
    parser.add_argument("--llama-quantize", type=Path, help="the tool to compare with, without importance")
    options = parser.parse_args()
    if options.weighted and options.llama_quantize:
        parser.error("--weighted: llama-quantize gets no importance here")
    generator = torch.Generator().manual_seed(0)
    weight = 0.02 * torch.randn(options.rows, WIDTH, generator=generator)
    weigh = torch.exp(torch.randn(WIDTH, generator=generator)) if options.weighted else None
    columns = options.levels + (["llama-quantize"] if options.llama_quantize else [])
    print("type    " + "".join(f"{column + ' MB/s, error %':>30}" for column in columns) + "   pack MB/s  unpack MB/s")
    with SERIAL.with_threads(1):
        for name in options.types:
            print(f"{name:8}" + _row(weight, weigh, BLOCK_TYPES[name], options), flush=True)


def _row(weight: Tensor, weigh: Tensor | None, spec: BlockSpec, options: argparse.Namespace) -> str:
    text, megabytes = "", 2e-6 * weight.numel()
    for level in options.levels:
        seconds, coded = _fastest(lambda level=level: LEVELS[level](weight, spec, SERIAL, weigh))
        text += f"{megabytes / seconds:20.1f} {_error(coded.decode(), weight, weigh):9.3f}"
    if options.llama_quantize:
        seconds, values = _llama_quantize(options.llama_quantize, weight, spec)
        text += f"{megabytes / seconds:20.1f} {_error(values, weight, None):9.3f}"
    packing, packed = _fastest(lambda: pack(coded))
    unpacking, _ = _fastest(lambda: unpack(packed, spec))
    return text + f"{megabytes / packing:12.0f} {megabytes / unpacking:12.0f}"


def _fastest(function):
    times = []
    for _ in range(3):
        began = time.thread_time()
        result = function()
        times.append(time.thread_time() - began)
    return min(times), result


def _error(values: Tensor, weight: Tensor, weigh: Tensor | None) -> float:
    root = 1.0 if weigh is None else weigh.sqrt()
    return 100 * float(((values - weight) * root).norm() / (weight * root).norm())


def _llama_quantize(tool: Path, weight: Tensor, spec: BlockSpec) -> tuple[float, Tensor]:
    """CPU seconds of the tool and the values that it stores."""
    with tempfile.TemporaryDirectory() as directory:
        source, target = Path(directory) / "source.gguf", Path(directory) / "target.gguf"
        _write(source, weight)
        command = [tool, "--pure", "--allow-requantize", source, target, spec.name, "1"]
        before = _child_seconds()
        done = subprocess.run([str(part) for part in command], check=False, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{tool} failed: {done.stderr[-500:]}")
        seconds = _child_seconds() - before
        tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(target).tensors}
        return seconds, unpack(torch.from_numpy(np.array(tensors[NAME].data)), spec).decode()


def _write(path: Path, weight: Tensor) -> None:
    """The least that the tool takes for a model."""
    writer = gguf.GGUFWriter(path, "llama")
    for key in ("block_count", "context_length", "embedding_length", "feed_forward_length"):
        getattr(writer, f"add_{key}")(1 if key == "block_count" else WIDTH)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tensor(NAME, weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _child_seconds() -> float:
    import resource

    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
