"""The loop that both kinds of run drive: work that is due at each boundary, and the same steps under two drivers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine import cases
from tests.engine.workload import TinyWorkload
from varuna_capslog.base import files
from varuna_capslog.base.errors import CapslogError, StepRefused
from varuna_capslog.config.settings import Config
from varuna_capslog.engine.communicator import Communicator
from varuna_capslog.engine.layout import Layout
from varuna_capslog.engine.pipeline import PipelineEngine
from varuna_capslog.engine.step import train_step
from varuna_capslog.plans.plan import Plan
from varuna_capslog.training.loop import PeakMeter, TrainingLoop
from varuna_capslog.training.run import Run
from varuna_capslog.training.run_setup import check_plan, set_up_run

CPU = torch.device("cpu")


def alone() -> Communicator:
    return Communicator(0, 1, "alone", cases.SECOND)


def loop_of(run_dir: Path, **sections: Any) -> TrainingLoop:
    config = cases.run_config(str(run_dir), **sections)
    setup = set_up_run(config, TinyWorkload(config))
    return TrainingLoop(setup, CPU, offset=6)


def begin(loop: TrainingLoop, number: int, base: int, saved: bool = False) -> None:
    setup = loop.setup
    layout = Layout.pipelines((0,), 11)
    engine = PipelineEngine(setup.chain, setup.workload.loss, layout, setup.options, alone(), CPU)
    loop.begin(engine, number, base, writes=True, saved=saved)


def make(loop: TrainingLoop, steps: int) -> None:
    for _ in range(steps):
        loop.compute(loop.step + 1)
        assert loop.vote(loop.step + 1).refusal is None
        loop.apply()


def plain_losses(config: Config, steps: int) -> list[float]:
    """Losses of the engine without any loop around it."""
    setup = set_up_run(config, TinyWorkload(config))
    engine = PipelineEngine(setup.chain, setup.workload.loss, Layout.pipelines((0,), 11), setup.options, alone(), CPU)
    feed = setup.feed(engine.loaded_microbatches)
    results = [train_step(engine, step, feed.minibatch(step), feed.loader(step)) for step in range(1, steps + 1)]
    feed.close()
    return [result.parts["loss"] for result in results]


def saved_steps(run_dir: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (run_dir / "checkpoints").glob("step-*"))


def test_a_driver_of_single_steps_writes_what_a_run_of_a_fixed_number_does(tmp_path: Path) -> None:
    """The member of an elastic run makes each step by itself; its losses are those of an ordinary run, to the bit."""
    config = cases.run_config(str(tmp_path / "fixed"), train={"max_steps": 4})
    run = Run(config, Plan.of_cuts(num_layers=11, cuts=(0,), model="tiny"), TinyWorkload(config), alone(), CPU)
    assert run.train().step == 4
    run.loop.close()
    loop = loop_of(tmp_path / "single", train={"max_steps": 4})
    begin(loop, 1, 0)
    make(loop, 4)
    assert (loop.is_done(3), loop.is_done(4)) == (False, True)
    assert not loop.finish(4, stopped=False)
    loop.close()
    fixed, single = (files.read_jsonl(tmp_path / name / "metrics.jsonl") for name in ("fixed", "single"))
    assert [row["loss"] for row in fixed] == [row["loss"] for row in single] == plain_losses(config, 4)
    assert [row["grad_norm"] for row in fixed] == [row["grad_norm"] for row in single]
    assert [row["generation"] for row in single] == [7] * 4
    # the peak of the second step is of that step in both: its update ends one measurement and begins no other
    assert [[row["step"] for row in rows if "peak_bytes" in row] for rows in (fixed, single)] == [[2], [2]]
    assert saved_steps(tmp_path / "fixed") == saved_steps(tmp_path / "single") == [4]


def test_what_is_due_at_a_boundary_is_done_once(tmp_path: Path) -> None:
    settings = {"checkpoint_every": 2, "evaluate_every": 3, "checkpoint_keep": 9, "checkpoint_background": False}
    loop = loop_of(tmp_path, train=settings)
    begin(loop, 1, 0)
    written = []
    assert not loop.boundaries.between(0, save=True), "there is nothing to save before the first step"
    for step in range(1, 7):
        make(loop, 1)
        written += [step] if loop.boundaries.between(step) else []
        assert not loop.boundaries.between(step)
    assert written == saved_steps(tmp_path) == [2, 3, 4, 6]
    make(loop, 1)
    assert loop.boundaries.between(7, save=True), "asked for, whatever the settings say"
    loop.finish(7, stopped=False)
    scored = files.read_jsonl(tmp_path / "evaluations.jsonl")
    assert [line["step"] for line in scored] == [3, 6, 7]
    assert [line["kind"] for line in files.read_jsonl(tmp_path / "events.jsonl")] == ["checkpoint"] * 5 + ["stop"]
    loop.close()


def test_a_generation_that_begins_with_a_saved_boundary_does_not_save_it_again(tmp_path: Path) -> None:
    loop = loop_of(tmp_path, train={"checkpoint_every": 2, "checkpoint_background": False})
    begin(loop, 1, 4, saved=True)
    assert not loop.boundaries.between(4)
    loop.end()
    begin(loop, 2, 2)
    assert loop.boundaries.between(2), "what was known of later steps, which were taken back, counts no more"
    loop.end()
    loop.close()


def test_a_stop_by_the_clock_is_evaluated_and_one_by_a_person_is_not(tmp_path: Path) -> None:
    for stopped in (False, True):
        folder = tmp_path / str(stopped)
        config = cases.run_config(str(folder), train={"evaluate_every": 50, "max_steps": 50, "max_seconds": 1e-9})
        plan = Plan.of_cuts(num_layers=11, cuts=(0,), model="tiny")
        run = Run(config, plan, TinyWorkload(config), alone(), CPU, stop_wished=lambda stopped=stopped: stopped)
        end = run.train()
        run.loop.close()
        assert (end.step, end.stopped, end.scores is None) == (1, stopped, stopped)
        assert (folder / "evaluations.jsonl").exists() != stopped
        assert saved_steps(folder) == [1]


def test_going_on_from_an_older_checkpoint_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It stood in the log of a worker, and steps were made again in silence."""
    config = cases.run_config(str(tmp_path), train={"max_steps": 2, "checkpoint_every": 1, "evaluate_every": None})
    plan = Plan.of_cuts(num_layers=11, cuts=(0,), model="tiny")

    def run() -> Run:
        return Run(config, plan, TinyWorkload(config), alone(), CPU)

    first = run()
    first.train()
    first.loop.close()
    for step, sentence in ((2, "step-00000002/layer-0003.pt: missing or cut short"), (1, "the run begins anew")):
        (tmp_path / "checkpoints" / f"step-{step:08d}" / "layer-0003.pt").write_bytes(b"x")
        capsys.readouterr()
        again = run()
        resumed = again.resume()
        again.loop.close()
        assert (resumed.step if resumed else 0) == step - 1
        assert sentence in capsys.readouterr().out


