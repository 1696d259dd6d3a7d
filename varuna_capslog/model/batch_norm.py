"""Warns of batch norms that train on one sample at a time, in plans, at the start of a run and in `fit`."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

__all__ = ["warning_of_one_sample"]


def warning_of_one_sample(modules: Iterable[tuple[str, nn.Module]], where: str, remedy: str) -> str | None:
    """Return a sentence on the first batch norm that trains; None where there is none, or all are frozen.

    Args:
        modules: with their names, in the mode in which they train.
        where: what has one sample, such as "a microbatch (train.microbatch_size=1)".
        remedy: how to give it more, such as "choose train.microbatch_size=2 or more".
    """
    norms = [(name, part) for name, part in modules if _trains(part)]
    if not norms:
        return None
    (name, part), more = norms[0], len(norms) - 1
    others = f" (and {more} more like it)" if more else ""
    return (
        f"{name!r} is a {type(part).__name__}{others}, and {where} has one sample, so that each is normalised by "
        f"itself, unlike in evaluations; {remedy}, replace it by a GroupNorm, or freeze it with eval()"
    )


def _trains(part: nn.Module) -> bool:
    return isinstance(part, nn.modules.batchnorm._BatchNorm) and part.training
