"""Scenarios of a run: functions that cause a fault or a change and check the outcome.

The tests run a few, `benchmarks/morph/faults/` all of them. A scenario returns its outcome, or None where its fault
does not exist (a point that this member never reaches).
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.elastic.live import Cradle, Live, Outcome, Truth, check, config_of, describe, truth_of
from tests.rig.faults import Fault
from varuna_capslog.base import files

Scenario = Callable[[Cradle, Truth, Path], Outcome | None]

LAST_ACTION = 60
IN_A_STEP = ("compute", "computed", "vote", "voted", "apply", "applying", "applied")
IN_A_CHANGE = {
    "abort": 1, "founding": 1, "founded": 1, "adopted": 2, "gathered": 2, "send": 1, "received": 1, "install": 2,
    "installed": 2, "prepare": 1, "shadow sent": 1, "prepared": 1, "serve": 1, "farewell": 1,
}  # fmt: skip
"""Point of a change -> number of times that a member of the first generation reaches it, up to the first change."""
ADOPTED_BY_A_NEWCOMER = 2
"""A newcomer first adopts the generation that it finds, of which it is no member, and then the one that admits it."""


def ended(outcome: Outcome, *lost: str) -> bool:
    """True if the members in `lost` were killed and all others ended with status 0."""
    return all(status == (-9 if member in lost else 0) for member, status in outcome.status.items())


def kill_in_a_step(devices: int, replicas: int, member: str, point: str, **elastic: Any) -> Scenario:
    """Return the scenario in which a member is killed at this point of step 5."""

    def scenario(cradle: Cradle, truth: Truth, folder: Path) -> Outcome | None:
        config = config_of(folder, devices, replicas, elastic=elastic)
        outcome = Live(cradle, config, faults=[Fault(member, point, count=5)]).finish()
        check(outcome, truth)
        if outcome.status[member] == 0:
            return None
        assert ended(outcome, member), describe(outcome)
        assert outcome.kinds().count("morph") == 1, describe(outcome)
        taken_back = len(outcome.rows) - len(outcome.accepted())
        assert taken_back <= (1 if config.elastic.protection == "sync" else 2), describe(outcome)
        return outcome

    return scenario


def kill_in_a_change(cause: str, member: str, point: str, devices: int = 3, **elastic: Any) -> Scenario:
    """Return the scenario in which a member is killed at this point of a change.

    Args:
        cause: "leave" (m1), "crash" (of m2) or "join" (of the next member).
        devices: with four, some send and receive layers when a member leaves; with three, the copies are in place.
    """

    def scenario(cradle: Cradle, truth: Truth, folder: Path) -> Outcome | None:
        comes = member == f"m{devices}"
        count = (ADOPTED_BY_A_NEWCOMER if point == "adopted" else 1) if comes else IN_A_CHANGE[point]
        faults = [Fault("m0", "compute", "wait", 4, "four"), Fault(member, point, count=count)]
        lost = {member}
        if cause == "crash":
            faults = [Fault("m2", "action 4", count=4), *faults[1:]]
            lost.add("m2")
        live = Live(cradle, config_of(folder, devices, elastic=elastic), faults=faults)
        if cause != "crash":
            live.when("four")
            if cause == "leave":
                live.leave("m1")
                live.until(lambda: live.heard("notice", "m1"), "the notice")
            else:
                live.until_asked(live.join())
            live.go("four")
        outcome = live.finish()
        check(outcome, truth)
        if outcome.status[member] == 0:
            return None
        assert ended(outcome, *lost), describe(outcome)
        return outcome

    return scenario


def crash_then_join(cradle: Cradle, folder: Path, **sections: Any) -> Truth:
    """Kill one of two members in step 3; a newcomer asks to join in step 5 and takes layers over in a later step. The
    results equal those of one process, which are returned.
    """
    steps = 10
    truth = truth_of(folder / "alone", steps, **sections)
    faults = [Fault("m1", "action 3", "kill", 3), Fault("m0", "compute", "wait", 5, "five")]
    live = Live(cradle, config_of(folder / "run", 2, steps=steps, **sections), faults=faults)
    live.when("five")
    live.until_asked(live.join())
    live.go("five")
    outcome = live.finish()
    assert outcome.status == {"m0": 0, "m1": -9, "m2": 0}, describe(outcome)
    assert outcome.kinds().count("morph") == 2, describe(outcome)
    check(outcome, truth, steps)
    return truth


def kill_several_at_once(redundancy: int, *members: str, **sections: Any) -> Scenario:
    """Return the scenario in which several of four members die in the same step. No settled step is lost where the
    copies cover the loss, else all begin anew.
    """

    def scenario(cradle: Cradle, truth: Truth, folder: Path) -> Outcome:
        faults = [Fault(member, "compute", "wait", 6, member) for member in members]
        config = config_of(folder, 4, elastic={"redundancy": redundancy}, **sections)
        live = Live(cradle, config, faults=faults)
        for member in members:
            live.when(member)
        for member in members:
            live.signal(member, signal.SIGKILL)
        outcome = live.finish()
        check(outcome, truth)
        assert ended(outcome, *members), describe(outcome)
        if redundancy >= len(members):
            assert len(outcome.rows) - len(outcome.accepted()) <= 1, describe(outcome)
        else:
            assert outcome.rows[5]["step"] == 1, describe(outcome)  # from the seed: there was no checkpoint
        return outcome

    return scenario


def stopped_then_continued(cradle: Cradle, truth: Truth, folder: Path) -> Outcome:
    """Stop a member, which is declared dead and continues while the others train: it must not disturb them."""
    faults = [Fault("m1", "action 7", "stop", 5), Fault("m0", "compute", "wait", 9, "nine")]
    live = Live(cradle, config_of(folder, 3), faults=faults)
    live.until(lambda: live.is_stopped("m1"), "the stop of m1")
    live.quiet.add("m1")
    live.tell("dead", "m1", why="stands still")
    live.when("nine")
    live.signal("m1", signal.SIGCONT)
    live.until(lambda: "m1" in live.status, "the end of m1")
    live.go("nine")
    outcome = live.finish()
    check(outcome, truth)
    assert (outcome.status["m0"], outcome.status["m2"]) == (0, 0), describe(outcome)
    assert "was declared lost (stands still)" in outcome.error_of("m1")
    return outcome


def hangs_in_a_change(cradle: Cradle, truth: Truth, folder: Path) -> Outcome:
    """Let m1 hang in the change after m2's loss: the others report it, and the member without a report is killed."""
    faults = [Fault("m2", "action 4", count=4), Fault("m1", "adopted", "hang", 2)]
    live = Live(cradle, config_of(folder, 3), faults=faults)
    live.until(lambda: any(e["kind"] == "broken" and e["generation"] == 2 for e in list(live.log)), "a complaint", 60.0)
    assert not any(e["kind"] == "broken" and e["generation"] == 2 and e["member"] == "m1" for e in list(live.log))
    live.signal("m1", signal.SIGKILL)
    outcome = live.finish()
    check(outcome, truth)
    assert ended(outcome, "m1", "m2"), describe(outcome)
    return outcome


