"""What the layers of a reference make of windows of text, kept on disk: later evaluations run its head alone.

Hidden states are kept, not log-probabilities: they are smaller by as much as the vocabulary is larger than the hidden
size, and the head makes the same logits of them to the bit.
"""

import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from llmcompress import __version__
from llmcompress.engine.write.run_report import file_sha256
from llmcompress.errors import RecipeError
from llmcompress.hardware import quick_type
from llmcompress.model.streamed_model import StreamedModel
from llmcompress.store.adapter import Adapter
from llmcompress.store.claim import ClaimedError
from llmcompress.store.files import bytes_of, refuse_unwritable, writing
from llmcompress.store.folder import Folder
from llmcompress.store.headers import read_headers
from llmcompress.store.tensor_file import checked_tensors, write_tensors
from llmcompress.store.unfinished import claimed
from llmcompress.validate.request import Request


class ReferenceCache:
    """Hidden states behind the last layer of one reference, for the batches of one text, in a file of `folder`.

    of: plain data, all that they depend on; the file is named by its hash, and its checksums begin with that. outcome:
    "hit" once they have been read, "miss" until then.
    """

    def __init__(self, folder: Path, of: Mapping[str, Any]) -> None:
        self.outcome: Literal["hit", "miss"] = "miss"
        self._of = sha256(json.dumps(of, sort_keys=True).encode()).hexdigest()
        self._file = folder / f"{self._of[:32]}.safetensors"

    def read(self) -> list[Tensor] | None:
        """States [rows, length, width] of each batch; None where they are not there, or not as they were written.

        PlanError and RunError for links and for what others own, PlanError where nothing is and nothing can be written.
        """
        try:
            with (
                closing(Folder(self._file.parent)) as folder,
                checked_tensors(folder / self._file.name, self._of) as found,
            ):
                states = [found.read(name) for name in found.names]
        except (FileNotFoundError, ValueError):
            refuse_unwritable(self._file)
            return None
        self.outcome = "hit"
        return states

    def write(self, states: Sequence[Tensor]) -> None:
        """Keep the states of all batches, unless another run is writing the same. RunError if the system refuses."""
        tensors = {str(number): state for number, state in enumerate(states)}
        with suppress(ClaimedError), writing(self._file), claimed(self._file) as claim:
            write_tensors(claim / self._file.name, self._of, tensors, {})
            os.replace(self._file.name, self._file, src_dir_fd=claim.fd)


def refuse_cache(folder: Path, compared: bool) -> None:
    """RecipeError where there is no reference to keep anything of, PlanError for a folder that cannot be used."""
    if not compared:
        raise RecipeError("--ref-cache keeps what a reference gives, and there is none", "give the original as --ref")
    refuse_unwritable(folder)
    if folder.exists():
        Folder(folder).close()


def reference_cache(request: Request, reference: StreamedModel | None, windows: Tensor) -> ReferenceCache | None:
    """The cache of a reference that was opened as `request` asks, for windows [windows, length]; None without one."""
    return reference_caches(request, reference)(windows, False)


def reference_caches(
    request: Request, reference: StreamedModel | None
) -> Callable[[Tensor, bool], ReferenceCache | None]:
    """As `reference_cache`, for any windows, and whether products are rounded; files are hashed once.

    What is kept serves the same files, text, batches, types and versions, on processors with the same instructions and
    as many threads, since others may sum floats in another order.
    """
    folder = request.ref_cache
    if folder is None or request.ref is None or reference is None:
        return lambda windows, rounds: None
    import transformers

    of = {
        "files": _hashes(request.ref),
        "adapter": None if request.ref_adapter is None else Adapter(request.ref_adapter).sha256,
        "batch": request.batch,
        "dtype": str(reference.dtype),
        "processor": _processor(reference.device),
        "versions": [__version__, torch.__version__, transformers.__version__],
    }

    def cache(windows: Tensor, rounds: bool) -> ReferenceCache:
        text = {"tokens": sha256(bytes_of(windows)).hexdigest(), "windows": list(windows.shape)}
        return ReferenceCache(folder, {**of, **text, **({"products": "bfloat16"} if rounds else {})})

    return cache


def _hashes(directory: Path) -> dict[str, str]:
    """SHA-256 of every file that says what a model computes, by name: weights, what JSON says, and code."""
    others = [file for kind in ("*.json", "*.py") for file in directory.glob(kind) if file.is_file()]
    return {file.name: file_sha256(file) for file in {*read_headers(directory).files, *others}}


def _processor(device: torch.device) -> list[Any]:
    """What the order and the precision of sums depend on."""
    precision = torch.get_float32_matmul_precision()
    if device.type == "cuda":
        return [torch.cuda.get_device_name(device), precision]
    capability = torch.backends.cpu.get_cpu_capability()
    return [platform.machine(), capability, str(quick_type(device)), torch.get_num_threads(), precision]
