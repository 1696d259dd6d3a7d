"""Memory model `ranks`: the fold of a rank's list of actions (`fold`), for every full plan and every schedule.

A search over cut lists needs the bytes of any stage at any place, and these are the closed form of the run's schedule
(`inflight`); what the plan that is found takes is then folded (`planning/ranks`).
"""

from __future__ import annotations

from varuna_capslog.memory import inflight
from varuna_capslog.memory.fold import MODEL
from varuna_capslog.memory.inflight import InflightCosts
from varuna_capslog.profiles.record import Profile
from varuna_capslog.schedules import RunShape

__all__ = ["gap", "stage_costs"]


def stage_costs(profile: Profile, run: RunShape) -> InflightCosts:
    """The costs of every stage of one pipeline, one stage per rank; see `inflight.stage_costs`."""
    return inflight.stage_costs(MODEL, profile, run)


def gap(run: RunShape) -> str | None:
    """None: a list of actions says all that the fold must know."""
    return None
