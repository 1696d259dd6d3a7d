"""mCAP's recommenders: brute force over all cut lists (`mcap-bf`), Bayesian optimisation over a hundred (`mcap-bo`).

CAPSlog's Fig. 11 and 13 compare with them. Both need only the bytes of stages, from any memory model. `exact` finds the
result of `mcap-bf` without evaluating cut lists one by one; both are baselines, and `mcap-bf` is also a test oracle.
"""

from __future__ import annotations

import math
import os
import time
import warnings
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from varuna_capslog.base.errors import CapslogError, install_sentence
from varuna_capslog.base.units import format_bytes
from varuna_capslog.memory.costs import StageCosts

__all__ = ["LIMIT", "count_cut_lists", "mcap_bf_cuts", "mcap_bo_cuts"]

LIMIT = 10**8
"""Most cut lists that `mcap-bf` evaluates; the variable CAPSLOG_MCAP_LIMIT sets another number."""

_LIMIT_VARIABLE = "CAPSLOG_MCAP_LIMIT"

_MOST_TABLE_BYTES = 4 << 30
"""Most bytes of the tables of stages, beginnings and ends, for any limit of cut lists."""

_BLOCK = 1 << 18
"""Cut lists that are evaluated in one numpy call."""

BO_CALLS, BO_INITIAL_POINTS = 100, 30
"""Number of cut lists that `mcap-bo` evaluates, and of the random first ones, before the model guides the search. As in
the program published with CAPSlog (henkdr/CAPSlog at cc11640, capslog/calc_mem_stats.py); the paper prints neither.
"""


def count_cut_lists(num_layers: int, devices: int) -> int:
    """Return the number of predictions of brute force: C(L-1, G-1) (CAPSlog, Sec. III-B2)."""
    return math.comb(num_layers - 1, devices - 1)


# -- brute force


