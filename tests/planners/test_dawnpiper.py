"""DawnPiper's partition: worked examples, its two algorithms line by line, and its theorem against all cuts."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from tests.planners.layered import Numbers, chain_of, random_chain
from tests.sweeps import some
from varuna_capslog.planners.capuchin import treated_stage
from varuna_capslog.planners.dawnpiper import compute_balanced, dawnpiper_stages, memory_balanced
from varuna_capslog.planners.layerwise import Layerwise, StageChoice


def cuts(stages: list[StageChoice]) -> list[int]:
    return [stage.first for stage in stages]


# -- the balanced cuts


def test_the_balanced_cuts_of_nine_equal_layers_on_two_devices() -> None:
    """Equation (2): 2 M_1 = M_2, so a third of the bytes in stage 0; and half of the seconds, rounded up to a layer."""
    chain = chain_of([1.0] * 9, [2] * 9, [2, 1])
    assert memory_balanced(chain, 0, 9, (0, 0, 1)) == 3
    assert compute_balanced(chain, 0, 9, (0, 0, 1)) == 5


def test_equation_2_for_four_devices() -> None:
    """M_1 = M / (1 + 4/3 + 2 + 4): of 25 bytes 3, 4, 6 and 12."""
    chain = chain_of([1.0] * 25, [1] * 25, [4, 3, 2, 1])
    assert [memory_balanced(chain, 0, 25, (0, stage, 3)) for stage in range(3)] == [3, 7, 13]


def test_under_gpipe_all_stages_keep_as_many_microbatches() -> None:
    chain = chain_of([1.0] * 12, [1] * 12, [4, 4, 4])
    assert [memory_balanced(chain, 0, 12, (0, stage, 2)) for stage in range(2)] == [4, 8]


def algorithm_2(numbers: Numbers, depth: int) -> dict[int, int]:
    """Run printed lines 1 to 18, x from 1. M_G is the peak of all layers; the planner's page gives the reason."""
    nodes = range(len(numbers.saved))
    x, cur_mem, peak_mem, total = 1, 0, 0, 0.0
    for i in range(depth):
        total += depth / (depth - i)
    m_1 = m_x = numbers.once(0, len(numbers.saved)) / total
    rho = {}
    for n in nodes:
        cur_mem += numbers.saved[n] + numbers.work[n] + numbers.weights[n]
        peak_mem = max(cur_mem, peak_mem)
        cur_mem -= numbers.work[n]
        if peak_mem >= m_x * (1 - 1e-9):
            rho[x] = n
            x += 1
            if x == depth:
                break
            m_x = depth / (depth - x + 1) * m_1
            cur_mem = peak_mem = 0
    return rho


@pytest.mark.parametrize("seed", some(range(60), 20))
def test_algorithm_2_line_by_line(seed: int) -> None:
    dice = random.Random(f"balance {seed}")
    depth = dice.randint(2, 5)
    size = dice.randint(depth, 30)
    columns = [[dice.randint(low, 9) for _ in range(size)] for low in (0, 1, 0)]
    chain = chain_of([1.0] * size, columns[1], list(range(depth, 0, -1)), weights=columns[0], work=columns[2])
    rho = algorithm_2(Numbers(*columns, columns[0], columns[0], []), depth)
    for stage in range(1, depth):
        expected = rho.get(stage, size) + 1
        # every stage before and behind it has a layer
        expected = max(stage, min(expected, size - (depth - stage)))
        assert memory_balanced(chain, 0, size, (0, stage - 1, depth - 1)) == expected


# -- the partition


def test_without_a_limit_the_seconds_are_balanced() -> None:
    chain = chain_of([3.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 3.0], [1] * 8, [4, 3, 2, 1])
    assert cuts(dawnpiper_stages(chain)) == [0, 1, 4, 7]
    assert all(not stage.intervals for stage in dawnpiper_stages(chain))


def test_the_walk_goes_from_balanced_seconds_to_balanced_bytes() -> None:
    """Nine layers of 3 s and 2 bytes, two microbatches in flight in stage 0: cuts 5, 4 and 3 need 20, 16 and 12 bytes
    there, and take 15, 15 and 18 s. Recomputing a layer takes 1 s and frees one byte of each microbatch.

    At 18 bytes cut 5 takes 16 s with one recomputed layer; cut 4 fits without, and the walk ends there. At 15 bytes
    stage 0 of cut 4 recomputes one layer, and the stage behind it takes 15 s.
    """
    for usable, first_cut, seconds, again in ((20, 5, 15.0, 0), (18, 4, 15.0, 0), (16, 4, 15.0, 0), (15, 4, 15.0, 1)):
        chain = chain_of([1.0] * 9, [2] * 9, [2, 1], [usable] * 2, freed=[1] * 9)
        stages = dawnpiper_stages(chain)
        assert cuts(stages) == [0, first_cut]
        assert max(stage.seconds for stage in stages) == seconds
        assert sum(len(stage.intervals) for stage in stages) == again


