"""Messages between members: order, tensors of all kinds, and the loss of a connection."""

import contextlib
import queue
import socket
import time

import pytest
import torch

from varuna_capslog.base.connection import CHALLENGE_BYTES
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.processes import OwnedThread
from varuna_capslog.elastic.member.inbox import Peers
from varuna_capslog.elastic.network import address_towards

TIMEOUT = 20.0


class Member:
    """End of a connection, with queues of all that it receives."""

    def __init__(self, name, addresses, key=b"k" * 32):
        self.messages, self.lost, self.failed = queue.Queue(), queue.Queue(), queue.Queue()
        self.peers = Peers(name, key, addresses.get, self.messages.put, self.lost.put, self.failed.put)
        addresses[name] = self.peers.address

    def next(self):
        return self.messages.get(timeout=TIMEOUT)


@pytest.fixture
def addresses():
    return {}


@pytest.fixture
def pair(addresses):
    sender, receiver = Member("one", addresses), Member("other", addresses)
    yield sender, receiver
    sender.peers.close(0.0)
    receiver.peers.close(0.0)


def test_tensors_of_any_kind_arrive_bit_for_bit(pair):
    sender, receiver = pair
    sent = {
        "transposed": torch.arange(12.0).reshape(3, 4).t(),
        "none": torch.zeros(0, 5),
        "scalar": torch.tensor(7, dtype=torch.int64),
        "mask": torch.tensor([True, False]),
        "half": torch.randn(5).to(torch.bfloat16),
        "channels last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    }
    sender.peers.send("other", "state", sent, generation=3, layer=1)
    message = receiver.next()
    assert (message.sender, message.kind, message.header) == ("one", "state", {"generation": 3, "layer": 1})
    assert list(message.tensors) == list(sent)
    for name, tensor in sent.items():
        assert message.tensors[name].dtype == tensor.dtype
        assert torch.equal(message.tensors[name], tensor)


def test_many_tensors_of_all_sizes_in_one_message(pair):
    """Small tensors are packed together, large ones are sent without a copy, more than a system call takes at once."""
    sender, receiver = pair
    dice = torch.Generator().manual_seed(0)
    large = torch.randn(70_001, generator=dice)
    sent = {f"small {k}": torch.randn(k % 5, 3, generator=dice) for k in range(40)}
    sent |= {"large": large, "after": torch.arange(3), "strided": large[::2]}
    sent |= {f"mixed {k}": torch.full((k,), k, dtype=(torch.int64, torch.float32)[k % 2]) for k in range(1500)}
    sender.peers.send("other", "update", sent)
    received = receiver.next().tensors
    assert list(received) == list(sent)
    for name, tensor in sent.items():
        assert (received[name].dtype, received[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(received[name], tensor)


def test_messages_of_one_sender_keep_their_order(pair):
    sender, receiver = pair
    for number in range(200):
        sender.peers.send("other", "count", {"x": torch.full((number % 7,), float(number))}, number=number)
    assert [receiver.next().header["number"] for _ in range(200)] == list(range(200))


def test_a_closed_peer_is_reported_by_both_directions(pair):
    sender, receiver = pair
    sender.peers.send("other", "hello")
    receiver.next()
    sender.peers.close(0.0)
    assert receiver.lost.get(timeout=TIMEOUT) == "one"
    receiver.peers.send("one", "anything")
    assert receiver.lost.get(timeout=TIMEOUT) == "one"


def test_an_unknown_member_is_lost(pair):
    sender, _ = pair
    sender.peers.send("nobody", "hello")
    assert sender.lost.get(timeout=TIMEOUT) == "nobody"


def test_a_member_of_another_run_is_not_heard(addresses, pair):
    stranger = Member("stranger", addresses, key=b"another run's" * 3)
    stranger.peers.send("other", "hello")
    pair[0].peers.send("other", "mine")
    assert pair[1].next().kind == "mine"
    stranger.peers.close(0.0)


@pytest.mark.parametrize(
    ("tensors", "header"),
    [({"x": torch.zeros(3, device="meta")}, {}), ({}, {"step": {1, 2}})],
    ids=["a device that fails", "no JSON"],
)
def test_a_member_that_cannot_send_is_told_so_itself(pair, tensors, header):
    """Regression: the sender's thread died of it; queued messages were dropped, and only the receiver saw a loss."""
    sender, receiver = pair
    sender.peers.send("other", "state", tensors, **header)
    assert "the thread peers-send-other failed with" in str(sender.failed.get(timeout=TIMEOUT))
    assert receiver.lost.get(timeout=TIMEOUT) == "one"


def test_a_message_that_cannot_be_read_is_the_loss_of_its_sender(pair, caplog):
    """Such a message may come from a member of another version. A tensor of 2^50 entries once ended in a traceback."""
    sender, receiver = pair
    wrong = _dialled(sender, "other")
    wrong.send_message(b'{"kind": "state", "tensors": [["x", "float32", [1125899906842624]]]}')
    assert receiver.lost.get(timeout=TIMEOUT) == "one"
    assert "a message of one cannot be read: RuntimeError" in caplog.text
    sender.peers.send("other", "hello")
    assert receiver.next().kind == "hello"


def _dialled(member, target):
    return member.peers._dial(target)


def test_where_there_is_no_thread_for_a_caller_the_next_one_is_heard(pair, monkeypatch):
    sender, receiver = pair
    with monkeypatch.context() as full:
        full.setattr(OwnedThread, "start", _refused)
        line = _dialled(sender, "other")._line
        with contextlib.suppress(ConnectionResetError):  # it was closed with unread bytes
            assert line.recv(1) == b""
    assert receiver.peers._incoming == set()
    sender.peers.send("other", "hello")
    assert receiver.next().kind == "hello"


def _refused(thread):
    raise CapslogError("can't start new thread")


def test_bytes_that_are_no_frame_close_their_connection_only(pair):
    sender, receiver = pair
    host, port = receiver.peers.address.split(":")
    with socket.create_connection((host, int(port))) as raw:
        raw.sendall(b"\xff" * 64)
        raw.settimeout(TIMEOUT)
        with contextlib.suppress(ConnectionResetError):  # a close with unread bytes is a reset
            assert len(raw.recv(CHALLENGE_BYTES, socket.MSG_WAITALL)) == CHALLENGE_BYTES
            assert raw.recv(1) == b""
    sender.peers.send("other", "still here")
    assert receiver.next().kind == "still here"


def test_the_end_waits_for_what_is_queued(pair):
    sender, receiver = pair
    sender.peers.send("other", "big", {"x": torch.zeros(4 << 20)})
    sender.peers.close(TIMEOUT)
    assert receiver.next().tensors["x"].numel() == 4 << 20


def test_the_end_of_a_lost_connection_does_not_wait(pair):
    sender, _ = pair
    sender.peers.send("nobody", "hello")
    sender.lost.get(timeout=TIMEOUT)
    began = time.monotonic()
    sender.peers.close(TIMEOUT)
    assert time.monotonic() - began < TIMEOUT / 2


def test_the_loopback_is_seen_from_the_loopback():
    assert address_towards("127.0.0.1:29500") == "127.0.0.1"
