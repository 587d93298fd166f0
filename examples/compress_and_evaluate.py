"""Compress a model to 4 bits, prove that the result is what it claims to be, and measure how faithful it is.

python examples/compress_and_evaluate.py MODEL OUTPUT
"""

import argparse
from pathlib import Path

import llmcompress


class Lines(llmcompress.Progress):
    """One line for each finished layer."""

    def layer_done(self, number: int, seconds: float) -> None:
        print(f"layer {number}: {seconds:.1f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--samples", type=int, default=128, help="windows of calibration text")
    parser.add_argument("--windows", type=int, help="windows of text that is evaluated")
    arguments = parser.parse_args()

    settings = {"bits": 4, "group_size": 64, "samples": arguments.samples}
    plan = llmcompress.plan(arguments.model, method="gptq", output=arguments.output, **settings)
    print(f"{plan.estimate.output_bytes:,} bytes exactly, about {plan.estimate.memory_bytes:,} bytes of memory")
    result = llmcompress.run(plan, progress=Lines())
    for entry in result.ledger:
        print(f"{entry.kind}: {entry.subject}: {entry.why}")

    llmcompress.verify(result.output, arguments.model).fail_if_damaged()
    evaluation = llmcompress.evaluate(result.output, arguments.model, windows=arguments.windows)
    print(f"{result.output}: perplexity {evaluation.perplexity:.2f}, KL divergence {evaluation.kl:.4f} nats per token")


if __name__ == "__main__":
    main()
