"""Members hold only the layers that they own or copy: freed values come back where they are needed.

All live tests check in `tests.elastic.checked` that the chain of a member has no values while it trains.
"""

from __future__ import annotations

import datetime
import time
import weakref
from pathlib import Path

import pytest
import torch

from tests.elastic import scenarios
from tests.elastic.live import CUTS, Cradle, Live, Truth, check, config_of, describe, truth_of
from tests.rig.faults import Fault
from tests.waiting import wait_until
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.processes import OwnedThread
from varuna_capslog.elastic.member import pipeline_work
from varuna_capslog.elastic.member.pipeline_work import PipelineRun, PipelineWork
from varuna_capslog.elastic.member.start_up import MemberStart
from varuna_capslog.elastic.member.work import Opening
from varuna_capslog.engine.communicator import Communicator
from varuna_capslog.membership.generation import INITIAL, MemberLayout, Stamp
from varuna_capslog.model.workload import load_workload
from varuna_capslog.plans.plan import Plan
from varuna_capslog.training import layer_state

CPU = torch.device("cpu")
FACTORIES = {"chain": "factory_chain"}


@pytest.fixture(scope="module")
def truth_of_factories(tmp_path_factory: pytest.TempPathFactory) -> Truth:
    """Results of a chain that one process builds layer by layer."""
    torch.set_num_threads(1)
    return truth_of(tmp_path_factory.mktemp("truth"), model={"chain": "factory_chain_by_hand"})


@pytest.mark.parametrize("room", [True, False], ids=["room for a second chain", "no room"])
def test_a_newcomer_knows_the_shapes_at_all_cuts_before_others_wait_for_its_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: bool
) -> None:
    config = config_of(tmp_path / "run", 2)
    workload = load_workload(config)
    chain = workload.build_chain()
    units = {"num_microbatches": config.num_microbatches, "microbatch_size": config.train.microbatch_size}
    plan = Plan.of_cuts(len(chain), CUTS[2], model=chain.name, schedule="1f1b", **units)
    work = PipelineWork(MemberStart("m0", tmp_path / "run"), PipelineRun(config, workload, plan, None), CPU)
    trained: list[int] = []
    monkeypatch.setattr(pipeline_work, "train_step", lambda engine, step, *rest: trained.append(step))
    if not room:
        monkeypatch.setattr(pipeline_work, "_WARM_UP_BYTES", 0)
    work.warm_up()
    assert trained == [1] * room
    monkeypatch.setattr(work._table, "_trace", lambda inputs: pytest.fail("traced in its first step"))
    assert len(work._table.boundaries(work.setup.feed().minibatch(1).inputs[0])) == len(chain) + 1


def test_a_run_that_has_lost_all_begins_anew_with_weights_that_were_freed(
    cradle: Cradle, truth: Truth, tmp_path: Path
) -> None:
    assert scenarios.kill_several_at_once(1, "m1", "m2", "m3")(cradle, truth, tmp_path) is not None


def test_so_does_a_run_of_factories(cradle: Cradle, truth_of_factories: Truth, tmp_path: Path) -> None:
    scenario = scenarios.kill_several_at_once(1, "m1", "m2", "m3", model=FACTORIES)
    assert scenario(cradle, truth_of_factories, tmp_path) is not None


def test_layers_of_factories_move_to_a_member_that_joins_and_from_one_that_leaves(
    cradle: Cradle, tmp_path: Path
) -> None:
    """A member leaves in the first step of the newcomer, however long joining takes."""
    steps = 24
    truth = truth_of(tmp_path / "alone", steps, model={"chain": "factory_chain_by_hand"})
    faults = [Fault("m0", "compute", "wait", 4, "four"), Fault("m2", "compute", "wait", 1, "joined")]
    live = Live(cradle, config_of(tmp_path / "run", 2, steps=steps, model=FACTORIES), faults=faults)
    live.when("four")
    live.until_asked(live.join())
    live.go("four")
    live.when("joined")
    live.leave("m0")
    live.until(lambda: live.heard("notice"), "the notice")
    live.go("joined")
    outcome = live.finish()
    assert outcome.status == {"m0": 0, "m1": 0, "m2": 0}, describe(outcome)
    assert outcome.kinds().count("morph") == 2, describe(outcome)
    assert len(outcome.rows) == steps
    check(outcome, truth, steps)


