"""Training state that a member can give, whatever it has in memory: each boundary with the values it had."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import pytest
import torch
from torch import Tensor

from varuna_capslog.elastic.member import holdings
from varuna_capslog.elastic.member.holdings import Holdings
from varuna_capslog.elastic.member.work import LayerState
from varuna_capslog.membership.generation import Stamp
from varuna_capslog.training import layer_state


class Follower:
    """Copy whose step adds the update; it counts its steps."""

    def __init__(self, state: LayerState) -> None:
        self.live = {name: tensor.clone() for name, tensor in state.items()}
        self.steps = 0

    def state(self, copy: bool) -> LayerState:
        return {name: tensor.clone() if copy else tensor for name, tensor in self.live.items()}

    def apply(self, update: Mapping[str, Tensor], step: int, scale: float) -> None:
        self.live["w"].add_(update["w"], alpha=scale)
        self.steps += 1


class Work:
    """Own layers whose step adds a number that depends on layer and step alone.

    beside: the steps of copies run only once they are awaited.
    """

    def __init__(self, beside: bool) -> None:
        self.beside = beside
        self.own: dict[int, LayerState] = {}
        self.followers: list[Follower] = []

    def state(self, layer: int, copy: bool) -> LayerState:
        return {name: tensor.clone() if copy else tensor for name, tensor in self.own[layer].items()}

    def follow(self, layer: int, state: LayerState) -> Follower:
        self.followers.append(Follower(state))
        return self.followers[-1]

    def apply_to_copies(
        self, due: Sequence[tuple[Follower, Mapping[str, Tensor], int, float]]
    ) -> Callable[[], None] | None:
        waiting, one_at_a_time = [*due], threading.Lock()

        def steps() -> None:
            with one_at_a_time:
                while waiting:
                    follower, *step = waiting.pop(0)
                    follower.apply(*step)

        if self.beside:
            return steps
        steps()
        return None

    def shelve(self) -> Mapping[int, LayerState]:
        shelved, self.own = self.own, {}
        return shelved


class Member:
    """Member that makes the runtime's calls in its order; every layer is checked at every boundary that is held."""

    def __init__(self, owned: set[int], copies: set[int], beside: bool = False) -> None:
        self.work, self.generation = Work(beside), 0
        self.holdings = Holdings(self.work)  # type: ignore[arg-type]
        self.at, self.own, self.copies = Stamp(0, 0), owned, copies
        self.truth = {(layer, self.at): float(layer) for layer in range(5)}
        for layer in owned | copies:
            self.holdings.take(layer, self.at, self.state_at(layer))
        self.held = frozenset((layer, self.at) for layer in owned | copies)
        self.install(owned, copies)

    def state_at(self, layer: int) -> LayerState:
        """Return the layer's state as another member sends it."""
        return {"w": torch.full((3,), self.truth[layer, self.at], dtype=torch.float64)}

    def update_of(self, layer: int, stamp: Stamp) -> dict[str, Tensor]:
        """Return the update of a layer. A step that is repeated in a newer generation has other values."""
        return {"w": torch.full((3,), 1000.0 * layer + 10 * stamp.step + stamp.generation, dtype=torch.float64)}

    def install(self, owned: set[int], copies: set[int]) -> None:
        """Begin a generation whose layers this member has already."""
        states = {layer: self.holdings.at(layer, self.at) for layer in sorted(owned)}
        self.work.own = {layer: {"w": state["w"].clone()} for layer, state in states.items()}
        self.own, self.copies, self.generation = owned, copies, self.generation + 1
        self.holdings.open(owned, copies, self.at)
        self.holdings.forget(self.held)

    def step(self) -> None:
        """Train a step whose vote succeeds; the updates of the copies arrive before it."""
        before, after = self.at, Stamp(self.at.step + 1, self.generation)
        step = after.step
        self.holdings.begin_digests(self.own, before)
        for layer in range(5):
            self.truth[layer, after] = self.truth[layer, before] + 0.5 * float(self.update_of(layer, after)["w"][0])
        for layer in self.copies:
            self.holdings.updates[(layer, step)] = self.update_of(layer, after)
        self.holdings.advance(self.held, self.generation, before.step)
        self.held |= {(layer, before) for layer in self.copies}
        self.holdings.scales[step] = 0.5
        self.at = after
        kept = {entry for entry in self.held if entry[1] == before and entry[0] in self.own | self.copies}
        self.held = frozenset(kept | {(layer, self.at) for layer in self.own | self.copies})
        self.holdings.forget(self.held)
        self.holdings.advance(self.held, self.generation, step)
        self.holdings.begin_digests(self.copies, before)
        self.holdings.keep_before()
        for layer in self.own:
            self.work.own[layer]["w"].add_(self.update_of(layer, after)["w"], alpha=0.5)
        self.holdings.live = self.at
        self.holdings.prune(step, behind=False)

    def fail(self) -> None:
        """Begin a step that is accepted, but not applied here, as where memory is lacking."""
        after = Stamp(self.at.step + 1, self.generation)
        for layer in self.copies:
            self.holdings.updates[(layer, after.step)] = self.update_of(layer, after)
        self.holdings.advance(self.held, self.generation, self.at.step)
        self.held |= {(layer, self.at) for layer in self.copies}
        self.holdings.scales[after.step] = 0.5
        kept = frozenset(entry for entry in self.held if entry[1] == self.at and entry[0] in self.own | self.copies)
        held = kept | {(layer, after) for layer in self.own | self.copies}
        self.holdings.forget(held)
        self.holdings.advance(held, self.generation, after.step)
        self.holdings.take_back(after.step)
        self.held = kept

    def shelve(self) -> None:
        self.holdings.shelve(self.held)
        self.holdings.adopt()
        self.holdings.forget(self.held)

    def back(self) -> None:
        """Return to the previous boundary, as the round decides for all members."""
        before = max(stamp for _, stamp in self.held if stamp < self.at)
        self.held = frozenset(entry for entry in self.held if entry[1] <= before)
        self.at = before
        self.holdings.forget(self.held)

    def check_digests(self) -> int:
        """Compare the digests that were begun with those of the true states; return their number."""
        begun = [entry for entry in self.held if self.holdings.has_digest(*entry)]
        for layer, stamp in begun:
            state = {"w": torch.full((3,), self.truth[layer, stamp], dtype=torch.float64)}
            assert self.holdings.digest_at(layer, stamp) == layer_state.digest(state), (layer, stamp)
        return len(begun)

    def values(self) -> dict[tuple[int, Stamp], float]:
        """Return the values that are written to disk where a run ends now."""
        states = self.holdings.everything(self.held)
        assert states.keys() == self.held
        return {entry: float(state["w"][0]) for entry, state in states.items()}

    def expected(self) -> dict[tuple[int, Stamp], float]:
        return {entry: self.truth[entry] for entry in self.held}


