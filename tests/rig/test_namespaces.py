"""Networks of the kernel's own: how a program enters one, and what is said where that is impossible."""

from __future__ import annotations

import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.rig import namespaces


@pytest.fixture
def begun(monkeypatch):
    """The programs that were begun in place of this one: (program, arguments, environment)."""
    found = []
    monkeypatch.setattr(namespaces.os, "execvpe", lambda *given: found.append(given))
    monkeypatch.setattr(namespaces, "how_to_enter", lambda: ["unshare", "--net"])
    return found


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
