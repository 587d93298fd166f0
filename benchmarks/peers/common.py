"""What the peers' scripts share: their command line and the line they end with. Standard library only."""

import argparse
import json
import os
from collections.abc import Callable
from importlib.metadata import version

os.environ.setdefault("HF_HUB_OFFLINE", "1")


def parser(description: str, desc_act: str) -> argparse.ArgumentParser:
    """The options all peers take; `desc_act` is the help of --desc-act."""
    result = argparse.ArgumentParser(description=description)
    result.add_argument("model", metavar="MODEL_DIR")
    result.add_argument("ids", metavar="IDS.safetensors")
    result.add_argument("out", metavar="OUT_DIR")
    result.add_argument("--bits", type=int, default=4)
    result.add_argument("--group-size", type=int, default=64)
    result.add_argument("--desc-act", action="store_true", help=desc_act)
    return result


def measured(args: argparse.Namespace, quantize: Callable[[argparse.Namespace], None], tool: str, variant: str) -> None:
    """Quantise, then print as JSON what did; whoever started the process measures what it took."""
    quantize(args)
    print(json.dumps({"tool": tool, "version": version(tool), "variant": variant}), flush=True)
