"""The first windows of a text as token ids, for tools that read a text from its start: `--calibration OUT` takes them.

python benchmarks/first_windows.py MODEL TEXT SAMPLES LENGTH OUT.safetensors
"""

import argparse
import sys
from pathlib import Path

from common import positive
from safetensors.torch import save_file
from transformers import AutoTokenizer


def main() -> None:
    """Cut and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("model", "text"):
        parser.add_argument(name, type=Path)
    for name in ("samples", "length"):
        parser.add_argument(name, type=positive)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model, local_files_only=True)
    ids = tokenizer(args.text.read_text(encoding="utf-8"), verbose=False, return_tensors="pt")["input_ids"][0]
    if len(ids) < args.samples * args.length:
        sys.exit(f"{args.text} fills {len(ids) // args.length} windows of {args.length}, not {args.samples}")
    save_file({"input_ids": ids[: args.samples * args.length].reshape(args.samples, args.length)}, args.out)


if __name__ == "__main__":
    main()
