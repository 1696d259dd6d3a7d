"""Whole commands that meet a fault: how they end, what they say, and that nothing is lost; see docs/faults.md."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.base.test_supervisor import failed
from tests.forks import start_command

ROOT = Path(__file__).parents[1]
CONFIG: dict[str, Any] = {
    "workload": "tests.faulty:workload",
    "device": "cpu",
    "train": {
        "max_steps": 5,
        "minibatch_size": 2,
        "microbatch_size": 1,
        "lr": 1e-3,
        "seed": 3,
        "checkpoint_every": 1,
        "checkpoint_background": False,  # the calls of faults are counted from the last whole one
        "evaluate_every": None,
    },
    # 13 layers; a trap lies on rank 0 and on rank 1
    "pipeline": {"devices": 3, "cuts": [0, 6, 11]},
}


class Command:
    """`capslog ...` in a session of its own, so that survivors are found."""

    def __init__(self, *arguments: str, **environment: str) -> None:
        self.began = time.monotonic()
        variables = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
        self._said = os.memfd_create("output"), os.memfd_create("errors")
        self.process = start_command(arguments, variables, *self._said, ROOT)

    def end(self, seconds: float = 400) -> tuple[int, str, str]:
        """Exit status, standard output, and the one sentence at the end of standard error."""
        try:
            status = self.process.wait(seconds)
        finally:
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)
        output, errors = (os.pread(file, 1 << 24, 0).decode() for file in self._said)
        assert not list(self.survivors()), "a process outlived its command"
        assert "Traceback" not in errors
        lines = [line for line in errors.splitlines() if line.startswith("capslog: ")]
        return status, output, lines[-1] if lines else ""

    def survivors(self) -> Iterator[str]:
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if folder.name.isdigit():
                    state, _, _, session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
                    if int(session) == self.process.pid and state not in "ZX":
                        yield folder.name

    def wait_for_step(self, run_dir: Path, step: int) -> None:
        while self.process.poll() is None and (not (last := lines(run_dir)) or max(last) < step):
            assert time.monotonic() - self.began < 240
            time.sleep(0.02)


def lines(run_dir: Path) -> dict[int, tuple[float, float]]:
    """Return (loss, gradient norm) by step; a repeated step must have the same bits."""
    losses: dict[int, tuple[float, float]] = {}
    with contextlib.suppress(FileNotFoundError):
        for text in (run_dir / "metrics.jsonl").read_text().splitlines():
            with contextlib.suppress(ValueError):
                line = json.loads(text)
                values = (line["loss"], line["grad_norm"])
                assert losses.setdefault(line["step"], values) == values
    return losses


def train(folder: Path, *overrides: str, **environment: str) -> Command:
    config = folder / "config.yaml"
    if not config.exists():
        config.write_text(yaml.safe_dump(CONFIG | {"run_dir": str(folder / "run")}))
    return Command("train", str(config), *overrides, **environment)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing happens to."""
    folder = tmp_path_factory.mktemp("whole")
    status, _, sentence = train(folder).end()
    assert status == 0, sentence
    return folder / "run"


