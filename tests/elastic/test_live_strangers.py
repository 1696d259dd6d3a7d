"""A stranger on the loopback sends arbitrary messages to every port of a run, which goes on with the same bits.

`benchmarks/stranger` sends each kind of message a thousand times.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import torch

from tests.elastic.live import Cradle, Live, Truth, check, config_of, describe
from tests.rig.faults import Fault
from tests.rig.stranger import KINDS, Answers, Stranger, addresses, recorded
from varuna_capslog.base.connection import Connection, NotTrusted, dial
from varuna_capslog.base.secret import run_secret
from varuna_capslog.elastic.member.inbox import Peers

EACH = 8
CROWD = 150


@pytest.fixture
def live(cradle: Cradle, tmp_path: Path) -> Live:
    """Run of three members that wait in step 4."""
    waiting_run = Live(cradle, config_of(tmp_path, 3), faults=[Fault("m0", "compute", "wait", 4, "four")])
    waiting_run.when("four")
    return waiting_run


def ports_of(live: Live) -> tuple[dict[int, str], set[int]]:
    """Return the run's own ports, each with the purpose that its key is derived for, and gloo's ports."""
    own_ports = {live.server.port: "store"}
    for member in live.pids:
        address = live.store.get(f"address/{member}")
        assert address is not None
        own_ports[int(address.rpartition(":")[2])] = f"peers {live.server.identity}"
    return own_ports, set(addresses(live.pids.values())) - set(own_ports)


def says_hello(connection: Connection) -> None:
    """Send the first message of a member, or of a client of the store."""
    connection.send_message(json.dumps({"sender": "m9", "kind": "value", "generation": 1, "tensors": []}).encode())


def test_own_ports_answer_a_stranger_with_their_challenge_only_and_the_run_goes_on(
    live: Live, truth: Truth, tmp_path: Path
) -> None:
    secret, (own_ports, _) = run_secret(tmp_path), ports_of(live)
    assert len(own_ports) == 4
    before, text = live.store.history(), (tmp_path / "secret").read_text().strip()
    # a client with the key of the store may ask for the log; the stranger replays the bytes that it sent
    records = {port: recorded(port, secret.key(purpose), says_hello) for port, purpose in own_ports.items()}
    assert all(len(record) > 64 for record in records.values())
    stranger, heard = Stranger(1, records), {kind: Answers() for kind in (*KINDS, "crowd")}
    held = []
    for port in own_ports:
        for kind in KINDS:
            for _ in range(EACH):
                stranger.speak(kind, port, heard[kind])
        held += stranger.crowd(port, CROWD, heard["crowd"])
    descriptors = {member: live.tasks(member) for member in live.pids}
    assert max(threads for threads, _ in descriptors.values()) < CROWD
    live.go("four")
    outcome = live.finish()
    for line in held:
        line.close()
    assert outcome.status == {"m0": 0, "m1": 0, "m2": 0}, describe(outcome)
    assert [event["kind"] for event in outcome.events].count("morph") == 0, describe(outcome)
    check(outcome, truth)
    for kind in KINDS:
        assert (heard[kind].challenges, heard[kind].more) == (EACH * len(own_ports), 0), (kind, heard)
    assert {entry["kind"] for entry in live.log[len(before) :]} <= {"checkpoint", "finished", "left"}
    for path in tmp_path.rglob("*"):
        if path.is_file() and path.name != "secret":
            assert text.encode() not in path.read_bytes(), path
    for member, pid in live.pids.items():
        assert outcome.status[member] == 0, pid


def test_a_member_of_an_old_generation_and_one_of_another_run_are_not_heard(
    live: Live, truth: Truth, tmp_path: Path
) -> None:
    secret, (own_ports, _) = run_secret(tmp_path), ports_of(live)
    for port, purpose in own_ports.items():
        if purpose != "store":
            with pytest.raises(NotTrusted):  # the same secret, another run
                dial("127.0.0.1", port, secret.key("peers of another store"), 5.0)
    lost: list[str] = []
    old = Peers(
        "m9",
        secret.key(f"peers {live.server.identity}"),
        lambda name: live.store.get(f"address/{name}"),
        print,
        lost.append,
        print,
    )
    noise = {"weight": torch.full((4, 4), float("nan"))}
    for member in ("m0", "m1", "m2"):
        for kind in ("value", "layer", "update", "plan", "farewell", "anything"):
            old.send(member, kind, noise, generation=0, value="{}", layers=[], step=4)
    old.close(5.0)
    live.go("four")
    outcome = live.finish()
    assert outcome.status == {"m0": 0, "m1": 0, "m2": 0}, describe(outcome)
    assert lost == []
    check(outcome, truth)


def test_at_a_port_of_gloo_a_stranger_ends_a_generation_at_worst(live: Live, truth: Truth) -> None:
    _, gloo = ports_of(live)
    owner = addresses([live.pids["m1"]])
    ports = [port for port in gloo if port in owner]
    assert ports, "gloo listens somewhere"
    stranger, heard, over = Stranger(2, {}, 0.01), Answers(), threading.Event()

    def speak() -> None:
        while not over.is_set():
            for port in ports:
                stranger.speak("garbage", port, heard)

    speaker = threading.Thread(target=speak)
    speaker.start()
    live.go("four")
    outcome = live.finish()
    over.set()
    speaker.join()
    assert heard.sent > 0
    check(outcome, truth)
