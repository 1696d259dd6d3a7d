"""PipeDream's planner: chooses the cuts and the replicas of every stage, to minimise the time of the slowest stage.

Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP 2019, Sec. 3.1, for one level of
devices. The layers are a line: branches follow one another.

    T(i -> j, m) = max(sum of seconds / m, exchange of gradients)        layers i .. j as one stage on m devices
    A(j, m)      = min(T(1 -> j, m), min over i, m' of max(A(i, m - m'), transfer over the cut behind i,
                                                           T(i + 1 -> j, m')))

A stage on m' devices, with n devices from the stage to the loss, has ceil(n / m') microbatches in flight on each device
(NOAM, Sec. 3.2), all with their activations. As published, all devices are used.

Deviations: PipeDream exchanges gradients after every minibatch that it pipelines. Here training is synchronous, as in
GraphPipe's comparisons (PipeDream-Flush): there is one exchange per step, whose time is divided by its microbatches.
The busiest replica's share replaces 1/m where m does not divide the microbatches.
"""

from __future__ import annotations

import numpy as np

from varuna_capslog.planners.replicas.costs import GraphCosts, ReplicatedStage

__all__ = ["pipedream_stages"]


def pipedream_stages(costs: GraphCosts) -> list[ReplicatedStage] | None:
    """Return the stages in order; None where none fit. State: layers 0 .. j-1 on m devices. Transition: the last stage
    (first layer, devices). Cost: as above. O(L^2 N^2).
    """
    layers, devices = costs.num_layers, costs.devices
    sums, counts = costs.sums, np.arange(1, costs.most_replicas + 1)
    transfer = np.array([costs.link.seconds(size) if size else 0.0 for size in costs.cuts])
    shares = np.array([costs.share(int(count)) for count in counts])
    best = np.full((layers + 1, devices + 1), np.inf)
    best[0, 0] = 0.0
    chosen = np.zeros((layers + 1, devices + 1, 2), dtype=np.int64)
    for end in range(1, layers + 1):
        stage_sums = {name: part[end] - part[:end] for name, part in sums.items()}  # by the first layer of the stage
        exchange = np.stack([costs.exchange_seconds(stage_sums["parameters"], int(m)) for m in counts], axis=1)
        stage_seconds = np.maximum(stage_sums["seconds"][:, None] * shares, exchange)  # [first, replicas - 1]
        stage_seconds = np.maximum(stage_seconds, transfer[:end, None])
        for used in range(1, devices + 1):
            now = counts[counts <= used]
            behind = devices - used
            slowest = np.maximum(best[:end, used - now], stage_seconds[:, : len(now)])
            if costs.usable is not None:
                in_flight = -(-(behind + now) // now)
                held = stage_sums["static"][:, None] + in_flight * stage_sums["saved"][:, None]
                slowest = np.where(held <= costs.usable, slowest, np.inf)
            place = int(np.argmin(slowest))
            first, number = divmod(place, len(now))
            best[end, used], chosen[end, used] = slowest[first, number], (first, now[number])
    finite = np.flatnonzero(np.isfinite(best[layers]))
    if not len(finite):
        return None
    end, used, stages = layers, int(finite[-1]), list[ReplicatedStage]()
    while end:
        first, replicas = map(int, chosen[end, used])
        stages.append(ReplicatedStage(tuple(range(first, end)), replicas))
        end, used = first, used - replicas
    return stages[::-1]
