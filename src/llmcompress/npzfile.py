"""Reading numpy's .npz files of arrays that nobody vouches for: nothing is unpacked, and nothing unpickled."""

import zipfile
from pathlib import Path
from typing import Any

from numpy.lib import format as format_
from numpy.typing import NDArray


def read_arrays(file: Path) -> dict[str, NDArray[Any]]:
    """All arrays of an .npz by name; ValueError, which names the file."""
    if file.exists() and not file.is_file():  # a pipe would block for ever
        raise ValueError(f"{file.name} is not a file")
    try:
        with zipfile.ZipFile(file) as arrays:
            # runs store arrays as they are: what is packed, or stands in two places, could unpack to anything
            items = arrays.infolist()
            stored = all(item.compress_type == zipfile.ZIP_STORED for item in items)
            if stored and sum(item.file_size for item in items) <= file.stat().st_size:
                return {name.removesuffix(".npy"): _array(arrays, name) for name in arrays.namelist()}
    except (ValueError, OSError, zipfile.BadZipFile, KeyError, EOFError, MemoryError) as error:
        raise ValueError(f"{file.name} cannot be read: {error}") from None
    raise ValueError(f"{file.name} is packed, which no run writes")


def _array(arrays: zipfile.ZipFile, name: str) -> NDArray[Any]:
    """An array of an .npz; ValueError for one of objects, which would be unpickled."""
    with arrays.open(name) as stored:
        values: NDArray[Any] = format_.read_array(stored)
    return values
