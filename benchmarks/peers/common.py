"""What the peers' scripts share: their command line and the costs they report. Standard library only."""

import argparse
import json
import os
import resource
import sys
import time
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
    """Quantise, then print what it took as JSON: wall time without Python's start, the rest of the whole process."""
    start = time.perf_counter()
    quantize(args)
    wall = time.perf_counter() - start
    usage = resource.getrusage(resource.RUSAGE_SELF)
    report = {
        "tool": tool,
        "version": version(tool),
        "bits": args.bits,
        "group_size": args.group_size,
        "variant": variant,
        "wall_s": round(wall, 1),
        "cpu_s": round(usage.ru_utime + usage.ru_stime, 1),
        "peak_rss_mb": round(usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e6, 1),
    }
    print(json.dumps(report), flush=True)
