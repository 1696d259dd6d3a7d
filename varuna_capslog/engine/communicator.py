"""All communication between the ranks of one generation, over `torch.distributed`.

A `Communicator` creates, aborts and closes all process groups of its generation; a process may have several of them.
Votes and small sums use gloo even where tensors use NCCL. Every wait has a timeout, and errors name the lost peer.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import re
import socket
import struct
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from varuna_capslog import accelerator
from varuna_capslog.base.errors import CapslogError, PeerLost
from varuna_capslog.engine.pair_groups import NotOpened, Opener, PairGroup, PairGroups, Waiting
from varuna_capslog.model.chain import TensorSpec

__all__ = [
    "Communicator",
    "PeerLost",
    "Pending",
    "connect",
    "connect_group",
    "connected",
    "local_store",
    "pack",
    "unpack",
    "why_lost",
]


# -- Rendezvous of an ordinary run: torch's store for the processes of one machine; several machines use torchrun's.


LOCAL = "127.0.0.1"
_TIMEOUT = datetime.timedelta(seconds=300)


def local_store(port: int = 0, timeout: datetime.timedelta = _TIMEOUT) -> dist.TCPStore:
    """Torch's store, reachable from this machine only: it has no access control, and by default torch listens on all
    interfaces. Raises OSError where the port is in use.
    """
    listener = socket.create_server((LOCAL, port), backlog=1024)
    return dist.TCPStore(
        LOCAL,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=timeout,
        master_listen_fd=listener.detach(),
    )


# -- Converts values to bytes and back, for `Communicator.gather`.
#
# The sockets of gloo have no authentication, so received bytes are never unpickled: only plain values can be sent, and
# reading them runs no received code.


_LENGTH = struct.Struct("!Q")
_ROWS: dict[str, tuple[type[Collection[Any]], Callable[[Iterable[Any]], Any]]] = {
    "list": (list, list),
    "tuple": (tuple, tuple),
    "set": (set, set),
    "frozenset": (frozenset, frozenset),
}


def pack(value: Any) -> bytes:
    """Return a value as bytes. It may be None, a boolean, number, text, bytes, tensor, NumPy array or scalar, or a
    list, tuple, set or dict of these. Raises CapslogError for other types.
    """
    blobs: list[bytes] = []
    text = json.dumps([_encoded(value, blobs), [len(blob) for blob in blobs]]).encode()
    return b"".join((_LENGTH.pack(len(text)), text, *blobs))


def unpack(data: bytes) -> Any:
    """Return the value from which `pack` made `data`, tensors on the CPU. Raises CapslogError for other bytes."""
    try:
        (size,) = _LENGTH.unpack_from(data)
        at = _LENGTH.size + size
        encoded, sizes = json.loads(data[_LENGTH.size : at])
        blobs = []
        for length in sizes:
            blobs.append(data[at : at + length])
            at += length
        return _value(encoded, blobs)
    except (struct.error, ValueError, TypeError, KeyError, IndexError, AttributeError, RuntimeError) as error:
        raise CapslogError(f"a rank sent {len(data)} bytes that are no value: {error}; start anew") from error


def _encoded(value: Any, blobs: list[bytes]) -> Any:
    """Return the value as JSON: plain values unchanged, others as [tag, ...]. Bytes are appended to `blobs`."""
    if isinstance(value, np.generic):
        return ["scalar", value.dtype.str, _kept(value.tobytes(), blobs)]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (bytes, bytearray)):
        return ["bytes", _kept(bytes(value), blobs)]
    if isinstance(value, dict):
        return ["dict", [[_encoded(key, blobs), _encoded(member, blobs)] for key, member in value.items()]]
    for name, (kind, _) in _ROWS.items():
        if isinstance(value, kind):
            return [name, [_encoded(member, blobs) for member in value]]
    if isinstance(value, Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1)
        data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
        return ["tensor", str(value.dtype).removeprefix("torch."), list(value.shape), _kept(data, blobs)]
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufcSU":
        return ["array", value.dtype.str, list(value.shape), _kept(value.tobytes(), blobs)]
    raise CapslogError(
        f"ranks cannot tell each other a {type(value).__name__}; use numbers, text, bytes, tensors, arrays, and lists, "
        "tuples, sets and dicts of these"
    )


def _kept(data: bytes, blobs: list[bytes]) -> int:
    blobs.append(data)
    return len(blobs) - 1


def _value(encoded: Any, blobs: list[bytes]) -> Any:
    if not isinstance(encoded, list):
        return encoded
    tag, *fields = encoded
    if tag == "bytes":
        return blobs[fields[0]]
    if tag == "dict":
        return {_value(key, blobs): _value(member, blobs) for key, member in fields[0]}
    if tag == "scalar":
        return np.frombuffer(blobs[fields[1]], _dtype(fields[0]))[0]
    if tag == "array":
        return np.frombuffer(blobs[fields[2]], _dtype(fields[0])).reshape(fields[1]).copy()
    if tag == "tensor":
        kind = getattr(torch, fields[0])
        if not isinstance(kind, torch.dtype):
            raise ValueError(f"{fields[0]!r} is no dtype")
        data = bytearray(blobs[fields[2]])
        flat = torch.frombuffer(data, dtype=torch.uint8).view(kind) if data else torch.empty(0, dtype=kind)
        return flat.reshape(fields[1])
    return _ROWS[tag][1](_value(member, blobs) for member in fields[0])


def _dtype(text: str) -> np.dtype[Any]:
    dtype = np.dtype(text)
    if dtype.hasobject:
        raise ValueError(f"arrays of {text!r} are not sent")
    return dtype


# -- the communicator


Value = TypeVar("Value")

_ENDING_TAG = (1 << 30) + 1
"""Tag of no message; a receive with this tag times out and so ends a group (see `Communicator.abort`)."""


_PEER_ERRORS = re.compile("timed? ?out|connect|closed|reset|broken pipe|refused", re.IGNORECASE)
"""Matches errors of a rendezvous, of torch or gloo, that another rank caused: it did not come, or left."""


def why_lost(error: RuntimeError, silence: str) -> str:
    """Cause of an error of gloo, as the end of a sentence; `silence` where the peer did not answer in time."""
    # gloo's text begins with a source file and ends with advice; the cause is between them
    text = re.sub(r"^\[\S*\]\s*", "", str(error).splitlines()[0]).split(". ")[0]
    return silence if "imed out" in text else f"connection lost ({text})"


def connect(
    rank: int,
    world_size: int,
    address: str,
    port: int,
    generation: int | str = 0,
    timeout_seconds: float = 30.0,
    host_store: bool = False,
) -> Communicator:
    """Join the ranks of `generation` through the store at `address:port`.

    Args:
        timeout_seconds: longest wait for any message of a peer.
        host_store: True if this rank serves the store, not another process (torchrun's agent, a test's parent).

    Raises PeerLost where not all ranks join in time, CapslogError where this rank itself cannot join.
    """
    timeout = datetime.timedelta(seconds=timeout_seconds)
    try:
        # joining waits for slow imports on other hosts, so it may take longer than one message
        joining = datetime.timedelta(seconds=max(60.0, timeout_seconds))
        if host_store and address == LOCAL:
            store = local_store(port, joining)
        else:
            store = dist.TCPStore(address, port, is_master=host_store, timeout=joining, wait_for_workers=False)
        prefixed = dist.PrefixStore(f"generation-{generation}", store)
        dist.init_process_group("gloo", store=prefixed, rank=rank, world_size=world_size, timeout=timeout)
    except (RuntimeError, ValueError, OSError) as error:
        sentence = (
            f"rank {rank} could not join {world_size} ranks at {address}:{port}: {str(error).partition(chr(10))[0]}"
        )
        if _PEER_ERRORS.search(str(error)) is None:  # no other rank is the cause
            raise CapslogError(f"{sentence}; mend this, or what GLOO_SOCKET_IFNAME says of the network") from error
        raise PeerLost(sentence, None) from error
    return Communicator(rank, world_size, generation, timeout, dist.group.WORLD, store)


def connect_group(
    store: dist.Store, prefix: str, rank: int, world_size: int, timeout_seconds: float = 30.0
) -> Communicator:
    """Join ranks that share a store, without process-wide state: the next group may open while this one is closing.

    Args:
        store: client that nothing else uses during the call, since the call blocks it; best one for this communicator.
        prefix: name of the group and generation of the communicator; never used twice in a store.
        timeout_seconds: longest wait for the other ranks, and later for any of their messages.

    Raises PeerLost where not all ranks join in time.
    """
    timeout = datetime.timedelta(seconds=timeout_seconds)
    group = None
    if world_size > 1:
        try:
            group = dist.ProcessGroupGloo(dist.PrefixStore(prefix, store), rank, world_size, timeout)
        except (RuntimeError, ValueError) as error:
            text = str(error).splitlines()[0]
            raise PeerLost(f"rank {rank} could not join {world_size} ranks as {prefix!r}: {text}", None) from error
    # a backend has the methods of a group, whatever torch's stubs say
    return Communicator(rank, world_size, prefix, timeout, cast("dist.ProcessGroup | None", group), store)


class Pending:
    """Send or receive in progress; it keeps the tensor alive until `wait`."""

    def __init__(
        self,
        communicator: Communicator,
        work: Waiting | None,
        peer: int,
        doing: str,
        buffer: Tensor,
        device: torch.device,
    ) -> None:
        self._communicator, self._work, self._peer, self._doing = communicator, work, peer, doing
        self._buffer, self._device = buffer, device

    def wait(self) -> Tensor:
        """Wait; return the received tensor, on the rank's device, or the sent tensor, which may now change.

        Raises PeerLost. Pair groups report no abort: the tensor is then worthless; `Communicator.check_open` raises.
        """
        if self._work is not None:
            pairs = self._communicator._pairs
            try:
                with contextlib.nullcontext() if pairs is None else pairs.progress.waiting(self._doing):
                    self._work.wait()
            except RuntimeError as error:
                raise self._communicator._lost(error, self._doing, self._peer) from error
            self._work = None
        return self._buffer.to(self._device, non_blocking=True) if self._buffer.device != self._device else self._buffer


class Communicator:
    """Point-to-point messages, small exact sums and gathers over the ranks of one generation.

    Tensors of an accelerator are staged through host memory (pinned where possible), so ranks may share one GPU, unless
    `open_pair_groups` was called. `group` is gloo's, None for a single rank. The rank that serves `store` keeps it
    alive as long as the group. Built by `connect` or `connect_group`.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        generation: int | str,
        timeout: datetime.timedelta,
        group: dist.ProcessGroup | None = None,
        store: dist.Store | None = None,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.generation = generation
        self._timeout = timeout
        self._names: dict[int, str] = {}
        self._group, self._store = group, store
        self._pairs: PairGroups | None = None
        self._overdue = ""
        self.aborted = False
        self._aborting = threading.Lock()
        self._beside: list[Callable[[], None]] = []

    def begin_pair_groups(self, pairs: Iterable[tuple[int, int]], opener: Opener, device: torch.device) -> None:
        """Begin to open groups for the ordered pairs (source, destination) that include this rank; do not wait."""
        local_pairs = {pair for pair in pairs if self.rank in pair}
        if local_pairs and self._pairs is None:
            assert self._store is not None
            store = dist.PrefixStore(str(self.generation), self._store)
            self._pairs = PairGroups(self.rank, store, self._timeout, device, self._is_overdue)
            self.abort_with(self._pairs.abort)
        if self._pairs is not None:
            self._pairs.begin(local_pairs, opener)

    @property
    def pair_groups_settled(self) -> bool:
        """True unless a pair group is being opened."""
        return self._pairs is None or self._pairs.settled

    def open_pair_groups(self, pairs: Iterable[tuple[int, int]], opener: Opener, device: torch.device) -> None:
        """Open a group for each ordered pair (source, destination), over which its tensors travel from now on.

        NCCL has no tags and matches messages by order, so each direction of each pair has its own communicator and
        stream, and both ranks use the same order. Votes and gathers stay on gloo. Every rank calls this with the same
        pairs, before its first message; groups from `begin_pair_groups` are only waited for.

        Raises NotOpened where a group cannot be opened, PeerLost where this communicator is aborted meanwhile.
        """
        local_pairs = sorted({pair for pair in pairs if self.rank in pair})
        self.begin_pair_groups(local_pairs, opener, device)
        for pair in local_pairs:
            assert self._pairs is not None
            peer = sum(pair) - self.rank
            doing = f"opening a group with {self._name(peer)}"
            try:
                self._pairs.wait(pair)
            except RuntimeError as error:
                self.check_open(doing, peer)
                self.abort()
                text = str(error).splitlines()[0]
                raise NotOpened(f"{self._name(self.rank)} was {doing}: {text}", peer) from error
        self.check_open("opening groups")

    def _is_overdue(self, why: str) -> None:
        self._overdue = f"{self._name(self.rank)} was {why}"
        self.abort()

    def describe_ranks(self, names: dict[int, str]) -> None:
        """Set the names of ranks in errors, such as {2: "rank 2 (stage 2)"}."""
        self._names = dict(names)

    def _name(self, peer: int) -> str:
        return self._names.get(peer, f"rank {peer}")

    def check_open(self, doing: str, peer: int | None = None) -> None:
        """Raise PeerLost if this communicator was aborted. doing: the operation, for the error message."""
        if self.aborted:
            ended = f"{self._name(self.rank)} cannot be {doing}: its generation was ended here"
            raise PeerLost(self._overdue or ended, peer)

    def _route(self, source: int, destination: int) -> tuple[PairGroup | dist.ProcessGroup, int]:
        """Group for messages from `source` to `destination`, and the peer's number in this group."""
        if self._pairs is not None:
            return self._pairs.route(source, destination)
        assert self._group is not None, "a communicator of one rank has no peers"
        return self._group, destination if source == self.rank else source

    def _lost(self, error: RuntimeError, doing: str, peer: int | None) -> PeerLost:
        """Return the error to raise; abort, so that ranks that wait for this rank get an error, too."""
        if self.aborted:
            ended = f"{self._name(self.rank)} was {doing} when its generation was ended here"
            return PeerLost(self._overdue or ended, peer)
        reason = why_lost(error, f"no answer within {self._timeout.total_seconds():g} s")
        self.abort()
        return PeerLost(f"{self._name(self.rank)} was {doing}: {reason}", peer)

    def send(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        """Begin to send a dense tensor of any dtype and device, which must not change before `Pending.wait`. The
        receiver uses the same `tag`, which no other pending message to `peer` has.
        """
        doing = f"sending to {self._name(peer)}"
        self.check_open(doing, peer)
        host = tensor.detach()
        if host.device.type != "cpu" and self._pairs is None:
            pins = accelerator.pins_memory(host.device.type)
            staged = torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, pin_memory=pins)
            staged.copy_(host, non_blocking=True)
            accelerator.current_stream(host.device).synchronize()
            host = staged
        if host.numel() == 0:
            return Pending(self, None, peer, doing, host, host.device)
        try:
            group, number = self._route(self.rank, peer)
            work = group.send([_wire(host)], number, tag)
        except RuntimeError as error:
            raise self._lost(error, doing, peer) from error
        return Pending(self, work, peer, doing, host, host.device)

    def receive(self, spec: TensorSpec, peer: int, tag: int, device: torch.device) -> Pending:
        """Begin to receive a tensor of `spec`, which `Pending.wait` returns on `device`."""
        doing = f"waiting for {self._name(peer)}"
        self.check_open(doing, peer)
        staged = device.type != "cpu" and self._pairs is None
        where, pins = (torch.device("cpu"), accelerator.pins_memory(device.type)) if staged else (device, False)
        buffer = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=where, pin_memory=pins)
        if buffer.numel() == 0:
            return Pending(self, None, peer, doing, buffer, device)
        try:
            group, number = self._route(peer, self.rank)
            work = group.recv([_wire(buffer)], number, tag)
        except RuntimeError as error:
            raise self._lost(error, doing, peer) from error
        return Pending(self, work, peer, doing, buffer, device)

    def sum_numbers(self, numbers: Sequence[float]) -> list[float]:
        """Sum the ranks' vectors in float64; a sum is exact where only one rank's number is not 0."""
        slots = torch.tensor(numbers, dtype=torch.float64)
        sums: list[float] = self._add_up(slots, "in the vote of all ranks").tolist()
        return sums

    def add(self, tensor: Tensor) -> Tensor:
        """All-reduce a tensor in place, as a sum in its own dtype, with the same bits on every rank."""
        return self._add_up(tensor, "adding over all ranks")

    def _add_up(self, tensor: Tensor, doing: str) -> Tensor:
        self.check_open(doing)
        if self.world_size > 1:
            assert self._group is not None
            try:
                self._group.allreduce([tensor]).wait()
            except RuntimeError as error:
                raise self._lost(error, doing, None) from error
        return tensor

    def gather(self, value: Any) -> list[Any]:
        """Values of all ranks, by rank; for small results. Raises CapslogError for types that `pack` refuses."""
        self.check_open("gathering from all ranks")
        if self.world_size == 1:
            return [value]
        assert self._group is not None
        raw = torch.frombuffer(bytearray(pack(value)), dtype=torch.uint8)
        sizes = [0.0] * self.world_size
        sizes[self.rank] = raw.numel()
        sizes = self.sum_numbers(sizes)
        longest = int(max(sizes))
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: raw.numel()] = raw
        everyone = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.world_size)]
        try:
            self._group.allgather([everyone], [padded]).wait()
        except RuntimeError as error:
            raise self._lost(error, "gathering from all ranks", None) from error
        return [unpack(part[: int(size)].numpy().tobytes()) for part, size in zip(everyone, sizes, strict=True)]

    def together(self, work: Callable[[], Value]) -> Value:
        """Call `work`, which may be slow and differ between ranks; return its result when all ranks have theirs.

        The ranks vote while they wait, so that no timeout takes a slow rank for lost. Raises the error of this rank's
        `work` unchanged, and PeerLost where another rank's `work` failed.
        """
        if self.world_size == 1:
            return work()
        with ThreadPoolExecutor(1, "together") as pool:
            future = pool.submit(work)
            pause = 0.002
            while True:
                wait([future], pause)
                pause = min(1.0, 2 * pause)
                flags = [0.0] * (2 * self.world_size)  # of each rank: done, failed
                flags[2 * self.rank] = float(future.done())
                flags[2 * self.rank + 1] = float(future.done() and future.exception() is not None)
                sums = self.sum_numbers(flags)
                failed = [rank for rank, count in enumerate(sums[1::2]) if count]
                if failed:
                    if future.done():
                        future.result()  # raises if this rank's work failed
                    raise PeerLost(f"{self._name(self.rank)} gave up because {self._name(failed[0])} failed", failed[0])
                if all(sums[::2]):
                    return future.result()

    def exchange(
        self, outgoing: Mapping[int, Tensor], wanted: Mapping[int, TensorSpec], tag: int, device: torch.device
    ) -> dict[int, Tensor]:
        """Send `outgoing` tensors to their ranks; return the `wanted` ones by rank, on `device`. Omit this rank."""
        receives = {peer: self.receive(spec, peer, tag, device) for peer, spec in wanted.items()}
        sends = [self.send(tensor, peer, tag) for peer, tensor in outgoing.items()]
        theirs = {peer: receive.wait() for peer, receive in receives.items()}
        for send in sends:
            send.wait()
        return theirs

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.sum_numbers([0.0])

    def abort(self) -> None:
        """End all pending and later operations, on this rank and at the peers, within some milliseconds.

        Any thread may call it. Operations that block other threads raise PeerLost, and so do all later operations. The
        gloo group ends first, so that its peers abort their groups, too: the end of a pair group may wait for that.

        Torch cannot interrupt a blocked wait of gloo, but gloo closes all connections of a group in which a wait times
        out. Therefore this method waits one millisecond for a message that no rank sends. A peer that waits for a third
        rank gets its error when that rank loses a message, and so aborts.
        """
        self.aborted = True
        with self._aborting:
            if self._group is not None:
                _end(self._group, [rank for rank in range(self.world_size) if rank != self.rank])
        for end in self._beside:
            end()

    def abort_with(self, end: Callable[[], None]) -> None:
        """Call `end` whenever this communicator is aborted, in the aborting thread; now if it is already aborted."""
        self._beside.append(end)
        if self.aborted:
            end()

    def close(self) -> None:
        """Close all groups. Before this, all messages must have ended, or the communicator must be aborted."""
        if self._pairs is not None:
            self._pairs.abort()
        group, self._group, self._store = self._group, None, None
        if group is not None and group is dist.group.WORLD:
            dist.destroy_process_group()