def one_leaves_while_all_wait(cradle: Cradle, truth: Truth, folder: Path) -> Outcome:
    """Lose the only holder of the state while newcomers join, and tell one of these to leave. It leaves, since it is
    not needed; later generations must not wait for it.
    """
    faults = [Fault("m0", "compute", "wait", 4, "four"), Fault("m0", "adopted", "wait", 2, "second")]
    config = config_of(folder, 1, elastic={"shadows": False})  # at the next boundary, met or not
    live = Live(cradle, config, faults=faults)
    live.when("four")
    for _ in range(2):
        live.until_asked(live.join())
    live.go("four")
    live.when("second")
    live.leave("m1")
    live.signal("m0", signal.SIGKILL)
    outcome = live.finish()
    check(outcome, truth)
    assert ended(outcome, "m0"), describe(outcome)
    assert outcome.kinds().count("waiting") == 1, describe(outcome)
    assert outcome.events[-1]["generation"] <= 5, describe(outcome)
    return outcome


def one_leaves_before_it_is_let_in(cradle: Cradle, truth: Truth, folder: Path) -> Outcome:
    """Let a newcomer ask to join and leave by notice; the others admit it all the same, and must not wait for it."""
    config = config_of(folder, 2, elastic={"shadows": False})  # at the next boundary, met or not
    live = Live(cradle, config, faults=[Fault("m0", "compute", "wait", 4, "four")])
    live.when("four")
    newcomer = live.join()
    live.until_asked(newcomer)
    live.leave(newcomer)
    live.until(lambda: live.heard("left", newcomer), "the newcomer's end")
    live.go("four")
    outcome = live.finish()
    check(outcome, truth)
    assert ended(outcome), describe(outcome)
    assert any("m2" in entry["record"]["members"] for entry in live.log if entry["kind"] == "generation")
    assert len(outcome.rows) == 12, describe(outcome)
    return outcome


