"""Checkpoints that are written beside training: their contents, when they get their name, and what breaks them off."""

from __future__ import annotations

import errno
import io
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.training.test_loop import begin, loop_of, make, saved_steps
from varuna_capslog.base import files
from varuna_capslog.base.errors import DiskFailed
from varuna_capslog.engine.communicator import connect_group
from varuna_capslog.training import checkpoint, layer_state
from varuna_capslog.training.checkpoint import latest_checkpoint, open_checkpoint
from varuna_capslog.training.checkpoint_writer import CheckpointWriter
from varuna_capslog.training.layer_state import digest
from varuna_capslog.training.loop import TrainingLoop
from varuna_capslog.training.stored_layers import from_checkpoint

ROOT = Path(__file__).parents[2]
SETTINGS = {"checkpoint_every": 2, "max_steps": 9, "evaluate_every": None}


class Disk:
    """Holds every write up until it is let go; fails it where it is full."""

    def __init__(self) -> None:
        self.free, self.reached, self.full = threading.Event(), threading.Event(), False
        self._write = checkpoint.write_synced

    def write(self, path: Path, state: Any) -> dict[str, Any]:
        self.reached.set()
        assert self.free.wait(60)
        if self.full:
            raise OSError(28, "No space left on device")
        return self._write(path, state)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    slow = Disk()
    monkeypatch.setattr(checkpoint, "write_synced", slow.write)
    yield slow
    slow.free.set()


def written(loop: TrainingLoop) -> None:
    """Waits until this rank has written its part."""
    saving = loop.boundaries._saving
    assert saving is not None
    assert saving._writing is not None
    saving._writing.exception(60)


def digests(loop: TrainingLoop) -> dict[str, bytes]:
    optimizer = loop.running.optimizer
    return {layer.name: digest(layer_state.capture(layer, optimizer, False)) for layer in loop.running.layers}


def digests_on_disk(loop: TrainingLoop, step: int) -> dict[str, bytes]:
    stored = open_checkpoint(loop.setup.checkpoints / f"step-{step:08d}")
    chain = loop.setup.chain
    names = [layer.name for layer in chain.layers]
    states = {name: from_checkpoint(stored, chain, index) for index, name in enumerate(names)}
    return {name: digest(state) for name, state in states.items()}


def test_training_goes_on_while_the_state_of_the_boundary_is_written(tmp_path: Path, disk: Disk) -> None:
    loop = loop_of(tmp_path, train=SETTINGS)
    begin(loop, 1, 0)
    make(loop, 2)
    then = digests(loop)
    assert loop.boundaries.between(2) is None
    assert disk.reached.wait(60)
    make(loop, 1)  # changes every tensor while nothing is on the disk yet
    assert loop.boundaries.between(3) is None
    assert saved_steps(tmp_path) == []
    assert digests(loop) != then
    disk.free.set()
    written(loop)
    make(loop, 1)  # its vote tells that all have written
    assert loop.boundaries.between(4) == 2, "the one of step 4 has only begun"
    assert saved_steps(tmp_path) == [2]
    assert digests_on_disk(loop, 2) == then
    make(loop, 1)
    now = digests(loop)
    loop.finish(5, stopped=False)
    assert saved_steps(tmp_path) == [4, 5], "the end waits for the one under way, and writes its own"
    assert digests_on_disk(loop, 5) == now
    events = [line for line in files.read_jsonl(tmp_path / "events.jsonl") if line["kind"] == "checkpoint"]
    assert [line["step"] for line in events] == [2, 4, 5]
    assert all(line["stall_seconds"] <= line["seconds"] for line in events)
    loop.close()


def test_the_copy_of_a_checkpoint_lies_in_the_memory_of_the_one_before(tmp_path: Path) -> None:
    loop = loop_of(tmp_path, train=SETTINGS)
    begin(loop, 1, 0)
    places, then = [], {}
    for step in (2, 4):
        make(loop, 2)
        then[step] = digests(loop)
        loop.boundaries.between(step)
        places.append({key: copy.data_ptr() for key, copy in loop.boundaries._copies._kept.items()})
    assert places[0]
    assert places[0] == places[1]
    loop.finish(4, stopped=False)
    assert {step: digests_on_disk(loop, step) for step in (2, 4)} == then
    loop.end()
    assert not loop.boundaries._copies._kept, "the next generation has other layers"
    loop.close()


def test_a_checkpoint_waits_for_the_one_before_and_one_asked_for_is_whole_at_once(tmp_path: Path, disk: Disk) -> None:
    loop = loop_of(tmp_path, train=SETTINGS)
    begin(loop, 1, 0)
    make(loop, 2)
    loop.boundaries.between(2)
    make(loop, 2)
    threading.Timer(0.2, disk.free.set).start()
    assert loop.boundaries.between(4) == 2, "no vote had told that it was written"
    assert loop.boundaries.between(4, save=True) == 4, "begun already, and now waited for"
    assert saved_steps(tmp_path) == [2, 4]
    loop.close()


