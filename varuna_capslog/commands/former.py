"""Options of earlier versions, which are refused with their new form."""

from __future__ import annotations

__all__ = ["former_option"]

_FORMER = {
    "--pareto": "is a command of its own: capslog front, with the arguments of capslog plan",
    "--maximize": "is a command of its own: capslog largest, with microbatch, minibatch or image-size among its words",
    "--joint": "is a planner: --planner joint",
    "--speeds": "is said by kinds, --devices '2x rtx4090, rtx3090', or by the key pipeline.speeds=[1,0.5]",
    "--blocks": "is the key train.accumulation_blocks=4",
    "--bandwidth": "is the key pipeline.bandwidth=10Gbit",
    "--latency": "is the key pipeline.latency=20us",
    "--host-bandwidth": "is the key pipeline.host_bandwidth=12GB/s",
    "--node-devices": "is the key pipeline.node_devices=4",
    "--search-seconds": "is the key pipeline.search_seconds=60",
    "--schedule": "is the key pipeline.schedule=1f1b",
    "--microbatches": "is the key train.minibatch_size, the samples of a step: microbatches times their size",
    "--microbatch": "is the key train.microbatch_size=4",
    "--recompute": "is the key pipeline.recompute=true",
    "--no-recompute": "is the key pipeline.recompute=false",
    "--stage-inputs": "is the key pipeline.stage_inputs=device",
}


def former_option(name: str) -> str | None:
    """Return a sentence that refuses an option of an earlier version and gives its new form; None for other options."""
    name = name.partition("=")[0]
    return f"{name} {_FORMER[name]}; it is no option any more" if name in _FORMER else None