def _end(group: dist.ProcessGroup, peers: Sequence[int]) -> None:
    """Make gloo close all connections of a group."""
    for peer in peers:
        try:
            group.recv([torch.empty(1, dtype=torch.uint8)], peer, _ENDING_TAG).wait(datetime.timedelta(milliseconds=1))
        except RuntimeError as error:
            if "imed out" in str(error):
                return
            # only the connection to this peer is closed already: try the next peer


def _wire(tensor: Tensor) -> Tensor:
    """Bytes of a dense tensor in memory order, for every dtype and memory format."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


# -- Joins the ranks of torchrun, or of our supervisor, by the environment variables that it sets.


@contextlib.contextmanager
def connected(generation: str, timeout_seconds: float = 60.0) -> Iterator[Communicator]:
    """Open a communicator of all ranks for the block; of this process alone where torchrun's variables are not set.

    Args:
        generation: a name that no other group of these ranks has had.
        timeout_seconds: longest wait for any message of a peer.

    Raises:
        PeerLost: not all ranks join.
    """
    # torchrun's agent serves the store itself, and a restarted group needs a new name in it
    hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    rank = int(os.environ.get("RANK", "0"))
    communicator = connect(
        rank,
        int(os.environ.get("WORLD_SIZE", "1")),
        os.environ.get("MASTER_ADDR", "127.0.0.1"),
        int(os.environ.get("MASTER_PORT", "0")),
        f"{generation}-{restart}",
        timeout_seconds,
        host_store=rank == 0 and not hosted,
    )
    yield communicator
    # only after success: a failed rank ends its process, by which the others get an error at once
    communicator.barrier()
    communicator.close()
