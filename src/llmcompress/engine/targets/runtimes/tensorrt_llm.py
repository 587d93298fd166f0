"""What TensorRT-LLM accepts."""

from llmcompress.engine.targets.base import Target
from llmcompress.engine.targets.machine import OnGpus
from llmcompress.engine.targets.model_facts import ModelTypes
from llmcompress.engine.targets.runtimes.common import caches, matrices
from llmcompress.engine.targets.runtimes.engines import FUSED
from llmcompress.engine.targets.scheme_facts import Alone

_ON_GPUS = (
    OnGpus(matrices("nvfp4"), least=(10, 0), why="it multiplies nvfp4 on GPUs from compute capability 10.0 on"),
    OnGpus(
        matrices("fp8-tensor"),
        least=(8, 9),
        why="it multiplies fp8 with one scale per matrix on GPUs from compute capability 8.9 on",
    ),
    OnGpus(
        matrices("fp8"),
        least=(9, 0),
        below=(10, 0),
        by_hand="use --type fp8-tensor --activations fp8-tensor",
        why="it multiplies fp8 with one scale per row on GPUs of compute capability 9.0 alone",
    ),
    OnGpus(
        matrices("fp8-block"),
        least=(9, 0),
        below=(11, 0),
        by_hand="use --type fp8-tensor --activations fp8-tensor",
        why="it multiplies blocks of fp8 on GPUs of compute capability 9 and 10 alone",
    ),
)
_LISTED = (
    "afmoe", "cohere2", "deepseek_v3", "exaone4", "gemma3_text", "glm4_moe", "gpt_oss", "llama", "mistral", "mixtral",
    "nemotron", "nemotron_h", "phi3", "qwen2", "qwen3", "qwen3_moe", "qwen3_next",
)  # fmt: skip
TARGET = Target(
    "tensorrt-llm",
    "TensorRT-LLM",
    "main branch of 2026, read, not run",
    place=8,
    formats={
        "modelopt": (
            Alone("fp8-block", why="of modelopt it reads blocks of fp8 where all matrices are such"),
            FUSED,
            *_ON_GPUS,
            OnGpus(
                caches("nvfp4"),
                least=(10, 0),
                by_hand="use --kv-cache fp8",
                why="it caches keys and values in nvfp4 on GPUs from compute capability 10.0 on",
            ),
        ),
        "fp8": (FUSED, *_ON_GPUS[-1:]),
        "dense": (),
    },
    always=(ModelTypes(_LISTED, why="its list of models has, of those known here, " + ", ".join(_LISTED)),),
    fuses=True,
    unasked=False,
)
