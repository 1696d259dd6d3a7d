"""Attributes replaced in another package's modules and classes, and put back exactly.

`install` fills one `Patches`, `uninstall` empties it. It knows nothing about Varuna.
"""

from __future__ import annotations

from typing import Any

__all__ = ["Patches"]

_ABSENT = object()


class Patches:
    """A list of replaced attributes, undone in reverse order."""

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, Any]] = []

    def __len__(self) -> int:
        return len(self._undo)

    def replace(self, owner: Any, name: str, value: Any) -> Any:
        """Sets `owner.name` (a module's or a class's own attribute) and returns what it was.

        Raises AttributeError where the owner has no such attribute of its own: a patch must hit something.
        """
        before = vars(owner).get(name, _ABSENT)
        if before is _ABSENT:
            raise AttributeError(f"{owner!r} has no attribute {name!r} of its own to replace")
        self._undo.append((owner, name, before))
        setattr(owner, name, value)
        return before

    def add(self, owner: Any, name: str, value: Any) -> None:
        """Sets an attribute that `owner` does not have."""
        if name in vars(owner):
            raise AttributeError(f"{owner!r} already has an attribute {name!r}")
        self._undo.append((owner, name, _ABSENT))
        setattr(owner, name, value)

    def names(self) -> list[str]:
        """What is replaced, as `module.Class.attribute`, in order."""
        return [f"{_path(owner)}.{name}" for owner, name, _ in self._undo]

    def undo(self) -> None:
        """Puts everything back as it was."""
        while self._undo:
            owner, name, before = self._undo.pop()
            if before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)


def _path(owner: Any) -> str:
    return f"{owner.__module__}.{owner.__qualname__}" if isinstance(owner, type) else str(owner.__name__)
