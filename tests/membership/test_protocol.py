"""Single rules of the protocol, for one member or a few driven by hand."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.rig.search.places import make_job
from tests.rig.search.world import World
from varuna_capslog.elastic.member.effects import Effects
from varuna_capslog.membership import messages as m
from varuna_capslog.membership import recovery
from varuna_capslog.membership.generation import EMPTY, INITIAL, Generation, Stamp
from varuna_capslog.membership.protocol import Phase, State, step


class Group(World):
    """Members whose effects are kept, driven by hand."""

    def __init__(self, count: int = 3, **rules: bool | int) -> None:
        super().__init__(make_job(3, **rules), int(rules.get("redundancy", 1)))  # type: ignore[arg-type]
        self.effects: list[list[m.Effect]] = [[] for _ in range(count)]
        self.names = [f"m{i}" for i in range(count)]
        for name in self.names:
            self.feed(self.add(State(name, f"host of {name}")), m.Enter())
        self.found(EMPTY.successor(self.names))

    def emit(self, i: int, effect: m.Effect) -> None:
        self.effects[i].append(effect)

    def found(self, record: Generation) -> None:
        self.compare_and_set(m.CompareAndSet(record.number - 1, record))
        for i in range(len(self.states)):
            self.feed(i, m.StoreSays(record))

    def tally(self, *members: int) -> None:
        """Send the complete tally of the present round to these members."""
        for i in members:
            key = (self.states[i].record.number, self.states[i].round)
            self.feed(i, m.Tally(*key, dict(self.casts[key])))

    def install(self) -> None:
        for i, state in enumerate(self.states):
            for layer in sorted(state.roles.missing):
                self.feed(i, m.Received(state.record.number, layer))

    def vote(self, *against: int) -> None:
        for i, state in enumerate(self.states):
            if state.phase is Phase.RUN:
                self.feed(i, m.Computed(state.record.number, state.round, i not in against))
                self.feed(i, m.Copied(state.record.number, state.round))

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.vote()
            self.tally(*[i for i, state in enumerate(self.states) if state.phase is Phase.RUN])

    def said(self, i: int, kind: type) -> list[m.Effect]:
        return [effect for effect in self.effects[i] if isinstance(effect, kind)]

    def proposal(self, i: int) -> Generation:
        effect = self.said(i, m.CompareAndSet)[-1]
        assert isinstance(effect, m.CompareAndSet)
        return effect.record


def running(steps: int = 0, **rules: bool | int) -> Group:
    group = Group(**rules)
    group.tally(0, 1, 2)
    group.install()
    group.train(steps)
    return group


def boundaries(state: State) -> set[int]:
    return {stamp.step for _, stamp in state.held}


def test_the_boundary_before_outlives_a_vote_until_the_next_one() -> None:
    group = running(2)
    assert all(boundaries(state) == {1, 2} for state in group.states)
    group.vote()
    group.tally(0)  # the others hear nothing of it
    assert boundaries(group.states[0]) == {2, 3}
    assert boundaries(group.states[1]) == {1, 2}


def test_survivors_meet_at_the_newest_boundary_that_all_have() -> None:
    group = running(2)
    group.vote()
    group.tally(1)  # it keeps no copies
    for i in (0, 1):
        group.feed(i, m.Suspects(frozenset({"m2"})))
    group.found(group.proposal(0))
    group.tally(0, 1)
    assert group.truth.bases[2] == Stamp(2, 1)
    assert boundaries(group.states[1]) <= {1, 2}  # step 3 is taken back
    group.install()
    group.train(1)
    assert group.states[0].at == group.states[1].at == Stamp(3, 2)


def test_sync_loses_the_interrupted_step_only_and_async_one_more() -> None:
    for sync, base in ((True, 3), (False, 2)):
        group = running(3, sync=sync)
        assert {state.at.step for state in group.states} == {3}
        for i in (0, 1):
            group.feed(i, m.Suspects(frozenset({"m2"})))
        group.found(group.proposal(0))
        group.tally(0, 1)
        assert group.truth.bases[2].step == base


def test_a_member_whose_step_found_too_little_memory_founds_the_same_members_anew_with_less() -> None:
    group = running(2)
    group.feed(1, m.Tightened(1, 500))
    proposal = group.proposal(1)
    assert (proposal.number, proposal.members, proposal.leaving) == (2, ("m0", "m1", "m2"), ())
    assert group.said(1, m.Abort)
    group.found(proposal)
    brought = group.casts[(2, 0)]
    assert {member: value.capacity for member, value in brought.items()} == {"m0": 0, "m1": 500, "m2": 0}  # type: ignore[union-attr]
    group.tally(0, 1, 2)
    group.install()
    assert group.truth.bases[2] == Stamp(2, 1), "the step is made again"
    group.train(1)
    assert {state.at for state in group.states} == {Stamp(3, 2)}
    group.vote()
    group.feed(1, m.Tightened(2, 100))
    assert group.states[1].capacity == 500, "it has voted, so the step did find its memory"
    group.tally(0, 1, 2)
    group.feed(1, m.Tightened(1, 100))
    assert group.states[1].phase is Phase.RUN, "of a generation that is gone"


@pytest.mark.parametrize(("redundancy", "base"), [(0, 2), (1, 3)])
def test_a_member_that_finds_no_memory_for_a_step_that_all_voted_for_brings_the_boundary_before(
    redundancy: int, base: int
) -> None:
    """The others have made the step. They take it back, or hold copies of the layers that were not updated."""
    group = running(2, redundancy=redundancy)
    group.vote()
    group.tally(0, 2)
    group.feed(1, m.Tightened(1, 500, voted=True))
    assert group.said(1, m.Abort)
    assert boundaries(group.states[1]) == {2}, "older ones made room for the boundary before"
    group.found(group.proposal(1))
    brought = group.casts[(2, 0)]
    assert {member: value.capacity for member, value in brought.items()} == {"m0": 0, "m1": 500, "m2": 0}  # type: ignore[union-attr]
    group.tally(0, 1, 2)
    group.install()
    assert group.truth.bases[2] == Stamp(base, 1)
    group.train(1)
    assert {state.at for state in group.states} == {Stamp(base + 1, 2)}
    group.feed(1, m.Tightened(2, 100, voted=True))
    assert group.states[1].phase is Phase.RUN, "nothing was voted"


def test_a_notice_costs_no_step_and_the_leaver_is_let_go() -> None:
    group = running(2)
    group.feed(2, m.Wished(("leave", "m2")))
    group.train(1)
    record = group.proposal(0)
    assert (record.members, record.leaving) == (("m0", "m1"), ("m2",))
    assert record == group.proposal(1) == group.proposal(2)
    group.found(record)
    group.tally(0, 1, 2)
    assert group.truth.bases[2] == Stamp(3, 1)  # nothing is done again
    assert group.states[2].phase is Phase.SERVE
    group.install()
    group.train(1)
    assert group.said(0, m.LetLeave) == [m.LetLeave(2, ("m2",))]
    group.feed(2, m.Farewell(2))
    assert group.said(2, m.Release)
    assert group.states[0].at == Stamp(4, 2)


def test_notices_close_together_become_one_change() -> None:
    group = running(1)
    group.feed(0, m.Wished(("leave", "m0")))
    group.feed(2, m.Wished(("leave", "m2")))
    group.feed(1, m.Wished(("join", "m9")))
    group.train(1)
    assert (group.proposal(1).members, group.proposal(1).leaving) == (("m1", "m9"), ("m0", "m2"))


def test_one_that_leaves_and_asks_to_come_back_is_named_once() -> None:
    group = running(1)
    group.feed(2, m.Wished(("leave", "m2")))
    group.train(1)
    group.found(group.proposal(0))  # nobody has trained in it: m2 may hold layers that are needed
    group.feed(0, m.Wished(("join", "m2")))
    group.feed(0, m.Broken(2))
    group.feed(0, m.Tick())
    assert (group.proposal(0).members, group.proposal(0).leaving) == (("m0", "m1", "m2"), ())


def test_with_shadows_a_change_waits_until_all_are_prepared_or_one_is_in_a_hurry() -> None:
    wish = frozenset({("leave", "m2")})
    for urgent in (False, True):
        group = running(1, shadows=True)
        group.feed(2, m.Wished(("leave", "m2"), urgent))
        group.train(1)
        if urgent:
            assert group.proposal(0).leaving == ("m2",)
            continue
        assert group.said(0, m.Prepare) == [m.Prepare(1, wish)]
        for i in range(3):
            group.feed(i, m.Prepared(1, wish, frozenset({2}) if i == 0 else frozenset()))
        group.train(1)
        assert group.proposal(0).leaving == ("m2",)
        group.found(group.proposal(0))
        group.tally(0, 1, 2)
        assert 2 not in group.states[0].roles.missing  # it came ahead, and was kept current


def test_a_change_that_brings_nothing_here_ends_the_wait_for_what_an_earlier_one_brought() -> None:
    first = frozenset({("leave", "m2")})
    second = first | {("join", "m3")}
    group = Group(3, shadows=True, redundancy=0)
    group.tally(0, 1, 2)
    group.install()
    group.feed(0, m.Prepared(1, first, frozenset({2})))
    group.feed(0, m.Computed(1, 1))
    assert not group.states[0].cast  # it follows layer 2, whose gradients are not here
    group.feed(0, m.Prepared(1, second, frozenset()))
    assert [effect.value.prepared for effect in group.said(0, m.Cast)[1:]] == [second]  # the first round's came before


def test_a_hint_copies_ahead_in_every_generation_and_changes_no_membership() -> None:
    hint = frozenset({("leave", "m2")})
    for shadows in (True, False):
        group = running(1, shadows=shadows)
        group.feed(2, m.Hint(("leave", "m2")))
        group.train(3)
        assert all(state.record.number == 1 and state.at.step == 4 for state in group.states)
        wanted = [m.Prepare(1, hint, hinted=True)] * 3 if shadows else []  # said again: it may be forgotten
        assert [group.said(i, m.Prepare) for i in range(3)] == [wanted] * 3
    group = running(1, shadows=True)
    group.feed(2, m.Hint(("leave", "m2")))
    group.train(1)
    group.feed(1, m.Wished(("leave", "m1"), True))  # another member leaves: a certain change goes before a possible one
    group.train(1)
    group.found(group.proposal(0))
    assert group.proposal(0).leaving == ("m1",)
    group.tally(0, 1, 2)
    group.install()
    group.train(1)
    assert group.said(0, m.Prepare)[-1] == m.Prepare(2, hint, hinted=True)


def test_a_checkpoint_that_was_written_beside_the_steps_counts_though_nobody_holds_its_boundary_any_more() -> None:
    group = running(5)
    assert 2 not in boundaries(group.states[0])
    group.feed(0, m.Checkpointed(Stamp(2, 1)))
    assert group.states[0].checkpoint == Stamp(2, 1)
    group.feed(0, m.Checkpointed(Stamp(1, 1)))
    assert group.states[0].checkpoint == Stamp(2, 1), "an older one"
    group.feed(0, m.Checkpointed(Stamp(9, 1)))
    assert group.states[0].checkpoint == Stamp(2, 1), "one that was not reached"


def test_a_change_that_may_be_cut_off_waits_for_a_checkpoint_and_no_longer() -> None:
    group = running(1)
    group.feed(2, m.Wished(("leave", "m2"), urgent=True, save=True))
    group.train(1)
    assert [group.said(i, m.SaveAll) for i in range(3)] == [[m.SaveAll(1)]] * 3
    assert all(state.phase is Phase.RUN for state in group.states)
    for i in range(3):
        group.feed(i, m.Checkpointed(Stamp(2, 1)))
    group.train(1)
    assert group.proposal(0).leaving == ("m2",)
    assert group.proposal(0).checkpoint == Stamp(2, 1)
    assert len(group.said(0, m.SaveAll)) == 1
    group = running(1)
    group.feed(2, m.Wished(("leave", "m2"), urgent=True, save=True))
    group.train(2)  # it could not be written
    assert group.proposal(0).leaving == ("m2",)


@pytest.mark.parametrize("moment", ["after its vote", "before its vote", "before the checkpoint is written"])
def test_a_checkpoint_that_is_to_come_first_is_asked_for_until_it_was_written(moment: str) -> None:
    group = running(1)
    if moment == "after its vote":
        group.vote()
    group.feed(2, m.Wished(("leave", "m2"), urgent=True, save=True))
    if moment == "after its vote":
        group.tally(0, 1, 2)
    elif moment == "before the checkpoint is written":
        group.train(1)
        assert group.said(1, m.SaveAll) == [m.SaveAll(1)]
    for i in range(3) if moment != "after its vote" else ():
        group.feed(i, m.Broken(1))
    if moment != "after its vote":  # a generation founded by a member that had not heard of the notice
        base, reached = group.states[0].base, group.states[0].at.step
        group.found(group.states[0].record.successor(group.names, base=base, reached=reached))
        assert [state.wishes.save for state in group.states] == [moment == "before the checkpoint is written"] * 2 + [
            True
        ]
        group.tally(0, 1, 2)
        group.install()
    number = group.states[0].record.number
    group.train(1)
    assert [group.said(i, m.SaveAll)[-1] for i in range(3)] == [m.SaveAll(number)] * 3
    group.train(1)
    assert group.proposal(0).leaving == ("m2",)
    assert group.states[0].record.number == number


def test_a_step_that_is_voted_down_changes_nothing() -> None:
    group = running(2)
    before = [(state.held, memory) for state, memory in zip(group.states, group.memory, strict=True)]
    group.vote(1)
    group.tally(0, 1, 2)
    assert all(state.phase is Phase.STOPPED for state in group.states)
    assert [(state.held, memory) for state, memory in zip(group.states, group.memory, strict=True)] == before
    assert all(group.said(i, m.Discard) == [m.Discard(1, 3)] for i in range(3))


def test_a_member_of_the_next_generation_never_answers_the_old_one() -> None:
    group = running(1)
    number, turn = group.states[0].record.number, group.states[0].round
    group.feed(0, m.Suspects(frozenset({"m1"})))
    for event in (m.Computed(number, turn), m.Copied(number, turn), m.Broken(number)):
        state, effects = step(group.job, group.states[0], event)
        assert not [effect for effect in effects if isinstance(effect, m.Cast)]
        assert state.phase is Phase.CHANGE


def test_who_was_left_out_refuses_to_train_and_asks_to_come_back() -> None:
    group = running(2)
    held = group.states[2].held
    group.feed(0, m.Suspects(frozenset({"m2"})))
    group.found(group.proposal(0))
    assert group.states[2].phase is Phase.OUTSIDE
    assert group.states[2].held == held  # it may be needed yet
    assert group.said(2, m.Ask)[-1] == m.Ask(("m0", "m1"))
    state, effects = step(group.job, group.states[2], m.Computed(1, 3))
    assert effects == ()
    assert state == group.states[2]


def test_a_minority_that_holds_too_little_does_not_hurry() -> None:
    group = running(2, redundancy=0)
    group.feed(0, m.Suspects(frozenset({"m1", "m2"})))
    assert not group.said(0, m.CompareAndSet)
    group.feed(0, m.Tick())
    group.found(group.proposal(0))
    group.tally(0)
    assert group.states[0].phase is Phase.WAIT  # settled steps would be lost
    assert group.said(0, m.Persist)
    group.feed(0, m.Tick())  # nobody has come back
    assert group.proposal(0).regress


def test_holders_who_come_back_save_what_was_settled() -> None:
    group = running(2, redundancy=0)
    group.feed(0, m.Suspects(frozenset({"m1", "m2"})))
    group.feed(0, m.Tick())
    group.found(group.proposal(0))
    group.tally(0)
    group.feed(0, m.Wished(("join", "m1")))
    assert not group.proposal(0).regress  # no time limit has passed
    group.found(group.proposal(0))
    group.tally(0, 1)
    assert group.states[1].phase is Phase.WAIT  # layer 2 is still missing
    group.feed(1, m.Wished(("join", "m2")))
    group.found(group.proposal(1))
    group.tally(0, 1, 2)
    assert group.truth.bases[4] == Stamp(2, 1)


def test_a_notice_that_comes_while_values_are_gathered_is_followed_by_those_that_then_wait() -> None:
    group = Group(fewest=4)
    group.feed(2, m.Wished(("leave", "m2")))
    group.tally(0, 1, 2)
    assert [state.phase for state in group.states] == [Phase.WAIT, Phase.WAIT, Phase.CHANGE]
    assert group.proposal(2).members == ("m0", "m1")
    group.found(group.proposal(2))
    assert group.states[2].phase is not Phase.WAIT


def test_the_loss_of_the_store_stops_a_change_but_no_run() -> None:
    group = running(1)
    group.feed(0, m.StoreLost())
    assert group.states[0].phase is Phase.RUN
    group.train(1)
    group.feed(0, m.Suspects(frozenset({"m1"})))
    group.feed(0, m.StoreLost())
    assert group.states[0].phase is Phase.STOPPED
    assert group.said(0, m.Persist)


def test_the_last_ones_park_the_run_on_disk_and_others_take_it_up() -> None:
    group = running(1)
    for i in range(3):
        group.feed(i, m.Wished(("leave", f"m{i}")))
    group.train(1)
    record = group.proposal(0)
    assert record.members == ()
    kinds = [type(effect) for effect in group.effects[0]]
    assert kinds.index(m.Persist) < kinds.index(m.CompareAndSet)
    group.found(record)
    assert all(group.said(i, m.Release) for i in range(3))
    effects: list[m.Effect] = []
    group.effects.append(effects)
    late = group.add(State("m9", "host of m9", held=group.states[0].held | group.states[2].held))
    group.memory[late] = group.states[late].held  # read from disk
    group.feed(late, m.Enter())
    group.feed(late, m.StoreSays(record))
    group.found(group.proposal(late))
    group.memory[late] |= group.states[1].held
    assert group.states[late].phase is Phase.GATHER


def test_older_and_doubled_events_change_nothing() -> None:
    group = running(2)
    state = group.states[0]
    doubled = m.Tally(1, 2, dict(group.casts[1, 2]))
    for event in (doubled, m.Received(1, 0), m.StoreSays(EMPTY), m.Broken(0), m.Computed(1, 2), m.Copied(1, 2)):
        assert step(group.job, state, event) == (state, ())


def test_a_vote_that_is_out_is_waited_for_before_a_newer_generation_is_adopted() -> None:
    group = running(1)
    group.vote()
    newer = group.states[0].record.successor(["m0", "m1", "m2"], base=INITIAL, reached=2)
    group.compare_and_set(m.CompareAndSet(1, newer))
    group.feed(1, m.StoreSays(newer))
    assert group.states[1].phase is Phase.RUN
    group.tally(1)
    assert (group.states[1].phase, group.states[1].at) == (Phase.GATHER, Stamp(2, 1))


def test_values_heard_one_by_one_make_a_tally_and_older_ones_are_fenced() -> None:
    group = running(1)
    group.vote()
    state = replace(group.states[0])
    votes = group.casts[1, 2]
    state, _ = step(group.job, state, m.Heard(0, 2, "m1", votes["m1"]))
    assert not state.heard
    for member in ("m0", "m1", "m1"):
        state, effects = step(group.job, state, m.Heard(1, 2, member, votes[member]))
        assert effects == ()
    state, effects = step(group.job, state, m.Heard(1, 2, "m2", votes["m2"]))
    assert m.Apply(1, 2, Stamp(1, 1)) in effects
    newer, effects = step(group.job, state, m.Heard(5, 0, "m1", votes["m1"]))
    assert effects == (m.ReadStore(),)
    assert step(group.job, newer, m.Heard(5, 0, "m2", votes["m2"]))[1] == (), "the store is asked once"


def proof(layer: int, owner: bool, digest: str, boundary: int = 2) -> m.Proof:
    return m.Proof(layer, Stamp(boundary, 1), owner, digest)


@pytest.mark.parametrize(
    ("owner", "copy", "trusted"),
    [
        (proof(2, True, "a"), proof(2, False, "a"), True),
        (proof(2, True, "a"), proof(2, False, "b"), False),
        (proof(2, True, "a", 3), proof(2, False, "b"), False),
        (proof(2, True, "a"), proof(2, False, "b", 3), False),
        (proof(1, True, "a"), proof(2, False, "b"), True),
        (proof(2, True, "a", 0), proof(2, False, "b"), True),
    ],
    ids=["equal", "another", "the owner has made one step more", "the owner has made one step less"]
    + ["no owner of this layer", "an owner of long ago"],
)
def test_a_copy_made_ahead_is_left_out_where_its_owner_says_so(owner: m.Proof, copy: m.Proof, trusted: bool) -> None:
    held = frozenset((layer, Stamp(2, 1)) for layer in range(3))
    values = {
        "m0": m.Contribution(held, "a", proofs=frozenset({owner})),
        "m1": m.Contribution(held, "b", proofs=frozenset({copy})),
    }
    left_out = recovery.distrusted(values)
    assert left_out == (frozenset() if trusted else {("m1", 2)})
    assert recovery.without(values, left_out)["m0"] == values["m0"]
    kept = {layer for layer, _ in recovery.without(values, left_out)["m1"].held}
    assert kept == ({0, 1, 2} if trusted else {0, 1})


def test_all_members_leave_out_the_damaged_copy_and_its_owner_sends_the_layer() -> None:
    group = Group(3, shadows=True, redundancy=0)
    group.proves = True
    group.tally(0, 1, 2)
    group.install()
    group.train(1)
    wish = frozenset({("leave", "m2")})
    group.feed(2, m.Wished(("leave", "m2")))
    group.train(1)
    for i in range(3):
        group.feed(i, m.Prepared(1, wish, frozenset({2}) if i == 1 else frozenset()))
    group.damage(1, 2)
    group.train(1)
    group.found(group.proposal(0))
    group.tally(0, 1, 2)
    decisions = [group.said(i, m.Decided)[-1] for i in range(3)]
    assert decisions[0] == decisions[1] == decisions[2]
    assert [decision.distrusted for decision in decisions if isinstance(decision, m.Decided)] == [{2}] * 3
    assert 2 in group.states[1].roles.missing
    assert not group.truth.damaged, "the damaged copy was freed"
    assert [effect.layer for effect in group.said(2, m.Send) if isinstance(effect, m.Send)] == [2]


def test_a_layer_that_arrives_damaged_ends_the_generation_and_is_sent_again_in_the_next_one() -> None:
    group = running(1)
    group.feed(2, m.Wished(("leave", "m2")))
    group.train(1)
    group.found(group.proposal(0))
    group.tally(0, 1, 2)
    i = next(i for i in (0, 1) if group.states[i].roles.missing)
    layer = min(group.states[i].roles.missing)
    group.feed(i, m.Damaged(2, layer))
    assert group.states[i].phase is Phase.CHANGE
    assert (layer, group.states[i].at) not in group.memory[i]
    group.feed(1 - i, m.Broken(2))
    group.feed(i, m.Tick())
    group.found(group.proposal(i))
    group.tally(0, 1, 2)
    group.install()
    assert group.states[i].phase is Phase.RUN


@pytest.mark.parametrize(
    ("kind", "handler"), [(m.ProtocolEvent, step), (m.Effect, Effects.carry_out)], ids=["event", "effect"]
)
def test_every_event_and_every_effect_has_a_case(kind: type, handler: Callable[..., Any]) -> None:
    handled = re.findall(r"\bm\.(\w+)\(", " ".join(re.findall(r"case (.*):", inspect.getsource(handler))))
    kinds = {subclass.__name__ for base in (kind, *kind.__subclasses__()) for subclass in base.__subclasses__()}
    assert kinds - {"GenerationEvent", "GenerationEffect"} <= set(handled)
