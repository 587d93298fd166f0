"""Model families as GGUF, one declaration per file."""
