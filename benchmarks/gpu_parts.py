"""The parts of gpu.py: each gives rows as it finds them."""

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from common import OURS
from gpu_bench import ROOT, Bench, MemoryWatch, NoGpuError, PartError, Row, bytes_of

TINY = ROOT / "tests" / "models"
STOPPED = 75
ENDING = 45  # seconds of a run after its last layer, and before its first


def checkpoint(bench: Bench) -> Iterator[Row]:
    begin = time.monotonic()
    model = bench.main
    took = time.monotonic() - begin
    yield Row(
        "checkpoint", f"{bench.sizes.model} written (or found)", f"{bytes_of(model) / 1e9:.2f} GB in {took:.1f} s"
    )


LINKS = """
import json, sys, time, torch
host = torch.empty(int(sys.argv[1]), dtype=torch.uint8, pin_memory=True)
there = torch.empty_like(host, device="cuda")
def rate(to, source):
    to.copy_(source); torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(5): to.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    return 5 * host.numel() / (time.perf_counter() - begin)
print(json.dumps([torch.cuda.get_device_name(), rate(there, host), rate(host, there)]))
"""


def links(bench: Bench) -> Iterator[Row]:
    """How fast files and the GPU's link are: what compression that does little else may be bound by."""
    files = sorted(bench.main.glob("model-*.safetensors"))[2:10]
    begin = time.monotonic()
    for file in files:
        file.read_bytes()
    bench.limits["read"] = sum(file.stat().st_size for file in files) / (time.monotonic() - begin)
    yield Row("links", "files read, as the system holds them", f"{bench.limits['read'] / 1e9:.2f} GB/s")
    block, copies, trial = files[0].read_bytes(), 8, bench.folder / "trial.bin"
    begin = time.monotonic()
    with trial.open("wb", buffering=0) as handle:
        for _ in range(copies):
            handle.write(block)
        os.fsync(handle.fileno())
    bench.limits["write"] = copies * len(block) / (time.monotonic() - begin)
    trial.unlink()
    yield Row("links", "file written and on disk", f"{bench.limits['write'] / 1e9:.2f} GB/s")
    if bench.device == "cpu":
        raise NoGpuError("PCIe")
    _, _, printed = bench.call(60, sys.executable, "-c", LINKS, 1 << 30)
    name, up, down = json.loads(printed)
    bench.limits["PCIe"] = min(up, down)
    yield Row("links", f"{name}, pinned memory to it and back", f"{up / 1e9:.1f} and {down / 1e9:.1f} GB/s")


def check(bench: Bench) -> Iterator[Row]:
    took, _, printed = bench.call(90, *OURS, "kernels", "check", "--json", allowed=(0, 3))
    found = json.loads(printed)
    wrong = [case for case in found["cases"] if not case["ok"]]
    yield Row("kernels check", f"{len(found['cases'])} cases against float64, {took:.0f} s",
              f"{len(wrong)} wrong", "0 wrong", not wrong)  # fmt: skip


def timing(bench: Bench) -> Iterator[Row]:
    _, _, printed = bench.call(90, *OURS, "kernels", "bench", "--json")
    (bench.folder / "kernels-bench.json").write_text(printed)
    yield from kernel_rows(json.loads(printed)["products"])


def kernel_rows(products: list[dict[str, Any]]) -> Iterator[Row]:
    """The bars of issue 7, section 2, on what `kernels bench` says."""
    w4 = [item for item in products if item["name"] == "w4 g128"]
    large = [item for item in w4 if item["bytes"] >= 20e6]
    few = [item["of_copy"] for item in large if item["tokens"] <= 8]
    some = [item["of_copy"] for item in large if 16 <= item["tokens"] <= 32]
    gain = [item["times_bf16"] for item in w4 if item["tokens"] <= 16]
    every = [item["times_bf16"] for item in w4]
    w8a8 = [item["times_bf16"] for item in products if item["name"] == "w8a8" and item["tokens"] == 512]
    q4k = [item["of_copy"] for item in products if item["name"] == "Q4_K" and item["tokens"] == 1]
    for what, values, least, share in (
        ("w4 g128, 1-8 rows, 20 MB and more: share of a copy's rate, least", few, 0.80, True),
        ("w4 g128, 16-32 rows: the same", some, 0.65, True),
        ("w4 g128, up to 16 rows: times cuBLAS bf16, least", gain, 3.3, False),
        ("w4 g128, any rows: times cuBLAS bf16, least", every, 1.0, False),
        ("w8a8, 512 rows: times cuBLAS bf16, least", w8a8, 1.5, False),
        ("Q4_K, 1 row: share of a copy's rate, least", q4k, 0.70, True),
    ):
        if values:
            shown, bar = (f"{min(values):.0%}", f">= {least:.0%}") if share else (f"{min(values):.2f}", f">= {least}")
            yield Row("kernels bench", what, shown, bar, min(values) >= least)
        else:
            yield Row("kernels bench", what, "not measured", f">= {least}")


