"""Degrees of parallelism by which another system divides a pipeline stage (divisors), and rules for keys that divide.

The `check_` functions raise ValueError with the keys, their values and what to change.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from varuna_capslog.base import fields
from varuna_capslog.base.errors import CapslogError

__all__ = ["KINDS", "Divisors", "check_pipeline", "check_samples", "check_shared_states", "check_stages"]

KINDS = ("matrix", "expert", "other")
"""Kinds of parameters that are divided differently: of matrices, of experts, and of all else (norms, routers)."""

_MOST_CARDS = 1 << 20


@dataclass(frozen=True)
class Divisors:
    """Degrees of parallelism in one pipeline stage of tensor x context x data cards. Our engine runs none of them.

    tensor: cards that share matrices and, by sequence parallelism, the activations between them.
    context: cards that share a sequence: its activations and its attention.
    expert: cards that share the experts of a layer; adds no cards, so `expert` divides tensor x context x data. Experts
        are not divided by `tensor`.
    data: cards that take different samples.
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
        """Return the divisors of a text such as `tensor=4,expert=8,data=2` or of an object; None where none divides.
        Raises CapslogError for unknown names and invalid numbers.
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
        """Return all divisors by name, for a file; arguments and errors like those of `of`."""
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
        """Return the number by which the bytes of a kind's parameters are divided on each card.

        level: least `zero` with which replicas share these bytes: 1 states, 2 gradients, 3 weights; 4: never.
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


def check_stages(stages_per_rank: int | list[int] | str | None, cuts: list[int] | None, devices: int) -> None:
    """Refuse a list of stages per rank without one entry per device, and cuts that contradict the stages per rank."""
    if isinstance(stages_per_rank, list):
        if len(stages_per_rank) != devices:
            raise ValueError(
                f"pipeline.stages_per_rank lists {len(stages_per_rank)} number(s) for pipeline.devices={devices}; give "
                "one per device, or one for all"
            )
        if cuts is not None and len(cuts) != sum(stages_per_rank):
            raise ValueError(
                f"pipeline.cuts={cuts} gives {len(cuts)} stages, but pipeline.stages_per_rank is {stages_per_rank}; "
                "leave one of them out"
            )
    elif cuts is not None:
        if len(cuts) % devices:
            raise ValueError(
                f"pipeline.cuts={cuts} gives {len(cuts)} stages for pipeline.devices={devices}; every device must get "
                "the same number of stages, or the number that a list in pipeline.stages_per_rank says"
            )
        if stages_per_rank not in (None, len(cuts) // devices):
            raise ValueError(
                f"pipeline.cuts={cuts} gives {len(cuts) // devices} stages per device, but pipeline.stages_per_rank is "
                f"{stages_per_rank}; leave one of them out"
            )


def check_pipeline(
    divisors: Divisors | None, devices: int, node_devices: int | None, replicas: int, has_node_bandwidth: bool
) -> None:
    """Refuse nodes that do not divide devices or cards, replicas beside `parallel`, a node bandwidth without it."""
    cards = devices * (1 if divisors is None else divisors.cards)
    if node_devices is not None and cards % node_devices:
        devices_named = f"pipeline.devices={devices}" if divisors is None else f"the {cards} cards of all stages"
        raise ValueError(
            f"pipeline.node_devices={node_devices} does not divide {devices_named}; all nodes must have the same "
            "number of devices"
        )
    if divisors is not None and replicas > 1:
        raise ValueError(
            f"pipeline.parallel={divisors.describe()} and pipeline.replicas={replicas} are both given; replicas are "
            "pipelines of our engine, those of another system are data=N in parallel"
        )
    if divisors is None and has_node_bandwidth:
        raise ValueError(
            "pipeline.node_bandwidth is for messages within a stage of pipeline.parallel, which is not given; leave "
            "one out or give both"
        )


def check_samples(divisors: Divisors | None, minibatch_size: int, microbatch_size: int) -> None:
    """Refuse a step that is no whole number of microbatches on each card of the divisor `data`."""
    if divisors is not None and minibatch_size % (microbatch_size * divisors.data):
        raise ValueError(
            f"train.minibatch_size={minibatch_size} is no multiple of microbatches of {microbatch_size} on each of "
            f"data={divisors.data} in pipeline.parallel; change one of them"
        )


def check_shared_states(plan: Path | str | None, replicas: int, elastic: bool, engine: str) -> None:
    """Refuse `pipeline.zero: 1` without replicas, beside a plan file, and where no engine shares states."""
    reasons = {
        f"pipeline.plan={plan}": (
            plan is not None,
            "stages[].moments of a plan file say who keeps what; leave pipeline.zero out, or plan again",
        ),
        f"pipeline.replicas={replicas}": (
            replicas == 1,
            "it shares optimizer states among replicas, and there are none; set pipeline.replicas to 2 or more, or "
            "leave pipeline.zero out",
        ),
        "elastic.enabled=true": (
            elastic,
            "a member that is lost would take its share of the states along; leave one of them out",
        ),
        f"engine={engine}": (
            engine != "capslog",
            "only our own engine shares optimizer states; set engine to capslog, or leave pipeline.zero out",
        ),
    }
    for key, (wrong, why_not) in reasons.items():
        if wrong:
            raise ValueError(f"pipeline.zero=1 does not go with {key}: {why_not}")
