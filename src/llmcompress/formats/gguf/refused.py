"""Model types of which no GGUF file could be run, and why."""

from collections.abc import Mapping

_LACKS = "llama.cpp has no such architecture"
NOT_RUN: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "aria_text", "axk1", "axk2", "bailing_hybrid", "biogpt", "codegen", "ctrl", "cwm", "diffllama", "doge",
            "flex_olmo", "flint", "gpt_neo", "gpt_neox_japanese", "gptj", "helium", "hyperclovax", "inkling_text",
            "jetmoe", "kolibri1", "lfm3", "longcat_flash", "ministral", "modernbert-decoder", "nanochat",
            "olmo_hybrid", "openai-gpt", "opt", "persimmon", "recurrent_gemma", "vaultgemma", "xglm", "xlstm", "zamba",
            "zamba2", "zaya",
        ),
        _LACKS,
    ),
    "bitnet": "llama.cpp's converter rounds its weights to three values, other ones than those of the checkpoint",
    "hy_v4": "llama.cpp rotates neighbouring values of a head, transformers halves of it, of the same weights",
    "phimoe": "llama.cpp computes its norms without subtracting the mean, and its router in another way",
}  # fmt: skip
"""Why llama.cpp does not run a model, by `model_type`."""

REASONS: Mapping[str, str] = {
    **NOT_RUN,
    **dict.fromkeys(("deepseek_v4", "hrm_text"), "llama.cpp has its architecture, which nothing here declares yet"),
}
"""Why no GGUF file is written of a model, by `model_type`."""
