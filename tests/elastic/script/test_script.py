"""Any program with `state()`, `load()` and `step()`: kept states, steps that are taken back, and a disturbed run."""

from __future__ import annotations

import contextlib
import difflib
import io
import json
import math
import os
import runpy
import signal
import socket
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.forks import Fork, start_command
from tests.rig.script_chaos import judge_script
from varuna_capslog import cli
from varuna_capslog.base import files
from varuna_capslog.base.errors import CapslogError, StepRefused
from varuna_capslog.config.settings import Elastic
from varuna_capslog.elastic import script
from varuna_capslog.elastic.member.start_up import MemberStart
from varuna_capslog.elastic.member.work import Opening
from varuna_capslog.elastic.script import Group, ScriptWork, pack, saved_states, unpack
from varuna_capslog.engine.communicator import connect_group
from varuna_capslog.membership.generation import INITIAL, Generation, MemberLayout, Stamp
from varuna_capslog.membership.recovery import Seat

ROOT = Path(__file__).resolve().parents[3]
ELASTIC, PLAIN = ROOT / "examples" / "ddp_elastic.py", ROOT / "examples" / "ddp_plain.py"


def same(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor):
        return isinstance(second, torch.Tensor) and first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, dict):
        return list(first) == list(second) and all(same(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        return type(first) is type(second) and len(first) == len(second) and all(map(same, first, second))
    return type(first) is type(second) and (first == second or first != first)


# -- states ------------------------------------------------------------------------------------------------------------


def test_a_nested_state_comes_back_as_it_was() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    state = {
        "model": dict(model.state_dict()),
        "optimizer": optimizer.state_dict(),
        "more": [1, 2.5, -0.0, math.inf, math.nan, True, None, "text", (3, ()), {}],
        7: torch.tensor(4, dtype=torch.int64),
        "dict": {"tensor": "a name", "tuple": {"list": []}},
    }
    assert same(unpack(pack(state, copy=True)), state)


def test_equal_states_give_equal_bytes_and_a_copy_is_a_copy() -> None:
    weight = torch.ones(2)
    live, copied = pack({"w": weight}, copy=False), pack({"w": weight}, copy=True)
    assert live.keys() == copied.keys()
    weight += 1
    assert unpack(live)["w"].tolist() == [2, 2]
    assert unpack(copied)["w"].tolist() == [1, 1]


def test_what_cannot_be_kept_is_named_with_its_place() -> None:
    with pytest.raises(CapslogError, match=r"state\(\)\['rng'\]\[1\] is a object"):
        pack({"rng": [1, object()]}, copy=False)


# -- one member --------------------------------------------------------------------------------------------------------


class Counting:
    """Program that adds all members' shares of the step's number; each step returns the value of `returns`."""

    def __init__(self, start: float = 0.0) -> None:
        self.total = torch.tensor([start])
        self.returns: Callable[[int, Group], Any] = lambda number, group: self.total[0]

    def state(self) -> Any:
        return {"total": self.total}

    def load(self, state: Any) -> None:
        self.total = state["total"]

    def step(self, number: int, group: Group) -> Any:
        self.total += group.all_reduce(torch.tensor([float(number)]))
        return self.returns(number, group)


def work_of(training: Any, folder: Path, steps: int = 10, **options: Any) -> ScriptWork:
    done = options.pop("done", lambda number, loss: None)
    settings = Elastic(**options.pop("elastic", {}))
    checkpoint_every = options.pop("every", None)
    return ScriptWork(MemberStart("m0", folder, **options), settings, training, steps, done, checkpoint_every)


def opening(number: int, base: Stamp, size: int = 1) -> Opening:
    members = tuple(f"m{rank}" for rank in range(size))
    return Opening(number, base, MemberLayout(1, dict.fromkeys(members, (0,)), {}), members)


def alone() -> Any:
    return connect_group(dist.HashStore(), "alone", 0, 1)


def make(work: ScriptWork, step: int) -> bool:
    work.compute(step)
    finite = work.vote(step, b"").finite
    if finite:
        work.apply(step)
    return finite


def test_a_step_that_was_not_voted_is_taken_back(tmp_path: Path) -> None:
    training = Counting()
    work = work_of(training, tmp_path)
    work.open(opening(1, INITIAL), alone(), {0: work.initial(0)})
    assert make(work, 1)
    work.compute(2)
    assert training.total.item() == 3
    states = work.shelve()
    assert unpack(states[0])["total"].item() == 1
    work.open(opening(2, Stamp(1, 1)), alone(), states)
    assert training.total.item() == 1
    assert make(work, 2)
    assert training.total.item() == 3
    training.total = torch.tensor(
        [99.0]
    )  # between two generations the script keeps its own state, which is not loaded again
    work.open(opening(3, Stamp(2, 2)), alone(), work.shelve())
    assert training.total.item() == 99
    assert [(row["step"], row["generation"]) for row in files.read_jsonl(tmp_path / "metrics.jsonl")] == [
        (1, 1),
        (2, 2),
    ]


def test_a_loss_that_is_not_finite_ends_the_run_with_the_state_before(tmp_path: Path) -> None:
    training = Counting()
    work = work_of(training, tmp_path, offset=4)
    work.open(opening(1, INITIAL), alone(), {0: work.initial(0)})
    assert make(work, 1)
    training.returns = lambda number, group: torch.tensor(math.nan)
    assert not make(work, 2)
    assert "step 2" in work.discard(2)
    at = Stamp(1, 1)
    work.persist({(0, at): work.state(0, copy=False)}, Generation(1, ("m0",)))
    ((stamp, path),) = saved_states(tmp_path)
    assert stamp == Stamp(1, 5)
    fresh = work_of(Counting(), tmp_path, resumed={Stamp(1, 0): path})
    assert unpack(fresh.load(0, Stamp(1, 0)))["total"].item() == 1


def test_a_run_alone_says_so_too() -> None:
    training, seen = Counting(), []
    script.train(training, 3, lambda number, loss: seen.append((number, loss)))
    assert seen == [(1, 1.0), (2, 3.0), (3, 6.0)]
    training.returns = lambda number, group: math.inf
    with pytest.raises(StepRefused, match="step 1"):
        script.train(training, 3)


def test_the_first_member_writes_what_a_lost_writer_did_not(tmp_path: Path) -> None:
    work = work_of(Counting(), tmp_path)
    work.open(opening(1, INITIAL), alone(), {0: work.initial(0)})
    for step in (1, 2, 3):
        make(work, step)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_text(lines[0])
    work.open(opening(2, Stamp(2, 1)), alone(), work.shelve())
    assert [row["step"] for row in files.read_jsonl(tmp_path / "metrics.jsonl")] == [1, 2]  # step 3 was taken back


def test_only_so_many_checkpoints_stay_and_damaged_ones_are_told(tmp_path: Path) -> None:
    work = work_of(Counting(), tmp_path, every=2)
    work.open(opening(1, INITIAL), alone(), {0: work.initial(0)})
    for step in range(1, 11):
        make(work, step)
        assert work.between(Stamp(step, 1)) == (Stamp(step, 1) if step % 2 == 0 else None)
    assert [stamp.step for stamp, _ in saved_states(tmp_path)] == [6, 8, 10]
    path = saved_states(tmp_path)[-1][1]
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(CapslogError, match=r"step-00000010-000001\.pt: cannot be read"):
        work.load(0, Stamp(10, 1))


def two(folder: Path, trainings: list[Any], part: Callable[[ScriptWork, Any], Any]) -> list[Any]:
    """Run `part` on two connected members; return both results."""
    store = dist.HashStore()

    def member(rank: int) -> Any:
        work = work_of(trainings[rank], folder)
        work.open(opening(1, INITIAL, 2), connect_group(store, "two", rank, 2, 20.0), {0: work.initial(0)})
        return part(work, trainings[rank])

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(member, range(2)))


def test_without_a_seed_all_begin_with_the_first_ones_weights(tmp_path: Path) -> None:
    def part(work: ScriptWork, training: Counting) -> float:
        make(work, 1)
        work.finish(Stamp(1, 1), False)
        return training.total.item()

    assert two(tmp_path, [Counting(5.0), Counting(7.0)], part) == [7.0, 7.0]  # 5 + 1 + 1


def test_states_that_differ_between_members_are_refused(tmp_path: Path) -> None:
    class Own(Counting):
        def step(self, number: int, group: Group) -> None:
            self.total += group.rank

    def part(work: ScriptWork, training: Counting) -> str:
        make(work, 1)
        with pytest.raises(CapslogError) as caught:
            work.finish(Stamp(1, 1), False)
        return str(caught.value)

    for sentence in two(tmp_path, [Own(), Own()], part):
        assert "after step 1 the members' states differ" in sentence
    assert not saved_states(tmp_path)


def test_everybody_owns_all_and_too_few_wait(tmp_path: Path) -> None:
    work = work_of(Counting(), tmp_path, elastic={"min_devices": 2, "redundancy": 1})
    sentence = work.place([Seat("m0", "a", 0)])
    assert isinstance(sentence, str)
    assert "min_devices=2" in sentence
    layout = work.place([Seat("m0", "a", 0), Seat("m1", "a", 0)])
    assert isinstance(layout, MemberLayout)
    assert layout.owned == {"m0": (0,), "m1": (0,)}
    assert "1 host(s); 2 are needed" in (layout.problem or "")


def test_a_script_that_never_trains_or_ends_itself_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = tmp_path / "s.py"
    order = {"run_dir": str(tmp_path), "script": str(path), "arguments": ["--x"], "elastic": {}}
    path.write_text("import sys\nassert sys.argv[1:] == ['--x']\n")
    wish: Any = object()
    with pytest.raises(CapslogError, match="without calling"):
        script._run(order, wish)
    path.write_text("raise SystemExit(3)\n")
    with pytest.raises(CapslogError, match="ended itself with 3"):
        script._run(order, wish)


# -- the examples ------------------------------------------------------------------------------------------------------


def run_here(path: Path, steps: int, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], dict[str, Any]]:
    """Run an example in this process; return its output lines and its variables."""
    monkeypatch.setattr(sys, "argv", [str(path), "--steps", str(steps)])
    torch.set_num_threads(1)
    with contextlib.redirect_stdout(io.StringIO()) as output:
        variables = runpy.run_path(str(path), run_name="__main__")
    return output.getvalue().splitlines(), variables


