"""Cuts searched on the spot: from a profile and Varuna's number of stages, when Varuna is built or its job is started.

Plain numbers; every rank searches alone and finds the same, which takes milliseconds.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from varuna_capslog import planners
from varuna_capslog.base import fields, units
from varuna_capslog.base.errors import CapslogError, DoesNotFit
from varuna_capslog.base.units import format_bytes
from varuna_capslog.memory import AUTO, MEMORY_MODELS
from varuna_capslog.planning.search import plan as search_plan
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiles.record import Profile, read_profile

__all__ = ["Search"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Search:
    """What to search cuts from.

    Attributes:
        profile: of the model's pieces, as `plugin.profile` or `capslog profile` gives it.
        devices: stages that are expected; None is as many as Varuna has.
        planner, memory: names as for `capslog plan`.
        capacity: bytes of every stage's device, or of each.
    """

    profile: Profile
    devices: int | None = None
    planner: str = "exact"
    memory: str = AUTO
    capacity: int | tuple[int, ...] | None = None

    @classmethod
    def of(
        cls,
        profile: Profile | str | os.PathLike[str],
        devices: int | None = None,
        planner: str = "exact",
        memory: str = AUTO,
        capacity: int | str | Sequence[int] | None = None,
    ) -> Search:
        """From what a user gives: also a file, and sizes such as "16GiB". Raises CapslogError for impossible ones."""
        fields.refuse_unknown([planner], planners.PLANNER_NAMES, "planner")
        fields.refuse_unknown([memory], [AUTO, *MEMORY_MODELS], "memory")
        if not isinstance(profile, Profile):
            profile = read_profile(Path(profile))
        sizes = units.parse_capacity(capacity) if isinstance(capacity, str) else capacity
        if sizes is not None and not isinstance(sizes, int):
            sizes = tuple(sizes)
        found = cls(profile, devices, planner, memory, sizes)
        if devices is not None:
            found.plan(devices)
        return found

    def check_microbatch(self, size: int) -> None:
        """Raises CapslogError where a capacity is to be kept with microbatches of another size than was profiled."""
        profiled = self.profile.conditions.get("microbatch_size")
        if self.capacity is not None and profiled not in (None, size):
            raise CapslogError(
                f"the profile holds for microbatches of {profiled}, not of {size} (chunk_size), so no capacity can be "
                "promised; profile with that size"
            )

    def plan(self, num_stages: int, num_pieces: int | None = None) -> Plan:
        """The plan for so many stages.

        Args:
            num_pieces: of the model, where known.

        Raises:
            CapslogError: the profile is of another model, other devices were expected, or it says nothing of bytes.
            DoesNotFit: no cut list keeps within the capacity; names the stage and how many devices would do.
        """
        if num_pieces is not None and num_pieces != self.profile.num_layers:
            raise CapslogError(
                f"the profile is of {self.profile.num_layers} layers, but the model has {num_pieces} pieces "
                f"({num_pieces - 1} CutPoints); profile this model"
            )
        if self.devices is not None and self.devices != num_stages:
            raise CapslogError(
                f"devices={self.devices}, but Varuna was started with {num_stages} stages; start with another "
                "--nstages, or leave devices out"
            )
        plan = search_plan(
            self.profile,
            num_stages,
            planner=self.planner,
            memory=self.memory,
            capacity=list(self.capacity) if isinstance(self.capacity, tuple) else self.capacity,
        )
        if plan.fits is False:
            raise DoesNotFit("; ".join(plan.notes))
        if plan.fits is None and self.capacity is not None:
            raise CapslogError("; ".join(plan.notes))
        peak = "unknown" if plan.peak_bytes is None else format_bytes(plan.peak_bytes)
        _log.info("cuts %s by %s, largest stage %s", list(plan.cuts), self.planner, peak)
        return plan