def test_a_refused_step_leaves_the_boundary_before_it_and_names_no_microbatch(tmp_path: Path) -> None:
    config = cases.run_config(str(tmp_path), data={"samples": 24, "poison": 5}, train={"max_steps": 3})
    plan = Plan.of_cuts(num_layers=11, cuts=(0,), model="tiny")
    run = Run(config, plan, TinyWorkload(config), alone(), CPU)
    with pytest.raises(StepRefused) as caught:
        run.train()
    run.loop.close()
    step = int(str(caught.value).split("step ")[1].split(":")[0])
    assert (run.begun_step, run.failed_at, run.loop.step) == (step, None, step - 1)
    assert saved_steps(tmp_path) == ([step - 1] if step > 1 else [])


def test_a_plan_for_another_model_is_refused(tmp_path: Path) -> None:
    setup = loop_of(tmp_path).setup
    with pytest.raises(CapslogError, match="the plan is for 5 layers, the model has 11"):
        check_plan(setup, Plan.of_cuts(num_layers=5, cuts=(0,)))
    with pytest.raises(CapslogError, match="the plan is for the model 'other', the config builds 'tiny'"):
        check_plan(setup, Plan.of_cuts(num_layers=11, cuts=(0,), model="other"))


# -- the peak meter ---------------------------------------------------------------------------------------------------