def several_leave_at_once(cradle: Cradle, truth: Truth, folder: Path) -> Outcome:
    """Let three of four members leave, the first among them; no step is made twice."""
    live = Live(cradle, config_of(folder, 4), faults=[Fault("m0", "compute", "wait", 4, "four")])
    live.when("four")
    live.leave("m0", "m1", "m3")
    live.until(lambda: live.heard("notice", "m3"), "the notices")
    live.go("four")
    outcome = live.finish()
    check(outcome, truth)
    assert ended(outcome), describe(outcome)
    assert len(outcome.rows) == 12, describe(outcome)
    assert outcome.rows[-1]["world_size"] == 1
    return outcome


def one_leaves_after_the_other(cradle: Cradle, truth: Truth, folder: Path) -> Outcome:
    """Send a second notice while layers are being copied ahead for the first one."""
    faults = [
        Fault("m0", "compute", "wait", 4, "four"),
        Fault("m0", "shadow sent", "wait", 1, "ahead"),
        Fault("m1", "shadow sent", "wait", 1, "ahead too"),
        Fault("m2", "shadow sent", "wait", 1, "ahead as well"),
    ]
    live = Live(cradle, config_of(folder, 4), faults=faults)
    live.when("four")
    live.leave("m1")
    live.until(lambda: live.heard("notice", "m1"), "the notice")
    live.go("four")
    live.when("ahead too")
    live.leave("m2")
    live.until(lambda: live.heard("notice", "m2"), "the second notice")
    for name in ("ahead", "ahead too", "ahead as well"):
        live.go(name)
    outcome = live.finish()
    check(outcome, truth)
    assert ended(outcome), describe(outcome)
    assert len(outcome.rows) == 12, describe(outcome)
    assert outcome.rows[-1]["world_size"] == 2
    return outcome


def everybody_leaves(cradle: Cradle, truth: Truth, folder: Path) -> Outcome:
    """Let all members leave: the run is parked, and the next run resumes where it stopped."""
    live = Live(cradle, config_of(folder, 3), faults=[Fault("m0", "compute", "wait", 6, "six")])
    live.when("six")
    live.leave("m0", "m1", "m2", urgent=True)
    live.until(lambda: live.heard("notice", "m2"), "the notices")
    live.go("six")
    parked = live.finish()
    assert ended(parked), describe(parked)
    assert len(parked.rows) == 6, describe(parked)
    return _goes_on(cradle, truth, folder, 2, parked)


def _goes_on(cradle: Cradle, truth: Truth, folder: Path, devices: int, before: Outcome) -> Outcome:
    """Resume a run that stopped between two checkpoints, without losing a step."""
    reached = max(row["step"] for row in before.rows)
    config = config_of(folder, devices)
    outcome = Live(cradle, config, first=10).finish()
    assert ended(outcome), describe(outcome)
    again = [row["step"] for row in outcome.rows[len(before.rows) :]]
    assert again[0] > reached - 1, (again, describe(outcome))  # at most the step that was under way
    assert not (folder / "held").exists()
    check(outcome, truth)
    return outcome