def test_the_elastic_example_is_ten_lines_from_the_plain_one() -> None:
    plain, elastic = (path.read_text().split('"""', 2)[2].splitlines() for path in (PLAIN, ELASTIC))
    changed = 0
    for tag, a, b, c, d in difflib.SequenceMatcher(None, plain, elastic, autojunk=False).get_opcodes():
        if tag != "equal":
            changed += max(len([line for line in lines if line.strip()]) for lines in (plain[a:b], elastic[c:d]))
    assert 0 < changed <= 10


def test_both_examples_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))
    plain, _ = run_here(PLAIN, 12, monkeypatch)
    elastic, _ = run_here(ELASTIC, 12, monkeypatch)
    assert len(plain) == 12
    assert plain == elastic


def wait_until(condition: Callable[[], bool], process: Fork, log: Path, seconds: float = 180.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, f"it has ended: {log.read_text()}"
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.01)


def test_kills_leaves_joins_and_a_new_start_change_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, log = tmp_path / "run", tmp_path / "said"

    def start(steps: int) -> Fork:
        command = ["script", "--nproc", "3", "--run-dir", str(run), "--name", "h"]
        command += ["--elastic", "patience_seconds=0.3", str(ELASTIC), "--steps", str(steps)]
        with log.open("wb") as output:
            variables = {**os.environ, "OMP_NUM_THREADS": "1"}
            return start_command(command, variables, output.fileno(), output.fileno(), tmp_path)

    def rows() -> list[dict[str, Any]]:
        path = run / "metrics.jsonl"
        return files.read_jsonl(path) if path.exists() else []

    def trains(generation: int, members: int) -> bool:
        return any((row["generation"], row["world_size"]) == (generation, members) for row in rows()[-20:])

    first = start(100_000)
    wait_until(lambda: trains(1, 3), first, log)
    os.kill(
        json.loads((run / "workers" / "h-1.json").read_text())["pid"], signal.SIGKILL
    )  # the worker that writes the metrics
    wait_until(lambda: trains(2, 2), first, log)
    assert cli._run(["notice", str(run), "--member", "h-2"]) == 0
    wait_until(lambda: trains(3, 1), first, log)
    assert cli._run(["morph", str(run), "--devices", "2"]) == 0
    wait_until(lambda: trains(4, 2), first, log)
    first.send_signal(signal.SIGINT)
    assert first.wait(60) == 130, log.read_text()
    for part in ("generation 2: h-1 lost", "generation 3: h-2 left", "generation 4: h-4 joined"):
        assert part in log.read_text(), log.read_text()
    reached = rows()[-1]["step"]
    second = start(reached + 5)
    assert second.wait(60) == 0, log.read_text()
    assert f"after step {reached}" in log.read_text()
    assert rows()[-1]["generation"] == 5

    lines, variables = run_here(ELASTIC, reached + 5, monkeypatch)
    truth = [float(line.split()[-1]) for line in lines]
    accepted = {row["step"]: row["loss"] for row in rows()}
    assert list(accepted) == list(range(1, reached + 6))
    assert [round(loss, 9) for loss in accepted.values()] == truth
    assert len(rows()) - len(accepted) <= 1  # the step that was under way when a worker was killed
    stamp, path = saved_states(run)[-1]
    assert stamp == Stamp(reached + 5, 5)
    assert same(unpack(torch.load(path, weights_only=True)), unpack(pack(variables["training"].state(), copy=False)))