def mcap_bf_cuts(costs: StageCosts, devices: int, capacities: Sequence[int] | None = None) -> list[int]:
    """Return the first layer of each of `devices` stages, 1 <= devices <= L: the smallest peak of all cut lists.

    Ties are broken by mCAP's rule, as in CAPTURE's Algorithm 4 and the program published with CAPSlog: in every
    remaining cut list the device with the highest prediction is left out, and the smallest peak of the others decides;
    and so on. The program stops at two devices and takes the first remaining cut list; the text continues until no
    device remains, then draws a cut list. Here the rule continues, too, and then takes the smallest, like `exact`.

    Each beginning (stages before the middle cut) is combined with each end, a block of pairs at a time. Every peak is
    computed. O(C(L-1, G-1)), some nanoseconds each. capacities: ignored, as in mCAP. Raises CapslogError for more cut
    lists than CAPSLOG_MCAP_LIMIT (default `LIMIT`), naming their number and time.
    """
    num_layers = costs.num_layers
    total = count_cut_lists(num_layers, devices)
    if total == 1:
        return list(range(devices))
    _refuse_too_many(costs, devices, total, _limit())
    middle = devices // 2
    matrices = [costs.matrix(0, devices)] * devices
    if not costs.position_free:
        matrices = [costs.matrix(stage, devices) for stage in range(devices)]
    middle_cuts = np.arange(middle, num_layers - (devices - middle) + 1)
    beginnings = _grown(np.zeros(1, dtype=np.int64), matrices, 0, middle)
    ends = _grown(middle_cuts, matrices, middle, devices - 1)
    last_stage = matrices[-1][ends.cuts[:, -1], num_layers]
    ends = _Lists(ends.cuts, np.column_stack([ends.bytes, last_stage]))

    best: _Lists | None = None
    for cut in middle_cuts.tolist():
        before = beginnings.where(beginnings.cuts[:, -1] == cut)
        after = ends.where(ends.cuts[:, 0] == cut)
        before_peaks, after_peaks = before.bytes.max(axis=1), after.bytes.max(axis=1)
        step = max(1, _BLOCK // len(after_peaks))
        for begin in range(0, len(before_peaks), step):
            block = np.maximum.outer(before_peaks[begin : begin + step], after_peaks)
            lowest = int(block.min())
            if best is None or lowest <= best.bytes.max():
                rows, columns = np.nonzero(block == lowest)
                lists = before.beside(after, rows + begin, columns)
                best = _winner(lists if best is None or lowest < best.bytes.max() else lists.and_also(best))
    assert best is not None, "there is at least one cut list"
    return [int(first) for first in best.cuts[0]]


class _Lists(NamedTuple):
    """Parts of cut lists, one per row: the first layer and the bytes of each of their stages. While parts grow, and in
    beginnings always, `cuts` has one more column: the first layer of the next stage.
    """

    cuts: NDArray[np.int64]
    bytes: NDArray[np.int64]

    def where(self, rows: NDArray[np.bool_]) -> _Lists:
        """Return the rows for which `rows` is True."""
        return _Lists(self.cuts[rows], self.bytes[rows])

    def beside(self, after: _Lists, rows: NDArray[np.int64], after_rows: NDArray[np.int64]) -> _Lists:
        """Return whole cut lists: beginnings `rows` joined pair by pair with the ends `after_rows` of `after`."""
        cuts = np.column_stack([self.cuts[rows, :-1], after.cuts[after_rows]])
        return _Lists(cuts, np.column_stack([self.bytes[rows], after.bytes[after_rows]]))

    def and_also(self, lists: _Lists) -> _Lists:
        """Return the rows of both."""
        return _Lists(np.vstack([self.cuts, lists.cuts]), np.vstack([self.bytes, lists.bytes]))


def _grown(starts: NDArray[np.int64], matrices: Sequence[NDArray[np.int64]], begin: int, end: int) -> _Lists:
    """Return every way to fill stages begin .. end-1 from each of `starts` on; each later stage still gets a layer."""
    cuts, bytes_ = starts[:, None], np.empty((len(starts), 0), dtype=np.int64)
    for stage in range(begin, end):
        matrix = matrices[stage]
        last_end = len(matrix) - (len(matrices) - stage - 1)
        choices = last_end - cuts[:, -1]
        rows = np.repeat(np.arange(len(cuts)), choices)
        firsts = cuts[rows, -1]
        ends = firsts + 1 + np.arange(len(rows)) - np.repeat(np.cumsum(choices) - choices, choices)
        bytes_ = np.column_stack([bytes_[rows], matrix[firsts, ends]])
        cuts = np.column_stack([cuts[rows], ends])
    return _Lists(cuts, bytes_)


def _winner(lists: _Lists) -> _Lists:
    """Return the cut list chosen by the tie-break rule: round by round the smallest of the next-highest predictions."""
    descending = -np.sort(-lists.bytes, axis=1)
    remaining = np.arange(len(descending))
    for column in (*descending.T, *lists.cuts.T):
        if len(remaining) == 1:
            break
        values = column[remaining]
        remaining = remaining[values == values.min()]
    return _Lists(lists.cuts[remaining[:1]], lists.bytes[remaining[:1]])


def _limit() -> int:
    text = os.environ.get(_LIMIT_VARIABLE)
    if text is None:
        return LIMIT
    try:
        return int(float(text))
    except (ValueError, OverflowError):
        raise CapslogError(f"{_LIMIT_VARIABLE}={text} is not a number of cut lists; set one such as 1e9") from None


def _refuse_too_many(costs: StageCosts, devices: int, total: int, limit: int) -> None:
    num_layers = costs.num_layers
    if total > limit:
        raise CapslogError(
            f"{num_layers} layers on {devices} devices have {total:.3g} cut lists, C({num_layers - 1}, {devices - 1}), "
            f"about {_duration(total * _seconds_each())} of planner mcap-bf here, which weighs at most {limit:.3g} "
            f"unless {_LIMIT_VARIABLE} allows more; planner exact finds the same cut list at once"
        )
    middle = devices // 2
    parts = math.comb(num_layers - devices + middle, middle) + math.comb(num_layers - middle, devices - middle)
    tables = 1 if costs.position_free else devices
    table_bytes = 8 * (parts * (devices + 1) + tables * num_layers * (num_layers + 1))
    if table_bytes > _MOST_TABLE_BYTES:
        raise CapslogError(
            f"planner mcap-bf would keep {format_bytes(table_bytes)} of tables for {num_layers} layers on {devices} "
            f"devices, more than its {format_bytes(_MOST_TABLE_BYTES)}; planner exact finds the same"
        )


def _seconds_each() -> float:
    """Measure this machine's seconds per cut list, on one block."""
    values = np.arange(512, dtype=np.int64)
    begun = time.perf_counter()
    block = np.maximum.outer(values, values)
    block.min()
    return (time.perf_counter() - begun) / block.size


def _duration(seconds: float) -> str:
    for size, name in ((31_557_600, "years"), (86_400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {name}"
    return f"{seconds:.3g} seconds"


# -- Bayesian optimisation


def mcap_bo_cuts(
    costs: StageCosts, devices: int, capacities: Sequence[int] | None = None, *, seed: int = 0, calls: int = BO_CALLS
) -> list[int]:
    """Return the best of `calls` cut lists that scikit-optimize tries; it need not be the best of all.

    A point has an integer percentage, 1 .. 100, for each device but the last: its share of its available layers (the
    remaining layers, less one per later device), rounded, and at least one layer. The surrogate is a Gaussian
    process with gp_hedge, xi = 1000 bytes, kappa = 0.01 and a sampled acquisition function, as in the program that
    `BO_CALLS` cites. The same seed gives the same result under the same versions. The process is fitted again after
    each cut list, so a search takes half a minute or more. capacities: ignored, as in mCAP. seed: of the random points
    and the sampling; the published program sets none. Raises CapslogError where scikit-optimize is not installed.
    """
    try:
        import skopt
    except ImportError as error:
        raise CapslogError(
            f"planner mcap-bo needs scikit-optimize, which is not installed; {install_sentence('bo')}; planner exact "
            "needs nothing and finds the smallest peak"
        ) from error
    if count_cut_lists(costs.num_layers, devices) == 1:
        return list(range(devices))
    optimizer = skopt.Optimizer(
        [(1, 100)] * (devices - 1),
        "GP",
        n_initial_points=min(BO_INITIAL_POINTS, calls),
        acq_optimizer="sampling",
        acq_func_kwargs={"xi": 1000, "kappa": 0.01},
        random_state=seed,
    )
    best: tuple[int, list[int]] | None = None
    with warnings.catch_warnings():
        # A point may come again, and a fit may not converge: neither is an error of the search.
        warnings.simplefilter("ignore")
        for _ in range(calls):
            point = optimizer.ask()
            cuts = _cuts_of_shares([int(share) for share in point], costs.num_layers)
            peak = max(costs.peaks(cuts))
            optimizer.tell(point, peak)
            if best is None or peak < best[0]:
                best = peak, cuts
    assert best is not None, "calls is at least 1"
    return best[1]


def _cuts_of_shares(shares: Sequence[int], num_layers: int) -> list[int]:
    """Return the cut list of a point: each device's percentage of its available layers."""
    cuts = [0]
    for later, share in zip(range(len(shares), 0, -1), shares, strict=True):
        free = num_layers - cuts[-1] - later
        cuts.append(cuts[-1] + max(1, round(share / 100 * free)))
    return cuts
