"""Perplexity of a model on windows of a text, as lm-evaluation-harness computes log-likelihoods, on the CPU.

    PYTHON run_lm_eval.py MODEL TEXT LENGTH WINDOWS

Prints JSON on its last line. PYTHON is one with lm_eval, such as scripts/interop/lm_eval_env.sh makes. The text is
tokenised once and cut into disjoint windows; all tokens but the first of each are scored, in float32, in batches of 4.
"""

import json
import math
import sys
from pathlib import Path

from lm_eval.models.huggingface import HFLM
from transformers import AutoTokenizer


def main() -> None:
    """Score the windows."""
    model, text, length, windows = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    ids = tokenizer(text.read_text(encoding="utf-8"), verbose=False)["input_ids"]
    if len(ids) < windows * length:
        sys.exit(f"{sys.argv[2]} fills {len(ids) // length} windows of {length}, not {windows}")
    cut = [ids[start : start + length] for start in range(0, windows * length, length)]
    judge = HFLM(pretrained=model, tokenizer=tokenizer, dtype="float32", device="cpu", batch_size=4)
    asked = [((str(number), ""), window[:1], window[1:]) for number, window in enumerate(cut)]
    total = sum(likelihood for likelihood, _ in judge._loglikelihood_tokens(asked, disable_tqdm=True))
    print(json.dumps({"perplexity": math.exp(-total / (windows * (length - 1)))}))


if __name__ == "__main__":
    main()
