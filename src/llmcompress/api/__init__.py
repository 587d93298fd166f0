"""What the command line does, as functions of Python. `import llmcompress` offers their names."""
