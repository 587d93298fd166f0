"""The parts of gpu.py by name; here those that are commands. Each gives figures by name as it finds them."""

import io
import json
import os
import runpy
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from statistics import median

from gpu import ROOT, Line, Setting
from gpu_kernels import PartError, bench, check, machine, said, tried

TINY = ROOT / "tests" / "models"
STOPPED = 75  # exit code of a run that --deadline ends
WINDOW = {True: (8, 64), False: (128, 2048)}  # samples and tokens of each that calibrate, by dry


def _llmcompress(*words: object, allowed: tuple[int, ...] = (0,)) -> str:
    """What a command prints; PartError with its last words if it fails."""
    from llmcompress.cli import app

    sys.argv = ["llmcompress", *map(str, words)]
    with redirect_stdout(io.StringIO()) as printed, redirect_stderr(io.StringIO()) as words_said:
        try:
            app.main()
        except SystemExit as end:
            code = end.code or 0
    lines = [line for line in words_said.getvalue().splitlines() if line.strip()]
    if code not in allowed:
        why = next((line for line in lines if line.startswith("error:")), lines[-1] if lines else "without a word")
        raise PartError(f"{words[0]} failed ({code}): {why}")
    return printed.getvalue()


def _model(setting: Setting, shape: str, layers: int | None = None, window: tuple[int, int] | None = None) -> Path:
    """A random model, written unless it is there; in a dry run always the same tiny one."""
    if not setting.dry:
        import torch

        if not torch.cuda.is_available():
            raise PartError("torch sees no GPU")
    shape, layers = ("tiny", 1) if setting.dry else (shape, layers)
    samples, length = (None if setting.dry else window) or WINDOW[setting.dry]
    place = setting.folder / f"{shape}-{layers}"
    script = ROOT / "scripts" / "make_random_model.py"
    options = () if layers is None else ("--layers", layers)
    sys.argv = [*map(str, (script, shape, place, "--samples", samples, "--length", length, *options))]
    if not (place / "made.json").exists():
        shutil.rmtree(place, ignore_errors=True)  # of a part whose time was over
        with redirect_stdout(sys.stderr):
            runpy.run_path(str(script), run_name="__main__")
    return place


def _bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("model-*.safetensors"))


def evaluation(setting: Setting) -> Iterator[Line]:
    """A trained model, small as it is, with its weights packed: does it agree with the reference, how fast is it."""
    model, out = (_model(setting, "tiny") if setting.dry else TINY / "tiny-llama"), setting.folder / "packed"
    _llmcompress("rtn", model, "-o", out, "--group-size", 32, "--quiet", "--json", "--device", "cpu")
    backend, length, windows = ("torch", 8, 2) if setting.dry else ("kernels", 64, 8)
    text = ("--text", TINY / "tiny-llama-eval.txt", "--length", length, "--windows", windows)
    asked = ("--backend", backend, "--device", setting.device, "--json")
    found = json.loads(_llmcompress("eval", out, "--ref", model, *text, *asked))
    error, bound = found["logits_error"], found["logits_bound"]
    yield {"name": "logits", "backend": backend, "logits_error": error, "error_of_bound": error / bound}
    ran = found["runtime"]
    for speed, other in zip(ran["speed"], ran["reference_speed"], strict=True):
        kinds = [f"{kind}_tokens_per_second" for kind in ("prefill", "decode")]
        of_original = {f"original_{kind}": other[kind] for kind in kinds}
        yield {"name": f"batch {speed['batch']}"} | {kind: speed[kind] for kind in kinds} | of_original


def compress(setting: Setting, share: float, model: Path, *command: object) -> Line:
    """What a compression takes that may have a share of the time left, by the layers that it did if not all of them.

    PartError if it did none.
    """
    out, times = setting.folder / "out.gguf", setting.folder / "times.jsonl"
    if command[0] != "gguf":
        out = out.with_suffix("")
    times.unlink(missing_ok=True)
    deadline = max(1.0, 0.8 * share * (setting.end - time.monotonic()))  # the last layer and the files take the rest
    begin = time.monotonic()
    with MemoryWatch() as memory:
        _llmcompress(command[0], model, *command[1:], "-o", out, "--quiet", "--json", "--timings", times,
                     "--device", setting.device, "--deadline", deadline, allowed=(0, STOPPED))  # fmt: skip
    wall = time.monotonic() - begin
    for left in (out, out.with_name(f"{out.name}.work")):
        shutil.rmtree(left, ignore_errors=True) if left.is_dir() else left.unlink(missing_ok=True)
    lines = [json.loads(line) for line in times.read_text().splitlines()]
    done, count = [line["seconds"] for line in lines if line["event"] == "layer"], lines[0]["layers"]
    if not done:
        raise PartError("no layer was done in its time")
    peak = max((line.get("device_peak_bytes") or 0 for line in lines), default=0)
    return {
        "seconds": extrapolated(wall, done, count), "layers_done": len(done), "layers": count,
        "seconds_a_layer": median(done), "tensors_gb": peak / 1e9 or None, "driver_gb": memory.most / 1e9 or None,
    }  # fmt: skip


def extrapolated(wall: float, done: list[float], count: int) -> float:
    """Seconds for all layers: measured, or by the median of those that were done."""
    return round(wall + (count - len(done)) * median(done), 2)


