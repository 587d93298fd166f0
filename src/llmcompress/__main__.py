"""`python -m llmcompress`."""

from llmcompress.cli.app import main

if __name__ == "__main__":
    main()
