"""Ten divisions by hand, by the published rules of Megatron and torchtitan.

Megatron-LM, docs "Distributed Optimizer": with bfloat16 weights and float32 gradients a parameter takes 18 bytes, with
d replicas 6 + 12/d. Megatron Core, "Context Parallelism": the optimizer is shared over data x context. Its experts are
replicated on tensor x context x data / expert cards (`parallel_state.py`, expert data parallel, with
--expert-tensor-parallel-size 1). torchtitan, `ParallelDims`: FSDP over dp_shard x cp, of experts over
dp_shard x cp x tp / ep. Korthikanti et al. 2022, Eq. 4: 34 sbh / t bytes of activations with sequence parallelism.
"""

import dataclasses

import pytest

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.config.parallel import Divisors
from varuna_capslog.profiles.conditions import UPDATE_RATE
from varuna_capslog.profiles.divided import PARALLEL, Network, divided, worst_routing
from varuna_capslog.profiles.record import ActionBytes, Divisible, LayerProfile, Observation, Profile, layers_of_runs

MATRICES, OTHERS, EXPERTS = 9_600, 400, 80_000
"""Parameters: a dense layer has the first two, a layer of experts all three."""
SAVED = 34_000
"""34 sbh for sbh = 1000."""


def row(first, end, parameters, **more):
    """A run of bf16 weights, float32 gradients and masters; a backward holds one gradient of the largest matrix."""
    static, gradient = 18 * parameters, 4 * parameters
    largest = 4 * (EXPERTS // 2 if end == 2 else MATRICES // 2)
    actions = ActionBytes(SAVED, 3_000, 4_000 + largest, 4_000 + gradient, 0, gradient, graph_bytes=SAVED)
    peak = static + SAVED + largest
    sizes = {"static_bytes": static, "saved_bytes": SAVED * (end - first), "transient_bytes": peak - static}
    sizes |= {"boundary_in_bytes": 2_000, "boundary_out_bytes": 2_000}
    seconds = {"forward_seconds": 1.0 * (end - first), "backward_seconds": 2.0 * (end - first)}
    return Observation((first, end), "cuda", 1, [1], peak, action_bytes=actions, **sizes, **seconds, **more)


def parts(parameters, experts):
    """Of one layer: largest parameters are half of their kind."""
    shares = MATRICES / parameters, experts / parameters
    bytes_of = (4_000, 4_000, 800, 16_000, 40_000) if experts else (4_000, 4_000, 800, 0, 0)
    return Divisible(*shares, *(share / 2 for share in shares), *bytes_of, 0.5 if experts else 0.0)


@pytest.fixture
def profile():
    dense, sparse = MATRICES + OTHERS, MATRICES + OTHERS + EXPERTS
    rows = (row(0, 1, dense), row(1, 2, sparse), row(0, 2, dense + sparse))
    layers = layers_of_runs(["dense", "sparse"], rows, [2 * dense, 2 * sparse])
    layers = tuple(
        dataclasses.replace(layer, divisible=parts(*sizes))
        for layer, sizes in zip(layers, [(dense, 0), (sparse, EXPERTS)], strict=True)
    )
    conditions = {"microbatch_size": 1, UPDATE_RATE: 1e-6}
    return Profile(layers, source="estimated", conditions=conditions, observations=rows)


CASES = {
    "data=2": (10_000 * 18, 90_000 * 18, SAVED),
    "data=8,zero=1": (10_000 * 7.5, 90_000 * 7.5, SAVED),  # 6 + 12/8 bytes
    "tensor=4": (2_800 * 18, 82_800 * 18, 8_500),  # 9600/4 + 400; experts whole
    "expert=8,data=8": (10_000 * 18, 20_000 * 18, SAVED),
    "expert=8,data=8,zero=1": (10_000 * 7.5, 10_000 * 7.5 + 10_000 * 18, SAVED),  # an expert has no replica
    "expert=4,data=8,zero=1": (10_000 * 7.5, 10_000 * 7.5 + 20_000 * 12, SAVED),  # two replicas: 6 + 12/2
    "tensor=2,context=2,expert=8,data=2,zero=1": (5_200 * 9, 5_200 * 9 + 10_000 * 18, 8_500),  # 6 + 12/4
    "context=4,zero=1": (10_000 * 9, 90_000 * 9, 8_500),
    "data=4,zero=2": (10_000 * 6, 90_000 * 6, SAVED),  # 2 + 4/4 + 12/4
    "tensor=2,expert=4,data=4,zero=3": (5_200 * 18 / 4, 5_200 * 18 / 4 + 20_000 * 18 / 2, 17_000),
}
"""Divisors -> bytes of weights, gradients and states of the dense layer and of that with experts; saved bytes."""


@pytest.mark.parametrize("text", CASES)
def test_ten_cases_by_hand(profile, text):
    dense, sparse = divided(profile, Divisors.of(text)).layers
    assert (dense.static_bytes, sparse.static_bytes) == pytest.approx(CASES[text][:2], abs=2)
    assert (dense.saved_bytes, sparse.saved_bytes) == (CASES[text][2],) * 2


def test_peaks_hold_the_largest_gradient_whose_kind_is_divided(profile):
    dense, sparse = divided(profile, Divisors.of("tensor=2,expert=8,data=4")).layers
    assert dense.isolated_bytes == dense.static_bytes + SAVED // 2 + 4 * MATRICES // 2 // 2
    assert sparse.isolated_bytes == sparse.static_bytes + SAVED // 2 + 4 * EXPERTS // 2 // 8
    assert (
        sparse.added_bytes
        == divided(profile, Divisors.of("tensor=2,expert=8,data=4")).observations[2].peak_bytes - dense.isolated_bytes
    )


def test_from_level_2_a_layer_has_its_whole_gradients_for_a_while(profile):
    actions = divided(profile, Divisors.of("data=4,zero=2")).observations[0].action_bytes
    assert actions.gradient_bytes == 40_000 // 4
    assert actions.backward_bytes == 4_000 + 40_000
    assert actions.first_backward_bytes == 4_000 + 40_000 + 40_000 // 4
    gathered = divided(profile, Divisors.of("data=4,zero=3")).observations[0].action_bytes
    assert gathered.forward_bytes == SAVED + 20_000
    assert gathered.backward_bytes == 4_000 + 40_000 + 20_000


def test_messages_by_hand(profile):
    """At 1 byte per second, a card's seconds are the bytes that it sends."""
    network = Network(bandwidth=1.0)
    dense, _ = divided(profile, Divisors.of("tensor=4"), network).layers
    assert dense.forward_seconds == 1 / 4 + 3 / 4 * 8_000  # all-gather of 4000, reduce-scatter of 4000
    assert dense.backward_seconds == 2 / 4 + 3 / 4 * 12_000  # and the inputs are gathered again
    _, sparse = divided(profile, Divisors.of("expert=8,data=8"), network).layers
    assert sparse.forward_seconds == 1 + 7 / 8 * 2 * 16_000  # rows go to their experts and back
    assert sparse.backward_seconds == 2 + 7 / 8 * 2 * 16_000
    dense, _ = divided(profile, Divisors.of("context=2"), network).layers
    assert (dense.forward_seconds, dense.backward_seconds) == (0.5 + 400, 1 + 800)  # keys and values round a ring


@pytest.mark.parametrize(
    ("zero", "sent"),
    [(0, 2 * 3 / 4 * 400_000), (1, 3 / 4 * 600_000), (2, 3 / 4 * 200_000), (3, 0)],
    ids=["all-reduce", "reduce-scatter and all-gather", "all-gather", "none"],
)
def test_messages_of_a_step(profile, zero, sent):
    """The seconds of an update are those of the parameters that a card updates, and of its messages."""
    answer = divided(profile, Divisors(data=4, zero=zero), Network(bandwidth=1.0))
    weights = sum(layer.parameter_bytes for layer in answer.layers)
    assert weights == 200_000 // (4 if zero == 3 else 1)
    updated = 200_000 / (4 if zero else 1)
    assert answer.conditions[UPDATE_RATE] * weights == pytest.approx(updated * 1e-6 + sent)


def test_small_groups_send_within_a_node(profile):
    network = Network(bandwidth=1.0, node_bandwidth=10.0, node_cards=4)
    dense, _ = divided(profile, Divisors.of("tensor=4,context=2"), network).layers
    tensor, context = 3 / 4 / 2 * 8_000, 1 / 2 / 4 * 800
    assert dense.forward_seconds == pytest.approx(1 / 8 + tensor / 10 + context)


def test_the_worst_routing(profile):
    assert worst_routing(profile, Divisors.of("expert=8,data=8")) == (7 * 40_000, 3 * 7 * 0.5)
    assert worst_routing(profile, Divisors.of("tensor=4")) == (0, 0.0)


def test_a_divided_profile_says_so_and_is_read_back(profile):
    answer = divided(profile, Divisors.of("tensor=2,data=2"))
    assert answer.conditions[PARALLEL] == vars(Divisors(tensor=2, data=2))
    assert Profile.from_json(answer.to_json()) == answer
    assert Profile.from_json(profile.to_json()) == profile


def test_profiles_without_parts_are_refused(profile):
    bare = Profile((LayerProfile("a", 5),), source="estimated")
    for refused in (bare, dataclasses.replace(profile, source="measured")):
        with pytest.raises(CapslogError, match="known in estimates alone"):
            divided(refused, Divisors(tensor=2))
