"""Processes for commands that a test stops or lets work together; their slow imports are done once."""

import multiprocessing

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(
    [
        "llmcompress.cli.commands",
        "llmcompress.engine.execute",
        "transformers.models.auto.tokenization_auto",
        "transformers.models.llama.modeling_llama",
    ]
)
