"""Our GGUF files against llama-quantize's: size, time, memory and, in llama.cpp itself, fidelity.

    bash scripts/interop/build_llama_cpp.sh BUILD
    python benchmarks/gguf_vs_llamacpp.py MODEL --tools BUILD/bin --calibrate VALID.txt --evaluate TEST.txt \
        --types Q2_K,Q3_K_M,Q4_K_M,IQ4_XS,Q5_K_M,Q6_K --out table.json

For MODEL, a directory of safetensors, once: a F16 file of ours, llama-perplexity's logits of it on the first `--chunks`
of TEST, and llama-imatrix over the first `--samples` chunks of VALID. Then per type four files:

    plain     llama-quantize without an importance matrix
    ours      llmcompress gguf without calibration
    imatrix   llama-quantize with that importance matrix
    best      llmcompress gguf calibrated on the windows that llama-imatrix reads

and of each its bytes, perplexity and mean KL divergence against F16 by llama-perplexity, and wall time, CPU seconds and
peak memory of the process that made it (for `imatrix`, llama-imatrix included). Everything runs with `--threads`.
MB are 10^6 bytes. What `--out` has already is not measured again, so that an interrupted table goes on.
"""

import argparse
import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common import ANEW, HERE, OURS, Cost, Results, machine, middle, positive, run, set_up

KINDS = ("plain", "ours", "imatrix", "best")
_FIGURES = {  # with their standard errors
    "kl": re.compile(r"Mean\s+KLD:\s+([-\d.e]+)\s+±\s+([-\d.e]+)"),
    "ppl": re.compile(r"Mean PPL\(Q\)\s+:\s+([-\d.e]+)\s+±\s+([-\d.e]+)"),
}