SMALL = """
import torch
from varuna_capslog.elastic.script import train
class Sum:
    def __init__(self): self.total = torch.zeros(1)
    def state(self): return {"total": self.total}
    def load(self, state): self.total = state["total"]
    def step(self, number, group):
        self.total += group.all_reduce(torch.tensor([0.1 * number]))
        return self.total[0]
if __name__ == "__main__":
    train(Sum(), 100)
    raise RuntimeError("it was to end with the step that is compared")
"""


def test_the_judge_of_a_disturbed_script_finds_a_wrong_loss_a_lost_step_and_a_wrong_state(tmp_path: Path) -> None:
    path, run = tmp_path / "sum.py", tmp_path / "run"
    path.write_text(SMALL)
    training = runpy.run_path(str(path))["Sum"]()
    work = work_of(training, run)
    work.open(opening(1, INITIAL), alone(), {0: work.initial(0)})
    for step in range(1, 6):
        make(work, step)
    work.finish(Stamp(5, 1), False)
    assert judge_script(path, [], run) == (5, [])
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    row = json.loads(lines[2])
    row["loss"] += 1e-7
    (run / "metrics.jsonl").write_text("".join([*lines[:2], json.dumps(row) + "\n", lines[4]]))
    training.total += 1e-6
    saved_states(run)[-1][1].unlink()
    work.finish(Stamp(5, 1), False)
    steps, breaches = judge_script(path, [], run)
    assert steps == 5
    assert [breach.split()[0:2] for breach in breaches] == [["the", "steps"], ["step", "3"], ["the", "state"]]


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--serve", "a:1", "--store", "b:1"], "exclude each other"),
        (["--nnodes", "2"], "needs --serve"),
        (["--serve", "nowhere"], "not HOST:PORT"),
        (["--elastic", "redundancy"], "--elastic 'redundancy': write name=value"),
        (["--elastic", "redundancy=!!int x"], "no valid YAML value"),
        (["--chaos", "3"], "launch/chaos.sh script FILE"),
        (["--seed", "1", "--chaos", "3"], "launch/chaos.sh script FILE"),
        (["--elastic", "redundance=1"], "redundance"),
    ],
)
def test_wrong_options_are_named(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli._run(["script", *words, str(ELASTIC)]) == 2
    assert sentence in capsys.readouterr().err


def test_a_dry_run_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli._run(["script", "--dry-run", "--nproc", "4", str(ELASTIC), "--steps", "3", "-h"]) == 0
    assert "4 worker(s)" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
    assert cli._run(["script", "nowhere.py"]) == 2
    assert "there is no script nowhere.py" in capsys.readouterr().err
