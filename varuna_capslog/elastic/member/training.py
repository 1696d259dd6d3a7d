"""Steps of one member: compute, vote, apply, and the updates that keep copies of layers equal to their owners.

`Runtime` decides when, and passes the results to the protocol; `Work` computes.
"""

from __future__ import annotations

import contextlib
import re
import time
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from varuna_capslog.base.errors import HostTierFailed
from varuna_capslog.base.failures import is_out_of_memory
from varuna_capslog.base.units import format_bytes
from varuna_capslog.elastic.member.parts import MemberLoop, Parts, decode, encode
from varuna_capslog.engine.communicator import PeerLost
from varuna_capslog.membership import messages as m
from varuna_capslog.membership.changes import Ahead, Phase, find_ahead, first_owner, stay_with
from varuna_capslog.membership.entries import CheckpointEntry
from varuna_capslog.membership.generation import Member, MemberLayout, Stamp

__all__ = ["Lack", "NotApplied", "Training", "lack_of"]


# -- Steps that run out of memory: reads the errors of torch and of the host tier.
#
# Other programs may take memory that a plan counted on. The member then gives the step up, lets plans count on less
# memory of its device, and all members compute the step again (`Training`, `membership/changes.tightened`).


TRIES = 3
"""Failures in a row for lack of memory, at one member, after which the run stops, with all held states on disk."""

_SIZE = re.compile(r"[Tt]ried to allocate (\d+(?:\.\d+)?) (bytes|KiB|MiB|GiB)")
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_UNKNOWN = 1 << 20
"""Bytes assumed to be lacking where the error names no number."""


@dataclass(frozen=True)
class Lack:
    """Memory that a step lacked.

    bytes: of the allocation that failed on a device, or in the memory of a CPU; 0 where a copy to or from the host
    tier failed: then the same plan is tried again. why: the error's words in that case.
    """

    bytes: int
    why: str | None = None

    def sentence(self, member: str, step: int) -> str:
        """Sentence on the lack, without a period."""
        if self.why is not None:
            return f"{member} could not make step {step}, since {self.why}"
        return f"{member} lacked {format_bytes(self.bytes)} in step {step}"


def lack_of(error: BaseException) -> Lack | None:
    """Return the memory that a step lacked, from its error; None: the error has another cause."""
    if isinstance(error, HostTierFailed):
        return Lack(0, str(error))
    if not is_out_of_memory(error):
        return None
    match = _SIZE.search(str(error))
    return Lack(_UNKNOWN if match is None else max(1, round(float(match[1]) * _UNITS[match[2]])))


# -- the steps of one member


_FOLLOWS = "new cuts and the copies that were lacking, after a small motion"
_MAY_LACK = (RuntimeError, MemoryError, HostTierFailed)


class NotApplied(Exception):
    """A step ran out of memory when it was applied after the vote; the boundary before it is still held."""

    def __init__(self, lack: Lack) -> None:
        super().__init__(lack)
        self.lack = lack


