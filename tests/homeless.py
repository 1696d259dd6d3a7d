"""A user as containers have them: no HOME, and no entry in passwd."""

from __future__ import annotations

import pwd
from typing import NoReturn

import pytest


def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on this process does not know its user's home."""

    def unknown(uid: int) -> NoReturn:
        raise KeyError(uid)

    for variable in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
