"""Libraries that one corner of llmcompress uses, each installed by an extra."""

from importlib.util import find_spec

from llmcompress.errors import RecipeError


def needs_extra(library: str, extra: str, what: str) -> None:
    """Raise RecipeError unless `library` can be imported. what: what needs it, as a noun phrase."""
    if find_spec(library) is None:
        raise RecipeError(
            f"{what} needs the {library} library, which is not installed", f"pip install 'llmcompress[{extra}]'"
        )