@dataclass(frozen=True)
class Compressed:
    """What a run took. wall: seconds of the process, all layers or not; layers: seconds of each that was done."""

    wall: float
    layers: list[float]
    count: int
    peak: int | None
    driver: int

    @property
    def seconds(self) -> float:
        """For all layers: measured, or by the median of those that were done."""
        return self.wall + (self.count - len(self.layers)) * median(self.layers)

    @property
    def said(self) -> str:
        if len(self.layers) == self.count:
            return f"{self.seconds:.0f} s"
        return f"{self.seconds:.0f} s, extrapolated from {len(self.layers)} of {self.count} layers"


def compress(bench: Bench, limit: float, name: str, model: Path, *command: object) -> Compressed:
    """Run a compression on the device, for as many layers as there is time for."""
    out, times = bench.folder / name, bench.folder / f"{name}.jsonl"
    times.unlink(missing_ok=True)
    limit = min(limit, bench.end - time.monotonic())
    deadline = max(1, limit - ENDING)
    words = (*OURS, *command, "-o", out, "--overwrite", "--quiet", "--json", "--timings", times)
    try:
        with MemoryWatch(bench.device) as memory:
            wall, _, _ = bench.call(limit, *words, "--device", bench.device, "--deadline", deadline,
                                       allowed=(0, STOPPED))  # fmt: skip
    finally:
        shutil.rmtree(out.with_name(f"{out.name}.work"), ignore_errors=True)
        if out.is_dir():
            shutil.rmtree(out)
        out.unlink(missing_ok=True)
    lines = [json.loads(line) for line in times.read_text().splitlines()]
    done = [line["seconds"] for line in lines if line["event"] == "layer"]
    peak = max((line.get("device_peak_bytes", 0) for line in lines), default=0) or None
    return Compressed(wall, done, lines[0]["layers"], peak, memory.most)


def _gptq(bench: Bench, model: Path) -> tuple[object, ...]:
    ids, sizes = model / "ids.safetensors", bench.sizes
    text = ("--calibration", ids, "--samples", sizes.samples, "--length", sizes.length)
    return ("gptq", model, "--bits", 4, "--group-size", 128, *text)


def _memory_rows(part: str, found: Compressed, bar: float | None) -> Iterator[Row]:
    said = "" if bar is None else f"< {bar / 1e9:.0f} GB"
    peak = found.peak
    if peak is not None:
        met = None if bar is None else peak < bar
        yield Row(part, "GPU memory of tensors, most", f"{peak / 1e9:.2f} GB", said, met)
    if found.driver:
        met = None if bar is None else found.driver < bar
        yield Row(part, "GPU memory by the driver, with CUDA's own", f"{found.driver / 1e9:.2f} GB", said, met)


def gptq(bench: Bench) -> Iterator[Row]:
    model = bench.main
    found = compress(bench, 290, "gptq", model, *_gptq(bench, model))
    sizes = bench.sizes
    what = f"GPTQ W4 g128 of {sizes.model}, {sizes.samples} x {sizes.length} tokens, {found.count} layers"
    yield Row("gptq", what, found.said, "< 240 s", found.seconds < 240 if bench.device != "cpu" else None)
    yield Row("gptq", "seconds of a layer, median", f"{median(found.layers):.2f}")
    yield from _memory_rows("gptq", found, 6e9)


def packing(bench: Bench) -> Iterator[Row]:
    """RTN and K-quants: what they read per second, beside the slowest of disk and link."""
    model = bench.main
    for name, command in (
        ("RTN W4 g128", ("rtn", model, "--bits", 4, "--group-size", 128)),
        ("Q4_K_M, fast search", ("gguf", model, "--type", "Q4_K_M", "--search", "fast")),
    ):
        out = "packed.gguf" if command[0] == "gguf" else "packed"
        try:
            found = compress(bench, 75, out, model, *command)
        except PartError as error:
            yield Row("packing", name, f"not measured: {error}")
            continue
        rate, slowest = bytes_of(model) / found.seconds, min(bench.limits.values(), default=0.0)
        bound = f">= half of the slowest link, {slowest / 1e9:.2f} GB/s"
        met = rate >= slowest / 2 if slowest and bench.device != "cpu" else None
        yield Row(
            "packing", f"{name}: bytes of the source each second", f"{rate / 1e9:.2f} GB/s ({found.said})", bound, met
        )


