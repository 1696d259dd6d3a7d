"""CAPTURE's predictor as printed (Sec. III-B): bytes of a stage from a profile's runs by degree (`Profile.by_degree`).

    M_p(l, m, d) = M_i(l) + sum of M_a(k) for k = l+1 .. m, from the runs on d devices, at each batch size
    a straight line through both batch sizes, sampled at the target batch size
    degrees that were not profiled: a + b ln(d) through the predictions for the two largest profiled degrees

Nothing here corrects the paper; `capture.DegreePeaks` and the fold do. `benchmarks/capture` has the errors of both.
"""

from __future__ import annotations

from collections import defaultdict

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.memory.additive import AdditiveCosts
from varuna_capslog.planners.replicas.capture import log_fit
from varuna_capslog.profiles.record import Observation, Profile, layers_of_runs

__all__ = ["FittedPeaks"]


class FittedPeaks:
    """Predicts the bytes of each device of a stage. Raises CapslogError for a profile without runs by degree."""

    def __init__(self, profile: Profile) -> None:
        if not profile.by_degree:
            raise CapslogError("the profile has no runs by degree; profile with `capslog profile --degrees 1,2,4`")
        names = [layer.name for layer in profile.layers]
        groups: dict[tuple[str, int], dict[int, list[Observation]]] = defaultdict(lambda: defaultdict(list))
        for row in profile.by_degree:
            groups[row.parallel["kind"], row.parallel["degree"]][row.microbatch_size].append(row)
        self._costs = {
            way: {samples: _alone_and_added(names, rows) for samples, rows in sizes.items()}
            for way, sizes in groups.items()
        }

    @property
    def degrees(self) -> dict[str, list[int]]:
        """Kind -> profiled degrees, rising. A tensor stage of degree 1 is a data stage of degree 1."""
        degrees: dict[str, list[int]] = defaultdict(list)
        for kind, degree in sorted(self._costs):
            degrees[kind].append(degree)
        return dict(degrees)

    def predicts(self, kind: str, degree: int) -> bool:
        """True for a profiled degree, and where two profiled degrees above 1 can be fitted."""
        return self.is_profiled(kind, degree) or len(self._fitted(kind)) == 2

    def is_profiled(self, kind: str, degree: int) -> bool:
        """True where the profile has runs on `degree` devices."""
        return _way(kind, degree) in self._costs

    def of(self, first: int, end: int, kind: str, degree: int, samples: int) -> float:
        """Return the bytes of layers first .. end-1 on each of `degree` devices. samples: of one call, on all devices
        together. Raises CapslogError for a degree that was not profiled, without two profiled degrees above 1 to fit.
        """
        if self.is_profiled(kind, degree):
            return self._at(first, end, *_way(kind, degree), samples)
        if not self.predicts(kind, degree):
            raise CapslogError(
                f"the profile has runs of kind {kind!r} on {self.degrees.get(kind, [])} devices; a fit for {degree} "
                "needs two degrees above 1, such as `capslog profile --degrees 1,2,4`"
            )
        low, high = ((known, self._at(first, end, kind, known, samples)) for known in self._fitted(kind))
        return log_fit(low, high, degree)

    def _fitted(self, kind: str) -> list[int]:
        """Return the two largest profiled degrees above 1, or fewer."""
        return [known for known in self.degrees.get(kind, []) if known > 1][-2:]

    def _at(self, first: int, end: int, kind: str, degree: int, samples: int) -> float:
        """Return the bytes for a profiled degree, by the line through the smallest and the largest batch."""
        sizes = self._costs[kind, degree]
        small, large = min(sizes), max(sizes)
        at_small, at_large = (sizes[size].stage_bytes(first, end) for size in (small, large))
        slope = (at_large - at_small) / (large - small) if large > small else 0.0
        return at_small + slope * (samples - small)


def _way(kind: str, degree: int) -> tuple[str, int]:
    return "data" if degree == 1 else kind, degree


def _alone_and_added(names: list[str], rows: list[Observation]) -> AdditiveCosts:
    layers = layers_of_runs(names, rows)
    return AdditiveCosts.of_statistics([row.isolated_bytes for row in layers], [row.added_bytes for row in layers])
