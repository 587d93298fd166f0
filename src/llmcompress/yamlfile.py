"""Reading YAML that nobody vouches for: plain data only, in bounded time and memory.

A YAML text of a few lines can stand for billions of nodes, by aliases of aliases, or nest without end. So the stream
of events is checked first, in which no alias is expanded yet.
"""

from typing import Any

import yaml

SIZE = 1_000_000  # characters of a text
_SCALAR = 10_000  # characters of a value: reading some numbers takes time quadratic in their length
_NODES = 50_000  # with aliases expanded
_DEPTH = 32

# libyaml is many times as fast, where PyYAML was built with it. It must not recurse deeply, which _DEPTH ensures
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_yaml(text: str) -> Any:
    """Plain data from a YAML text; ValueError, which says why, for a text that is not YAML or is too large."""
    if len(text) > SIZE:
        raise ValueError(f"it has more than {SIZE:,} characters")
    try:
        _refuse_bombs(text)
        _refuse_repetition(text)
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None
    # what the constructors of PyYAML raise for values that do not fit a tag, such as `!!int ''`
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError) as error:
        raise ValueError(f"a value does not fit its type ({type(error).__name__})") from None


def _refuse_bombs(text: str) -> None:
    """ValueError if the text nests too deeply, or holds too many nodes once aliases are expanded."""
    sizes: dict[str, int] = {}
    stack: list[tuple[str | None, int]] = []  # of open collections: the anchor, and the nodes before it
    nodes = 0
    for event in yaml.parse(text, Loader=_Loader):
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in sizes:
                raise ValueError(f"alias {event.anchor!r} stands for what contains it, or for nothing")
            nodes += sizes[event.anchor]
        elif isinstance(event, yaml.ScalarEvent):
            if len(event.value) > _SCALAR:
                raise ValueError(f"a value has more than {_SCALAR:,} characters")
            nodes += 1
            if event.anchor is not None:
                sizes[event.anchor] = 1
        elif isinstance(event, yaml.CollectionStartEvent):
            stack.append((event.anchor, nodes))
            nodes += 1
            if len(stack) > _DEPTH:
                raise ValueError(f"it nests more than {_DEPTH} deep")
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = stack.pop()
            if anchor is not None:
                sizes[anchor] = nodes - before
        if nodes > _NODES:
            raise ValueError(f"it holds more than {_NODES:,} values once aliases are expanded")


def _refuse_repetition(text: str) -> None:
    """ValueError for a key that stands twice in one mapping: YAML forbids it, and the parser takes the last one."""
    stack: list[tuple[set[str] | None, bool]] = []  # of open collections: keys of a mapping, and whether one is due
    for event in yaml.parse(text, Loader=_Loader):
        keys, due = stack[-1] if stack else (None, False)
        if isinstance(event, yaml.CollectionEndEvent):
            stack.pop()
            continue
        if keys is not None and isinstance(event, yaml.NodeEvent):
            stack[-1] = keys, not due
            if due and isinstance(event, yaml.ScalarEvent):
                if event.value in keys:
                    line = event.start_mark.line + 1 if event.start_mark else 0
                    raise ValueError(f"key {event.value!r} stands twice in one mapping, again in line {line}")
                keys.add(event.value)
        if isinstance(event, yaml.CollectionStartEvent):
            stack.append((set(), True) if isinstance(event, yaml.MappingStartEvent) else (None, False))
