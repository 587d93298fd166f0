"""Model types of which no GGUF file could be run, and why."""

_LACKS = "llama.cpp has no such architecture"
REASONS = {
    **dict.fromkeys(
        (
            "codegen", "ctrl", "diffllama", "flex_olmo", "gpt_neo", "gptj", "helium", "hyperclovax",
            "longcat_flash", "ministral", "nanochat", "olmo_hybrid", "opt", "persimmon", "recurrent_gemma",
            "vaultgemma", "xglm", "xlstm", "zamba", "zamba2",
        ),
        _LACKS,
    ),
    "phimoe": "llama.cpp computes its norms without subtracting the mean, and its router in another way",
}  # fmt: skip
"""Reasons by `model_type`."""