def test_all_boundaries_are_written_with_their_own_values() -> None:
    for steps in range(4):
        member = Member({0, 1}, {2, 3})
        for _ in range(steps):
            member.step()
        assert len(member.held) == (8 if steps else 4)
        assert member.values() == member.expected()


def test_a_copy_that_goes_on_as_a_copy_makes_no_step_between_two_generations() -> None:
    member = Member({0}, {1, 2})
    for _ in range(3):
        member.step()
    steps = [follower.steps for follower in member.work.followers]
    member.shelve()
    assert member.holdings.stands_at(1, member.held) == Stamp(2, 1)
    member.install({0, 2}, {1})
    after = [follower.steps for follower in member.work.followers]
    assert (after[0], after[1]) == (steps[0], steps[1] + 1), "layer 2 is trained here now"
    assert not member.holdings._shelf, "its memory is free"
    assert member.values() == member.expected()


def test_a_copy_whose_boundary_before_is_not_held_is_proved_at_its_newest() -> None:
    member = Member({0}, {1})
    member.step()
    held = frozenset({(1, member.at)})
    assert member.holdings.stands_at(1, held) == member.at
    assert float(member.holdings.at(1, member.at)["w"][0]) == member.truth[1, member.at]


def test_a_copy_makes_no_step_that_could_not_be_applied_here() -> None:
    """Regression: it offered the boundary of that step, which the protocol had taken back."""
    member = Member({0}, {1})
    member.step()
    member.fail()
    assert member.holdings.copies[1].stamps == {member.at}
    assert member.values() == member.expected()


@pytest.mark.parametrize("beside", [False, True], ids=["at once", "beside the training"])
@pytest.mark.parametrize("seed", range(40))
def test_any_course_of_generations(monkeypatch, seed: int, beside: bool) -> None:
    """Digests are slow here: a step that does not wait for them would change their states."""

    def digest(state: LayerState) -> bytes:
        time.sleep(0.002)
        return layer_state.digest(state)

    monkeypatch.setattr(holdings, "digest", digest)
    dice, layers = random.Random(seed), [0, 1, 2, 3, 4]
    owned = set(dice.sample(layers, 2))
    member = Member(owned, set(layers) - owned, beside)
    for _ in range(12):
        for _ in range(dice.choice([0, 1, 1, 2, 3])):
            member.step()
        if dice.random() < 0.2:
            assert member.values() == member.expected()
        if member.at.generation == member.generation and dice.random() < 0.3:
            assert member.check_digests() >= len(owned)
        if dice.random() < 0.2:
            member.fail()
        member.shelve()
        if dice.random() < 0.5:
            member.holdings.catch_up(dice.sample(layers, 2))
        if dice.random() < 0.3 and any(stamp < member.at for _, stamp in member.held):
            member.back()
        if dice.random() < 0.3:
            assert member.values() == member.expected()
        present = sorted({layer for layer, stamp in member.held if stamp == member.at})
        owned = set(dice.sample(present, min(2, len(present))))
        copies = {layer for layer in present if layer not in owned and dice.random() < 0.7}
        member.install(owned, copies)
        for layer in set(layers) - owned - copies:  # another member sends it, to be followed from here
            if dice.random() < 0.8:
                member.holdings.follow(layer, member.at, member.state_at(layer))
                member.copies = member.copies | {layer}
    member.step()
    assert member.values() == member.expected()
