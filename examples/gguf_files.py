"""Write GGUF files of a model for llama.cpp: one of each type, and one of the types that fit a size best.

python examples/gguf_files.py MODEL OUTPUT Q8_0 Q4_K_M --bpw 5.5
"""

import argparse
from pathlib import Path

import llmcompress


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("output", type=Path, help="directory of the files")
    parser.add_argument("types", nargs="+", help="types of `llmcompress list types`")
    parser.add_argument("--bpw", type=float, help="bits per weight of one more file")
    parser.add_argument("--samples", type=int, default=128, help="windows of calibration text for that file")
    arguments = parser.parse_args()

    results = [
        llmcompress.compress(arguments.model, method="gguf", type=kind, output=arguments.output / f"model-{kind}.gguf")
        for kind in arguments.types
    ]
    if arguments.bpw is not None:
        text = {"calibration": "default", "samples": arguments.samples}
        fitted = llmcompress.fit(arguments.model, method="gguf", bpw=arguments.bpw, **text)
        output = arguments.output / f"model-{arguments.bpw:g}bpw.gguf"
        results.append(llmcompress.compress(arguments.model, fitted.recipe, output))
    for result in results:
        llmcompress.verify(result.output, arguments.model).fail_if_damaged()
        print(f"{result.output}: {result.nbytes:,} bytes")


if __name__ == "__main__":
    main()
