"""Start of a member's process, which finds its run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.secret import run_secret
from varuna_capslog.elastic.member import start_up
from varuna_capslog.elastic.member.runtime import End, take_part
from varuna_capslog.elastic.member.start_up import Beginning, MemberStart, RuntimeOptions
from varuna_capslog.membership.generation import Stamp


class Keys:
    """Store that holds these keys."""

    identity = "run"

    def __init__(self, keys: dict[str, str]) -> None:
        self._keys = keys

    def get(self, key: str, wait_seconds: float = 0.0) -> str | None:
        return self._keys.get(key)


@pytest.fixture
def member(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("MEMBER", "a-1"), ("STORE", "127.0.0.1:1"), ("HOST", "a"), ("LOCAL_RANK", "2")):
        monkeypatch.setenv(f"CAPSLOG_{name}", value)
    monkeypatch.delenv("CAPSLOG_ADDRESS", raising=False)


@pytest.mark.parametrize("beginning", [Beginning(), Beginning(4, 12, Path("/runs/one/checkpoints/step-00000012"))])
def test_what_the_host_writes_is_what_a_member_reads(beginning: Beginning) -> None:
    store: Any = Keys(beginning.keys())
    assert Beginning.read(store) == beginning


def test_a_store_that_does_not_say_where_the_run_begins_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = Beginning().keys()
    del keys["resumed-step"]
    store: Any = Keys(keys)
    with pytest.raises(CapslogError, match="does not say which boundary the run begins with"):
        Beginning.read(store)


@pytest.mark.parametrize(
    ("stopped", "asked", "status"), [(False, False, 0), (True, False, 0), (True, True, 130), (False, True, 0)]
)
def test_a_member_takes_part_and_closes_its_work(
    member: None, tmp_path: Path, stopped: bool, asked: bool, status: int
) -> None:
    path = tmp_path / "checkpoints/step-00000012"
    store: Any = Keys(Beginning(4, 12, path).keys())
    run_secret(tmp_path, create=True)
    start, found_store = start_up.enter(tmp_path, lambda: True, lambda address, secret, identity: store)
    assert (start.me, start.offset, start.resumed) == ("a-1", 3, {Stamp(12, 0): path})
    closed: list[bool] = []

    def runtime(begun: MemberStart, work: Any, where: Any, options: RuntimeOptions) -> Any:
        assert (begun, where, options.capacity) == (start, store, 8)
        return SimpleNamespace(run=lambda: End(20, stopped, False))

    work: Any = SimpleNamespace(asked=asked, close=lambda: closed.append(True))
    kind: Any = runtime
    end, exit_status = take_part(start, found_store, work, RuntimeOptions(capacity=8), kind)
    assert (end.step, exit_status, closed) == (20, status, [True])
    assert (start.host, start.checkpoint, start.address) == ("a", Stamp(12, 0), "127.0.0.1")
    assert start.stop_wished()