def test_a_full_disk_is_told_at_the_next_boundary_and_the_one_before_stays(tmp_path: Path, disk: Disk) -> None:
    disk.free.set()
    loop = loop_of(tmp_path, train=SETTINGS)
    begin(loop, 1, 0)
    make(loop, 2)
    loop.boundaries.save_new(2)
    disk.full = True
    make(loop, 2)
    assert loop.boundaries.between(4) is None
    written(loop)
    make(loop, 1)
    with pytest.raises(DiskFailed, match=r"checkpoint of step 4 could not be .*rank 0: No space left on device"):
        loop.boundaries.between(5)
    assert latest_checkpoint(loop.setup.checkpoints)[0].step == 2  # type: ignore[union-attr]
    assert not list(loop.setup.checkpoints.glob(".partial-*"))
    make(loop, 1)
    loop.boundaries.between(6)
    with pytest.raises(DiskFailed, match="checkpoint of step 6 could not be"):
        loop.finish(6, stopped=False)
    loop.close()


def test_a_change_of_generation_makes_the_checkpoint_again_that_it_broke_off(tmp_path: Path, disk: Disk) -> None:
    loop = loop_of(tmp_path, train={**SETTINGS, "checkpoint_every": 4})
    begin(loop, 1, 0)
    make(loop, 4)
    loop.boundaries.between(4)
    make(loop, 1)
    assert disk.reached.wait(60)
    loop.end()
    disk.free.set()
    begin(loop, 2, 5)
    assert loop.boundaries.between(5) is None  # not due by the settings
    assert loop.boundaries._saving is not None
    written(loop)
    make(loop, 1)
    assert loop.boundaries.between(6) == 5
    assert saved_steps(tmp_path) == [5]
    assert loop.boundaries.between(6) is None
    loop.close()


def test_an_evaluation_begins_once_the_checkpoint_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = loop_of(tmp_path, train={**SETTINGS, "evaluate_every": 2})
    begin(loop, 1, 0)
    make(loop, 2)

    def broken_off(engine: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(loop.boundaries, "evaluate", broken_off)
    with pytest.raises(KeyboardInterrupt):
        loop.boundaries.between(2)
    loop.close()
    assert saved_steps(tmp_path) == [2]


def test_ballots_come_out_as_they_went_in() -> None:
    plain = (b"", b"7|x", b'{"finite":true}')
    assert CheckpointWriter.unmarked(plain) == (plain, False)
    assert CheckpointWriter.unmarked([b"written|" + ballot for ballot in plain]) == (plain, True)
    assert CheckpointWriter.unmarked([b"written|", *plain]) == ((b"", *plain), False)


KILLED_WHILE_WRITING = """
import os, signal, sys
from pathlib import Path
from tests.training.test_loop import begin, loop_of, make
from varuna_capslog.training import checkpoint

loop = loop_of(Path(sys.argv[1]), train={"checkpoint_every": 2, "max_steps": 9, "evaluate_every": None})
begin(loop, 1, 0)
make(loop, 2)
loop.boundaries.save_new(2)
make(loop, 2)
write, files = checkpoint.write_synced, []
def counted(path, state):
    files.append(path)
    if len(files) == 5:
        path.write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGKILL)
    return write(path, state)
checkpoint.write_synced = counted
loop.boundaries.between(4)
while True:
    make(loop, 1)
"""


def test_killed_while_writing_the_checkpoint_before_is_whole(tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", KILLED_WHILE_WRITING, str(tmp_path)], cwd=ROOT, timeout=240)
    assert ended.returncode == -signal.SIGKILL
    partial = next((tmp_path / "checkpoints").glob(".partial-step-00000004-*"))
    assert len(list(partial.iterdir())) == 5
    newest, skipped = latest_checkpoint(tmp_path / "checkpoints")
    assert newest is not None
    assert (newest.step, skipped) == (2, [])
    for name in newest.manifest["layers"]:
        newest.layer(name)


def test_a_write_that_fails_under_torch_says_why(tmp_path: Path) -> None:
    """torch's own error has a position in its file instead."""

    class Full(io.BytesIO):
        def write(self, data: Any) -> int:
            if self.tell() + len(data) > 4096:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(data)

    with pytest.raises(OSError, match="No space left") as caught:
        checkpoint._save(Full(), {"weight": torch.zeros(10_000)})
    assert caught.value.errno == errno.ENOSPC


def test_ranks_wait_for_a_rank_whose_disk_is_slower_than_the_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shared file system may take a second for each sync; the others took rank 0 for lost while it gave the
    checkpoint its name.
    """
    sync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: (time.sleep(0.8), sync(descriptor)))
    store, paths = dist.HashStore(), {}

    def take_part(rank: int) -> None:
        group = connect_group(store, "slow", rank, 2, timeout_seconds=2.0)
        nothing = SimpleNamespace(reporter=None, name="c", layers=(), shared=())
        engine = SimpleNamespace(communicator=group, layers=(), layout=nothing, optimizer=None, chain=nothing)
        paths[rank] = CheckpointWriter(tmp_path, 3, 1, engine, {}, copies=None).complete()  # type: ignore[arg-type]
        group.abort()

    ranks = [threading.Thread(target=take_part, args=(rank,)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(30)
    assert paths == dict.fromkeys(range(2), tmp_path / "step-00000003")
    assert (tmp_path / "step-00000003" / "manifest.json").exists()
