"""What the steps of solving a matrix take: in one thread, and in two at once, each of which solves one.

    python benchmarks/solver_parts.py --rows 1536 --width 2048

Random weights and inputs, integers in groups of 128; milliseconds, medians. Two threads share memory, caches and the
interpreter, so that what they take more than one shows how much they wait for one another.
"""

import argparse
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from statistics import median

import torch

from llmcompress.engine.process.process_memory import keep_freed_memory
from llmcompress.engine.run.rtn_ratio import output_energies
from llmcompress.grids.fitting import fit
from llmcompress.grids.integer import IntegerSpec
from llmcompress.hardware import exact_float32
from llmcompress.solve.damping import damped, inverse_factor
from llmcompress.solve.gptq import gptq_codes
from llmcompress.solve.prepared import Prepared, column_order
from llmcompress.stats.gram import Gram
from llmcompress.workers import SERIAL


def steps(rows: int, width: int, tokens: int, bits: int) -> dict[str, Callable[[], object]]:
    """Each step of a solution by its name, with what it needs of the steps before it."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(tokens, width, generator=generator).to(torch.bfloat16)
    weight, spec = torch.randn(rows, width, generator=generator) * 0.02, IntegerSpec(bits, 128)
    gram = Gram(width, SERIAL)
    gram.update(inputs)
    hessian = gram.mean()
    order = column_order(hessian, by_energy=True)
    factor = inverse_factor(hessian, 0.01, order=order)
    ready = Prepared(damped(hessian, 0.01), order, factor)
    grid = fit(weight, spec, importance=ready.cost, scale_dtype=torch.bfloat16)
    coded = gptq_codes(weight, grid, factor, order)
    gradient = ready.refiner.gradient(weight, coded)
    delta = coded.decode() - weight
    return {
        "Gram matrix": lambda: Gram(width, SERIAL).update(inputs),
        "factor": lambda: inverse_factor(hessian, 0.01, order=order),
        "scale search": lambda: fit(weight, spec, importance=ready.cost, scale_dtype=torch.bfloat16),
        "column sweep": lambda: gptq_codes(weight, grid, factor, order),
        "gradient": lambda: ready.refiner.gradient(weight, coded),
        "descent on codes": lambda: ready.refiner.descend_codes(coded, gradient.clone()),
        "scales anew": lambda: coded.grid.refit_all(coded.codes, hessian, delta.clone(), torch.bfloat16),
        "energies": lambda: output_energies((delta, weight), hessian, SERIAL),
    }


def milliseconds(step: Callable[[], object], repeat: int) -> list[float]:
    """What calls of a step take in this thread."""
    found = []
    with torch.no_grad():
        for _ in range(repeat):
            start = time.perf_counter()
            step()
            found.append(1e3 * (time.perf_counter() - start))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1536)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--repeat", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    print("| step | one thread | two at once |\n|---|---|---|")
    with exact_float32(), ThreadPoolExecutor(2) as pool:
        for name, step in steps(args.rows, args.width, args.tokens, args.bits).items():
            milliseconds(step, 1)
            alone = milliseconds(step, args.repeat)
            both = [pool.submit(milliseconds, step, args.repeat) for _ in range(2)]
            print(f"| {name} | {median(alone):.0f} | {median(both[0].result() + both[1].result()):.0f} |", flush=True)


if __name__ == "__main__":
    main()
