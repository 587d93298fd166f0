"""torch, imported when something of it is first asked for.

Files that declare options, such as grids, are read by every command; most commands never touch a tensor. Annotations in
such files are not evaluated (`from __future__ import annotations`).
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:

    class _Torch:
        def __getattr__(self, name: str) -> Any:
            import torch

            value = getattr(torch, name)
            setattr(self, name, value)  # the next look-up finds it here
            return value

    torch, Tensor = _Torch(), object

__all__ = ["Tensor", "torch"]
