"""The store of an ordinary run is for the processes of this machine alone."""

from __future__ import annotations

import os

import pytest
import torch.distributed as dist

from tests.rig.stranger import addresses
from varuna_capslog.engine.communicator import local_store


def test_it_listens_on_the_loopback_alone():
    store = local_store()
    assert addresses([os.getpid()])[store.port] == "127.0.0.1"
    client = dist.TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)
    client.set("a", "1")
    assert store.get("a") == b"1"
    with pytest.raises(OSError, match="in use"):
        local_store(store.port)