def test_one_stage_is_treated_by_itself() -> None:
    chain = chain_of([1.0] * 4, [2] * 4, [1], [7], freed=[1] * 4)
    (stage,) = dawnpiper_stages(chain)
    assert (stage.first, stage.end, len(stage.intervals), stage.seconds, stage.lack) == (0, 4, 1, 13.0, 0)


def test_of_three_stages_the_first_is_cut_off_first() -> None:
    """Layers of 9, 6, 6 and 6 s: a third of 27 s is reached behind layer 0, half of the other 18 s behind layer 2. With
    the printed middle 18 s would be cut off first, reached behind layer 2, and half of these 21 s behind layer 1."""
    chain = chain_of([3.0, 2.0, 2.0, 2.0], [1] * 4, [3, 2, 1])
    assert cuts(dawnpiper_stages(chain)) == [0, 1, 3]


def test_where_nothing_fits_what_lacks_least_is_the_answer() -> None:
    stages = dawnpiper_stages(chain_of([1.0] * 9, [2] * 9, [2, 1], [5] * 2, freed=[1] * 9))
    assert cuts(stages) == [0, 3]
    assert [stage.lack for stage in stages] == [1, 1]


def test_cuts_that_many_tensors_cross_are_passed_over() -> None:
    """The walk goes over cuts 6, 5 and 4, which take 22, 21 and 24 s. A mask crosses all of them; only cut 6, and then
    only cut 4, has a single other tensor."""
    crossing = [frozenset({"mask", "x", "skip"})] * 13

    def walked(crossing: list[frozenset[str]] | None) -> list[int]:
        chain = chain_of([1.0] * 12, [2] * 12, [2, 1], [16] * 2, freed=[1] * 12, crossing=crossing)
        return cuts(dawnpiper_stages(chain))

    assert walked(None) == [0, 5]
    for cut in (6, 4):
        assert walked([*crossing[:cut], frozenset({"mask", "y"}), *crossing[cut + 1 :]]) == [0, cut]
    # if every cut has several tensors, all cuts count
    assert walked(crossing) == [0, 5]
    assert walked([frozenset({"mask", "x", "skip", f"own {cut}", f"other {cut}"}) for cut in range(13)]) == [0, 5]


@pytest.mark.parametrize("seed", some(range(40), 14))
def test_what_fits_fits_whatever_the_speed_of_the_tier_and_without_one(seed: int) -> None:
    """A faster tier used to offload what two calls in flight hold anyway, and to recompute nothing."""
    dice = random.Random(f"tier {seed}")
    chain = replace(random_chain(dice, seed % 4 + 1), swaps_within_calls=False)
    tiers = [replace(chain, host_bandwidth=bandwidth) for bandwidth in (0.01, 0.5, 2.0, 8.0, 1e9)]
    fits = [not any(stage.lack for stage in dawnpiper_stages(tier)) for tier in tiers]
    without = replace(chain, moved=[0] * chain.num_layers)
    assert len(set(fits)) == 1
    assert fits[0] or any(stage.lack for stage in dawnpiper_stages(without))


# -- Algorithm 1, line by line, with stages from 1

Found = tuple[int, float, list[StageChoice]]


class Printed:
    """AdjacentPartition and BiPar as printed, plus cases for one and three stages and for stages that lack memory."""

    def __init__(self, chain: Layerwise) -> None:
        self.chain, self.depth = chain, chain.stages
        self.lacked = False

    def walk(self, nodes: range, first_sid: int, mid: int, last_sid: int) -> list[int]:
        share = [1 / self.chain.in_flight[x - 1] for x in range(first_sid, last_sid + 1)]
        total = self.chain.seconds(nodes[0], nodes[-1] + 1)
        behind = range(nodes[0] + mid - first_sid + 1, nodes[-1] + 2 - (last_sid - mid))
        even = (mid - first_sid + 1) / (last_sid - first_sid + 1)
        rho_cb = next(
            (cut for cut in behind if self.chain.seconds(nodes[0], cut) >= total * even * (1 - 1e-9)), behind[-1]
        )
        node_bytes, begin, rho_mb = self.chain.once(nodes[0], nodes[-1] + 1), nodes[0], behind[-1]
        for x in range(first_sid, mid + 1):
            target = node_bytes * share[x - first_sid] / sum(share)
            ends = [n + 1 for n in nodes if n >= begin and self.chain.once(begin, n + 1) >= target * (1 - 1e-9)]
            begin = ends[0] if ends else nodes[-1] + 1
        rho_mb = min(max(begin, behind[0]), behind[-1])
        return sorted(range(min(rho_cb, rho_mb), max(rho_cb, rho_mb) + 1), key=lambda cut: abs(cut - rho_cb))

    def mem_opt(self, sid: int, begin: int, end: int) -> Found:
        stage = treated_stage(self.chain, sid - 1, begin, end)
        return stage.lack, stage.seconds, [stage]

    def adjacent(self, nodes: range, sid: int) -> Found:
        par_dict = {}
        for rho in self.walk(nodes, sid, sid, sid + 1):
            ends = (nodes[0], rho), (rho, nodes[-1] + 1)
            free = [self.chain.peak(sid - 1 + n, *ends[n], ()) <= self.chain.usable[sid - 1 + n] for n in (0, 1)]
            if not par_dict and all(free):  # lines 3 to 5
                return 0, max(self.chain.seconds(*bounds) for bounds in ends), [
                    StageChoice(*bounds, (), self.chain.seconds(*bounds), 0) for bounds in ends
                ]  # fmt: skip
            par_dict[rho] = self.joined(self.mem_opt(sid, *ends[0]), self.mem_opt(sid + 1, *ends[1]))
            if all(free):
                break
        return self.best(par_dict)

    def joined(self, front: Found, back: Found) -> Found:
        return max(front[0], back[0]), max(front[1], back[1]), front[2] + back[2]

    def bi_par(self, nodes: range, first_sid: int, last_sid: int) -> Found:
        if first_sid == last_sid:
            return self.mem_opt(first_sid, nodes[0], nodes[-1] + 1)
        if last_sid - first_sid == 1:
            return self.adjacent(nodes, first_sid)
        mid = first_sid if last_sid - first_sid == 2 else (first_sid + last_sid) // 2
        par_dict = {}
        for rho in self.walk(nodes, first_sid, mid, last_sid):
            halves = (
                self.bi_par(range(nodes[0], rho), first_sid, mid),
                self.bi_par(range(rho, nodes[-1] + 1), mid + 1, last_sid),
            )
            par_dict[rho] = self.joined(*halves)
            if not par_dict[rho][0] and not any(stage.intervals for stage in par_dict[rho][2]):
                break
        return self.best(par_dict)

    def best(self, par_dict: dict[int, Found]) -> Found:
        found = min(par_dict.values(), key=lambda candidate: candidate[:2])
        self.lacked |= found[0] > 0
        return found


