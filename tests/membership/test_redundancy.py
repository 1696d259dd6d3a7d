"""Placement of copies, checked by trying every loss."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from itertools import pairwise

import pytest

from tests.rig.drawn_plans import draw_plan
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.membership.generation import MemberLayout
from varuna_capslog.membership.placing import Choice
from varuna_capslog.membership.redundancy import Copies, place_copies, reserves
from varuna_capslog.plans.parts import Units

Pipelines = list[list[tuple[str, tuple[int, ...]]]]


def holders(pipelines: Pipelines, copies: Copies) -> dict[int, set[str]]:
    layer_holders: dict[int, set[str]] = {}
    for stages in pipelines:
        for member, layers in stages:
            for layer in layers:
                layer_holders.setdefault(layer, set()).add(member)
    for member, kept in copies.kept.items():
        for layer in kept:
            assert member not in layer_holders[layer], "a copy beside the original"
            layer_holders[layer].add(member)
    return layer_holders


def survives(layer_holders: dict[int, set[str]], hosts: dict[str, str], losses: int) -> bool:
    """True if every layer keeps a holder after any loss of this many hosts. All sets are tried."""
    names = sorted(set(hosts.values()))
    return all(
        any(hosts[member] not in lost for member in members)
        for lost in itertools.combinations(names, min(losses, len(names)))
        for members in layer_holders.values()
    )


def neighbours_hold_all(pipelines: Pipelines, layer_holders: dict[int, set[str]]) -> bool:
    pairs = [{a, b} for stages in pipelines for (a, _), (b, _) in pairwise(stages) if a != b]
    return any(members <= pair for pair in pairs for members in layer_holders.values())


def draw(dice: random.Random) -> tuple[Pipelines, dict[str, str], int, list[str]]:
    layers, replicas = dice.randint(1, 7), dice.choice((1, 1, 1, 2))
    pipelines: Pipelines = []
    names = (f"m{number}" for number in itertools.count())
    for _ in range(replicas):
        cuts = sorted(dice.sample(range(1, layers), dice.randint(0, min(layers - 1, 5)))) if layers > 1 else []
        members = [next(names) for _ in range(len(cuts) + 1)]
        if len(members) > 2 and dice.random() < 0.2:
            members[-1] = members[0]  # several stages on one rank
        bounds = [0, *cuts, layers]
        pipelines.append([(m, tuple(range(a, b))) for m, (a, b) in zip(members, pairwise(bounds), strict=True)])
    spare = [next(names) for _ in range(dice.choice((0, 0, 1)))]
    everyone = dict.fromkeys([member for stages in pipelines for member, _ in stages] + spare)
    hosts = {member: f"h{dice.randrange(dice.choice((2, 3, 4, 9)))}" for member in everyone}
    return pipelines, hosts, layers, spare


def draw_rectangles(dice: random.Random) -> tuple[Pipelines, dict[str, str], int, list[str]]:
    """The ways through the stages of a plan: stages that serve several pipelines, replicas of single stages."""
    layers, ranks = dice.randint(1, 8), dice.randint(1, 6)
    plan = draw_plan(dice, layers, Units(4, 1, 4), ranks)
    ways = Choice.of_plan(plan, [0] * layers).ways
    pipelines = [[(f"m{rank}", held) for rank, held in way] for way in ways]
    hosts = {f"m{rank}": f"h{dice.randrange(dice.choice((2, 3, 4, 9)))}" for rank in range(ranks)}
    used = {member for way in pipelines for member, _ in way}
    return pipelines, hosts, layers, [member for member in hosts if member not in used]


@pytest.mark.parametrize("draw", [draw, draw_rectangles])
def test_every_loss_that_is_promised_is_survived_and_every_refusal_is_true(
    draw: Callable[[random.Random], tuple[Pipelines, dict[str, str], int, list[str]]],
) -> None:
    dice = random.Random(3)
    complete = partial = 0
    for _ in range(1500):
        pipelines, hosts, layers, spare = draw(dice)
        redundancy = dice.randint(1, 3)
        copies = place_copies(pipelines, hosts, redundancy, [dice.randint(1, 9) for _ in range(layers)], spare)
        layer_holders = holders(pipelines, copies)
        assert survives(layer_holders, hosts, copies.survives) or copies.survives == 0
        alone = {member: member for member in hosts}
        assert survives(layer_holders, alone, min(redundancy, len(hosts) - 1)), (
            "so many workers may be lost on any hosts"
        )
        count = len(set(hosts.values()))
        assert copies.survives == min(redundancy, count - 1)  # without limits of room, more cannot be had
        if copies.problem is None:
            complete += 1
            assert copies.survives == redundancy
            assert not neighbours_hold_all(pipelines, layer_holders)
        else:
            partial += 1
            # hosts are too few, or there is nobody but two neighbours
            assert count <= redundancy or len(hosts) <= 2
    assert min(complete, partial) > 100


def test_a_stage_that_serves_several_pipelines_counts_once() -> None:
    """Layer 1 is on b and on c, all others serve both pipelines: a holds 4 bytes, not 8, so it is the lightest that is
    no neighbour of e.
    """
    ways: Pipelines = [[("a", (0,)), (name, (1,)), ("d", (2,)), ("e", (3,))] for name in "bc"]
    copies = place_copies(ways, {name: name for name in "abcde"}, 1, [4, 6, 1, 5])
    assert copies == Copies({"a": (2, 3), "d": (0,)}, 1, None)


def test_a_stage_of_several_pipelines_has_neighbours_in_all_of_them() -> None:
    """Both ends on a, the middle on b and c: a layer that only two neighbours hold gets a third holder."""
    ways: Pipelines = [[("a", (0,)), (name, (1,)), ("a", (2,))] for name in "bc"]
    spared = place_copies(ways, {name: name for name in "abcd"}, 1, [1, 1, 1], ["d"])
    assert spared == Copies({"d": (0, 2)}, 1, None)
    tight = place_copies(ways, {name: name for name in "abc"}, 1, [3, 1, 3])
    assert sorted(layer for kept in tight.kept.values() for layer in kept) == [0, 0, 2, 2]


def test_no_more_copies_than_needed() -> None:
    stages: Pipelines = [[(f"m{i}", (i,)) for i in range(6)]]
    hosts = {f"m{i}": f"h{i}" for i in range(6)}
    copies = place_copies(stages, hosts, 1, [1] * 6)
    assert sorted(layer for kept in copies.kept.values() for layer in kept) == list(range(6))
    assert max(len(kept) for kept in copies.kept.values()) <= 2  # spread; neighbours keep a greedy choice from 1
    assert place_copies(stages, hosts, 0, [1] * 6) == Copies({}, 0, None)


def test_replicas_are_copies() -> None:
    stages: Pipelines = [[("a", (0,)), ("b", (1,))], [("c", (0,)), ("d", (1,))]]
    copies = place_copies(stages, {name: name for name in "abcd"}, 1, [1, 1])
    assert copies == Copies({}, 1, None)


def test_it_says_what_cannot_be_placed() -> None:
    two: Pipelines = [[("a", (0,)), ("b", (1,))]]
    assert "2 device(s)" in (place_copies(two, {"a": "x", "b": "y"}, 1, [1, 1]).problem or "")
    problem = place_copies(two, {"a": "x", "b": "y"}, 2, [1, 1]).problem or ""
    assert "needs every layer on 3 hosts, but there are 2" in problem
    assert "add 1 host(s), or set redundancy to 1" in problem
    three: Pipelines = [[("a", (0,)), ("b", (1,)), ("c", (2,))]]
    hosts = {name: name for name in "abc"}
    tight = place_copies(three, hosts, 1, [4, 4, 4], room_bytes={"a": 4, "b": 0, "c": 4})
    assert "finds no room for copies of layers" in (tight.problem or "")
    with pytest.raises(CapslogError, match="redundancy is -1"):
        place_copies(three, hosts, -1, [1, 1, 1])
    with pytest.raises(CapslogError, match=r"layers \[3\]"):
        place_copies(three, hosts, 1, [1, 1, 1, 1])


def test_what_protection_costs() -> None:
    reserved = reserves(MemberLayout(3, {"a": (0,), "b": (1, 2)}, {"a": (2,)}), True, [10, 20, 30], [1, 2, 3])
    assert (reserved["a"].snapshot, reserved["a"].copies, reserved["a"].updates, sum(reserved["a"])) == (10, 60, 3, 73)
    assert (reserved["b"].snapshot, reserved["b"].copies, reserved["b"].updates) == (50, 0, 0)
    behind = reserves(MemberLayout(3, {"a": (0,)}, {"a": (2,)}), False, [10, 20, 30], [1, 2, 3])
    assert behind["a"].updates == 0
