"""The GPU benchmark command: needs only what its README says, leaves no process, gives a reason for each row."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[1]
GPU = ROOT / "benchmarks/gpu"
HELPERS = {"facts", "trained"}
HIDDEN = ("typer", "rich", "pycocotools", "matplotlib", "tensorboard", "sklearn")
BARE = f"import sys\nsys.modules.update(dict.fromkeys({HIDDEN!r}))\n"  # an import of None says that there is none


@pytest.fixture
def bare(tmp_path: Path) -> dict[str, str]:
    """Environment whose Python processes lack the packages that a machine with a GPU lacks."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text(BARE)
    return os.environ | {"PYTHON": sys.executable, "PYTHONPATH": str(tmp_path / "site")}


@pytest.fixture
def folders(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make the parts importable, as `gpu.py` does."""
    path = list(sys.path)
    folders = [GPU, *(ROOT / "benchmarks" / folder for folder in ("", "one_stage", "step_equality", "truth", "morph"))]
    sys.path[:0] = map(str, folders)
    yield
    sys.path[:] = path
    for name in [name for name in sys.modules if name in ("report", "running", "gpu") or name.startswith("parts")]:
        del sys.modules[name]


def started(output: Path, environment: dict[str, str], *arguments: str) -> subprocess.Popen[str]:
    command = [str(ROOT / "launch/gpu.sh"), "-o", str(output), *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, cwd="/", stdout=pipe, stderr=pipe, text=True)


def left_over(word: str) -> list[str]:
    """Return the command lines of processes whose environment contains `word`."""
    commands = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if word.encode() in path.read_bytes():
                commands.append(path.parent.joinpath("cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return commands


def test_it_ends_whole_when_it_is_told_to_and_every_row_has_a_reason(tmp_path: Path, bare: dict[str, str]) -> None:
    """All its processes lack the packages. That all parts run to their ends so is tried by hand, see the README.

    It is told to in the middle of a part with several processes: none stays, and the JSON says why rows lack.
    """
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    output, word = tmp_path / "result.json", f"GPU_TEST_{os.getpid()}"
    command = started(output, bare | {"GPU_TEST": word})
    assert command.stderr is not None
    assert "equality on cpu" in command.stderr.readline()
    until = time.monotonic() + 180
    while len(left_over(word)) < 3 and time.monotonic() < until:  # the command, its part, and a rank of that
        time.sleep(0.05)
    command.send_signal(signal.SIGTERM)
    table, _ = command.communicate(timeout=90)
    assert command.returncode == 128 + signal.SIGTERM
    result = json.loads(output.read_text())
    assert result["machine"]["torch"] == torch.__version__
    reasons = {"cuda": f"torch {torch.__version__} can use no GPU here", "cpu": "the command was ended by SIGTERM"}
    assert {row["part"] for row in result["rows"]} == {path.stem for path in GPU.glob("parts/*.py")} - HELPERS
    for row in result["rows"]:
        assert row["not_run"].startswith(reasons[row["device"]])
        assert f"| {row['part']} | {row['device']} | {row['name']} | not run: {row['not_run']} |" in table
    until = time.monotonic() + 10
    while left_over(word) and time.monotonic() < until:
        time.sleep(0.05)
    assert left_over(word) == []


@pytest.mark.usefixtures("folders")
def test_parts_that_hang_or_fail_side_by_side_leave_their_reasons_and_the_rows_they_had(tmp_path: Path) -> None:
    import running

    lines: list[Any] = []

    def part(code: str, seconds: float) -> running.Part:
        folder = tmp_path / str(seconds)
        folder.mkdir()
        first = f'import sys, time; open({str(folder / "rows")!r}, \'w\').write(\'{{"name": "a"}}\\n{{"na\'); '
        return running.Part([sys.executable, "-c", first + code], folder, seconds, lines.append)

    parts = [part("", 60.5), part("raise SystemExit('no bread')", 60.0), part("time.sleep(60)", 2.0)]
    assert running.run_parts(parts) == [
        None,
        "its part failed with status 1: no bread",
        "its part took longer than 2 s",
    ]
    assert lines == [{"name": "a"}] * 3


@pytest.mark.usefixtures("folders")
def test_a_table_tells_what_missed_its_aim_and_what_is_open(tmp_path: Path) -> None:
    from report import Report, Row

    rows = [Row("a", "cpu", name, "an aim") for name in ("one", "two", "three", "four")]
    report = Report(tmp_path / "deep/result.json", {}, rows)
    report.take({"part": "a", "device": "cpu", "name": "one", "result": "1 s", "passed": True, "numbers": {"s": 1}})
    report.take({"part": "a", "device": "cpu", "name": "two", "result": "9 s", "passed": False})
    report.take({"part": "a", "device": "cpu", "name": "three", "not_run": "no GPU", "lacks": True})
    report.close(rows, "the time was spent")
    report.write()
    assert [row.is_failure for row in rows] == [False, True, False, True]
    assert [line.split(" | ")[3] for line in report.table().splitlines()[2:]] == [
        "1 s",
        "9 s **missed**",
        "not run: no GPU",
        "not run: the time was spent",
    ]
    assert json.loads(report.path.read_text())["rows"][0]["numbers"] == {"s": 1}


@pytest.mark.usefixtures("folders")
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("The NVIDIA driver on your system is too old (found version 11040). Please update", "; update the driver"),
        ("CUDA out of memory. Tried to allocate 20.00 MiB.", "; end what fills the GPU"),
    ],
)
def test_a_gpu_that_cannot_be_used_is_one_sentence(monkeypatch: pytest.MonkeyPatch, text: str, words: str) -> None:
    """torch's own texts stand in for the driver and the full GPU, which are not here."""
    from parts.facts import no_cuda

    def init() -> None:
        raise RuntimeError(text)

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", init)
    assert (
        no_cuda()
        == f"torch {torch.__version__} can use no GPU here: {text.split('. ')[0]}{words}"
        + {
            "; update the driver": ", or install a torch for an older CUDA",
            "; end what fills the GPU": ", or choose another one with CUDA_VISIBLE_DEVICES",
        }[words]
    )


class Told:
    """Stand-in for the report: records the messages of a part."""

    def __init__(self, *gpus: dict[str, Any]) -> None:
        self.facts = {"gpus": list(gpus)}
        self.reasons: dict[str, str] = {}

    def not_run(self, name: str, why: str) -> None:
        self.reasons[name] = why


@pytest.mark.usefixtures("folders")
def test_one_gpu_is_too_few_for_nccl_and_a_full_one_for_eight_ranks() -> None:
    from parts import nccl, ranks

    tell = Told({"free_bytes": 11 << 30, "total_bytes": 80 << 30})
    nccl.measure(torch.device("cuda"), tell)
    assert list(tell.reasons) == list(nccl.ROWS["cuda"])
    assert all("a GPU for every rank" in why and "CUDA_VISIBLE_DEVICES" in why for why in tell.reasons.values())
    assert ranks._too_full(1 << 30, tell.facts) == ""
    assert ranks._too_full(6 << 30, tell.facts) == (
        "8 ranks need about 12.0 GiB, and 11.0 of 80.0 GiB of the first GPU are free; end what fills it, or choose "
        "another one with CUDA_VISIBLE_DEVICES"
    )


@pytest.mark.usefixtures("folders")
def test_a_trace_of_torchs_allocator_is_replayed() -> None:
    """Written by hand in the form of `torch.cuda.memory._snapshot`: two blocks, one after the other at one address."""
    from parts.costs import events_of

    from varuna_capslog.profiling.estimation.allocator import replay

    trace = [
        {"action": "segment_alloc", "addr": 7, "size": 20 << 20},
        {"action": "alloc", "addr": 7, "size": 12 << 20},
        {"action": "free_requested", "addr": 7, "size": 12 << 20},
        {"action": "free_completed", "addr": 7, "size": 12 << 20},
        {"action": "alloc", "addr": 7, "size": 14 << 20},
    ]
    assert events_of(trace) == [(7, 12 << 20), (7, 0), (7, 14 << 20)]
    assert replay(events_of(trace)).reserved_bytes == 26 << 20
