"""Files that survive a crash."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from varuna_capslog.base import files
from varuna_capslog.base.errors import CapslogError, DiskFailed


def test_json_survives_both_ways_and_makes_folders(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b.json"
    files.write_json(path, {"x": [1, None, "é"]})
    assert files.read_json(path) == {"x": [1, None, "é"]}
    assert [entry.name for entry in path.parent.iterdir()] == ["b.json"]
    plain = tmp_path / "plain"
    plain.write_text("")
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)


def test_a_full_disk_leaves_the_old_file_and_no_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    files.write_json(path, 1)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CapslogError, match=r"plan\.json cannot be written: No space left on device"):
        files.write_json(path, 2)
    assert files.read_json(path) == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["plan.json"]


def test_a_writer_killed_at_any_moment_leaves_a_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    program = (
        "import sys; from varuna_capslog.base import files\n"
        "for n in range(10**9): files.write_json(sys.argv[1], [n] * 2000)\n"
    )
    for wait in (0.1, 0.15, 0.21):
        path.unlink(missing_ok=True)
        environment = {**os.environ, "PYTHONPATH": str(Path(files.__file__).parents[2])}
        writer = subprocess.Popen([sys.executable, "-c", program, str(path)], env=environment)
        deadline = time.monotonic() + 60
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(0.002)
        end = time.monotonic() + wait
        while time.monotonic() < end:
            assert len(files.read_json(path)) == 2000, "a reader beside the writer sees whole files only"
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        value = files.read_json(path)
        assert len(value) == 2000
        assert len(set(value)) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [('{"a": 1,\n "b" 2}', "line 2, column 6"), ("[NaN]", "NaN is not a JSON number"), ("", "line 1")],
)
def test_what_is_not_json_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(CapslogError) as error:
        files.read_json(path)
    assert str(path) in str(error.value)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100 + "]" * 100, None),
        ("[" * 101 + "]" * 101, "nested more than 100 deep"),
        ('{"a": ' * 700 + "1" + "}" * 700, "nested more than 100 deep"),
        ("[" * 100_000, "nested more than 100 deep"),
        ("1e400", "1e400 is more than a number can be"),
        ("1" * 308, None),
        ("1" * 309, "has 309 digits"),
        ("1" * 5000, "has 5000 digits"),
        ('"\\ud83d\\ude00"', None),
        ('"\\ud83d"', "half of a surrogate pair"),
        (b"\xed\xa0\xbd", "not UTF-8"),
        (" " * (files.MOST_BYTES + 1), "more than 32 MiB"),
    ],
    ids=str.split("deep too-deep objects deepest float whole digits 5000 pair half bytes long"),
)
def test_a_strangers_json_is_bounded(text: str | bytes, message: str | None) -> None:
    """An event line nested 700 deep ended a report, and a COCO area of 10^400 an evaluation: both were read as JSON."""
    if message is None:
        files.parse_json(text, "plan.json")
    else:
        with pytest.raises(CapslogError, match=f"plan.json .*{message}"):
            files.parse_json(text, "plan.json")


def test_what_is_no_file_or_too_large_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe that nobody writes to blocked every reader of a folder for ever; a pipe of the user's own is read."""
    os.mkfifo(tmp_path / "plan.json")
    for read in (files.read_json, files.read_jsonl, files.last_lines):
        with pytest.raises(CapslogError, match="is a pipe or a device"):
            read(tmp_path / "plan.json")
    with pytest.raises(CapslogError, match="holds more than 32 MiB"):
        files.read_json("/dev/zero")
    with pytest.raises(CapslogError, match="null byte"):
        files.read_json("a\0b")
    end, begin = os.pipe()
    os.write(begin, b"[1]")
    os.close(begin)
    assert files.read_json(f"/dev/fd/{end}") == [1]
    os.close(end)
    (tmp_path / "rows").write_text("{}\n" * 3)
    monkeypatch.setattr(files, "_MOST_LINES", 2)
    with pytest.raises(CapslogError, match="more than 2 lines"):
        files.read_jsonl(tmp_path / "rows")


def test_files_that_cannot_be_read_or_written_are_named(tmp_path: Path) -> None:
    with pytest.raises(CapslogError, match=r"missing\.json cannot be read: No such file"):
        files.read_json(tmp_path / "missing.json")
    (tmp_path / "runs" / "first").mkdir(parents=True)
    (tmp_path / "runs" / "first" / "plan-0.json").write_text("{}")
    for typed in ("runs/first/plan_0.json", "run/first/plan-0.json"):
        with pytest.raises(CapslogError, match=rf"{typed} cannot .*; did you mean .*/runs/first/plan-0\.json\?"):
            files.read_json(tmp_path / typed)
    with pytest.raises(CapslogError, match="check the path"):
        files.read_json(tmp_path / "run" / "first" / "other.json")
    with pytest.raises(CapslogError, match="cannot be read: Is a directory"):
        files.read_jsonl(tmp_path)
    (tmp_path / "latin.json").write_bytes(b'"\xe9"')
    with pytest.raises(CapslogError, match="not UTF-8"):
        files.read_json(tmp_path / "latin.json")
    (tmp_path / "file").write_text("")
    with pytest.raises(CapslogError, match="below cannot be written: "):
        files.write_text(tmp_path / "file" / "below", "")
    with pytest.raises(CapslogError, match=r"other cannot be written: '.udcff' is no text of UTF-8"):
        files.write_text(tmp_path / "other", "\udcff")
    with pytest.raises(CapslogError, match="cannot be appended to: Is a directory"):
        files.append_jsonl(tmp_path, {})


