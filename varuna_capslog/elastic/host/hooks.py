"""Requests of programs, people and schedulers to a run: more or fewer devices, a host or worker to leave.

Requests are entries in the log of the run's store, whose address is in `workers/store.json` and in the environment of
workers. No function here waits for the effect, which is written to `events.jsonl`.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from varuna_capslog.base import fields, files
from varuna_capslog.base.clock import wall_seconds
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.secret import run_secret
from varuna_capslog.elastic.notices.interface import Deadline, Kind, Notice
from varuna_capslog.membership.entries import AnnounceEntry, HintEntry, NoticeEntry, RequestEntry, Roster
from varuna_capslog.plans.plan import latest_plan

if TYPE_CHECKING:
    from varuna_capslog.elastic.store.opening import MembershipStore

__all__ = [
    "belong",
    "check_same_folder",
    "give_notice",
    "notice_of",
    "outlook",
    "request_morph",
    "tell_address",
]

_here: list[tuple[str, str, Path]] = []
"""(store address, store identity, run folder) of each host that runs in this process."""


def request_morph(devices: int, run_dir: Path | str | None = None) -> None:
    """Request that the run continue with `devices` workers: each host starts or releases its share.

    A host starts at most as many workers as it began with. Superfluous workers leave, the newest first, at a step
    boundary, after the layers they own have moved. Any program may call this: a worker, a host, or another one.

    Args:
        run_dir: the run's folder; None: the run that this process belongs to.

    Raises:
        CapslogError: no run is known or going on, or `devices` is less than 1.
    """
    if devices < 1:
        raise CapslogError(f"devices={devices}: a run needs at least one; stop it with Ctrl-C instead")
    with _store_of(run_dir) as store:
        store.append(RequestEntry(devices).to_json())


def outlook(devices: int, run_dir: Path | str) -> str:
    """Return a sentence on the effect of a request for `devices` workers. Raises CapslogError if they cannot start."""
    with _store_of(run_dir) as store:
        roster, address = _roster_of(store), store.address
    if roster.finished is not None:
        raise CapslogError(f"the run in {run_dir} has ended; start it again with `capslog train` or `capslog host`")
    staying = roster.staying
    used = {host: sum(roster.members[member] == host for member in staying) for host in roster.hosts}
    room = {host: max(used[host], devices) for host, devices in roster.hosts.items()}
    if devices > max(sum(room.values()), len(staying)):
        each, most = ", ".join(f"{host}: {count}" for host, count in sorted(room.items())), sum(room.values())
        raise CapslogError(
            f"{devices} devices: this run's hosts start at most {most} worker(s) ({each}), as many as they began with, "
            f"and {len(staying)} are there; nothing was asked for: ask for at most {most}, or let another host join "
            f"with `capslog host CONFIG --store {address}`"
        )
    shares = {host: roster.share(host, devices) for host in sorted(roster.hosts)}
    leave = [member for _, members in shares.values() for member in members]
    started = [f"{count} on {host}" for host, (count, _) in shares.items() if count]
    text = f"{len(staying)} worker(s) are there already, nothing changes"
    if leave:
        text = f"{_listed(leave)} of {len(staying)} worker(s) will leave at a step boundary, once their layers moved"
    elif started:
        text = f"starting {_listed(started)} beside the {len(staying)} that are there; they join at a step boundary"
    return "; ".join([text, *_limits(devices, Path(run_dir))])


def _limits(devices: int, run_dir: Path) -> Iterator[str]:
    """Yield sentences on limits that the run's config and model set; none for a script, which has neither."""
    from varuna_capslog.config.reading import load_config
    from varuna_capslog.planners import BUDGET, JOINT

    planned = latest_plan(run_dir)
    if planned is None or not (run_dir / "config.yaml").is_file():
        return
    config, layers = load_config(run_dir / "config.yaml"), planned[1].num_layers
    if devices < config.elastic.min_devices:
        yield f"elastic.min_devices is {config.elastic.min_devices}: the run will wait with fewer"
    most = config.num_blocks * layers
    if config.pipeline.planner in (BUDGET, JOINT):  # pipelines may differ in length: no device is left over
        if most < devices:
            yield f"{layers} layers in {config.num_blocks} blocks: at most {most} devices train, the others keep copies"
        return
    usable = {
        copies: copies * min(layers, devices // copies)
        for copies in range(1, devices + 1)
        if config.num_blocks % copies == 0
    }
    replicas = max(usable, key=lambda copies: usable[copies])
    if usable[replicas] < devices:
        times = f" in {replicas} replicas (train.accumulation_blocks={config.num_blocks})" if replicas > 1 else ""
        yield (
            f"{layers} layers{times}: at most {usable[replicas]} devices train, the other {devices - usable[replicas]} "
            "only keep copies"
        )


def give_notice(
    run_dir: Path | str | None = None,
    host: str | None = None,
    member: str | None = None,
    urgent: bool = False,
    seconds: float | None = None,
    hint: bool = False,
) -> str:
    """Tell a run that a host or one worker must leave; return its name in words.

    Args:
        host: its name in the run; None with `member` None: the only host.
        urgent: leave at the next boundary, even if nothing was copied ahead.
        seconds: until the deadline; None: no deadline.
        hint: it may have to leave soon: its layers are copied ahead, and no worker leaves.

    Raises:
        CapslogError: no run is going on there, or it has no such host or worker.
    """
    with _store_of(run_dir) as store:
        roster = _roster_of(store)
        if member is not None:
            if member not in roster.members:
                raise CapslogError(f"no worker {member!r} in this run; there are {_listed(roster.members)}")
            entry_type = HintEntry if hint else NoticeEntry
            store.append(entry_type(member, urgent, source="person", **deadline_fields(seconds)).to_json())
            return f"worker {member}"
        if host is None:
            if len(roster.hosts) != 1:
                raise CapslogError(f"this run has the hosts {_listed(roster.hosts)}; name one with --host")
            host = next(iter(roster.hosts))
        if host not in roster.hosts:
            raise CapslogError(f"no host {host!r} in this run; there are {_listed(roster.hosts)}")
        kind = "hint" if hint else "now" if urgent else "leave"
        store.append(AnnounceEntry(host, kind, id=uuid.uuid4().hex, **deadline_fields(seconds)).to_json())
        return f"host {host}"


def belong(stack: contextlib.ExitStack, address: str, identity: str, run_dir: Path) -> None:
    """Record that this process belongs to the run with this store and folder, until the stack is closed."""
    _here.append((address, identity, run_dir))
    stack.callback(_here.remove, (address, identity, run_dir))


def tell_address(run_dir: Path, address: str, identity: str) -> None:
    """Write the address of a run's store into its folder, for programs that know only the folder."""
    files.write_json(_place(run_dir), {"address": address, "identity": identity})


def check_same_folder(run_dir: Path, address: str, identity: str, seconds: float = 10.0) -> None:
    """Raise CapslogError unless this store's host uses the same folder, which may be a slow shared one: so wait."""
    until = time.monotonic() + seconds
    while True:
        if _place(run_dir).is_file() and _read_address(run_dir)[1] == identity:
            return
        if time.monotonic() > until:
            raise CapslogError(
                f"run_dir={run_dir} is not the folder that the host with the store at {address} uses; it must be one "
                "that all hosts share"
            )
        time.sleep(0.1)


def deadline_fields(seconds: float | None) -> dict[str, Any]:
    """Return the fields `deadline` and `left` of an entry whose deadline is in `seconds`; None: no deadline."""
    if seconds is None:
        return {"deadline": None, "left": None}
    remaining = max(0.0, seconds)
    return {"deadline": wall_seconds() + remaining, "left": remaining}


def seconds_left(entry: NoticeEntry | HintEntry | AnnounceEntry) -> float | None:
    """Return the seconds from now until an entry's deadline; None: no deadline.

    The log holds a time of day, so an entry that is sent or read late leaves less time. Where the clocks of writer and
    reader disagree, or one has jumped, the reader still counts at most the seconds that were left when the entry was
    written: a worker leaves early rather than late.
    """
    if entry.deadline is None:
        return None
    remaining = max(0.0, entry.deadline - wall_seconds())
    return remaining if entry.left is None else min(remaining, entry.left)


def notice_of(entry: NoticeEntry | HintEntry | AnnounceEntry, host: str) -> Notice:
    """Return the notice of a log entry for `host` or one of its workers."""
    match entry:
        case AnnounceEntry():
            kind, source, name = Kind[entry.notice.upper()], "person", entry.id
        case HintEntry():
            kind, source, name = Kind.HINT, entry.source, entry.member
        case NoticeEntry():
            kind, source, name = Kind.NOW if entry.urgent else Kind.LEAVE, entry.source, entry.member
    deadline, remaining = None, seconds_left(entry)
    if remaining is not None:
        deadline = Deadline(time.monotonic() + remaining, f"{round(remaining, 1):g} s from when it was told")
    return Notice(kind, source, name, (host,), deadline, detail="told through the run's store")


@contextlib.contextmanager
def _store_of(run_dir: Path | str | None = None) -> Iterator[MembershipStore]:
    """Open the store of the run in a folder, or of this process's run. Raises CapslogError where no store answers."""
    from varuna_capslog.elastic.store.opening import StoreGone, open_store

    address, identity, folder = _where(run_dir)
    try:
        store = open_store(address, run_secret(folder), identity)
    except StoreGone as error:
        raise CapslogError(f"no run is going on in {run_dir or 'this process'}: {error}") from None
    try:
        yield store
    finally:
        store.close()


def _where(run_dir: Path | str | None) -> tuple[str, str | None, Path]:
    if run_dir is None:
        if "CAPSLOG_STORE" in os.environ:
            folder = os.environ.get("CAPSLOG_RUN_DIR", ".")
            return os.environ["CAPSLOG_STORE"], os.environ.get("CAPSLOG_STORE_IDENTITY"), Path(folder)
        if len(set(_here)) > 1:
            raise CapslogError(f"this process belongs to {len(set(_here))} runs; say which one is meant by its run_dir")
        if _here:
            return _here[0]
        raise CapslogError("this process belongs to no run; say which one is meant by its run_dir")
    place = _place(Path(run_dir))
    if not place.is_file():
        raise CapslogError(
            f"no elastic run is going on in {run_dir}: it has no workers/{place.name}; check the path, or start one "
            "with `capslog train CONFIG elastic.enabled=true`"
        )
    return *_read_address(Path(run_dir)), Path(run_dir)


def _read_address(run_dir: Path) -> tuple[str, str]:
    """Read address and identity of a run's store, as `tell_address` wrote them."""

    def read() -> tuple[str, str]:
        record = fields.mapping(files.read_json(place), "what it holds")
        return fields.text(record.get("address"), "address"), fields.text(record.get("identity"), "identity")

    place = _place(run_dir)
    return fields.within(str(place), read)


def _roster_of(store: MembershipStore) -> Roster:
    """Read the log up to now into a roster. Raises StoreGone."""
    roster = Roster()
    for entry in store.history():
        roster.take(entry)
    return roster


def _place(run_dir: Path) -> Path:
    return Path(run_dir) / "workers" / "store.json"


def _listed(names: Any) -> str:
    return ", ".join(names) or "none"
