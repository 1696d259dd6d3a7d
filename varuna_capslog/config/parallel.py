"""Rules between the keys that divide a stage or its optimizer states, and other keys of a config.

Each function raises ValueError with the keys, their values and what to change.
"""

from __future__ import annotations

from pathlib import Path

from varuna_capslog.base.divisors import Divisors

__all__ = ["check_pipeline", "check_samples", "check_shared_states", "check_stages"]


def check_stages(stages_per_rank: int | list[int] | str | None, cuts: list[int] | None, devices: int) -> None:
    """Refuse a list of stages per rank of another length, and cuts of another number of stages."""
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
    """Refuse nodes of another number of devices or cards, and replicas of our engine beside `pipeline.parallel`."""
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
    """Refuse a step that is no whole number of microbatches on each of the cards with samples."""
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
