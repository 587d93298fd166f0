"""The checks by which a plan refuses a model, run on an output: whether config.json and the headers fit each other.

Unlike the rest of `verify` this is the code of the engine: a further look, which proves nothing alone.
"""

from dataclasses import replace
from pathlib import Path

from llmcompress.arch import find
from llmcompress.engine.source.header_checks import check_numbers
from llmcompress.engine.source.matrix_refs import matrices_of
from llmcompress.engine.source.multimodal import text_view
from llmcompress.engine.source.quantised import decoded_headers
from llmcompress.errors import LlmcompressError
from llmcompress.ledger import Ledger
from llmcompress.store.headers import read_headers


def plan_wrongs(out: Path) -> list[str]:
    """The fault for which a plan would refuse an output, had it never been quantised; no code of a model is run."""
    try:
        headers = decoded_headers(text_view(read_headers(out)))
        check_numbers(headers)
        if find(str(headers.config.get("model_type"))) is not None:
            config = {key: value for key, value in headers.config.items() if key != "auto_map"}
            matrices_of(replace(headers, config=config), False, Ledger())
    except LlmcompressError as error:
        return [error.message]
    return []