def store_lost_while_training(cradle: Cradle, truth: Truth, folder: Path) -> Outcome:
    """Lose the store while no member needs it: the run goes on to its end."""
    live = Live(cradle, config_of(folder, 3), faults=[Fault("m0", "compute", "wait", 4, "four")])
    live.when("four")
    live.lose_store()
    live.go("four")
    outcome = live.finish()
    check(outcome, truth)
    assert ended(outcome), describe(outcome)
    assert len(outcome.rows) == 12
    return outcome


def store_lost_at_a_change(cradle: Cradle, truth: Truth, folder: Path) -> Outcome:
    """Lose the store, then a member: without the store the others cannot go on, so they write the state that they hold,
    and the next run resumes from it.
    """
    faults = [Fault("m0", "compute", "wait", 4, "four"), Fault("m1", "action 7", count=6)]
    live = Live(cradle, config_of(folder, 3), faults=faults)
    live.when("four")
    live.lose_store()
    live.go("four")
    stopped = live.finish()
    assert stopped.status["m1"] == -9, describe(stopped)
    for member in ("m0", "m2"):
        assert stopped.status[member] not in (0, -9), describe(stopped)
        assert "the membership store is lost" in stopped.error_of(member)
    assert max(row["step"] for row in stopped.rows) == 5
    return _goes_on(cradle, truth, folder, 2, stopped)


def voted_down(cradle: Cradle, truth: Truth, folder: Path) -> Outcome:
    """Train a step with a loss that is not finite: the run ends, all members report it, and the state before the step
    is on disk.
    """
    config = config_of(folder, 3, data={"poison": 11})
    outcome = Live(cradle, config).finish()
    assert all(status not in (0, -9) for status in outcome.status.values()), describe(outcome)
    step = max([row["step"] for row in outcome.rows], default=0)
    for member in outcome.status:
        assert f"step {step + 1}: the loss is not finite" in outcome.error_of(member), describe(outcome)
    held = sorted(path.name for path in (folder / "held").glob("0*"))
    assert any(name.startswith(f"{step:08d}-") for name in held), held
    for row in outcome.rows:
        assert row["loss"] == truth.loss[row["step"]]
    return outcome


def full_disk_while_persisting(cradle: Cradle, truth: Truth, folder: Path) -> Outcome:
    """Let a member fail to write the state that it holds: it reports the error and ends."""
    faults = [Fault("m0", "compute", "wait", 6, "six"), Fault("m1", "persist", "full")]
    live = Live(cradle, config_of(folder, 3), faults=faults)
    live.when("six")
    live.leave("m0", "m1", "m2", urgent=True)
    live.until(lambda: live.heard("notice", "m2"), "the notices")
    live.go("six")
    outcome = live.finish()
    assert (outcome.status["m0"], outcome.status["m2"]) == (0, 0), describe(outcome)
    assert outcome.status["m1"] not in (0, -9), describe(outcome)
    # its report cannot be written, either; its log could before the disk was full
    return _goes_on(cradle, truth, folder, 2, outcome)


def one_comes_late(cradle: Cradle, truth: Truth, folder: Path) -> Outcome:
    """Let a member of the first generation load for longer than the others' patience: they wait for it, in the same
    generation.
    """
    live = Live(cradle, config_of(folder, 3), late=1)
    live.until(lambda: live.heard("hello", "m1"), "m1")
    until = time.monotonic() + 6.5
    live.until(lambda: time.monotonic() > until, "the pause")
    live.start_late()
    outcome = live.finish()
    check(outcome, truth)
    assert ended(outcome), describe(outcome)
    assert len({row["generation"] for row in outcome.rows}) == 1, describe(outcome)
    assert not live.heard("broken"), live.log
    return outcome


