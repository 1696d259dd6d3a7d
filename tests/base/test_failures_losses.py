"""Reasons for lost workers, from the lines of events.jsonl."""

from __future__ import annotations

from typing import Any

from varuna_capslog.base.failures import losses_by_cause, losses_in_words


def lost(member: str, cause: str | None, host: str = "a") -> dict[str, Any]:
    return {"kind": "lost", "member": member, "host": host, "cause": cause}


def test_a_host_that_comes_back_corrects_what_the_others_thought() -> None:
    events = [
        lost("a-1", "killed"),
        lost("b-1", "host", "b"),
        lost("b-2", "host", "b"),
        lost("c-1", "host", "c"),
        {"kind": "cause", "host": "b", "cause": "network"},
        lost("b-3", "host", "b"),
        lost("a-2", None),
        {**lost("a-3", None), "cause": ["killed"]},  # a stranger's line, which no report may end at
        {"kind": "cause", "host": "b", "cause": {}},
        {"kind": "morph", "members": []},
    ]
    assert losses_by_cause(events) == {
        "a-1": "killed",
        "b-1": "network",
        "b-2": "network",
        "c-1": "host",
        "b-3": "host",
        "a-2": "failed",
        "a-3": "failed",
    }
    words = losses_in_words(events)
    assert words is not None
    assert words.startswith("2 cut off from the network, 2 its machine gone")
    assert losses_in_words(events[-1:]) is None
