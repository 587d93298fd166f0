"""OUT.partial beside an output OUT: the claim of the run that makes it, and all of it that is unfinished.

Nothing is left of it once the run has ended, unless the process was killed; then the next run that claims OUT clears it
away.
"""

import os
from contextlib import closing
from pathlib import Path

from llmcompress.store.claim import Claim, refuse_other
from llmcompress.store.files import refuse_existing, refuse_unwritable, writing
from llmcompress.store.folder import Folder

_MARK = ".llmcompress-partial"  # only a directory that carries it is ever deleted


def unfinished(path: Path) -> Path:
    """Where what is unfinished of an output lies."""
    return path.with_name(f"{path.name}.partial")


def claimed(path: Path) -> Claim:
    """The claim on an output, a file or a directory. ClaimedError if another run has it."""
    hint = "wait for it, or give another --output"
    return Claim(unfinished(path), _MARK, f"{path} is being written by", hint)


def refuse_unclaimable(path: Path) -> None:
    """PlanError where an output could not be created, or not be claimed."""
    refuse_unwritable(path)
    refuse_foreign(path)


def refuse_foreign(path: Path) -> None:
    """PlanError where an output cannot be claimed, since something else is there."""
    if os.path.lexists(unfinished(path)):
        with closing(Folder(unfinished(path))) as folder:
            refuse_other(folder, _MARK)


def write_whole(file: Path, content: bytes, overwrite: bool) -> None:
    """Write a file that appears whole or not at all; errors of `refuse_existing`, and RunError if the system fails."""
    with writing(file), claimed(file) as claim:
        refuse_existing(file, overwrite)
        put_in_place(claim, file, content)


def put_in_place(claim: Claim, file: Path, content: bytes) -> None:
    """Write a claimed file that appears whole or not at all."""
    (claim / file.name).write_whole([content])
    os.replace(file.name, file, src_dir_fd=claim.fd)