def large(bench: Bench) -> Iterator[Row]:
    sizes = bench.sizes
    text = ("--samples", sizes.samples, "--length", sizes.length)
    model = bench.made(sizes.slice, "--layers", sizes.slice_layers, *text)
    found = compress(bench, 120, "large", model, *_gptq(bench, model))
    what = f"GPTQ W4 g128 of {sizes.slice_layers} layers of {sizes.slice}"
    yield Row("large", what, f"{found.said}, {median(found.layers):.1f} s a layer")
    yield from _memory_rows("large", found, None)


def codes(bench: Bench) -> Iterator[Row]:
    """Codes of the same Gram matrices on the device and on the processor."""
    sizes, work = bench.sizes, bench.folder / "codes"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    model = bench.made(sizes.compared, "--samples", sizes.compared_samples, "--length", sizes.compared_length)
    text = ("--samples", sizes.compared_samples, "--length", sizes.compared_length)
    common = ("--calibration", model / "ids.safetensors", *text, "--group-size", 128, "--qep-alpha", 0)
    common = (*common, "--compute-dtype", "float32", "--stats", work / "stats", "--quiet", "--json", "--keep-work")
    gather = (*OURS, "gptq", model, "-o", work / "first", "--bits", 8, "--descent", 0, *common)
    bench.call(60, *gather, "--device", "cpu")
    for device in dict.fromkeys(("cpu", bench.device)):
        command = (*OURS, "gptq", model, "-o", work / device, "--bits", 4, *common)
        bench.call(60, *command, "--device", device)
    _, _, printed = bench.call(60, sys.executable, "-c", COMPARE, work / "cpu.work", work / f"{bench.device}.work")
    different, total = json.loads(printed)
    met = different < 0.001 * total if bench.device != "cpu" else None
    what = f"of {total:,} codes, those that differ from the processor's on the same statistics"
    yield Row("codes", what, f"{different:,} ({different / total:.4%})", "< 0.1%", met)
    shutil.rmtree(work)


COMPARE = """
import json, pathlib, sys
from safetensors.torch import load_file
one, other = map(pathlib.Path, sys.argv[1:])
different = total = 0
for file in sorted(one.glob("section-*.safetensors")):
    here, there = load_file(file), load_file(other / file.name)
    for name in (name for name in here if name.endswith(".codes")):
        different, total = different + int((here[name] != there[name]).sum()), total + here[name].numel()
print(json.dumps([different, total]))
"""


def evaluation(bench: Bench) -> Iterator[Row]:
    """A trained model, small as it is, with its weights packed: does it agree with the reference, how fast is it."""
    model, out = TINY / "tiny-llama", bench.folder / "tiny-w4"
    text = ("--samples", 16, "--length", 64)
    made = (*OURS, "gptq", model, "-o", out, "--group-size", 32, *text, "--overwrite", "--quiet", "--json")
    bench.call(60, *made, "--device", "cpu")
    backend = "torch" if bench.device == "cpu" else "kernels"
    asked = ("--text", TINY / "tiny-llama-eval.txt", "--length", 64, "--windows", 8, "--json", "--backend", backend)
    _, _, printed = bench.call(90, *OURS, "eval", out, "--ref", model, *asked, "--device", bench.device)
    (bench.folder / "eval.json").write_text(printed)
    shutil.rmtree(out)
    yield from evaluation_rows(json.loads(printed), backend)


def evaluation_rows(found: dict[str, Any], backend: str) -> Iterator[Row]:
    """What `eval --backend` says."""
    error, bound, ran = found["logits_error"], found["logits_bound"], found["runtime"]
    what = f"logits of {backend} beside the reference decode, relative error"
    yield Row("eval", what, f"{error:.2e}", f"<= {bound:.2e}", error <= bound)
    for speed, other in zip(ran["speed"], ran["reference_speed"], strict=True):
        for kind in ("prefill", "decode"):
            key = f"{kind}_tokens_per_second"
            shown = f"{speed[key]:,.0f}, the original {other[key]:,.0f}"
            yield Row("eval", f"tokens per second at batch {speed['batch']}, {kind}", shown)


PARTS: dict[str, Callable[[Bench], Iterator[Row]]] = {
    "checkpoint": checkpoint,
    "links": links,
    "check": check,
    "codes": codes,
    "gptq": gptq,
    "eval": evaluation,
    "packing": packing,
    "bench": timing,
    "large": large,
}