def test_values_that_json_lacks_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with pytest.raises(CapslogError, match=r"metrics\.jsonl"):
        files.append_jsonl(path, {"loss": float("nan")})
    assert not path.exists()


def test_lines_survive_both_ways(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    for step in range(1, 4):
        files.append_jsonl(path, {"step": step, "note": "two\nlines"})
    assert [record["step"] for record in files.read_jsonl(path)] == [1, 2, 3]
    assert len(path.read_text().splitlines()) == 3


@pytest.mark.parametrize("cut", range(1, 12))
def test_a_torn_last_line_is_left_out_and_closed_by_the_next(
    tmp_path: Path, cut: int, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "events.jsonl"
    files.append_jsonl(path, {"n": 1})
    first_bytes = path.stat().st_size
    files.append_jsonl(path, {"n": 2222})
    os.truncate(path, first_bytes + cut)
    lost = cut < 11
    expected = [{"n": 1}] if lost else [{"n": 1}, {"n": 2222}]
    assert files.read_jsonl(path) == expected
    files.append_jsonl(path, {"n": 3})
    assert files.read_jsonl(path) == [*expected, {"n": 3}]
    assert ("line 2 is torn" in caplog.text) == lost


def test_a_line_that_is_no_object_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A line `17` in a run's events.jsonl kept all events from its report."""
    path = tmp_path / "x.jsonl"
    path.write_text('{"a": 1}\n17\n')
    assert files.read_jsonl(path) == [{"a": 1}]
    assert "line 2 is torn, or no object" in caplog.text


@pytest.mark.parametrize("line", ["[" * 10_000, '{"a": "\\ud800"}', '{"a": NaN}', "\xff\xfe", '{"a": 1} 2', '"{'])
def test_what_is_no_json_or_no_text_is_a_torn_line_for_every_reader(tmp_path: Path, line: str) -> None:
    """Endless brackets were a RecursionError; half of a surrogate pair could not be written to any page."""
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"n": 1}\n' + line.encode("latin-1") + b'\n{"n": "\\ud83d\\ude00"}\n')
    expected = [{"n": 1}, {"n": "\N{GRINNING FACE}"}]
    assert files.read_jsonl(path) == expected
    assert files.last_lines(path) == expected


def _append_many(path: str, worker: int) -> None:
    for n in range(500):
        files.append_jsonl(path, {"worker": worker, "n": n, "text": "x" * 300})


def test_lines_of_several_processes_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_append_many, args=(str(path), worker)) for worker in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(30)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert sorted((record["worker"], record["n"]) for record in records) == [
        (w, n) for w in range(4) for n in range(500)
    ]


def test_the_last_lines_are_those_at_the_end_without_what_is_cut_or_torn(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    for number in range(100):
        files.append_jsonl(path, {"n": number})
    with open(path, "ab") as file:
        file.write(b'{"n": 10')
    assert files.last_lines(path, 25) == [{"n": 99}]  # 8 bytes torn, 10 of line 99, and a part of line 98
    assert [line["n"] for line in files.last_lines(path)] == list(range(100))


def test_a_full_disk_is_told_from_a_folder_that_is_not_there():
    read_only = files.write_failure("the file cannot be written", OSError(errno.EROFS, "Read-only file system"))
    assert isinstance(read_only, DiskFailed)
    assert str(read_only).endswith("Read-only file system; make the file system writable or choose another path")
    with pytest.raises(DiskFailed, match="/dev/full cannot be appended to: No space left on device; free space"):
        files.append_jsonl("/dev/full", {"step": 1})
    with pytest.raises(CapslogError, match="cannot be written") as caught:
        files.write_text("/dev/null/run/plan.json", "")
    assert not isinstance(caught.value, DiskFailed)


def test_no_run_writes_through_a_link(tmp_path: Path) -> None:
    """A stranger's run folder had metrics.jsonl as a link: a run resumed there appended to its target."""
    (tmp_path / "own").write_text("mine\n")
    (tmp_path / "metrics.jsonl").symlink_to(tmp_path / "own")
    with pytest.raises(CapslogError, match=r"metrics\.jsonl is a link, through which no run writes; remove it"):
        files.append_jsonl(tmp_path / "metrics.jsonl", {"step": 1})
    (tmp_path / "dangling").symlink_to(tmp_path / "new")
    with pytest.raises(OSError, match="dangling is a link"):
        files.no_link(tmp_path / "dangling", os.O_WRONLY | os.O_CREAT)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CapslogError, match="cannot be appended to: pipe is a pipe, into which no run writes"):
        files.append_jsonl(tmp_path / "pipe", {})
    assert (tmp_path / "own").read_text() == "mine\n"
    assert not (tmp_path / "new").exists()
    files.write_text(tmp_path / "metrics.jsonl", "whole files take the place of a link")
    assert (tmp_path / "own").read_text() == "mine\n"
