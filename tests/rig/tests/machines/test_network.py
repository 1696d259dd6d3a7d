"""Access of a machine to the store, and ways that a disturbed network carries."""

from __future__ import annotations

import socket

import pytest

from tests.rig.machines import network
from tests.rig.machines.links import LinkShape
from tests.rig.machines.network import STORE_HOST, Access, MachineNetwork
from tests.rig.relayed import VARIABLE
from tests.secret import SECRET


def test_on_loopback_the_store_is_called_directly():
    machine_network = MachineNetwork("loopback", ["a"], SECRET)
    machine_network.register_store("127.0.0.1:4711")
    assert machine_network.access("a", "127.0.0.1:4711") == Access("127.0.0.1:4711", None, {})
    machine_network.close()


def test_through_the_relay_a_machine_is_cut_from_the_store():
    machine_network = MachineNetwork("relay", ["a", "b"], SECRET)
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(5.0)
    store = f"127.0.0.1:{listener.getsockname()[1]}"
    machine_network.register_store(store)
    access = machine_network.access("a", store)
    assert access.store != store
    assert access.environment[VARIABLE].startswith("a@127.0.0.1:")
    host, _, port = access.store.rpartition(":")
    client = socket.create_connection((host, int(port)), 5.0)
    connection, _ = listener.accept()
    ways = {("a", STORE_HOST)}
    machine_network.disturb(ways)
    client.sendall(b"x")
    connection.settimeout(0.15)
    with pytest.raises(TimeoutError):
        connection.recv(1)
    machine_network.heal(ways)
    connection.settimeout(5.0)
    assert connection.recv(1) == b"x"
    for end in (client, connection, listener):
        end.close()
    machine_network.close()


def test_with_namespaces_the_store_is_at_the_gateway_of_every_machine(monkeypatch):
    class Spaces:
        def __init__(self, names, router, shape, seed):
            assert (names, router, shape, seed) == (["a", "b"], STORE_HOST, LinkShape(0.02), 5)
            self.calls = calls

        def gateway(self, name):
            return {"a": "10.77.1.1", "b": "10.77.2.1"}[name]

        def path(self, name):
            return f"/proc/{name}/ns/net"

        def disturb(self, ways, delay):
            calls.append(("disturb", ways, delay))

        def heal(self, ways):
            calls.append(("heal", ways))

        def close(self):
            calls.append(("close",))

    calls = []
    monkeypatch.setattr(network, "Namespaces", Spaces)
    machine_network = MachineNetwork("namespaces", ["a", "b"], SECRET, LinkShape(0.02), 5)
    assert machine_network.access("b", "127.0.0.1:4711") == Access("10.77.2.1:4711", "/proc/b/ns/net", {})
    cluster = machine_network.access("a", "etcd://127.0.0.1:1,127.0.0.1:2/chaos").store
    assert cluster == "etcd://10.77.1.1:1,10.77.1.1:2/chaos"
    machine_network.disturb({("a", "b")})
    machine_network.disturb({("b", "a")}, 0.1)
    machine_network.heal({("a", "b")})
    machine_network.close()
    assert calls == [("disturb", {("a", "b")}, None), ("disturb", {("b", "a")}, 0.1)] + [
        ("heal", {("a", "b")}),
        ("close",),
    ]
