"""What mlx-lm accepts."""

from llmcompress.engine.targets.base import Target
from llmcompress.engine.targets.model_facts import ModelTypes

# those whose logits were compared; others fail on keys of config.json that transformers 5 writes anew
_SEEN = (
    "afmoe", "dbrx", "dots1", "ernie4_5", "falcon_mamba", "gemma4_text", "glm4", "gptj", "granite", "granitemoe",
    "helium", "hunyuan_v1_dense", "internlm3", "iquestcoder", "llama", "mamba", "ministral3", "mistral", "mixtral",
    "nemotron", "olmo2", "olmoe", "phi", "phi3", "qwen2", "qwen2_moe", "qwen3", "recurrent_gemma", "seed_oss",
    "smollm3", "stablelm", "starcoder2",
)  # fmt: skip
TARGET = Target(
    "mlx-lm",
    "mlx-lm",
    "0.32.2",
    place=6,
    formats={
        "mlx": (
            ModelTypes(
                _SEEN,
                why="it was seen to run codes of llama, mistral, mixtral, qwen2, qwen3 and 27 other model types",
            ),
        ),
    },
    remark="on Apple's machines, and on Linux on a processor",
)
