"""A gate for CI: compress a model with two settings, and fail if the better one is too far from the original.

python examples/gate.py MODEL OUTPUT --kl 0.05

Exit code 3 if the gate fails, as the command line has it.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import llmcompress

SETTINGS: dict[str, dict[str, Any]] = {
    "rtn": {"method": "rtn", "bits": 4, "group_size": 32},
    "gptq": {"method": "gptq", "bits": 4, "group_size": 128},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("output", type=Path, help="directory of both results")
    parser.add_argument("--kl", type=float, required=True, help="nats per token at most")
    parser.add_argument("--samples", type=int, default=128, help="windows of calibration text")
    parser.add_argument("--windows", type=int, help="windows of text that is evaluated")
    arguments = parser.parse_args()

    evaluations = {}
    for name, settings in SETTINGS.items():
        output = arguments.output / name
        result = llmcompress.compress(arguments.model, output=output, samples=arguments.samples, **settings)
        evaluations[name] = llmcompress.evaluate(output, arguments.model, windows=arguments.windows)
        print(f"{name}: {result.nbytes:,} bytes, KL divergence {evaluations[name].kl:.4f}")
    best = min(evaluations, key=lambda name: evaluations[name].figures["kl"])
    print(f"the better one is {best}")
    evaluations[best].fail_if(f"kl > {arguments.kl}")


if __name__ == "__main__":
    try:
        main()
    except llmcompress.LlmcompressError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
