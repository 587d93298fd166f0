"""Commands that read and write files more than they compute: GB that they read per CPU second, beside cp and sha256sum.

    python benchmarks/files.py WORK [--layers 9] [--repeat 3]

A random model in the shapes of Llama-2-7B is written to WORK first, 4 GB with 9 layers. One thread each; the median of
CPU seconds counts, less those that the same command takes on a model of a few megabytes, most of which Python takes to
start. `verify` and `export` read what `rtn` wrote, `inspect` headers alone, for which there is no bar. What is written
is removed again, but for the models. The bar is half of what the slower of cp and sha256sum does.
"""

import argparse
import shutil
import sys
from pathlib import Path
from statistics import median

from common import HERE, OURS, machine, positive, run, say, set_up

BAR = 0.5


def commands(model: Path, work: Path) -> dict[str, list[str]]:
    """What is measured, by name, in an order in which each finds what it needs."""
    weights = [str(file) for file in sorted(model.glob("*.safetensors"))]
    out, run_of = str(work / "rtn"), str(work / "rtn.work")
    rtn = [*OURS, "rtn", str(model), "--bits", "4", "--group-size", "128", "--threads", "1", "--overwrite", "--quiet"]
    gguf = [*OURS, "gguf", str(model), "--threads", "1", "--overwrite", "--quiet"]
    return {
        "cp": ["cp", "-r", str(model), str(work / "copy")],
        "sha256sum": ["sha256sum", *weights],
        "rtn, ranges of weights": [*rtn, "-o", str(work / "minmax"), "--clip", "minmax"],
        "rtn": [*rtn, "-o", out, "--keep-work", "--work", run_of],
        "export": [*OURS, "export", run_of, "-o", str(work / "exported"), "--format", "gptq", "--overwrite"],
        "verify": [*OURS, "verify", out],
        "verify --source": [*OURS, "verify", out, "--source", str(model)],
        "inspect": [*OURS, "inspect", str(model)],
        "gguf --type Q8_0": [*gguf, "-o", str(work / "q8.gguf"), "--type", "Q8_0"],
        "gguf --search fast": [*gguf, "-o", str(work / "q4.gguf"), "--type", "Q4_K_M", "--search", "fast"],
    }


def made(work: Path, name: str, layers: int) -> Path:
    """A random model, written unless it is there."""
    model = work / f"{name}-{layers}"
    script = HERE.parent / "scripts" / "make_random_model.py"
    options = ["--layers", str(layers), "--samples", "1", "--length", "8"]
    run([sys.executable, str(script), name, str(model), *options], work / "model.log")
    return model


def read_by(name: str, model: Path, work: Path) -> int:
    """Bytes of weights that a command reads; none by `inspect`, which reads headers."""
    places = {"export": [work / "rtn.work"], "verify": [work / "rtn"], "verify --source": [work / "rtn", model]}
    folders = places.get(name, [] if name == "inspect" else [model])
    return sum(file.stat().st_size for folder in folders for file in folder.rglob("*.safetensors"))


def seconds(model: Path, work: Path, repeat: int) -> dict[str, tuple[float, float, int]]:
    """CPU seconds, seconds on the clock and bytes read of every command."""
    found = {}
    for name, command in commands(model, work).items():
        costs = []
        for _ in range(repeat):
            shutil.rmtree(work / "copy", ignore_errors=True)
            if "--keep-work" in command:
                shutil.rmtree(work / "rtn.work", ignore_errors=True)
            costs.append(run(command, work / "command.log")[0])
        say(f"{model.name}, {name}: {[cost.cpu_s for cost in costs]}")
        cpu, wall = (median(getattr(cost, key) for cost in costs) for key in ("cpu_s", "wall_s"))
        found[name] = cpu, wall, read_by(name, model, work)
    for left in ("copy", "minmax", "rtn", "rtn.work", "exported"):
        shutil.rmtree(work / left, ignore_errors=True)
    for left in work.glob("q[48].gguf*"):
        left.unlink()
    return found


def table(large: dict[str, tuple[float, float, int]], small: dict[str, tuple[float, float, int]]) -> str:
    """As Markdown. large, small: what `seconds` says of both models; a rate is of what they differ by."""
    rates = {}
    for name, (cpu, _, size) in large.items():
        rates[name] = (size - small[name][2]) / max(cpu - small[name][0], 1e-3) / 1e9
    slower = min(rates["cp"], rates["sha256sum"])
    lines = ["| | CPU s | s | GB per CPU s | of the slower | bar |", "|---|---|---|---|---|---|"]
    for name, rate in rates.items():
        bar = "" if name in ("cp", "sha256sum", "inspect") else "yes" if rate >= BAR * slower else "no"
        cpu, wall, _ = large[name]
        lines.append(f"| {name} | {cpu:.1f} | {wall:.1f} | {rate:.3f} | {rate / slower:.2f} | {bar} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--layers", type=int, default=9)
    parser.add_argument("--repeat", type=positive, default=3)
    args = parser.parse_args()
    set_up(threads=1)
    args.work.mkdir(parents=True, exist_ok=True)
    large, small = made(args.work, "llama-2-7b", args.layers), made(args.work, "tiny", 1)
    print(machine())
    print(table(seconds(large, args.work, args.repeat), seconds(small, args.work, args.repeat)))


if __name__ == "__main__":
    main()