def test_ctrl_c_a_second_run_a_kill_and_an_exception_and_still_the_same_losses(whole: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"

    first = train(tmp_path, "train.max_steps=1000")
    first.wait_for_step(run_dir, 1)
    before = (run_dir / "config.yaml").read_text()
    status, _, sentence = train(tmp_path, "pipeline.cuts=[0,4,11]").end()
    assert (status, sentence) == (
        2,
        f"capslog: {run_dir} is in use by another run; wait for it to end or choose another run_dir",
    )
    assert (run_dir / "config.yaml").read_text() == before, "the second run changed the first one's config"
    assert not (run_dir / "plan-1.json").exists()
    os.killpg(first.process.pid, signal.SIGINT)
    status, _, sentence = first.end()
    done = max(lines(run_dir))
    assert status == 130
    assert f"interrupted: stopped cleanly after step {done}; the same command continues the run" in sentence
    assert (run_dir / f"checkpoints/step-{done:08d}/manifest.json").exists()

    last = f"train.max_steps={done + 3}"
    status, output, sentence = train(tmp_path, last, "model.fault={what: kill, call: 6}").end()
    assert status == 1
    assert f"rank 1 (stage 1) was killed by SIGKILL at step {done + 2}" in sentence
    assert f"resumed after step {done}" in output

    status, _, sentence = train(tmp_path, last, "model.fault={what: raise, in: backward, call: 4}").end()
    assert status == 1
    assert f"rank 1 (stage 1) failed at step {done + 3}, microbatch 1: RuntimeError: deliberate fault" in sentence

    status, _, sentence = train(tmp_path, last).end()
    assert status == 0, sentence
    assert max(lines(run_dir)) == done + 3
    assert all(lines(run_dir)[step] == values for step, values in lines(whole).items() if step <= done + 3)


SHELLED = """
import os, subprocess, time, torch
from torch import nn

class Data(torch.utils.data.Dataset):
    reads = 0
    def __len__(self):
        return 64
    def __getitem__(self, index):
        Data.reads += 1
        if Data.reads == 5:  # in a rank, which has read the first microbatch before
            child = subprocess.Popen(["sleep", "60"])
            child.terminate()
            open("child", "w").write(str(child.wait()))
            print("from the data set" * 9999, flush=True)
        if Data.reads > 24:
            time.sleep(600)
        return torch.ones(4), index % 2

def model():
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
"""


def test_a_reader_that_goes_away_a_child_of_the_data_and_data_that_hang(tmp_path: Path) -> None:
    """Three faults of one device: the reader of standard output ended the run, the child of a data set outlived its
    `terminate`, and a data set that hangs was waited for without end and without a word."""
    (tmp_path / "shelled.py").write_text(SHELLED)
    config = {
        "workload": "varuna_capslog.own_data:workload",
        "device": "cpu",
        "model": {"factory": "shelled:model"},
        "data": {"dataset": "shelled:Data", "loss": "cross_entropy"},
        "train": {**CONFIG["train"], "max_steps": 8, "minibatch_size": 8, "microbatch_size": 4},
        "profile": {"source": "estimated"},
        "pipeline": {"devices": 1, "timeout_seconds": 4},
        "run_dir": "run",
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    reading, writing = os.pipe()
    os.close(reading)  # before the first line
    errors = os.memfd_create("errors")
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = start_command(("train", "config.yaml"), variables, writing, errors, tmp_path)
    os.close(writing)
    try:
        status = process.wait(120)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    sentence = os.pread(errors, 1 << 20, 0).decode().splitlines()[-1]
    assert (tmp_path / "child").read_text() == str(-signal.SIGTERM)
    assert "rank 0 (stage 0) does not answer at step 3: it waits for its data: the samples [" in sentence
    assert status == 1
    assert sorted(lines(tmp_path / "run")) == [1, 2]
    assert (tmp_path / "run/checkpoints/step-00000002/manifest.json").exists()


def test_a_stopped_rank_is_named_not_the_ones_that_wait_for_it(tmp_path: Path) -> None:
    command = train(tmp_path, "model.fault={what: stop, call: 6}", "pipeline.timeout_seconds=6")
    command.wait_for_step(tmp_path / "run", 1)
    stopped = time.monotonic()
    status, _, sentence = command.end()
    assert status == 1
    assert "rank 1 (stage 1) does not answer at step 2: it is stopped (SIGSTOP, or a debugger)" in sentence
    assert time.monotonic() - stopped < 30


def test_of_a_row_of_waiting_ranks_the_silent_last_one_is_blamed(tmp_path: Path) -> None:
    # Rank 0 gives up first and blames rank 1, which only waits for rank 2 and says so later than usual.
    body = """
    if rank < 2:
        time.sleep(0.2 + 1.5 * rank)
        report(kind="peer", cause="no answer", peer=rank + 1)
        sys.exit(5)
    hang()
    """
    error, _ = failed(tmp_path, body)
    assert "rank 2 does not answer at step 7: it hangs, or it is so slow that" in str(error)
    assert error.exit_status == 1


def test_what_a_worker_refuses_at_its_start_is_one_sentence(whole: Path, tmp_path: Path) -> None:
    status, _, sentence = train(whole.parent, "resume=never", "train.max_steps=2").end()
    assert status == 2
    assert "resume=never, but" in sentence
    assert "holds the checkpoints of an earlier run" in sentence
    status, _, sentence = train(whole.parent, "model.name=other", "train.max_steps=7").end()
    assert status == 2
    assert "was written for the model 'faulty', the config builds 'other'" in sentence
    status, _, sentence = train(tmp_path, "train.lr_multipliers={encodre: 0.1}").end()
    assert status == 2
    assert "train.lr_multipliers has the key 'encodre', which is part of no parameter's address" in sentence


KILLED_AT_EVERY_FILE_OPERATION = """
import datetime, os, pathlib, signal, sys, threading, types
import torch
from tests.engine import models
from varuna_capslog.training.checkpoint import latest_checkpoint, prune
from varuna_capslog.training.checkpoint_writer import CheckpointWriter, HostCopies
from varuna_capslog.engine.communicator import Communicator
from varuna_capslog.engine.layers import take_layers
from varuna_capslog.engine.layout import Layout
from varuna_capslog.engine.optimizer import StageOptimizer
from varuna_capslog.engine.recipe import Recipe

torch.set_num_threads(1)
folder, device = pathlib.Path(sys.argv[1]), torch.device("cpu")
chain = models.build_chain()
layers = take_layers(chain, range(len(chain)), device, "float32")
optimizer = StageOptimizer(layers, Recipe())
alone = Communicator(0, 1, 0, datetime.timedelta(seconds=5))
layout = Layout.pipelines((0,), len(chain))
engine = types.SimpleNamespace(chain=chain, layers=layers, optimizer=optimizer, communicator=alone, layout=layout)
weight = layers[1].parameters["conv.weight"]

def save(step, in_thread):
    torch.nn.init.constant_(weight, float(step))
    saving = CheckpointWriter(folder, step, 0, engine, {}, HostCopies() if in_thread else None)
    saving.complete(lambda: prune(folder, 1, in_thread=in_thread))
    for thread in threading.enumerate():
        if thread is not threading.main_thread():
            thread.join()

def crash_at(number):
    seen = 0
    def count(event, arguments):
        nonlocal seen
        if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir") and str(folder) in str(arguments[0]):
            seen += 1
            if seen == number:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(count)

save(1, False)
moments = 0
for beside in (False, True):
    for moment in range(1, 1000):
        newest = latest_checkpoint(folder)[0].step
        child = os.fork()
        if child == 0:
            crash_at(moment)
            save(newest + 1, beside)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        found, skipped = latest_checkpoint(folder)
        assert not skipped, skipped
        assert found.step in (newest, newest + 1)
        for name in found.manifest["layers"]:
            state = found.layer(name)
        assert float(found.layer("conv1")["parameters"]["conv.weight"].mean()) == found.step
        if status == 0:
            break
        assert status == signal.SIGKILL
        moments += 1
    assert found.step == newest + 1
    assert [path.name for path in folder.iterdir()] == [found.path.name]
print(moments)
"""


def test_a_kill_at_any_moment_of_a_checkpoint_leaves_one_that_loads(tmp_path: Path, programs: Path) -> None:
    """The process dies at the first, second, ... file operation of writing and pruning, until one comes through: while
    training waits, and beside it.
    """
    result = subprocess.run(
        [programs / "python", "-", str(tmp_path / "checkpoints")],
        input=KILLED_AT_EVERY_FILE_OPERATION,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) > 2 * 2 * 11, "fewer moments than two per layer file: the hook saw too little"
