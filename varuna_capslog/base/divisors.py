"""Divisors of a pipeline stage in a run of another system: the cards of one stage, and what each of them holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from varuna_capslog.base import fields
from varuna_capslog.base.errors import CapslogError

__all__ = ["KINDS", "Divisors"]

KINDS = ("matrix", "expert", "other")
"""Kinds of parameters that are divided differently: of matrices, of experts, and of all else (norms, routers)."""

_MOST_CARDS = 1 << 20


@dataclass(frozen=True)
class Divisors:
    """Divisors of one pipeline stage, which is tensor x context x data cards; the engine of capslog runs none of them.

    tensor: cards that share matrices and, by sequence parallelism, the activations between them.
    context: cards that share a sequence: its activations and its attention.
    expert: cards that share the experts of a layer; adds no cards, so that it divides tensor x context x data. Experts
        are not divided by `tensor`.
    data: cards that take samples of their own.
    zero: what replicas share: 0 nothing, 1 optimizer states and masters, 2 also gradients, 3 also weights. Replicas are
        data x context cards, those of an expert tensor x context x data / expert.

    Raises CapslogError for other numbers.
    """

    tensor: int = 1
    context: int = 1
    expert: int = 1
    data: int = 1
    zero: int = 0

    def __post_init__(self) -> None:
        for name in ("tensor", "context", "expert", "data"):
            object.__setattr__(self, name, fields.whole(getattr(self, name), f"parallel.{name}", 1, _MOST_CARDS))
        object.__setattr__(self, "zero", fields.whole(self.zero, "parallel.zero", 0, 3))
        if self.cards % self.expert:
            raise CapslogError(
                f"parallel.expert is {self.expert}, which does not divide the {self.cards} cards of a stage (tensor x "
                "context x data); experts are shared among these cards, so give a divisor of their number"
            )

    @classmethod
    def of(cls, value: Any) -> Divisors | None:
        """Return the divisors that a text such as `tensor=4,expert=8,data=2` or an object says; None where each is 1.
        Raises CapslogError for unknown names and other numbers.
        """
        if isinstance(value, str):
            value = _numbers_in(value)
        if isinstance(value, Mapping):
            fields.refuse_unknown(value, [part.name for part in dataclasses.fields(cls)], "divisor of parallel")
            value = cls(**value)
        elif value is not None and not isinstance(value, cls):
            raise CapslogError(f"parallel is {value!r}; give divisors such as tensor=4,expert=8,data=2")
        return None if value == cls() else value

    @classmethod
    def plain(cls, value: Any) -> dict[str, int] | None:
        """Return all divisors by name, for a file; arguments and errors as of `of`."""
        divisors = cls.of(value)
        return None if divisors is None else dict(vars(divisors))

    @property
    def cards(self) -> int:
        """Cards of one stage."""
        return self.tensor * self.context * self.data

    def replicas(self, kind: str) -> int:
        """Return the cards that hold the same parameters of this kind (`KINDS`), by which `zero` divides them."""
        return self.cards // self.expert if kind == "expert" else self.data * self.context

    def shards(self, kind: str, level: int = 4) -> int:
        """Return by how much the bytes of parameters of a kind are divided on each card.

        level: of `zero` from which replicas share these bytes: 1 states, 2 gradients, 3 weights; 4: they never do.
        """
        split = {"matrix": self.tensor, "expert": self.expert, "other": 1}[kind]
        return split * self.replicas(kind) if self.zero >= level else split

    def describe(self) -> str:
        """Return the text that `of` reads, without divisors of 1."""
        return ",".join(f"{name}={size}" for name, size in vars(self).items() if size != getattr(Divisors, name))


def _numbers_in(text: str) -> dict[str, int]:
    numbers: dict[str, int] = {}
    for part in text.split(","):
        name, equals, number = (word.strip() for word in part.partition("="))
        if not equals or not number.isdecimal() or name in numbers:
            raise CapslogError(
                f"parallel is {text!r}, in which {part.strip()!r} names no divisor; give each once, such as "
                "tensor=4,expert=8,data=2"
            )
        numbers[name] = int(number)
    return numbers
