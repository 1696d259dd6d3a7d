"""Real etcd servers for tests, which are skipped where there is no etcd."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rig.etcd_servers import EtcdServers, find_program
from varuna_capslog.base.errors import CapslogError

__all__ = ["find_etcd", "start_etcd"]


def find_etcd() -> None:
    """Skip the test where etcd is not installed."""
    try:
        find_program()
    except CapslogError as error:
        pytest.skip(str(error))


def start_etcd(folder: Path, size: int = 1) -> EtcdServers:
    """Start a cluster that answers calls."""
    find_etcd()
    return EtcdServers(folder, size)
