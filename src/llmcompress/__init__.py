"""llmcompress: make large language models small, offline, from one command line."""

__version__ = "0.1.0"
