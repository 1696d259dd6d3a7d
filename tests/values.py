"""JSON values for tests of the code that reads JSON."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any


def changed(base: dict[str, Any], *path: str | int, to: Any) -> dict[str, Any]:
    """`base` with one value replaced, or removed where `to` is Ellipsis."""
    value = copy.deepcopy(base)
    inner: Any = value
    for key in path[:-1]:
        inner = inner[key]
    if to is ...:
        del inner[path[-1]]
    else:
        inner[path[-1]] = to
    return value


def each_place(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """The path of every value inside a JSON value, for `changed`."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        yield (*path, key)
        yield from each_place(item, (*path, key))


OF_ANY_TYPE: tuple[Any, ...] = (
    None, True, -1, 5, 1.5, "x", [], [None], ["a"], [["a"], [1]], [[0], 5], [[[0]]], {}, {"a": 1}, {"0": None},
    1e308, 10**400, float("inf"),
)  # fmt: skip
"""Values of every type that JSON has, most of them wrong in most places."""
