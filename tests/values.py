"""JSON values for the tests of what reads them."""

from __future__ import annotations

import copy
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
