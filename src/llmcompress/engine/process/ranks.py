"""The processes (ranks) that torchrun has started for one run; they are joined by what torchrun set in the environment.

Without WORLD_SIZE, or where it is 1, there is one process, and torch.distributed is not touched. Where it is larger,
gloo (on processors) or nccl (on GPUs) connects the ranks, at the address that torchrun was given: no other part of
llmcompress opens a connection.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from llmcompress.errors import ElsewhereError, LlmcompressError, PlanError, RecipeError, RunError

if TYPE_CHECKING:
    import torch

    from llmcompress.workers import Workers

T = TypeVar("T")

PATIENCE = timedelta(days=1)  # a rank waits for one that is not known to have ended: the first works alone for hours
GATHERING = timedelta(minutes=10)  # a rank waits for the others to start
_HEARING = 2.0  # seconds that rank 0 waits for the others to end as well
_KEY = "llmcompress"  # prefix of the counters that all ranks share
_SET = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")  # variables that torchrun sets


def several() -> bool:
    """Whether torchrun started more than one process. PlanError if one of torchrun's variables is missing."""
    size = os.environ.get("WORLD_SIZE", "1")
    if size == "1":
        return False
    missing = [name for name in _SET if name not in os.environ]
    if missing:
        raise PlanError(
            f"WORLD_SIZE is {size}, but {missing[0]} is not set",
            "start with torchrun, which sets both, or unset WORLD_SIZE",
        )
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        if not os.environ[name].isdigit():
            raise PlanError(f"{name} is {os.environ[name]!r}, not a number", "start with torchrun, which sets it")
    return True


def leads() -> bool:
    """Whether this process writes the output and prints: it is rank 0, or the only process."""
    return os.environ.get("WORLD_SIZE", "1") == "1" or os.environ.get("RANK", "0") == "0"


def refuse_several(what: str) -> None:
    """RecipeError if torchrun started several processes for `what`, which one process does."""
    if several():
        raise RecipeError(
            f"{what} is done by one process, and torchrun started {os.environ['WORLD_SIZE']}",
            "start it without torchrun",
        )


def says(error: LlmcompressError) -> bool:
    """Whether this process prints an error: before the ranks have joined, all of them meet the same error."""
    return not isinstance(error, ElsewhereError) and (leads() or error.rank is not None)


def device_of(name: str) -> "torch.device":
    """The device for `name`: cpu, cuda, or auto, which is cuda where there is a GPU.

    PlanError where cuda is asked for and there is no GPU, or where this rank has no GPU of its own.
    """
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        why = "this torch is built for processors alone" if torch.version.cuda is None else "torch sees no GPU"
        raise PlanError(f"--device cuda needs an NVIDIA GPU, and {why}", "use --device cpu, or auto")
    if name != "cuda" or not several():
        return torch.device(name)
    here, count = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if here >= count:
        raise PlanError(
            f"this machine has more ranks than GPUs, which are {count}",
            "use a smaller --nproc-per-node, or --device cpu",
        )
    return torch.device("cuda", here)


@contextmanager
def joined(device: str) -> Iterator["Workers"]:
    """All ranks of the run, connected as long as the context lasts. device: cpu, cuda or auto.

    Of an error within, one rank raises the error itself, and the others raise ElsewhereError.
    """
    from llmcompress.workers import Workers

    if not several():
        yield Workers()
        return
    ranks = Ranks(device)
    try:
        yield Workers(ranks)
    except LlmcompressError as error:
        if not ranks.may_speak(knows=not isinstance(error, ElsewhereError)):
            raise ElsewhereError(error.exit_code) from None
        error.rank = ranks.rank
        if ranks.rank > 0:
            error.message = f"rank {ranks.rank}: {error.message}"
        raise
    except BaseException:
        ranks.may_speak(knows=True)
        raise
    ranks.leave()


class Ranks:
    """A `Communicator` (workers.py) over torch.distributed."""

    def __init__(self, device: str) -> None:
        """Wait until all ranks have connected; RunError if they do not within `GATHERING`."""
        import torch
        from torch import distributed
        from torch.distributed.rendezvous import rendezvous

        self.device = device_of(device)
        cuda = self.device.type == "cuda"
        if cuda:
            torch.cuda.set_device(self.device)
        with _answered():
            self._store, self.rank, self.size = next(rendezvous("env://", timeout=GATHERING))
            self._store.set(f"{_KEY}/here/{self.rank}", "")
            self._store.wait([f"{_KEY}/here/{rank}" for rank in range(self.size)], GATHERING)
            self._store.set_timeout(PATIENCE)
            distributed.init_process_group(
                "nccl" if cuda else "gloo", store=self._store, rank=self.rank, world_size=self.size, timeout=PATIENCE
            )

    def all_gather(self, mine: Any) -> Iterator[Any]:
        """What every rank gives, in order of ranks. RunError if a rank has ended."""
        import torch
        from torch import distributed

        from llmcompress.engine.process.exchange import packed, unpacked

        given = packed(mine, self.device)
        sizes = torch.zeros(self.size, dtype=torch.int64, device=self.device)
        sizes[self.rank] = given.numel()
        with _answered():
            distributed.all_reduce(sizes)
        for source, size in enumerate(sizes.tolist()):
            own = source == self.rank
            buffer = given if own else torch.empty(size, dtype=torch.uint8, device=self.device)
            with _answered():
                distributed.broadcast(buffer, source)
            yield mine if own else unpacked(buffer)

    def all_or_raise(self, function: Callable[[], T]) -> T:
        """What `function` gives here.

        If it raises LlmcompressError in any rank, the lowest such rank raises its own error, all others ElsewhereError.
        """
        failed: LlmcompressError | None = None
        try:
            result = function()
        except LlmcompressError as error:
            failed = error
        codes = list(self.all_gather(None if failed is None else failed.exit_code))
        wrong = [rank for rank, code in enumerate(codes) if code is not None]
        if failed is not None and wrong[0] == self.rank:
            raise failed
        if wrong:
            raise ElsewhereError(codes[wrong[0]])
        return result

    def may_speak(self, knows: bool) -> bool:
        """Whether this rank, which ends with an error, reports it: the first that `knows` the cause does."""
        try:
            chosen = knows and self._store.add(f"{_KEY}/knowing", 1) == 1
            ended = self._store.add(f"{_KEY}/ended", 1)
            until = time.monotonic() + _HEARING
            while self.rank == 0 and ended < self.size and time.monotonic() < until:
                time.sleep(0.02)  # rank 0 may keep the store, which other ranks that end now still have to reach
                ended = self._store.add(f"{_KEY}/ended", 0)
        except RuntimeError:  # the rank that kept the store has ended
            return knows
        return chosen

    def leave(self) -> None:
        """Close the connections."""
        from torch import distributed

        distributed.destroy_process_group()


@contextmanager
def _answered() -> Iterator[None]:
    """RunError in place of the RuntimeError that torch.distributed raises when another rank has gone."""
    try:
        yield
    except RuntimeError as error:
        raise RunError(
            f"another rank has ended or does not answer: {error}",
            "finished layers are kept; start the same command again, with as many ranks or others",
        ) from None
