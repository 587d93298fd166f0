"""The outcome of each check of an output; damage that stops a check becomes a failed check."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmcompress.errors import LlmcompressError
from llmcompress.validate.stored import DamageError

AGREEMENT = 1e-3  # relative difference between a recorded and a measured error

# errors that settings of unexpected types and sizes cause
_MISFITS = (ArithmeticError, AttributeError, LookupError, OSError, RecursionError, TypeError, ValueError, re.error)


@dataclass(frozen=True)
class Check:
    """One property that was checked. warning: a failure is worth knowing, but the output is still good."""

    name: str
    ok: bool
    detail: str
    warning: bool = False


def summary(name: str, wrong: Sequence[str], right: str) -> Check:
    """A check that is ok if `wrong` is empty; otherwise its detail names the first three faults."""
    if not wrong:
        return Check(name, True, right)
    more = f" (and {len(wrong) - 3} more)" if len(wrong) > 3 else ""
    return Check(name, False, "; ".join(wrong[:3]) + more)


def lacks_adapter(report: Mapping[str, Any], adapter: Path | None) -> list[Check]:
    """The failed check of an output that cannot be compared with its source; empty where it can."""
    if report.get("adapter") is None or adapter is not None:
        return []
    return [Check("source", False, "an adapter was merged into the source: give it as --adapter")]


def guarded(name: str, look: Callable[[], Check]) -> Check:
    """The check that `look` returns; a failed check if damage or a setting of an unexpected type stops `look`."""
    try:
        return look()
    except LlmcompressError as error:
        return Check(name, False, error.message)
    except DamageError as error:
        return Check(name, False, str(error))
    except _MISFITS as error:
        return Check(name, False, f"{type(error).__name__}: {error}")


def guarded_list(look: Callable[[], list[str]]) -> list[str]:
    """The faults that `look` finds, or the damage that stopped `look`."""
    check = guarded("", lambda: summary("", look(), ""))
    return [] if check.ok else [check.detail]
