"""Load checkpoints with vLLM on the CPU and save the logarithms of probabilities they give for some token ids.

    .venv-vllm/bin/python vllm_check.py IDS.safetensors FOUND.safetensors CHECKPOINT ...

vLLM needs an environment of its own, which vllm_env.sh makes. IDS holds an integer tensor `input_ids` [samples,
length]. FOUND gets a float32 tensor [samples, length - 1, vocabulary] under each checkpoint's name as given. The last
line printed is a JSON object with `errors`, those of checkpoints that do not load, `verdicts`, what kernels of GPUs say
of matrices, and `scales`, by name those that keys and values are cached under.

Models run in float32, with what vllm_standins.py has for products that vLLM has on GPUs alone. With `--own` they run in
bfloat16, by what vLLM has for this processor.
"""

import argparse
import gc
import json
import os
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # all in this process, where the stand-ins are
os.environ["VLLM_NO_USAGE_STATS"] = "1"
os.environ["TORCHDYNAMO_DISABLE"] = "1"  # nothing here is worth compiling

import torch
import vllm_standins
from safetensors.torch import load_file, save_file
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory

PARTS = ("k_scale", "v_scale")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--own", action="store_true", help="no stand-ins")
    parser.add_argument("ids", metavar="IDS.safetensors")
    parser.add_argument("found", metavar="FOUND.safetensors")
    parser.add_argument("checkpoints", nargs="+", metavar="CHECKPOINT")
    arguments = parser.parse_args()
    ids = load_file(arguments.ids)["input_ids"].tolist()
    if not arguments.own:
        vllm_standins.install()
    found: dict[str, torch.Tensor] = {}
    errors: dict[str, str] = {}
    verdicts: dict[str, dict[str, list[str]]] = {}
    scales: dict[str, dict[str, float]] = {}
    for checkpoint in arguments.checkpoints:
        gc.collect()
        gc.freeze()  # vLLM collects garbage many times, and would look at all that is loaded each time
        vllm_standins.verdicts.clear()
        try:
            found[checkpoint], scales[checkpoint] = probabilities(checkpoint, ids, arguments.own)
        except Exception as error:  # whatever another project raises is the finding
            errors[checkpoint] = f"{type(error).__name__}: {error}"
        verdicts[checkpoint] = {kernel: sorted(answers) for kernel, answers in vllm_standins.verdicts.items()}
        cleanup_dist_env_and_memory()
    save_file(found, arguments.found)
    print(json.dumps({"errors": errors, "verdicts": verdicts, "scales": scales}), flush=True)


def probabilities(checkpoint: str, ids: list[list[int]], own: bool) -> tuple[torch.Tensor, dict[str, float]]:
    """Logarithms of the probabilities of all tokens after each but the last; scales of cached keys and values."""
    llm = LLM(
        checkpoint,
        dtype="bfloat16" if own else "float32",
        enforce_eager=True,
        max_model_len=len(ids[0]) + 1,
        max_num_seqs=len(ids),
        max_logprobs=-1,
        seed=0,
        skip_tokenizer_init=True,
        distributed_executor_backend="uni",
        disable_log_stats=True,
        kv_cache_memory_bytes=1 << 26,
    )
    try:
        prompts: Any = [{"prompt_token_ids": sample} for sample in ids]
        wanted = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=-1, detokenize=False)
        answers = llm.generate(prompts, wanted, use_tqdm=False)
        found = torch.tensor([[values(token) for token in answer.prompt_logprobs[1:]] for answer in answers])
        model = llm.llm_engine.model_executor.driver_worker.worker.model_runner.model
        layers = {name: layer for name, layer in model.named_modules() if hasattr(layer, "_k_scale_float")}
        scales = {
            f"{name}.{part}": getattr(layer, f"_{part}_float") for name, layer in layers.items() for part in PARTS
        }
        return found, scales
    finally:
        llm.llm_engine.engine_core.shutdown()


def values(token: Any) -> list[float]:
    return [token[number].logprob for number in range(len(token))]


if __name__ == "__main__":
    main()