class Training:
    """Training steps of one member. Called by its one thread.

    Attributes:
        todo: the step that the protocol wants computed.
        waits_since: when the last computation ended; `time.monotonic`.
        usual_seconds: of the longest of the last steps; 0 before the first one.
        sent_ahead: layers that this member sent ahead of a planned change in the last generation that trained.
        coming_own: layers that this member is to train after that change.
        save_all: a checkpoint is due at the next boundary, together with all members.
    """

    def __init__(self, parts: Parts, loop: MemberLoop) -> None:
        self._parts, self._loop = parts, loop
        self.todo: m.Compute | None = None
        self.waits_since = 0.0
        self.usual_seconds = 0.0
        self.sent_ahead: frozenset[int] = frozenset()
        self.coming_own: frozenset[int] = frozenset()
        self.save_all = False
        self._ahead: Ahead | None = None
        self._awaited = False  # the layers that come here ahead are not known yet; others may already send them
        self._computing: int | None = None
        self._stop = False
        self._began = 0.0
        self._pressures = 0  # steps that failed here for lack of memory, since the last applied step

    def abort(self) -> None:
        """Drop the step under way: this generation computes no more."""
        if self._computing is not None:
            self._parts.report.lost_step_seconds += time.monotonic() - self._began
        self.todo = self._computing = None

    def adopt(self) -> None:
        """Adopt a newer generation. A request to stop is repeated in its first vote, so that new members hear it."""
        self.abort()
        self._stop = self.save_all = self._awaited = False
        ahead, self._ahead = self._ahead, None
        if ahead is not None:  # else it ended before it copied ahead: the copies of the generation before still count
            self.sent_ahead = frozenset() if ahead.hinted else frozenset(ahead.sent)
            layout = ahead.layout
            self.coming_own = frozenset() if layout is None else frozenset(layout.owned.get(self._parts.me, ()))

    # -- a step -------------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Compute the step that is due and feed Computed; the protocol votes once the step's copies are here."""
        todo, self.todo = self.todo, None
        assert todo is not None
        parts, loop, generation, step = self._parts, self._loop, todo.generation, todo.step
        loop.drain()
        if not self._goes_on(generation):
            return
        try:
            if self._stop or parts.work.is_done(loop.state.at.step):
                self._finish()
                return
            self._between()
            if parts.work.is_done(loop.state.at.step):  # by the evaluation that was made there
                self._finish()
                return
            loop.look_at_deadline()
            self._began = time.monotonic()
            self._computing = step
            self._send_ahead()
            self._begin_digests()
            parts.probe("compute")
            finite, lack = self._compute(step)
        except PeerLost:
            loop.feed(m.Broken(generation))
            return
        if lack is not None:
            loop.feed(self.pressed(step, lack, voted=False))
            return
        parts.probe("computed")
        self._send_updates(generation, step)
        loop.drain()
        if not self._goes_on(generation):
            return
        parts.holdings.advance(loop.state.held, generation, loop.state.at.step)
        self._check_ahead()
        self.waits_since = time.monotonic()
        loop.feed(m.Computed(generation, step, finite))

    def _compute(self, step: int) -> tuple[bool, Lack | None]:
        """Compute a step; return whether this rank's share is finite, and the memory that the step lacked."""
        try:
            return self._parts.work.compute(step), None
        except _MAY_LACK as error:
            lack = lack_of(error)
            if lack is None:
                raise
        return False, lack  # outside the except block: the error has freed the tensors of its frames

    def pressed(self, step: int, lack: Lack, voted: bool) -> m.Tightened:
        """Handle a step that lacked memory: all members give it up and compute it again by a plan that counts on less
        memory here; after `TRIES` times the run stops, with CapslogError. voted: the step failed in `apply`.
        """
        parts, loop, me = self._parts, self._loop, self._parts.me
        generation = loop.state.record.number
        self._pressures += 1
        limits = [size for size in (loop.state.capacity, parts.work.needs()) if size]
        capacity = max(1, min(limits) - lack.bytes) if limits else 0
        about: dict[str, Any] = {"member": me, "step": step, "lacking_bytes": lack.bytes, "capacity_bytes": capacity}
        about |= {"cause": lack.why} if lack.why is not None else {}
        parts.work.note("memory", generation=generation, times=self._pressures, **about)
        if self._pressures >= TRIES:
            loop.stop_for_memory(
                f"{lack.sentence(me, step)}, after plans for less memory {TRIES - 1} times; "
                "what the members held is on disk; free memory of that device, add devices, or set pipeline.capacity "
                "to what is there"
            )
        for member in loop.state.record.members:
            if member != me:  # whichever member founds the next generation plans with it
                parts.peers.send(member, "tightened", generation=generation, capacity=capacity)
        parts.tighten(me, capacity)
        return m.Tightened(generation, capacity, voted)

    def _between(self) -> None:
        save, self.save_all = self.save_all, False
        written = self._parts.work.between(self._loop.state.at, save)
        if written is not None:
            if self._parts.me == self._loop.state.record.members[0]:
                self._loop.append(CheckpointEntry(written.step, written.generation))
            self._loop.feed(m.Checkpointed(written))

    def _goes_on(self, generation: int) -> bool:
        state = self._loop.state
        return not self._loop.ended and state.phase is Phase.RUN and state.record.number == generation

    def _finish(self) -> None:
        """Write the last checkpoint and evaluation together with all members, and end the run."""
        self._parts.work.finish(self._loop.state.at, self._stop)
        # the loss of a member from here on does not matter: everything is written
        with contextlib.suppress(PeerLost):
            self._parts.path.barrier()
        self._loop.end(self._stop)

    def vote(self, effect: m.Cast) -> tuple[m.ProtocolEvent, ...]:
        """Vote on the step that was computed."""
        parts = self._parts
        assert isinstance(effect.value, m.Vote)
        parts.probe("vote")
        try:
            outcome = parts.work.vote(effect.round, encode(effect.value))
        except PeerLost:
            return (m.Broken(effect.generation),)
        parts.probe("voted")
        parts.holdings.scales[effect.round] = outcome.scale
        self._stop = self._stop or outcome.stop
        votes: dict[Member, m.Value] = {}
        for member, ballot in zip(self._loop.state.record.members, outcome.ballots, strict=True):
            vote = decode(ballot)
            # a sum that is not finite counts as not finite for all members
            votes[member] = vote if outcome.finite else m.Vote(finite=False)
        return (m.Tally(effect.generation, effect.round, votes),)

    def apply(self, effect: m.Apply) -> None:
        """Apply the step, and keep the boundary before it until the next vote. Raises NotApplied where memory ran out
        before, while or after the layers were changed.
        """
        parts, holdings = self._parts, self._parts.holdings
        parts.probe("apply")
        assert holdings.live == effect.before, (holdings.live, effect.before)
        state = self._loop.state
        holdings.forget(state.held)
        holdings.advance(state.held, effect.generation, effect.step)  # beside the step of the own layers
        if state.wishes.planned:
            holdings.begin_digests(state.roles.shadows, effect.before)
        lack = self._change(effect.step)
        if lack is not None:
            holdings.take_back(effect.step)
            raise NotApplied(lack)
        self._pressures = 0
        holdings.live = Stamp(effect.step, effect.generation)
        self._computing = None
        self.sent_ahead = self.coming_own = frozenset()
        coming = self._ahead is not None and not self._ahead.mine <= holdings.copies.keys()
        holdings.prune(effect.step, behind=coming or self._awaited)
        parts.probe("applied")
        self._tell(effect.step)

    def _change(self, step: int) -> Lack | None:
        """Copy the own layers aside, then apply the step to them; return the memory that this lacked."""
        try:
            self._parts.holdings.keep_before()
            self._parts.probe("applying")
            self._parts.work.apply(step)
            self._parts.probe("changed")
        except _MAY_LACK as error:
            lack = lack_of(error)
            if lack is None:
                raise
            return lack
        return None

    def _tell(self, step: int) -> None:
        now, report, record = time.monotonic(), self._parts.report, self._loop.state.record
        self.usual_seconds = max(now - self._began, 0.8 * self.usual_seconds)
        if report.why and self._parts.me == record.members[0]:
            kind, details = report.event(record, step, self._began)
            self._parts.work.note(kind, **details)
        report.applied(now)
        self._rebalance()

    def _rebalance(self) -> None:
        """Request another plan for the same members where the measured speeds of their devices justify it."""
        parts, record = self._parts, self._loop.state.record
        if parts.me != record.members[0] or not parts.seats.keys() >= set(record.members):
            return
        if record.copies is not None:
            parts.report.rebalanced = _FOLLOWS  # requested in `Effects._install`
            return
        request = parts.work.rebalance([parts.seats[member] for member in record.members])
        if request is not None:
            member, parts.report.rebalanced = request
            parts.proposals.known.clear()
            self._loop.feed(m.Wished(("rebalance", member)))

    # -- copies -------------------------------------------------------------------------------------------------------

    def _send_updates(self, generation: int, step: int) -> None:
        parts, state = self._parts, self._loop.state
        layout, members = state.roles.layout, state.record.members
        assert layout is not None
        messages: dict[Member, dict[str, Tensor]] = {}
        layers: dict[Member, list[int]] = {}
        for layer in sorted(state.roles.own):
            if first_owner(layer, layout, members) != parts.me:
                continue
            copies = [member for member in members if layer in layout.copied.get(member, ())]
            shadows = self._ahead.sent.get(layer, ()) if self._ahead is not None else ()
            if not copies and not shadows:
                continue
            update = dict(parts.work.update(layer))
            if shadows or not parts.job.sync:  # no vote waits until they have arrived, and the step changes them
                update = {name: tensor.clone() for name, tensor in update.items()}
            for member in dict.fromkeys([*copies, *shadows]):
                message = messages.setdefault(member, {})
                message |= {f"{layer}/{name}": tensor for name, tensor in update.items()}
                layers.setdefault(member, []).append(layer)
        for member, message in messages.items():
            about = layers[member]  # a frozen layer has no gradients, but is listed: its copy makes the step, too
            parts.peers.send(member, "update", message, generation=generation, layers=about, step=step)

    def check_copies(self) -> None:
        """Feed Copied once the updates that the vote waits for are here."""
        state, holdings = self._loop.state, self._parts.holdings
        if state.phase is not Phase.RUN or self._computing != state.round or state.copied == state.round:
            return
        holdings.advance(state.held, state.record.number, state.at.step)
        if self._check_ahead() or not (state.roles.copies or state.roles.shadows):
            return  # the event Prepared, just fed, changes the copies: they are checked again
        for layer in state.roles.copies | state.roles.shadows:
            copy = holdings.copies.get(layer)
            if copy is None or copy.stamp != state.at:
                return
            needs_update = self._parts.job.sync or layer in state.roles.shadows
            if needs_update and (layer, state.round) not in holdings.updates:
                return
        self._loop.feed(m.Copied(state.record.number, state.round))

    # -- planned changes: copy ahead ----------------------------------------------------------------------------------

    def is_sent(self, layer: int) -> bool:
        """True where the layer was sent ahead in this generation, to all members that need it."""
        return self._ahead is not None and layer in self._ahead.sent

    @property
    def coming(self) -> MemberLayout | None:
        """Layout of the generation after a planned change, where it is known here."""
        return None if self._ahead is None else self._ahead.layout

    def prepare(self, changes: frozenset[m.Change], hinted: bool = False) -> bool:
        """Find the layers that would move for these changes; False where they are known, or cannot be known yet.

        They need the seat of every joining member, which a vote may name before the log does, and the plan that one
        member searches for all; without them this member would wait for ever for layers that no member sends.
        hinted: the changes may never be made; layers that come here are only kept current.
        """
        parts, seats, before = self._parts, self._parts.seats, self._ahead
        if before is not None and (before.changes, before.hinted) == (changes, hinted):
            return False
        state, place, sizes = self._loop.state, parts.proposals.place, parts.job.layer_bytes
        assert state.roles.layout is not None
        stay = stay_with(state.record, changes)
        all_seated = seats.keys() >= set(stay)
        self._awaited = not all_seated or not parts.proposals.settle(state.record, [seats[member] for member in stay])
        if self._awaited:
            return False  # Prepare comes again after the next step
        self._ahead = find_ahead(parts.me, state.record, state.roles.layout, changes, seats, place, sizes)
        self._ahead.hinted = hinted
        if before is not None:  # members with a shadow copy still get its updates: votes may wait for them
            self._ahead.sent = before.sent
        return True

    def _send_ahead(self) -> None:
        """Send the layers to copy ahead, at the beginning of a step. Their updates are sent from this step on."""
        parts, at, number = self._parts, self._loop.state.at, self._loop.state.record.number
        if self._ahead is None or self._ahead.began:
            return
        for layer, members in self._ahead.due():
            state = parts.work.state(layer, copy=True)
            for member in members:
                parts.send_state("shadow", member, number, layer, at, state)
                parts.probe("shadow sent")

    def _begin_digests(self) -> None:
        """Begin the digests of the layers that were sent ahead of a planned change, beside the step's computation.
        After the step this boundary is that of the copies, so the digests are ready if the change comes then.
        """
        if self._ahead is not None and self._ahead.began and not self._ahead.hinted:
            state = self._loop.state
            self._parts.holdings.begin_digests(state.roles.own & self._ahead.sent.keys(), state.at)

    def _check_ahead(self) -> bool:
        """Feed Prepared once all layers of the change are here at this step's boundary; True if it was fed now."""
        parts, state, ahead = self._parts, self._loop.state, self._ahead
        if ahead is None or ahead.hinted or not ahead.began or state.wishes.prepared == ahead.changes or state.cast:
            return False
        copies = [parts.holdings.copies.get(layer) for layer in ahead.mine]
        if not all(copy is not None and copy.stamp == state.at for copy in copies):
            return False
        if not self._parts.path.has_met(state.record, ahead.changes, self._loop.roster.dead):
            return False
        parts.probe("prepared")
        self._loop.feed(m.Prepared(state.record.number, ahead.changes, ahead.mine))
        return True
