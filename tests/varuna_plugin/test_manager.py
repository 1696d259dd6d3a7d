"""Varuna's `run_varuna` with our morph server, in namespaces of processes and network of the test's own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.varuna_plugin import models
from varuna_capslog.varuna_plugin import FoundVaruna

SCRIPT = Path(__file__).parent / "managed_script.py"
ROOT = Path(__file__).parents[2]
APART = ["unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
STEPS, BATCH = 6, 8


@pytest.fixture(scope="session")
def apart() -> list[str]:
    """Command words that run a program where it can neither end nor reach another one."""
    for words in (APART, [*APART, "--map-root-user"]):
        if shutil.which("ip") and shutil.which("unshare") and not subprocess.call([*words, "true"]):
            return [*words, "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    pytest.skip("this machine allows no namespaces of processes and network (unshare, ip)")


def run(varuna: FoundVaruna, apart: list[str], folder: Path, *words: str) -> tuple[int, str]:
    """Run the manager there; return its status and what it wrote. `sudo` writes a file, and does nothing else."""
    (folder / "bin").mkdir(exist_ok=True)
    (folder / "bin" / "sudo").write_text(f'#!/bin/sh\necho "$@" >> {folder}/sudo.txt\n')
    (folder / "bin" / "sudo").chmod(0o755)
    paths = os.pathsep.join([str(ROOT), str(varuna.folder.parent), os.environ.get("PYTHONPATH", "")])
    program = [sys.executable, "-m", "varuna_capslog.varuna_plugin.manager", "--machine_list", "machines", *words]
    variables = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "PATH": f"{folder}/bin:{os.environ['PATH']}"}
    environment = os.environ | variables
    done = subprocess.run([*apart, *program], cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert not (folder / "sudo.txt").exists()
    logs = "".join(path.read_text() for path in sorted(folder.glob("ssh_logs/ssh_err_*")))
    return done.returncode, done.stderr + logs


def job(store: Path, *script: str) -> list[str]:
    layout = ["--gpus_per_node", "1", "--nstages", "2", "--batch_size", str(BATCH), "--chunk_size", "2"]
    return [*layout, str(SCRIPT), f"--store={store}", f"--steps={STEPS}", *script]


def losses_of_one_process() -> list[float]:
    torch.manual_seed(0)
    model = models.Model(models.PlainCut, norm=False)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(1, STEPS + 1):
        loss = model(**models.batch(BATCH, 8, 8, step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_a_job_morphs_from_four_workers_to_two(varuna: FoundVaruna, apart: list[str], tmp_path: Path) -> None:
    """With Varuna's own morph server nothing goes on: it restarts through ssh and `sudo pkill`."""
    (tmp_path / "machines").write_text("127.0.0.1\n" * 4)
    (tmp_path / "machines.next").write_text("127.0.0.1\n" * 2)
    status, text = run(varuna, apart, tmp_path, "--cuts=0,4", *job(tmp_path, "--morph-after=3"))
    assert status == 0, text
    assert text.count("goes on with the machines") == 1
    rows = [line.split() for line in (tmp_path / "losses.txt").read_text().splitlines()]
    assert [(int(step), int(workers)) for step, workers, _ in rows] == [(1, 4), (2, 4), (3, 4), (4, 2), (5, 2), (6, 2)]
    assert [float(row[2]) for row in rows] == pytest.approx(losses_of_one_process(), abs=1e-6)


def test_a_failure_ends_the_job_with_its_status(varuna: FoundVaruna, apart: list[str], tmp_path: Path) -> None:
    (tmp_path / "machines").write_text("127.0.0.1\n" * 2)
    status, text = run(varuna, apart, tmp_path, *job(tmp_path / "nowhere"))
    assert status == 1, text
    assert "ended with status 1; the others are stopped" in text


@pytest.mark.parametrize(
    ("machines", "words", "message"),
    [
        ("10.0.0.1\n", ["--nstages=1"], "names '10.0.0.1', but only this machine"),
        ("\n", ["--nstages=1"], "the list of machines is empty"),
        ("127.0.0.1\n", ["--no_such"], "run_varuna did not start"),
        ("127.0.0.1\n", ["--manager_ip", "10.0.0.1", "--nstages=1"], "10.0.0.1:4200"),
    ],
)
def test_mistakes_are_told_before_anything_starts(
    varuna: FoundVaruna, apart: list[str], tmp_path: Path, machines: str, words: list[str], message: str
) -> None:
    (tmp_path / "machines").write_text(machines)
    status, text = run(varuna, apart, tmp_path, *words, "--batch_size=4", "--chunk_size=2", str(SCRIPT))
    assert status == 2, text
    assert message in text
    assert "Traceback" not in text