LOW = {"precision": "bfloat16", "weights": "bfloat16", "moments": "bfloat16"}


@pytest.mark.parametrize("types", [{}, LOW], ids=["float32", "bfloat16"])
def test_layers_that_change_between_own_and_copy_keep_their_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, types: dict[str, str]
) -> None:
    """At a change of members, layers that this member has already are not copied in memory."""
    config = config_of(tmp_path / "run", 2, train=types)
    workload = load_workload(config)
    count = len(workload.build_chain())

    def plan_of(*cuts: int) -> Plan:
        units = {"num_microbatches": config.num_microbatches, "microbatch_size": config.train.microbatch_size}
        return Plan.of_cuts(count, cuts, model=workload.build_chain().name, schedule="1f1b", **units)

    start = MemberStart("m0", tmp_path / "run")
    work = PipelineWork(start, PipelineRun(config, workload, plan_of(0), None), CPU)

    def opened(number: int, plan: Plan, states: dict[int, layer_state.LayerState]) -> dict[int, list[int]]:
        """Open a generation; return the addresses of the parameters of each layer that this member owns."""
        members = ("m0", "m1")[: len(plan.stages)]
        mine = range(len(states))
        copied = {"m0": tuple(index for index in range(count) if index not in mine)}
        layout = MemberLayout.of_plan(plan, members, copied)
        base = INITIAL if number == 1 else Stamp(1, 1)
        alone = Communicator(0, len(members), number, datetime.timedelta(seconds=1))
        work.open(Opening(number, base, layout, members), alone, states)
        return {index: places(work.state(index, copy=False)) for index in mine}

    def places(state: layer_state.LayerState) -> list[int]:
        return [tensor.data_ptr() for tensor in state.values()]

    opened(1, plan_of(0), {index: work.initial(index) for index in range(count)})
    decoded = work._table.boundaries(work.setup.feed().minibatch(1).inputs[0])[8]["state"]
    assert decoded.dtype == (torch.bfloat16 if types else torch.float32), "what an embedding writes"
    work.compute(1)
    work.vote(1, b"")
    work.apply(1)
    behind = CUTS[2][1]
    assert work.engine is not None
    freed = weakref.ref(next(iter(work.engine.layers[behind].parameters.values())))
    shelved = dict(work.shelve())
    assert work.layer_bytes == tuple(sum(tensor.nbytes for tensor in shelved[index].values()) for index in range(count))
    lay = {index: places(state) for index, state in shelved.items()}
    shared = {index for use in work.chain.shared for index in use.layers}
    assert 0 < behind < min(shared)
    assert opened(2, plan_of(*CUTS[2]), {index: shelved.pop(index) for index in range(behind)}) == {
        index: lay[index] for index in range(behind)
    }
    elsewhere = {behind: layer_state.cloned(shelved[behind])}
    del shelved[behind]
    copies = {index: work.follow(index, shelved.pop(index)) for index in range(behind + 1, count)}
    for index, copy in copies.items():
        assert (places(copy.state(copy=False)) == lay[index]) == (index not in shared)
    assert freed() is not None
    monkeypatch.setattr(work.loop, "compute", lambda step: None)
    work.compute(2)
    OwnedThread("papers", lambda: {}["no such member"], work._papers_failed).start()
    wait_until(lambda: work._failure is not None)
    with pytest.raises(CapslogError, match="papers failed with KeyError"):  # a generation without a plan file ends
        work.compute(2)
    assert freed() is None, "what has not become a copy when training goes on takes no memory"
    del lay[behind]
    states = dict(work.shelve()) | elsewhere | {index: copy.state(copy=False) for index, copy in copies.items()}
    apart = {0, behind + 1}  # these come from another member, although this one holds them as well
    assert not apart & shared
    written: list[int] = []
    assert work._writer is not None
    work._writer.join()
    monkeypatch.setattr(work, "_placed", lambda number, stages: (time.sleep(0.2), written.append(number)))
    again = opened(3, plan_of(0), states | {index: layer_state.cloned(states[index]) for index in apart})
    assert all(set(again[index]).isdisjoint(lay.pop(index)) for index in apart)
    assert {index: again[index] for index in lay if index not in shared} == {
        index: lay[index] for index in lay if index not in shared
    }
    work.close()
    assert written == [3], "the end waits for the newest plan file"
