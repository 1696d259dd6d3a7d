"""The profile of one card of a stage that another system divides over several cards. Imports no torch.

Rules: `tensor` divides matrices and, by sequence parallelism, all activations; `context` divides activations and
attention (Korthikanti et al. 2022, Sec. 4.2.2; Megatron's context parallelism). `zero` divides over replicas: at level
1 as Megatron's distributed optimizer, at levels 2 and 3 as FSDP (`config.parallel.Divisors`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.config.parallel import KINDS, Divisors
from varuna_capslog.profiles.conditions import UPDATE_RATE
from varuna_capslog.profiles.record import ActionBytes, Divisible, LayerProfile, Observation, Profile, layers_of_runs

__all__ = ["PARALLEL", "Network", "divided", "worst_routing"]

PARALLEL = "parallel"
"""Condition: the divisors of a divided profile."""

_OF_KINDS = dict[str, float]
"""Kind of parameters (`KINDS`) -> bytes."""


@dataclass(frozen=True)
class Network:
    """Links between the cards of a stage, in bytes per second.

    bandwidth: between nodes; None: takes no time. node_bandwidth: within a node; None: as `bandwidth`. node_cards: in a
    node; None: all cards. Neighbouring cards form tensor groups, these context groups, so small groups lie in one node.
    """

    bandwidth: float | None = None
    node_bandwidth: float | None = None
    node_cards: int | None = None

    def seconds(self, count: float, span: int) -> float:
        """Return the seconds in which a card sends `count` bytes within a group that spans `span` cards."""
        near = self.node_cards is None or span <= self.node_cards
        rate = self.node_bandwidth or self.bandwidth if near else self.bandwidth
        return 0.0 if rate is None else count / rate


def divided(profile: Profile, divisors: Divisors, network: Network | None = None) -> Profile:
    """Return the profile of one card of each stage: bytes and seconds divided, messages added to the seconds.

    Assumptions: messages do not overlap with computation and have no latency; each expert gets equally many tokens.
    `forward_seconds` and `backward_seconds` include the messages of a microbatch, the condition `UPDATE_RATE` those of
    a step. Raises CapslogError for a measured profile, and for an estimate in which a layer has no `divisible`.
    """
    return _Division(profile, divisors, network or Network()).profile()


def worst_routing(profile: Profile, divisors: Divisors) -> tuple[int, float]:
    """Return the additional bytes that a card saves per microbatch, and its additional seconds, if all tokens of each
    layer go to this card's experts: the maximum over layers, 0 without experts. profile: not yet divided.
    """
    more = (divisors.expert - 1) / (divisors.tensor * divisors.context)
    parts = [layer.divisible for layer in profile.layers if layer.divisible is not None]
    row_bytes = max((part.expert_row_bytes for part in parts), default=0)
    return math.ceil(more * row_bytes), 3 * more * max((part.expert_seconds for part in parts), default=0.0)


class _Division:
    """Division of one profile. `tokens`: cards that share the tokens of a microbatch."""

    def __init__(self, profile: Profile, divisors: Divisors, network: Network) -> None:
        self._profile, self._divisors, self._network = profile, divisors, network
        self.tokens = divisors.tensor * divisors.context
        self._parts = [_parts_of(layer, profile) for layer in profile.layers]
        self._weights = [
            _kinds(part, layer.parameter_bytes or 0) for part, layer in zip(self._parts, profile.layers, strict=True)
        ]
        self._gradients = [dict.fromkeys(KINDS, 0.0) for _ in profile.layers]
        for row in profile.observations:
            if row.layers[1] - row.layers[0] == 1 and row.action_bytes is not None:
                place = row.layers[0]
                self._gradients[place] = _kinds(self._parts[place], row.action_bytes.gradient_bytes)

    def profile(self) -> Profile:
        profile, divisors = self._profile, self._divisors
        rows = [self._row(row) for row in profile.observations]
        first = [row for row in rows if row.condition == rows[0].condition]
        weights = [math.ceil(self._shared(kinds, 3)) for kinds in self._weights]
        layers_alone = layers_of_runs([layer.name for layer in profile.layers], first, weights)
        layers = tuple(
            dataclasses.replace(layer, **self._seconds(profile.layers[place], [place]))
            for place, layer in enumerate(layers_alone)
        )
        conditions = dict(profile.conditions) | {PARALLEL: dataclasses.asdict(divisors)}
        if UPDATE_RATE in conditions and any(weights):
            updated = sum(self._shared(kinds, 1) for kinds in self._weights)
            messages = sum(map(self._step_seconds, range(profile.num_layers)))
            conditions[UPDATE_RATE] = (conditions[UPDATE_RATE] * updated + messages) / sum(weights)
        shared = []
        for parameter in profile.shared:
            before, after = (of[parameter.layers[0]].static_bytes or 0 for of in (profile.layers, layers))
            shared.append(dataclasses.replace(parameter, bytes=parameter.bytes * after // max(1, before)))
        tensors = (dataclasses.replace(tensor, bytes=self._passed(tensor.bytes)) for tensor in profile.tensors)
        return dataclasses.replace(
            profile,
            layers=layers,
            observations=tuple(rows),
            shared=tuple(shared),
            tensors=tuple(tensors),
            conditions=conditions,
            by_degree=(),
        )

    # -- bytes

    def _shared(self, kinds: Mapping[str, float], level: int) -> float:
        """Return the sum over the kinds of the bytes on one card; level: as in `Divisors.shards`."""
        return sum(size / self._divisors.shards(kind, level) for kind, size in kinds.items())

    def _passed(self, size: int) -> int:
        """Bytes of activations on one card."""
        return math.ceil(size / self.tokens)

    def _row(self, row: Observation) -> Observation:
        actions, places = row.action_bytes, range(*row.layers)
        profile_size = self._profile.observations[0].microbatch_size
        if actions is None or row.static_bytes is None:
            raise CapslogError("the profile's runs have no bytes of actions, by which parallel divides; profile again")
        sums = [_sum([of[place] for place in places]) for of in (self._weights, self._gradients)]
        states = max(0.0, row.static_bytes - sum(sums[0].values()) - actions.gradient_bytes)
        gradients = self._shared(sums[1], 2)
        static = math.ceil(self._shared(sums[0], 3) + gradients + states * self._state_part(sums[0]))
        passing = row.peak_bytes - row.static_bytes
        lasting = min(passing, actions.lasting_bytes or 0)
        peak = static + lasting + self._working(passing - lasting, places, backward=True)
        seconds = self._seconds(row, places, row.microbatch_size // profile_size)
        optional = ("saved_bytes", "boundary_in_bytes", "boundary_out_bytes", "weight_bytes")
        passed: dict[str, Any] = {
            name: self._passed(size) for name in optional if (size := getattr(row, name)) is not None
        }
        return dataclasses.replace(
            row,
            peak_bytes=peak,
            static_bytes=static,
            transient_bytes=None if row.transient_bytes is None else peak - static,
            action_bytes=self._actions(actions, places, sums[0], gradients),
            **passed,
            **seconds,
        )

    def _state_part(self, weights: Mapping[str, float]) -> float:
        """Part of the optimizer's states that a card holds."""
        total = sum(weights.values())
        return self._shared(weights, 1) / total if total else 1.0

    def _actions(
        self, actions: ActionBytes, places: Sequence[int], weights: Mapping[str, float], gradients: float
    ) -> ActionBytes:
        def same(size: int) -> int:
            return size

        def states(size: int) -> int:
            return math.ceil(size * self._state_part(weights))

        def working(size: int) -> int:
            return self._working(size, places)

        def backward(size: int) -> int:
            return self._working(size, places, backward=True)

        def first(size: int) -> int:
            return self._working(size, places, backward=True, first=True)

        rules: dict[str, Callable[[int], int]] = {
            **dict.fromkeys(("forward_bytes", "bare_bytes"), working),
            **dict.fromkeys(("backward_bytes", "weight_half_bytes"), backward),
            **dict.fromkeys(("first_backward_bytes", "first_weight_half_bytes"), first),
            **dict.fromkeys(("update_bytes", "moment_bytes"), states),
            **dict.fromkeys(("statistics_bytes", "lasting_bytes"), same),
            "gradient_bytes": lambda size: math.ceil(gradients),
        }
        sizes = {part.name: getattr(actions, part.name) for part in dataclasses.fields(actions)}
        of_card: dict[str, Any] = {
            name: None if size is None else rules.get(name, self._passed)(size) for name, size in sizes.items()
        }
        return ActionBytes(**of_card)

    def _working(self, size: int, places: Sequence[int], backward: bool = False, first: bool = False) -> int:
        """Return the bytes that an action adds on one card: activations, and gradients in a backward.

        The first backward makes all gradients; a later one adds a gradient of the largest parameter. From level 2 of
        `zero` on, it holds a layer's whole gradients. At level 3, every action holds a layer's gathered weights.
        """
        divisors, gradients = self._divisors, [self._gradients[place] for place in places]
        part, fresh = 0.0, 0.0
        if first:
            part = sum(sum(kinds.values()) for kinds in gradients)
            fresh = sum(self._shared(kinds, 2) for kinds in gradients)
        elif backward:
            part, fresh = max((self._largest(place) for place in places), default=(0.0, 0.0))
        more = max(self._shared(self._weights[place], 4) for place in places) if divisors.zero == 3 else 0.0
        if backward and divisors.zero >= 2:
            fresh = fresh if first else 0.0
            more += max(self._shared(kinds, 4) for kinds in gradients)
        cut = 1.0 if part <= size else size / part
        return math.ceil((size - cut * part) / self.tokens + cut * fresh + more)

    def _largest(self, place: int) -> tuple[float, float]:
        """Return the bytes of a layer's largest gradient: the whole, and the part on one card."""
        parts, total = self._parts[place], sum(self._gradients[place].values())
        sizes = [
            (parts.largest_matrix_share * total, self._divisors.shards("matrix")),
            (parts.largest_expert_share * total, self._divisors.shards("expert")),
        ]
        return max((size, size / shards) for size, shards in sizes)

    # -- seconds

    def _seconds(
        self, record: Observation | LayerProfile, places: Sequence[int], microbatches: int = 1
    ) -> dict[str, Any]:
        """Return the seconds of one card for a run or a layer. microbatches: number in one call."""
        forward = sum(self._messages(place)[0] for place in places) * microbatches
        backward = sum(self._messages(place)[1] for place in places) * microbatches
        more = {"forward_seconds": forward, "backward_seconds": backward, "input_seconds": backward}
        names = (*more, "weight_seconds")
        known = {name: seconds for name in names if (seconds := getattr(record, name)) is not None}
        return {name: seconds / self.tokens + more.get(name, 0.0) for name, seconds in known.items()}

    def _messages(self, place: int) -> tuple[float, float]:
        """Seconds of a card's messages in the forward and in the backward of a microbatch in one layer."""
        divisors, parts, network = self._divisors, self._parts[place], self._network
        tensor, context, expert = divisors.tensor, divisors.context, divisors.expert
        # all-gathers and reduce-scatters; the backward gathers inputs again for the gradients of weights
        rows = _sent(tensor) / context
        forward = network.seconds(rows * (parts.gathered_bytes + parts.scattered_bytes), tensor)
        backward = network.seconds(rows * (2 * parts.gathered_bytes + parts.scattered_bytes), tensor)
        keys = _sent(context) / tensor * parts.attended_bytes  # round a ring; the backward also sends their gradients
        forward += network.seconds(keys, tensor * context)
        backward += network.seconds(2 * keys, tensor * context)
        exchanged = network.seconds(2 * _sent(expert) / self.tokens * parts.exchanged_bytes, expert)  # there and back
        forward, backward = forward + exchanged, backward + exchanged
        if divisors.zero >= 2:
            backward += self._replica_seconds(self._gradients[place])
        if divisors.zero == 3:
            gathered = self._replica_seconds(self._weights[place])
            forward, backward = forward + gathered, backward + gathered
        return forward, backward

    def _step_seconds(self, place: int) -> float:
        """Return the seconds of a card's messages for one layer in each step: the sum of gradients, the new weights."""
        zero = self._divisors.zero
        gradients = self._replica_seconds(self._gradients[place])
        weights = self._replica_seconds(self._weights[place])
        return {0: 2 * gradients, 1: gradients + weights, 2: weights, 3: 0.0}[zero]

    def _replica_seconds(self, kinds: Mapping[str, float]) -> float:
        """Return the seconds of one all-gather or reduce-scatter among the cards that hold the same parameters."""
        divisors = self._divisors
        sizes = (_sent(divisors.replicas(kind)) * size / divisors.shards(kind) for kind, size in kinds.items())
        return self._network.seconds(sum(sizes), divisors.cards)


def _sent(cards: int) -> float:
    """Return the fraction of the bytes that each card sends in an all-gather, reduce-scatter or all-to-all."""
    return (cards - 1) / cards


def _parts_of(layer: LayerProfile, profile: Profile) -> Divisible:
    if layer.divisible is None or profile.source != "estimated":
        raise CapslogError(
            f"parallel divides the parts of each layer, which are known in estimates alone, and {layer.name} has none; "
            "profile with --estimate, or leave parallel out"
        )
    return layer.divisible


def _kinds(parts: Divisible, size: float) -> _OF_KINDS:
    """Return the bytes of each kind among `size` bytes of a layer's parameters."""
    other_share = max(0.0, 1 - parts.matrix_share - parts.expert_share)
    return {"matrix": parts.matrix_share * size, "expert": parts.expert_share * size, "other": other_share * size}


def _sum(rows: Sequence[Mapping[str, float]]) -> _OF_KINDS:
    return {kind: sum(row[kind] for row in rows) for kind in KINDS}
