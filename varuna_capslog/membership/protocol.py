"""The membership protocol: `step(job, state, event) -> (state, effects)`, all decisions of one member in every change.

A pure function without I/O, clocks or randomness: the live runtime, the exhaustive explorer and the simulator run
this same code. The runtime keeps one `State` per member, feeds it the events of `messages.py` one after the other and
carries out the effects in the order given; time enters only as `Tick`, a lost peer only as `Broken` and `Suspects`.

This holds, whatever is lost, late, doubled or wrongly suspected (`tests/rig/search/world.py` checks it,
`docs/membership-protocol.md` explains it):

- Two groups never train. A generation is founded only by compare-and-set on its predecessor, by a voter of the
  predecessor that has stopped answering it for ever; a step needs the vote of every voter. So when g+1 exists, no
  step of g can get all its votes any more, unless all had voted before.
- A settled step is never lost. A vote that succeeded here does not prove what the others know, but it proves that all
  of them hold the boundary *before* the step; that boundary is dropped only when the next vote has succeeded.
- A state that was taken back is never mixed with another: states are named by `Stamp`, and the record of a generation
  says which stamps lie on its past.
- A damaged copy is never used if a participant could notice it: copies made ahead are compared with their owners in
  the first round of a generation, and a layer that arrives damaged ends the generation (`Damaged`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from varuna_capslog.membership import changes, recovery
from varuna_capslog.membership import messages as m
from varuna_capslog.membership.changes import Job, Phase, Roles, State, Step
from varuna_capslog.membership.generation import Generation, Held, Member, Stamp

__all__ = ["Phase", "State", "step"]


def step(job: Job, state: State, event: m.ProtocolEvent) -> Step:
    """Handle an event at one member. Unknown, late and doubled events change nothing."""
    if state.phase is Phase.STOPPED:
        return state, ()
    match event:
        case m.Heard():
            return _heard(job, state, event)
        case m.GenerationEvent(generation) if generation != state.record.number:
            return state, ()
        case m.Tally():
            return _tally(job, state, event.round, event.values)
        case m.Computed():
            return _computed(state, event)
        case m.Copied():
            return _copied(state, event)
        case m.Received():
            return _received(state, event)
        case m.StoreSays():
            return changes.store_says(state, event.record)
        case m.StoreLost():
            return changes.store_lost(state)
        case m.Damaged() | m.Broken():  # a damaged layer is not taken, and is sent again only after a change
            return changes.broken(state)
        case m.Tightened(voted=True) if state.phase is Phase.RUN and state.cast:
            # like a lost tally; but it proves that all hold the boundary before the step: older ones are freed
            kept = replace(state, cast=False, held=_kept(state, state.at))
            return changes.tightened(kept, event.capacity)
        case m.Tightened(voted=False):
            return changes.tightened(state, event.capacity)
        case m.Suspects():
            return changes.suspects(state, event.members - {state.me})
        case m.Tick():
            return changes.tick(state)
        case m.Enter():
            return replace(state, wants_in=True), (m.ReadStore(),)
        case m.Wished():
            return changes.wish(state, event.change, event.urgent, event.save)
        case m.Hint():
            return changes.hint(state, event.change)
        case m.Prepared():
            return _prepared(state, event)
        case m.Checkpointed():
            # A checkpoint from before a roll-back is void. One that was written in the background is of an earlier
            # boundary, of which no member may hold a layer any more; it counts if it lies on this generation's past.
            behind = event.stamp.step <= state.at.step and state.record.continues(event.stamp)
            newer = event.stamp > state.checkpoint and (behind or event.stamp in {stamp for _, stamp in state.held})
            return (replace(state, checkpoint=event.stamp) if newer else state), ()
        case m.Farewell():
            if state.phase is Phase.SERVE:
                return changes.outside(state, state.record, wants_in=False)
    return state, ()


# -- rounds ----------------------------------------------------------------------------------------------------------


def _heard(job: Job, state: State, event: m.Heard) -> Step:
    """Collect a round value by value. A value of a newer generation makes it read the store; older ones are dropped."""
    if event.generation < state.record.number:
        return state, ()
    newest = max((heard.generation for heard in state.heard), default=state.record.number)
    state = replace(state, heard=state.heard | {event})
    if event.generation > state.record.number:
        return state, (m.ReadStore(),) if event.generation > newest else ()
    return _complete(job, state)


def _complete(job: Job, state: State) -> Step:
    """Act on the present round once all of its values were heard."""
    if not state.cast:
        return state, ()
    voters = state.record.members if state.round else state.record.participants
    if len(state.heard) < len(voters):  # saves the costlier count below, which would run for each value
        return state, ()
    values = {
        heard.sender: heard.value
        for heard in state.heard
        if heard.generation == state.record.number and heard.round == state.round
    }
    if len(values) < len(voters):
        return state, ()
    return _tally(job, state, state.round, values)


def _tally(job: Job, state: State, number: int, values: Mapping[Member, m.Value]) -> Step:
    """Handle a complete round of the present generation in which this member has cast."""
    if number != state.round or not state.cast:
        return state, ()
    if state.phase is Phase.GATHER:
        return _first_round(job, state, values)
    if state.phase is Phase.RUN:
        return _voted(job, state, job.remembered(state.record, values, _count))
    return state, ()


def _first_round(job: Job, state: State, values: Mapping[Member, m.Value]) -> Step:
    """Handle a complete round 0: all participants have the same values and leave out the same untrusted copies."""
    decision, decided, left_out = job.remembered(state.record, values, _decide)
    mine = frozenset(entry for entry in state.held if (state.me, entry[0]) in left_out) if left_out else frozenset()
    state, effects = _decided(replace(state, held=state.held - mine), decision)
    return state, (decided, *effects)


def _decide(
    job: Job, record: Generation, values: Mapping[Member, m.Value]
) -> tuple[recovery.Decision, m.Decided, frozenset[tuple[Member, int]]]:
    """Decide as all participants do: they have the same values, and use them in the same order."""
    brought: dict[Member, m.Contribution] = {member: values[member] for member in record.participants}  # type: ignore[misc]
    left_out = recovery.distrusted(brought, record.continues)
    brought = recovery.without(brought, left_out)
    decision = recovery.decide(record, brought, job.layer_bytes, job.place)
    moved_bytes = sum(move.bytes for move in decision.moves)
    layers = frozenset(layer for _, layer in left_out)
    return decision, m.Decided(record.number, brought, layers, moved_bytes), left_out


def _decided(state: State, decision: recovery.Decision) -> Step:
    """Carry out the decision of the first round at this member."""
    base, layout = decision.boundary.stamp, decision.layout
    state = replace(state, checkpoint=decision.checkpoint)
    if layout is None:
        why = decision.waiting or ""
        if not state.votes:
            state, more = changes.outside(state, state.record, wants_in=False)
            return state, (m.Persist(why), *more)
        waiting = replace(state, phase=Phase.WAIT, regress=decision.for_holders)
        wait_effects = (m.Persist(why), m.Wait(why))
        if not state.wishes.changes:
            return waiting, wait_effects
        # A change was wished while values were gathered; without votes it is made at once.
        waiting, more = changes.stop_answering(
            replace(waiting, wishes=replace(waiting.wishes, planned=True), regress=False)
        )
        return waiting, (*wait_effects, *more)
    # Roll-back: boundaries beyond the base were never settled, or the members do not hold all their layers.
    kept = frozenset(entry for entry in state.held if entry[1] == base or entry[1].step < base.step)
    mine = [move for move in decision.moves if state.me in (move.source, move.target)]
    generation = state.record.number
    effects: list[m.Effect] = [
        m.Send(generation, move.layer, base, move.target) for move in mine if move.source == state.me
    ]
    effects += [m.Load(generation, move.layer, base) for move in mine if move.source is None]
    state = replace(
        state,
        phase=Phase.INSTALL if state.votes else Phase.SERVE,
        held=kept,
        at=base,
        base=base,
        roles=Roles(
            own=frozenset(layout.owned.get(state.me, ())),
            copies=frozenset(layout.copied.get(state.me, ())),
            missing=frozenset(move.layer for move in mine if move.target == state.me),
            layout=layout,
        ),
        wishes=replace(state.wishes, prepared=frozenset()),
    )
    state, more = _start(state)
    return state, (*effects, *more)


def _received(state: State, event: m.Received) -> Step:
    if state.phase is not Phase.INSTALL or event.layer not in state.roles.missing:
        return state, ()
    roles = replace(state.roles, missing=state.roles.missing - {event.layer})
    return _start(replace(state, held=state.held | {(event.layer, state.at)}, roles=roles))


def _start(state: State) -> Step:
    if state.phase is not Phase.INSTALL or state.roles.missing or state.roles.layout is None:
        return state, ()
    install = m.Install(state.record.number, state.at, state.roles.layout)
    state, effects = _next_step(replace(state, phase=Phase.RUN))
    return state, (install, *effects)


def _next_step(state: State) -> Step:
    number = state.at.step + 1
    heard = frozenset(
        heard for heard in state.heard if (heard.generation, heard.round) >= (state.record.number, number)
    )
    state = replace(state, round=number, cast=False, computed=False, copied=0, heard=heard)
    return state, (m.Compute(state.record.number, number),)


# -- a step ------------------------------------------------------------------------------------------------------------


def _computed(state: State, event: m.Computed) -> Step:
    if state.phase is not Phase.RUN or event.step != state.round or state.computed:
        return state, ()
    if state.wishes.saving:  # a checkpoint that could not be written is not tried again
        state = replace(state, wishes=replace(state.wishes, save=False, saving=False))
    if not event.finite:  # a step that is not finite needs no protection
        return _cast(replace(state, computed=True), finite=False)
    return _cast_if_ready(replace(state, computed=True))


def _copied(state: State, event: m.Copied) -> Step:
    if state.phase is not Phase.RUN or event.step != state.round:
        return state, ()
    follows = frozenset((layer, state.at) for layer in state.roles.copies | state.roles.shadows)
    return _cast_if_ready(replace(state, copied=event.step, held=state.held | follows))


def _cast_if_ready(state: State) -> Step:
    """Cast the vote once the step is computed and its copies have arrived: the vote confirms them, too."""
    protected = state.copied == state.round or not (state.roles.copies or state.roles.shadows)
    if not state.computed or state.cast or not protected:
        return state, ()
    return _cast(state, finite=True)


def _cast(state: State, finite: bool) -> Step:
    wishes, number = state.wishes, state.record.number
    vote = m.Vote(finite, wishes.changes, wishes.prepared, wishes.urgent, wishes.hints, wishes.save)
    return replace(state, cast=True, voted=(number, state.at)), (m.Cast(number, state.round, vote),)


class _Counted(NamedTuple):
    """Votes of all members together. prepared: the changes for which all are prepared; None: the members differ."""

    finite: bool
    changes: frozenset[m.Change]
    hints: frozenset[m.Change]
    urgent: bool
    save: bool
    prepared: frozenset[m.Change] | None


def _count(job: Job, record: Generation, values: Mapping[Member, m.Value]) -> _Counted:
    votes: list[m.Vote] = [values[member] for member in record.members]  # type: ignore[misc]
    nothing, prepared = frozenset[m.Change](), {vote.prepared for vote in votes}
    return _Counted(
        all(vote.finite for vote in votes),
        nothing.union(*[vote.changes for vote in votes]),
        nothing.union(*[vote.hints for vote in votes]),
        any(vote.urgent for vote in votes),
        any(vote.save for vote in votes),
        prepared.pop() if len(prepared) == 1 else None,
    )


def _voted(job: Job, state: State, votes: _Counted) -> Step:
    """Act on the complete vote on a step. It is unknown if the other members have received it."""
    generation, number = state.record.number, state.round
    if not votes.finite:
        why = f"step {number} was voted down; nothing was changed"
        return replace(state, phase=Phase.STOPPED), (m.Discard(generation, number), m.Persist(why))
    before, after = state.at, Stamp(number, generation)
    follows = state.roles.own | state.roles.shadows | (state.roles.copies if job.sync else frozenset())
    held = _kept(state, before) | frozenset((layer, after) for layer in follows)
    effects: list[m.Effect] = [m.Apply(generation, number, before)]
    if state.record.leaving:
        effects.append(m.LetLeave(generation, state.record.leaving))  # sent again after each step: it may be lost
    state = replace(state, held=held, at=after)
    if state.unseen is not None:
        state, more = changes.adopt(state, state.unseen)
        return state, (*effects, *more)
    # A change that may not be finished in time waits one step for the checkpoint. All members remember its wish, or it
    # would be lost with the generation, or with the only member that knew it.
    wished, hinted, save = votes.changes, votes.hints, votes.save
    wishes = state.wishes
    wishes = replace(wishes, changes=wishes.changes | wished, hints=wishes.hints | hinted, save=wishes.save or save)
    state = replace(state, wishes=wishes)
    if wished and not save and (votes.urgent or not job.shadows or votes.prepared == wished):
        state, more = changes.stop_answering(replace(state, wishes=replace(wishes, planned=True)))
        return state, (*effects, *more)
    if wished and wishes.prepared != wished:
        effects.append(m.Prepare(generation, wished))
    elif hinted and not wished and job.shadows:
        effects.append(m.Prepare(generation, hinted, hinted=True))
    if save:
        effects.append(m.SaveAll(generation))
        state = replace(state, wishes=replace(wishes, saving=True))
    state, more = _next_step(state)
    return state, (*effects, *more)


def _kept(state: State, before: Stamp) -> Held:
    """State to keep after a successful vote: the boundary before it, in the roles of this generation. All voters hold
    that boundary, copies included, or they would not have voted; so no older boundary is ever needed.
    """
    roles = state.roles.own | state.roles.copies | state.roles.shadows
    return frozenset(entry for entry in state.held if entry[1] == before and entry[0] in roles)


def _prepared(state: State, event: m.Prepared) -> Step:
    if state.phase is not Phase.RUN or state.cast or state.copied == state.round:
        return state, ()  # too late for this step: Prepare comes again
    held = state.held | {(layer, state.at) for layer in event.layers}
    roles = replace(state.roles, shadows=event.layers - state.roles.own - state.roles.copies)
    wishes = replace(state.wishes, prepared=event.changes)
    # these shadow copies replace earlier ones: the vote may have none left to wait for
    return _cast_if_ready(replace(state, wishes=wishes, roles=roles, held=held))
