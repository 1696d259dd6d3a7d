"""Reduces a member's state to the part that decides its future: values that are never read again are forgotten.

The search identifies a world by these reduced states. Two states may be merged only if equal events always lead them to
states that are merged again; `tests/rig/tests/search/test_forgetting.py` checks this on whole graphs.
"""

from __future__ import annotations

import functools
from dataclasses import replace

from varuna_capslog.membership import messages as m
from varuna_capslog.membership.changes import Phase, Roles, State
from varuna_capslog.membership.generation import INITIAL, Generation, Held, Stamp

__all__ = ["adopts", "brought", "living", "valid"]

_MANY = 100_000


def adopts(state: State, newest: Generation) -> Generation:
    """Return the record that decides which parts of a member's state are void: its own, or the store's if the member
    adopts that next. All later records void the same parts.
    """
    return newest if state.phase in (Phase.CHANGE, Phase.OUTSIDE) else state.record


@functools.lru_cache(_MANY)
def living(state: State, newest: Generation) -> State:
    """Return a member's state without the fields that its phase writes before it reads them again.

    Args:
        newest: the store's record.
    """
    record = adopts(state, newest)
    state = replace(state, held=valid(state.held, record), voted=_voted(state.voted, record))
    match state.phase:
        case Phase.RUN:
            return replace(state, roles=replace(state.roles, missing=frozenset()))
        case Phase.INSTALL:
            return replace(state, cast=False, computed=False, copied=0)
        case Phase.CHANGE if state.record.number < newest.number:  # its proposal cannot be founded any more
            leaves = frozenset(change for change in state.wishes.changes if change[0] == "leave")
            wishes = replace(state.wishes, changes=leaves, planned=False)
            state = replace(state, wishes=wishes, regress=False, base=None)
    trained = state.phase is Phase.CHANGE and state.base is not None
    return replace(
        state,
        round=0,
        cast=state.phase is Phase.GATHER,
        computed=False,
        copied=0,
        at=state.at if trained else INITIAL,
        base=state.base if trained else None,
        roles=Roles(layout=state.roles.layout),
        wishes=replace(state.wishes, saving=False, prepared=frozenset()),
    )


@functools.lru_cache(_MANY)
def brought(value: m.Value, record: Generation) -> m.Value:
    """Return a member's cast in a generation, without the parts that the generation's record voids."""
    if not isinstance(value, m.Contribution):
        return value
    proofs = frozenset(proof for proof in value.proofs if record.continues(proof.stamp))
    return replace(value, held=valid(value.held, record), voted=_voted(value.voted, record), proofs=proofs)


@functools.lru_cache(_MANY)
def valid(held: Held, record: Generation) -> Held:
    """Return the held entries that lie on a record's past."""
    return frozenset(entry for entry in held if record.continues(entry[1]))


def _voted(voted: tuple[int, Stamp], record: Generation) -> tuple[int, Stamp]:
    return voted if record.continues(voted[1]) else (0, INITIAL)
