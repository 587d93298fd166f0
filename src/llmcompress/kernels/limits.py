"""What no kernel takes."""

from llmcompress.errors import EXIT_REFUSED, LlmcompressError


class KernelLimitError(LlmcompressError):
    """A shape, type or grid that a kernel does not take: the message says which limit."""

    exit_code = EXIT_REFUSED
