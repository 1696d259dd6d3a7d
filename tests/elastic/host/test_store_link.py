"""A host's connection with the store: what is told during an outage reaches the log when it is over."""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from varuna_capslog.elastic.host.options import HostOptions
from varuna_capslog.elastic.host.store_link import HostStore
from varuna_capslog.elastic.store.opening import StoreGone
from varuna_capslog.membership.roster import Roster


@dataclass
class Said:
    """An entry of a kind that no room knows."""

    number: int

    def to_json(self) -> dict[str, Any]:
        return {"kind": "said", "number": self.number}


class Connected:
    """A host's connection with a store that it serves itself, and all that it passes on."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self.lines: list[str] = []
        self.roster = Roster()
        self.heard: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        options = HostOptions(folder, name="h", num_workers=2, keys={"first-plan": "3"}, say=self.lines.append)
        self.link = HostStore(options, self.roster, lambda kind, what: self.heard.put((kind, what)))
        (folder / "workers").mkdir()
        self.link.connect(stack)
        self.link.begin(stack)

    def log(self, count: int) -> list[dict[str, Any]]:
        """The next entries of the log that are passed on, as the host would take them."""
        found: list[dict[str, Any]] = []
        until = time.monotonic() + 20
        while len(found) < count:
            kind, what = self.heard.get(timeout=max(0.0, until - time.monotonic()))
            if kind == "log":
                self.roster.take(what)
                found.append(what)
        return found


@pytest.fixture
def connected(tmp_path: Path) -> Iterator[Connected]:
    with contextlib.ExitStack() as stack:
        yield Connected(tmp_path, stack)


def test_what_is_told_during_an_outage_is_sent_in_order_when_it_is_over(connected, monkeypatch):
    link = connected.link
    assert connected.log(1) == [{"kind": "hosts", "host": "h", "state": "here", "workers": 2}]
    assert link.store.get("first-plan") == "3"

    def gone(*_: Any) -> None:
        raise StoreGone("the store is gone")

    with monkeypatch.context() as outage:
        outage.setattr(link.store, "append", gone)
        outage.setattr(link.store, "count", gone)
        for number in range(3):
            link.tell(Said(number))
        assert link.new_member() is None, "no worker could join without a store"
        link.found(0, link.store.read().successor(["h-1"]))
        assert not link.answers
        assert connected.lines == ["the store is gone; the run goes on, and stops safely at the next change"]
    link.back()
    link.tell(Said(3))
    assert [entry.get("number") for entry in connected.log(5)] == [1, 0, 1, 2, 3], "the generation, then what was kept"
    assert connected.lines[1:] == ["the store answers again"]
    assert link.new_member() == "h-1"


def test_a_log_that_was_not_heard_is_followed_again_from_where_it_was(connected):
    link = connected.link
    connected.log(1)
    link._unfollow()
    link.tell(Said(0))
    link.unheard("the store is gone")
    link.back()
    assert [entry["number"] for entry in connected.log(1)] == [0]
    link.leave()
    assert len(link.store.history()) == 3
