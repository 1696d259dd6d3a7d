"""Network namespaces: how a program enters one, and the error where that is impossible."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest

from tests.rig import namespaces
from varuna_capslog.base.errors import CapslogError


@pytest.fixture
def begun(monkeypatch):
    """Programs that replaced this one: (program, arguments, environment)."""
    programs = []
    monkeypatch.setattr(namespaces.os, "execvpe", lambda *arguments: programs.append(arguments))
    monkeypatch.setattr(namespaces, "how_to_enter", lambda: ["unshare", "--net"])
    return programs


def test_the_same_command_line_is_begun_again_in_a_network_of_its_own_and_only_once(begun, monkeypatch):
    monkeypatch.setattr(sys, "orig_argv", ["python3", "-X", "dev", "-m", "some.program", "chaos", "--seed", "5"])
    namespaces.enter()
    ((program, arguments, environment),) = begun
    assert program == "unshare"
    assert arguments == [
        "unshare", "--net", sys.executable, "-X", "dev", "-m", "some.program", "chaos", "--seed", "5",
    ]  # fmt: skip
    (variable,) = environment.keys() - namespaces.os.environ.keys()
    monkeypatch.setenv(variable, environment[variable])
    namespaces.enter()
    assert len(begun) == 1


def test_programs_that_are_missing_are_named(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "nsenter" else f"/bin/{name}")
    with pytest.raises(CapslogError, match="needs nsenter, not found on PATH; use --network relay"):
        namespaces.how_to_enter()


@pytest.mark.parametrize(
    ("allowed", "expected"),
    [
        ((["unshare", "--net"], ["unshare", "--net", "--map-root-user"]), ["unshare", "--net"]),
        ((["unshare", "--net", "--map-root-user"],), ["unshare", "--net", "--map-root-user"]),
    ],
)
def test_user_namespaces_are_the_second_choice(monkeypatch, allowed, expected):
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    run = lambda words, **_: SimpleNamespace(returncode=0 if words[:-1] in allowed else 1)  # noqa: E731
    monkeypatch.setattr(subprocess, "run", run)
    assert namespaces.how_to_enter() == expected


def test_a_machine_that_allows_none_is_told_of_the_relay(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(subprocess, "run", lambda words, **_: SimpleNamespace(returncode=1))
    with pytest.raises(CapslogError, match="allows no network namespaces"):
        namespaces.how_to_enter()


def measured(*shape):
    try:
        command = namespaces.how_to_enter()
    except CapslogError as error:
        pytest.skip(str(error))
    words = [*command, sys.executable, "-m", "tests.rig.tests.shaped", *shape]
    done = subprocess.run(words, capture_output=True, text=True, timeout=180)
    if "no TUN device can be opened" in done.stderr:
        pytest.skip(done.stderr.splitlines()[-1])
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_kernel_s_tcp_meets_the_delay_and_the_bandwidth_that_were_asked_for():
    """Upper bounds are wide: the machine may be busy. Nothing is faster than asked for."""
    measurements = measured("20ms", "-", "40Mbit")
    assert 0.04 <= measurements["round_trip"] < 0.06
    assert 2e6 < measurements["bytes_per_second"] < 5.2e6
    assert (measurements["passed_a_cut"], measurements["passed_later"]) == (False, True)
    assert measurements["cut"] > 0


def test_packets_that_get_lost_are_sent_again_by_the_kernel():
    measurements = measured("1ms", "2%", "-")
    sent = measurements["carried"] + measurements["lost"]
    assert measurements["lost"] == pytest.approx(0.02 * sent, rel=0.7)
    assert measurements["passed_later"]
