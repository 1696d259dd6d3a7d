"""Titles of pictures: the model, the devices and the schedule, as far as they are known, in one line of text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiles.record import Profile
from varuna_capslog.reports.markup import plural

__all__ = ["device_kind", "plan_title", "schedules_text", "title_of"]


def title_of(what: str, model: str | None, devices: str, *more: str | None) -> str:
    """Return a title such as "One step of vit on 4 devices (cuda:t4), schedule 1f1b".

    devices: such as "4 devices", or "" where nothing is known of them. more: what else is known; None is left out.
    """
    place = f" on {devices}" if devices else ""
    return ", ".join([f"{what} of {model or 'a model'}{place}", *filter(None, more)])


def device_kind(conditions: Mapping[str, Any], speeds: Sequence[float | None] | None = None) -> str:
    """Return the kind of device that a profile is for in parentheses, such as " (cuda:t4)"; "" where it is not known.

    speeds: of the devices; where they differ, the kinds do, and the profile has only the fastest.
    """
    device, gpu = conditions.get("device"), conditions.get("gpu")
    if not device or len(set(speeds or ())) > 1:
        return ""
    return f" ({device}:{gpu})" if gpu else f" ({device})"


def plan_title(what: str, plan: Plan, profile: Profile | None, *more: str | None) -> str:
    """Return the title of a picture of a plan: its model, its devices, its planner and `more`."""
    model = plan.model or (None if profile is None else profile.model)
    kind = "" if profile is None else device_kind(profile.conditions, [rank.speed for rank in plan.ranks])
    count = plural(plan.num_ranks, "device")
    # the short form does not tell how many such pipelines a run has
    devices = f"a pipeline of {count}" if plan.short and plan.num_ranks > 1 else count
    planner = None if plan.planner is None else f"planner {plan.planner}"
    return title_of(what, model, f"{devices}{kind}", planner, *more)


def schedules_text(names: Sequence[str | None]) -> str | None:
    """Return the schedules of several plans, each once: "schedule 1f1b", "schedules 1f1b, varuna"; None for none."""
    known = [name for name in dict.fromkeys(names) if name is not None]
    return f"schedule{'s' if len(known) > 1 else ''} {', '.join(known)}" if known else None
