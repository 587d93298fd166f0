"""What a look at an output found, and how damage that stops a look becomes a finding."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llmcompress.errors import LlmcompressError
from llmcompress.validate.stored import DamageError

AGREEMENT = 1e-3  # relative difference between a recorded and a measured error

# what settings of types and sizes that no writer gives them lead to
_MISFITS = (ArithmeticError, AttributeError, LookupError, OSError, RecursionError, TypeError, ValueError, re.error)


@dataclass(frozen=True)
class Check:
    """One thing that was looked at. warning: a failure is worth knowing, but the directory is not wrong."""

    name: str
    ok: bool
    detail: str
    warning: bool = False


def summary(name: str, wrong: Sequence[str], right: str) -> Check:
    """A check that is ok if nothing is `wrong`; else the first three of what is."""
    if not wrong:
        return Check(name, True, right)
    more = f" (and {len(wrong) - 3} more)" if len(wrong) > 3 else ""
    return Check(name, False, "; ".join(wrong[:3]) + more)


def guarded(name: str, look: Callable[[], Check]) -> Check:
    """Damage that stops a look is a failed check; so are settings of types that no config should have."""
    try:
        return look()
    except LlmcompressError as error:
        return Check(name, False, error.message)
    except DamageError as error:
        return Check(name, False, str(error))
    except _MISFITS as error:
        return Check(name, False, f"{type(error).__name__}: {error}")


def guarded_list(look: Callable[[], list[str]]) -> list[str]:
    """What a look finds wrong, or the damage that stopped it."""
    check = guarded("", lambda: summary("", look(), ""))
    return [] if check.ok else [check.detail]