def many_changes(cradle: Cradle, truth: Truth, folder: Path, count: int = 10, **elastic: Any) -> Outcome:
    """Run through `count` changes with the same members: no generation leaves a thread, descriptor or state behind.

    Notes "tasks": threads and descriptors of m1 and m2 after a quarter, two, three quarters and all of the changes, and
    finally few more than at first, once the last groups have ended.
    """
    steps = 6 * count + 12
    config = config_of(folder, 3, steps=steps, elastic={"patience_seconds": 0.02} | elastic)
    live = Live(cradle, config, faults=[Fault("m0", "compute", "wait", steps - 2, "last")])
    path, seen = folder / "metrics.jsonl", []

    def trains(generation: int) -> bool:
        lines = files.last_lines(path) if path.exists() else []
        return bool(lines) and lines[-1]["generation"] >= generation

    for number in range(1, count + 1):
        live.until(lambda: trains(live.generation().number - 1), "a step of the generation")
        live.shake(at := live.generation().number)
        live.until(lambda at=at: live.generation().number > at, "the next generation")  # type: ignore[misc]
        if number % max(1, count // 4) == 0:
            seen.append([live.tasks("m1"), live.tasks("m2")])
    live.when("last", 120.0)
    limits = [number + more for member in seen[0] for number, more in zip(member, (5, 10), strict=True)]

    def is_tidy() -> bool:
        tasks = [live.tasks("m1"), live.tasks("m2")]
        if any(number > limit for number, limit in zip(sum(tasks, ()), limits, strict=True)):
            return False
        seen.append(tasks)
        return True

    live.until(is_tidy, f"threads and descriptors as few as {limits} after {seen}", 20.0)
    live.go("last")
    outcome = live.finish()
    assert sorted(outcome.accepted()) == list(range(1, steps + 1)), describe(outcome)
    assert ended(outcome), describe(outcome)
    assert len({row["generation"] for row in outcome.rows}) >= count
    outcome.notes["tasks"] = seen
    return outcome


def all_scenarios() -> Iterator[tuple[str, Scenario]]:
    """Yield all scenarios by name; unbounded ones (the actions of a step) in the order of their points."""
    for devices, replicas in ((3, 1), (2, 2)):
        for rank in range(devices * replicas):
            for point in (*(f"action {number}" for number in range(LAST_ACTION)), *IN_A_STEP):
                name = f"kill m{rank} of {devices}x{replicas} at {point}"
                yield name, kill_in_a_step(devices, replicas, f"m{rank}", point)
    for point in ("action 5", *IN_A_STEP):
        for rank in range(3):
            yield f"async: kill m{rank} at {point}", kill_in_a_step(3, 1, f"m{rank}", point, protection="async")
    for cause, elastic in (("leave", {}), ("leave", {"shadows": False}), ("crash", {}), ("join", {})):
        members = {"leave": ("m0", "m1", "m2"), "crash": ("m0", "m1"), "join": ("m0", "m1", "m3")}[cause]
        for member in members:
            for point in IN_A_CHANGE:
                how = "without shadows" if elastic else ""
                yield f"{cause} {how}: kill {member} at {point}", kill_in_a_change(cause, member, point, **elastic)
    for cause, members in (("leave", ("m0", "m2")), ("crash", ("m0", "m1")), ("join", ("m1", "m3"))):
        for member in members:
            for point in ("abort", "adopted", "gathered", "received", "installed", "prepared"):
                name = f"async: {cause}: kill {member} at {point}"
                yield name, kill_in_a_change(cause, member, point, protection="async")
    for shadows in (True, False):
        for rank in range(4):
            for point in ("send", "received", "shadow sent", "prepared", "gathered", "serve", "farewell"):
                name = f"leave of four {'ahead' if shadows else 'at the boundary'}: kill m{rank} at {point}"
                yield name, kill_in_a_change("leave", f"m{rank}", point, 4, shadows=shadows)
    yield "three of four at once, redundancy 1", kill_several_at_once(1, "m1", "m2", "m3")
    yield "two of four at once, redundancy 2", kill_several_at_once(2, "m1", "m2")
    for scenario in (
        stopped_then_continued, hangs_in_a_change, several_leave_at_once, one_leaves_after_the_other,
        one_leaves_while_all_wait, one_leaves_before_it_is_let_in, everybody_leaves, store_lost_while_training,
        store_lost_at_a_change, voted_down, full_disk_while_persisting, one_comes_late,
    ):  # fmt: skip
        yield scenario.__name__.replace("_", " "), scenario