def test_a_ballot_comes_out_as_it_went_in() -> None:
    meter = PeakMeter(torch.device("cpu"))
    meter.begin(1)
    plain = (b"", b'{"finite":true}', b"12", b'{"why":"a|b"}')
    assert meter.without_peaks(plain) == (plain, None)
    assert meter.with_peak(b"x") == b"x"  # nothing was measured yet
    meter._steps, meter._bytes = meter._at, 77
    assert meter.without_peaks([meter.with_peak(ballot) for ballot in plain]) == (plain, [77] * 4)
    # peaks of some are no peaks of all, but their ballots count
    assert meter.without_peaks([meter.with_peak(b""), b'{"finite":true}']) == ((b"", b'{"finite":true}'), None)


@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize(("generation", "rounds", "step"), [(1, False, 2), (1, True, 3), (2, False, 5), (7, True, 5)])
def test_which_step_is_measured(
    generation: int, rounds: bool, step: int, skips: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Nothing:
        layers = ()
        optimizer = None

    meter = PeakMeter(torch.device("cpu"))
    monkeypatch.setattr("varuna_capslog.training.loop.resident_tensors", lambda layers, optimizer: [])
    meter.begin(generation, rounds)
    measured = []
    for number in range(1, 10):
        with meter.computing(Nothing()) as due:  # type: ignore[arg-type]
            kept = torch.ones(1000)
        if due:
            measured.append(number)
            assert meter._bytes is not None
            assert meter._bytes >= kept.nbytes
        assert (meter.with_peak(b"") != b"") == due
        skipped = skips and number in (1, step + 2)
        with meter.applying(Nothing(), skipped):  # type: ignore[arg-type]
            pass
    assert measured == [step + skips], "a step that is skipped before it makes no moments"


def test_a_run_that_no_longer_improves_stops_also_after_a_resume(tmp_path: Path, monkeypatch, capsys) -> None:
    """The evaluations since the best one are counted by the run's files, so that a new process counts on."""
    scores = iter([0.5, 0.7, 0.6, 0.7, 0.8])

    def judged(until: int, base: int = 0) -> TrainingLoop:
        loop = loop_of(tmp_path, train={"evaluate_every": 1, "stop_after_evaluations": 2})
        monkeypatch.setattr(loop.boundaries, "evaluate", lambda engine: {"AP": next(scores)})
        begin(loop, 1, base, saved=base > 0)
        while loop.step < until and not loop.is_done(loop.step):
            make(loop, 1)
            loop.boundaries.between(loop.step)
        return loop

    first = judged(3)
    assert not first.is_done(3)  # worse once
    first.close()
    second = judged(9, base=3)
    assert second.step == 4  # as good as the best one is no improvement
    second.finish(4, stopped=False)
    second.close()
    why = files.read_jsonl(tmp_path / "events.jsonl")[-1]["why"]
    assert "the last 2 evaluations did not improve on the best one, which is that of step 2" in why
    assert why in capsys.readouterr().out


def test_early_stopping_needs_evaluations(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"train\.stop_after_evaluations=2 but train\.evaluate_every=null"):
        cases.run_config(str(tmp_path), train={"stop_after_evaluations": 2})


@pytest.mark.parametrize(("best", "ends"), [((0.9, 2), False), (None, True)], ids=["one_knows_a_better", "none_does"])
def test_members_count_alike_before_one_of_them_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, best: tuple[float, int] | None, ends: bool
) -> None:
    """A member may read the files before the best score is in them: it would end alone, and the others wait for it."""
    loop = loop_of(tmp_path, train={"evaluate_every": 1, "stop_after_evaluations": 2}, elastic={"enabled": True})
    for step in (2, 3):
        files.append_jsonl(tmp_path / "evaluations.jsonl", {"step": step, "scores": {}})
    begin(loop, 2, 3, saved=True)
    assert not loop.is_done(3), "no member has heard of the others"
    other = 3, 3, False, best, {3}
    monkeypatch.setattr(loop.running.communicator, "gather", lambda mine: [mine, other])
    loop.boundaries.between(3)
    assert loop.is_done(3) is ends
    loop.close()