class Bench:
    """One model, its files in `work`, and what is known so far, which is kept in a file."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given, self.work, self.tools = given, given.work, given.tools
        self.work.mkdir(parents=True, exist_ok=True)
        self.base, self.logits = self.work / "f16.gguf", self.work / "f16.logits"
        self.imatrix, self.ids = self.work / "imatrix.gguf", self.work / "ids.safetensors"
        of = ("model", "calibrate", "evaluate", "samples", "length", "chunks", "no_fidelity", "repeat")
        self.results = Results(given.out, given, *of)

    def call(self, *command: object) -> tuple[Cost, str]:
        """Cost of a command, and all it printed."""
        log = self.work / "log.txt"
        cost, printed = run(list(map(str, command)), log)
        return cost, printed + log.read_text(errors="replace")

    def tool(self, name: str, *arguments: object) -> tuple[Cost, str]:
        return self.call(self.tools / name, "-t", self.given.threads, *arguments)

    def often(self, measure: Callable[[], Cost]) -> dict[str, float]:
        """The median cost of `--repeat` times."""
        return asdict(middle([measure() for _ in range(self.given.repeat)]))

    def prepare(self) -> None:
        given = self.given
        self.results.once("machine", machine)
        made = (*OURS, "gguf", given.model, "--type", "F16", "-o", self.base, *ANEW, "-q")
        self.results.once("f16", lambda: asdict(self.call(*made)[0]))
        text = ("-m", self.base, "-c", given.length, "--chunks", given.chunks, "-f", given.evaluate)
        logits = (*text, "--kl-divergence-base", self.logits)
        if not given.no_fidelity:
            self.results.once("logits", lambda: asdict(self.tool("llama-perplexity", *logits)[0]))
        text = ("-m", self.base, "-c", given.length, "--chunks", given.samples, "-f", given.calibrate)
        self.results.once(
            "imatrix", lambda: self.often(lambda: self.tool("llama-imatrix", *text, "-o", self.imatrix)[0])
        )
        wanted = (given.model, given.calibrate, given.samples, given.length, self.ids)
        self.call(OURS[0], HERE / "first_windows.py", *wanted)

    def file(self, kind: str, name: str) -> Cost:
        """Make one file and say what it took."""
        given, out = self.given, self.path(kind, name)
        out.unlink(missing_ok=True)
        if kind in ("plain", "imatrix"):
            matrix = ("--imatrix", self.imatrix) if kind == "imatrix" else ()
            return self.call(self.tools / "llama-quantize", *matrix, self.base, out, name, given.threads)[0]
        calibrated = ("--calibration", self.ids, "--samples", given.samples, "--length", given.length)
        command = ["gguf", given.model, "--type", name, "-o", out, *ANEW, "--threads", given.threads, "-q"]
        return self.call(*OURS, *command, *(calibrated if kind == "best" else ()))[0]

    def path(self, kind: str, name: str) -> Path:
        return self.work / f"{name}-{kind}.gguf"

    def row(self, kind: str, name: str) -> dict[str, Any]:
        """All about one file; the file itself is removed."""
        cost = self.often(lambda: self.file(kind, name))
        if kind == "imatrix":
            extra = self.results.rows["imatrix"]
            cost = {
                "wall_s": cost["wall_s"] + extra["wall_s"],
                "cpu_s": cost["cpu_s"] + extra["cpu_s"],
                "peak_mb": max(cost["peak_mb"], extra["peak_mb"]),
            }
        path = self.path(kind, name)
        result = {"bytes": path.stat().st_size, **cost}
        if not self.given.no_fidelity:
            arguments = ("-m", path, "-c", self.given.length, "--chunks", self.given.chunks, "-f", self.given.evaluate)
            logits = ("--kl-divergence-base", self.logits, "--kl-divergence")
            # tensors repacked for AMX end llama-perplexity in a fault on some machines
            _, said = self.tool("llama-perplexity", "--no-repack", *arguments, *logits)
            result |= {key: [float(part) for part in found_in(said, key)] for key in _FIGURES}
        if not self.given.keep:
            path.unlink()
        return result


def found_in(said: str, key: str) -> tuple[str, ...]:
    found = _FIGURES[key].search(said)
    if found is None:
        raise SystemExit(f"llama-perplexity did not say its {key}: {said[-500:]}")
    return found.groups()


def table(rows: dict[str, dict[str, Any]], types: list[str]) -> str:
    """What was measured, and each of ours as a share of its counterpart; as Markdown."""
    lines = [
        "| type | file | bytes | KL | perplexity | wall s | CPU s | peak MB | KL of llama.cpp's |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name in types:
        for kind in KINDS:
            row = rows.get(f"{name} {kind}")
            if row is None:
                continue
            other = rows.get(f"{name} {'plain' if kind == 'ours' else 'imatrix'}", {})
            share = f"{row['kl'][0] / other['kl'][0]:.2f}" if kind in ("ours", "best") and "kl" in other else ""
            kl, ppl = (f"{row[key][0]:.4f} ± {row[key][1]:.4f}" if key in row else "" for key in ("kl", "ppl"))
            cost = f"{row['wall_s']:.1f} | {row['cpu_s']:.1f} | {row['peak_mb']:.0f}"
            lines.append(f"| {name} | {kind} | {row['bytes']:,} | {kl} | {ppl} | {cost} | {share} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--tools", type=Path, required=True, help="directory of llama-quantize and its like")
    parser.add_argument("--calibrate", type=Path, required=True)
    parser.add_argument("--evaluate", type=Path, required=True)
    parser.add_argument("--types", default="Q2_K,Q3_K_M,Q4_K_M,IQ4_XS,Q5_K_M,Q6_K")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--chunks", type=int, default=40)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=positive, default=1, metavar="N", help="median of N runs of what is timed")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--no-fidelity", action="store_true", help="time and memory only")
    parser.add_argument("--keep", action="store_true", help="keep the files")
    given = parser.parse_args()
    types, kinds = given.types.split(","), given.kinds.split(",")
    if not set(kinds) <= set(KINDS):
        parser.error(f"--kinds are some of {','.join(KINDS)}")
    set_up(given.threads)
    bench = Bench(given)
    bench.prepare()
    for name in types:
        for kind in kinds:
            bench.results.once(f"{name} {kind}", lambda kind=kind, name=name: bench.row(kind, name))
    print(table(bench.results.rows, types))


if __name__ == "__main__":
    main()
