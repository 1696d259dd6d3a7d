"""The address at which a machine listens, and the errors for addresses that are not its own."""

from __future__ import annotations

import re
import socket

import pytest

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.elastic.network import address_towards, check_gloo_interfaces, listen


def test_it_listens_at_the_address_that_is_given_and_at_no_other():
    with listen("127.0.0.1") as listener:
        assert listener.getsockname()[0] == "127.0.0.1"
    with listen("localhost") as listener:
        assert listener.getsockname()[0] == "127.0.0.1"


def test_a_name_that_only_this_machine_takes_for_the_loopback_means_all_addresses(monkeypatch):
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1")
    with listen("node-7") as listener:
        assert listener.getsockname()[0] == "0.0.0.0"


@pytest.mark.parametrize("host", ["192.0.2.7", "no-such-machine.invalid"])
def test_an_address_of_another_machine_is_refused(host):
    with pytest.raises(
        CapslogError, match=f"{host} is not an address of this machine; give one of its own, or its name"
    ):
        listen(host)


def test_a_port_that_is_taken_or_none_is_named():
    with listen("127.0.0.1") as listener:
        port = listener.getsockname()[1]
        with pytest.raises(CapslogError, match=rf"nothing can listen at 127\.0\.0\.1:{port}: Address already in use"):
            listen("127.0.0.1", port)
    with pytest.raises(CapslogError, match=r"nothing can listen at 127\.0\.0\.1:70000"):
        listen("127.0.0.1", 70000)


def test_the_loopback_is_seen_from_the_loopback():
    assert address_towards("127.0.0.1:29500") == "127.0.0.1"


@pytest.mark.parametrize("named", ["", "lo", "lo,lo", "lo,", "x"])
def test_interfaces_that_gloo_finds(named: str) -> None:
    check_gloo_interfaces({"GLOO_SOCKET_IFNAME": named})


@pytest.mark.parametrize(
    ("named", "missing"), [("eth-9", "eth-9"), ("lo,eth-9", "eth-9"), ("^lo", "^lo"), ("=lo", "=lo")]
)
def test_an_interface_that_is_not_there_is_named_before_the_start(named: str, missing: str) -> None:
    """Otherwise rank 1 is said to hang after half a minute (vllm-project/vllm#7074, aws-samples/aws-do-eks#69)."""
    with pytest.raises(
        CapslogError, match=re.escape(f"GLOO_SOCKET_IFNAME={named} names '{missing}', which is no network")
    ):
        check_gloo_interfaces({"GLOO_SOCKET_IFNAME": named})
