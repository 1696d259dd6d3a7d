"""Rules between `pipeline.parallel` and other keys of a config."""

from __future__ import annotations

from typing import TYPE_CHECKING

from varuna_capslog.base.divisors import Divisors

if TYPE_CHECKING:
    from varuna_capslog.config.settings import Pipeline, Train

__all__ = ["check_pipeline", "check_samples"]


def check_pipeline(pipeline: Pipeline) -> None:
    """Raise ValueError for nodes of another number of devices or cards, and for replicas of our engine beside it."""
    divisors = pipeline.divisors
    cards = pipeline.devices * (1 if divisors is None else divisors.cards)
    if pipeline.node_devices is not None and cards % pipeline.node_devices:
        what = f"pipeline.devices={pipeline.devices}" if divisors is None else f"the {cards} cards of all stages"
        raise ValueError(
            f"pipeline.node_devices={pipeline.node_devices} does not divide {what}; all nodes must have the same "
            "number of devices"
        )
    if divisors is not None and pipeline.replicas > 1:
        raise ValueError(
            f"pipeline.parallel={divisors.describe()} and pipeline.replicas={pipeline.replicas} are both given; "
            "replicas are pipelines of our engine, those of another system are data=N in parallel"
        )
    if divisors is None and pipeline.node_bandwidth is not None:
        raise ValueError(
            "pipeline.node_bandwidth is for messages within a stage of pipeline.parallel, which is not given; leave "
            "one out or give both"
        )


def check_samples(divisors: Divisors | None, train: Train) -> None:
    """Raise ValueError where a step is no whole number of microbatches on each of the cards with samples."""
    if divisors is not None and train.minibatch_size % (train.microbatch_size * divisors.data):
        raise ValueError(
            f"train.minibatch_size={train.minibatch_size} is no multiple of microbatches of {train.microbatch_size} on "
            f"each of data={divisors.data} in pipeline.parallel; change one of them"
        )