@pytest.mark.parametrize("seed", some(range(240), 60))
def test_algorithm_1_line_by_line(seed: int) -> None:
    dice = random.Random(f"partition {seed}")
    chain = random_chain(dice, seed % 8 + 1)
    printed, stages = Printed(chain), dawnpiper_stages(chain)
    lack, seconds, expected = printed.bi_par(range(chain.num_layers), 1, chain.stages)
    if printed.lacked:  # then one cut more is tried
        assert max(stage.lack for stage in stages) <= lack
        assert lack or max(stage.seconds for stage in stages) <= seconds
    else:
        assert stages == expected


# -- Theorem 4.1


@pytest.mark.parametrize("seed", some(range(150), 50))
def test_the_theorem_holds_for_two_stages_to_within_a_layer(seed: int) -> None:
    """Its conditions: seconds and bytes grow with every layer, transfers take no time, and every byte saved costs the
    same. Whole layers move each balanced position by less than one layer."""
    dice = random.Random(f"theorem {seed}")
    size = dice.randint(2, 40)
    saved = [dice.randint(1, 20) for _ in range(size)]
    in_flight = dice.choice([[2, 1], [1, 1], [4, 4], [3, 1]])
    chain = chain_of([dice.uniform(0.1, 3) for _ in range(size)], saved, in_flight)
    limit, per_byte = dice.uniform(0.2, 1.0) * sum(saved) * in_flight[0], dice.uniform(0.0, 0.5)

    def slowest(cut: int) -> float:
        parts = (saved[:cut], saved[cut:])
        over = [max(0.0, k * sum(part) - limit) for k, part in zip(in_flight, parts, strict=True)]
        return max(
            chain.seconds(0, cut) + per_byte * over[0],
            chain.seconds(cut, size) + per_byte * over[1],
        )  # fmt: skip

    ends = sorted(find(chain, 0, size, (0, 0, 1)) for find in (compute_balanced, memory_balanced))
    inside = range(max(1, ends[0] - 1), min(size - 1, ends[1]) + 1)
    assert min(map(slowest, inside)) == min(map(slowest, range(1, size)))


@pytest.mark.parametrize("size", [4, 5, 6, 7])
@pytest.mark.parametrize("part", range(3, 11))
def test_equal_layers_on_two_devices_get_the_best_cut_and_choice_of_the_range(size: int, part: int) -> None:
    usable = size * 2 * part // 10
    chain = chain_of([1.0] * size, [2] * size, [2, 1], [usable] * 2, freed=[1] * size)

    def cheapest(stage: int, first: int, end: int) -> float:
        """Return the fewest seconds of a stage over all sets of recomputed layers."""
        best = float("inf")
        for again in itertools.product((0, 1), repeat=end - first):
            if chain.in_flight[stage] * (2 * (end - first) - sum(again)) <= usable:
                best = min(best, 3.0 * (end - first) + sum(again))
        return best

    # half of the seconds, and a third of the bytes, both rounded up to a layer
    named = range(-(-size // 3), -(-size // 2) + 1)
    slowest = {cut: max(cheapest(0, 0, cut), cheapest(1, cut, size)) for cut in range(1, size)}
    best = min(slowest[cut] for cut in named)
    if best == float("inf"):  # then the layer below is tried
        best = slowest.get(named[0] - 1, best)
    stages = dawnpiper_stages(chain)
    if best == float("inf"):
        assert any(stage.lack for stage in stages)
    else:
        assert max(stage.seconds for stage in stages) == best
        assert not any(stage.lack for stage in stages)
