"""The steps of one member: compute, vote, apply, and what keeps copies of layers equal to their owners.

`Runtime` says when, and feeds the protocol with what comes of it; `Work` computes. Nothing here founds or leaves a
generation.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from varuna_capslog.elastic.member.change_report import Story
from varuna_capslog.elastic.member.wire import decode, encode
from varuna_capslog.engine.communicator import PeerLost
from varuna_capslog.membership import messages as m
from varuna_capslog.membership.ahead import Ahead, find_ahead, first_owner, stay_with
from varuna_capslog.membership.generation import Member, Stamp
from varuna_capslog.membership.recovery import Seat
from varuna_capslog.membership.state import Phase

if TYPE_CHECKING:
    from varuna_capslog.elastic.member.runtime import Runtime

__all__ = ["Training"]


class Training:
    """The part of a member that trains. Called by its one thread.

    Attributes:
        todo: the step that the protocol wants computed.
        waits_since: when the last computation ended; `time.monotonic`.
        usual_seconds: of the longest of the last steps; 0 before the first one.
        sent_ahead: layers that this member sent ahead of a planned change in the generation before.
        save_all: a checkpoint is due at the next boundary, together with all members.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._of = runtime
        self.todo: m.Compute | None = None
        self.waits_since = 0.0
        self.usual_seconds = 0.0
        self.sent_ahead: frozenset[int] = frozenset()
        self.save_all = False
        self._ahead: Ahead | None = None
        self._computing: int | None = None
        self._stop = False
        self._began = 0.0

    @property
    def due(self) -> bool:
        """Whether a step waits to be computed."""
        return self.todo is not None

    def abort(self) -> None:
        """Nothing of the generation is computed any more."""
        self.todo = self._computing = None

    def adopt(self) -> None:
        """A newer generation: whoever wants to stop says so again in its first vote, also to those that are new."""
        self.abort()
        self._stop = self.save_all = False
        ahead, self._ahead = self._ahead, None
        self.sent_ahead = frozenset() if ahead is None or ahead.hinted else frozenset(ahead.sent)

    # -- a step -------------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Computes the step that is due, and votes as soon as all that the vote waits for is here."""
        todo, self.todo = self.todo, None
        assert todo is not None
        runtime, generation, step = self._of, todo.generation, todo.step
        runtime.drain()
        if not self._goes_on(generation):
            return
        try:
            if self._stop or runtime.work.is_done(runtime.state.at.step):
                self._finish()
                return
            self._between()
            runtime.look_at_deadline()
            self._began = time.monotonic()
            self._computing = step
            self._send_ahead()
            runtime.probe("compute")
            finite = runtime.work.compute(step)
        except PeerLost:
            runtime.feed(m.Broken(generation))
            return
        runtime.probe("computed")
        self._send_updates(generation, step)
        runtime.drain()
        if not self._goes_on(generation):
            return
        runtime.holdings.advance(runtime.state.held, generation)
        self._check_ahead()
        self.waits_since = time.monotonic()
        runtime.feed(m.Computed(generation, step, finite))

    def _between(self) -> None:
        save, self.save_all = self.save_all, False
        written = self._of.work.between(self._of.state.at, save)
        if written is not None:
            if self._of.me == self._of.state.record.members[0]:
                self._of.append({"kind": "checkpoint", "step": written.step, "generation": written.generation})
            self._of.feed(m.Checkpointed(written))

    def _goes_on(self, generation: int) -> bool:
        state = self._of.state
        return not self._of.ended and state.phase is Phase.RUN and state.record.number == generation

    def _finish(self) -> None:
        """The last boundary: all members write the end together."""
        runtime = self._of
        runtime.work.finish(runtime.state.at, self._stop)
        assert runtime.communicator is not None
        # who is gone from here on has finished, or would have: everything is written
        with contextlib.suppress(PeerLost):
            runtime.communicator.barrier()
        runtime.end(self._stop)

    def vote(self, effect: m.Cast) -> tuple[m.Event, ...]:
        """The vote on the step that was computed."""
        runtime = self._of
        assert isinstance(effect.value, m.Vote)
        runtime.probe("vote")
        try:
            outcome = runtime.work.vote(effect.round, encode(effect.value))
        except PeerLost:
            return (m.Broken(effect.generation),)
        runtime.probe("voted")
        runtime.holdings.voted(effect.round, outcome.scale)
        self._stop = self._stop or outcome.stop
        votes: dict[Member, m.Value] = {}
        for member, ballot in zip(runtime.state.record.members, outcome.ballots, strict=True):
            vote = decode(ballot)
            # what is not finite only in the sum is not finite for everybody
            votes[member] = vote if outcome.finite else m.Vote(finite=False)
        return (m.Tally(effect.generation, effect.round, votes),)

    def apply(self, effect: m.Apply) -> None:
        """The step becomes state; the boundary before it is kept until the next vote."""
        runtime, holdings = self._of, self._of.holdings
        runtime.probe("apply")
        assert holdings.live == effect.before, (holdings.live, effect.before)
        holdings.forget(runtime.state.held)
        holdings.keep_before()
        runtime.probe("applying")
        runtime.work.apply(effect.step)
        holdings.live = Stamp(effect.step, effect.generation)
        self._computing = None
        holdings.advance(runtime.state.held, effect.generation)
        coming = self._ahead is not None and not self._ahead.mine <= holdings.copies.keys()
        holdings.prune(effect.step, behind=coming)
        runtime.probe("applied")
        self._tell(effect.step)

    def _tell(self, step: int) -> None:
        now, runtime = time.monotonic(), self._of
        self.usual_seconds = max(now - self._began, 0.8 * self.usual_seconds)
        record = runtime.state.record
        if runtime.story.why:
            if runtime.me == record.members[0]:
                kind, details = runtime.story.event(record, step, self._began)
                runtime.work.note(kind, **details)
            runtime.story = Story()
        runtime.story.last_apply = now

    # -- copies -------------------------------------------------------------------------------------------------------

    def _send_updates(self, generation: int, step: int) -> None:
        """What those need that follow layers of this member."""
        runtime = self._of
        layout, members = runtime.state.layout, runtime.state.record.members
        assert layout is not None
        messages: dict[Member, dict[str, Tensor]] = {}
        layers: dict[Member, list[int]] = {}
        for layer in sorted(runtime.state.own):
            if first_owner(layer, layout, members) != runtime.me:
                continue
            copies = [member for member in members if layer in layout.copied.get(member, ())]
            shadows = self._ahead.sent.get(layer, ()) if self._ahead is not None else ()
            if not copies and not shadows:
                continue
            update = dict(runtime.work.update(layer))
            if shadows or not runtime.job.sync:  # no vote waits for their arrival, and the step changes them
                update = {name: tensor.clone() for name, tensor in update.items()}
            for member in dict.fromkeys([*copies, *shadows]):
                message = messages.setdefault(member, {})
                message |= {f"{layer}/{name}": tensor for name, tensor in update.items()}
                layers.setdefault(member, []).append(layer)
        for member, message in messages.items():
            about = layers[member]  # a layer that is not trained has no gradients, and makes its step all the same
            runtime.senses.peers.send(member, "update", message, generation=generation, layers=about, step=step)

    def check_copies(self) -> None:
        """Tells the protocol when what the vote waits for is here."""
        runtime, state, holdings = self._of, self._of.state, self._of.holdings
        if state.phase is not Phase.RUN or self._computing != state.round or state.copied == state.round:
            return
        holdings.advance(state.held, state.record.number)
        if self._check_ahead() or not (state.copies or state.shadows):
            return  # what is prepared now is looked at again
        for layer in state.copies | state.shadows:
            copy = holdings.copies.get(layer)
            if copy is None or copy.stamp != state.at:
                return
            needs_update = runtime.job.sync or layer in state.shadows
            if needs_update and not holdings.has_update(layer, state.round):
                return
        runtime.feed(m.Copied(state.record.number, state.round))

    # -- planned changes: copy ahead ----------------------------------------------------------------------------------

    def is_sent(self, layer: int) -> bool:
        """Whether it was sent ahead in this generation, to all that need it."""
        return self._ahead is not None and layer in self._ahead.sent

    def prepare(self, changes: frozenset[m.Change], seats: Mapping[Member, Seat], hinted: bool = False) -> bool:
        """Finds out what would move for these changes; False where that is known, or cannot be known yet.

        A vote may tell of a newcomer before the log does; without its seat this member would expect other layers than
        the others send, for ever.

        Args:
            hinted: they may never be made: what comes here is kept current, and that is all.
        """
        runtime, before = self._of, self._ahead
        if before is not None and (before.changes, before.hinted) == (changes, hinted):
            return False
        state = runtime.state
        assert state.layout is not None
        if not seats.keys() >= set(stay_with(state.record, changes)):
            return False  # Prepare is said again after the next step
        self._ahead = find_ahead(
            runtime.me, state.record, state.layout, changes, seats, runtime.place, runtime.job.layer_bytes
        )
        self._ahead.hinted = hinted
        if before is not None:  # who follows a layer goes on to follow it: votes may wait for that
            self._ahead.sent = before.sent
        return True

    def _send_ahead(self) -> None:
        """At the beginning of a step: what moves ahead, at this boundary. Updates follow from this step on."""
        runtime = self._of
        if self._ahead is None or self._ahead.began:
            return
        for layer, members in self._ahead.due():
            state = runtime.work.state(layer, copy=True)
            for member in members:
                runtime.send_state("shadow", member, runtime.state.record.number, layer, runtime.state.at, state)
                runtime.probe("shadow sent")

    def _check_ahead(self) -> bool:
        """Prepared, once all that comes here has come and stands at this step's boundary. Whether that was said now."""
        runtime, state, ahead = self._of, self._of.state, self._ahead
        if ahead is None or ahead.hinted or not ahead.began or state.prepared == ahead.changes or state.cast:
            return False
        copies = [runtime.holdings.copies.get(layer) for layer in ahead.mine]
        if not all(copy is not None and copy.stamp == state.at for copy in copies):
            return False
        if not runtime.has_met(ahead.changes):
            return False
        runtime.probe("prepared")
        runtime.feed(m.Prepared(state.record.number, ahead.changes, ahead.mine))
        return True