def _gptq(setting: Setting, model: Path) -> tuple[object, ...]:
    samples, length = WINDOW[setting.dry]
    text = ("--calibration", model / "ids.safetensors", "--samples", samples, "--length", length)
    return ("gptq", "--bits", 4, "--group-size", 128, *text)


def gptq(setting: Setting) -> Iterator[Line]:
    begin = time.monotonic()
    model = _model(setting, "llama-2-7b")
    yield {"name": "model written", "gb": _bytes(model) / 1e9, "seconds": round(time.monotonic() - begin, 1)}
    found = compress(setting, 1, model, *_gptq(setting, model))
    yield {"name": "memory of tensors", "gb": found.pop("tensors_gb")}
    yield {"name": "memory by the driver", "gb": found.pop("driver_gb")}
    yield {"name": "time", "model": model.name, **found}


def large(setting: Setting) -> Iterator[Line]:
    model = _model(setting, "llama-2-70b", 2)
    yield {"name": "two layers", "model": model.name, **compress(setting, 1, model, *_gptq(setting, model))}


def codes(setting: Setting) -> Iterator[Line]:
    """Codes of the same Gram matrices on the device and on the processor."""
    from safetensors.torch import load_file

    samples, length = WINDOW[True] if setting.dry else (64, 512)
    model, work = _model(setting, "small", None, (samples, length)), setting.folder / "codes"
    text = ("--calibration", model / "ids.safetensors", "--samples", samples, "--length", length)
    same = ("--batch", 8, "--compute-dtype", "float32", "--stats", work / "stats")  # else each gathers statistics anew
    common = (*text, "--group-size", 128, "--qep-alpha", 0, *same)
    runs = {"first": ("cpu", 8, "--descent", 0), "one": ("cpu", 4), "other": (setting.device, 4)}
    work.mkdir()
    for name, (device, bits, *more) in runs.items():
        _llmcompress("gptq", model, "-o", work / name, *common, "--bits", bits, *more, "--device", device,
                     "--quiet", "--json", "--keep-work")  # fmt: skip
    for name in ("one", "other"):
        ledger = json.loads((work / name / "report.json").read_text())["ledger"]
        if not any(note["kind"] == "statistics" for note in ledger):
            raise PartError(f"the run on {runs[name][0]} did not use the first one's statistics")
    different = total = 0
    for file in sorted((work / "one.work").glob("section-*.safetensors")):
        here, there = load_file(file), load_file(work / "other.work" / file.name)
        for name in (name for name in here if name.endswith(".codes")):
            different, total = different + int((here[name] != there[name]).sum()), total + here[name].numel()
    yield {"name": "codes", "codes": total, "differing": different, "differing_share": different / total}


def packing(setting: Setting) -> Iterator[Line]:
    """RTN and K-quants: what they read per second, beside the slowest of disk and link."""
    model, rates = _model(setting, "llama-2-7b"), []
    for name, rate in links(setting, model):
        rates.append(rate)
        yield {"name": name, "gb_per_second": rate / 1e9}
    rtn, quants = ("rtn", "--bits", 4, "--group-size", 128), ("gguf", "--type", "Q4_K_M", "--search", "fast")
    for name, share, command in (("RTN W4 g128", 0.5, rtn), ("Q4_K_M", 1, quants)):
        found = compress(setting, share, model, *command)
        rate = _bytes(model) / found["seconds"]
        yield {"name": name, "gb_per_second": rate / 1e9, "of_slowest_link": rate / min(rates), **found}


def links(setting: Setting, model: Path) -> Iterator[tuple[str, float]]:
    """Bytes per second of files, read as the system holds them and written, and of the GPU's link."""
    files = sorted(model.glob("model-*.safetensors"))[2:10]
    begin = time.monotonic()
    for file in files:
        file.read_bytes()
    yield "files read", sum(file.stat().st_size for file in files) / (time.monotonic() - begin)
    block, copies, trial = files[0].read_bytes(), 8, setting.folder / "trial.bin"
    begin = time.monotonic()
    with trial.open("wb", buffering=0) as handle:
        for _ in range(copies):
            handle.write(block)
        os.fsync(handle.fileno())
    yield "file written and on disk", copies * len(block) / (time.monotonic() - begin)
    trial.unlink()
    import torch

    host = torch.empty(1 << (20 if setting.dry else 30), dtype=torch.uint8, pin_memory=not setting.dry)
    there = torch.empty_like(host, device=setting.device)
    for name, to, source in (("memory to the GPU", there, host), ("memory from the GPU", host, there)):
        for _ in range(2):  # the second time counts
            begin = time.perf_counter()
            to.copy_(source)
            took = time.perf_counter() - begin
        yield name, host.numel() / took


class MemoryWatch:
    """The most memory of the GPU in use, as the driver sees it, beyond that before; 0 where it is not told."""

    def __init__(self) -> None:
        self.most, self._stop = 0, threading.Event()
        self._before = _used()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "MemoryWatch":
        if self._before is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()

    def _watch(self) -> None:
        while not self._stop.wait(0.5):
            self.most = max(self.most, (_used() or 0) - (self._before or 0))


def _used() -> int | None:
    asked = ("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0")
    return tried(lambda: int(said(*asked)) << 20)


PARTS: dict[str, Callable[[Setting], Iterator[Line]]] = {
    "machine": machine,
    "check": check,
    "bench": bench,
    "eval": evaluation,
    "gptq": gptq,
    "codes": codes,
    "packing": packing,
    "large": large,
}
