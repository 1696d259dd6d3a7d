"""Tensors of a profile as a stage with direct routes sees them, by hand.

    0 -> a -> 1 -> b -> 2 -> c -> 3 -> d -> 4 -> e -> loss (5)

a is also read by 3 and 4, b by 4; c carries no gradient to anything else.
"""

from __future__ import annotations

from varuna_capslog.memory.cut_bytes import LinkBytes, StageTensors
from varuna_capslog.profiles.record import TensorRecord

TENSORS = (
    TensorRecord("x", 1, False, None, (0, 2)),
    TensorRecord("a", 10, True, 0, (1, 3, 4)),
    TensorRecord("b", 100, True, 1, (2, 4)),
    TensorRecord("c", 1000, True, 2, (3,)),
    TensorRecord("d", 10000, True, 3, (4,)),
    TensorRecord("e", 100000, True, 4, (5,)),
    TensorRecord("mask", 7, False, 0, (4,)),
    TensorRecord("dead end", 5, True, 1, (3,)),
)


def seen(*layers: int) -> tuple[dict[str, tuple[int | None, tuple[int, ...]]], list[int], list[int]]:
    stage_tensors = StageTensors.of(TENSORS, layers, 5)
    return (
        {tensor.name: (tensor.writer, tensor.readers) for tensor in stage_tensors.tensors},
        stage_tensors.gradient.tolist(),
        stage_tensors.added.tolist(),
    )


def test_a_stage_that_only_hands_on() -> None:
    """Both received gradients of a wait until layer 1 has computed its own; those of b are added before layer 1."""
    tensors, gradient, added = seen(0, 1)
    assert tensors == {"x": (None, (0,)), "a": (0, (1, 2)), "b": (1, (2,)), "mask": (0, (2,)), "dead end": (1, (2,))}
    assert gradient == [0, 10, 20 + 200 + 5, 0, 0, 0]
    assert added == [0, 100, 0, 0, 0]


def test_a_stage_that_reads_a_tensor_twice_has_two_gradients_of_it() -> None:
    tensors, gradient, added = seen(3, 4)
    assert tensors == {
        "a": (None, (3, 4)), "b": (None, (4,)), "c": (None, (3,)), "d": (3, (4,)), "e": (4, (5,)), "mask": (None, (4,)),
        "dead end": (None, (3,)),
    }  # fmt: skip
    # layer 5: gradient of e; 4: of d, a and b; 3 and before: a second one of a, and those of c and the dead end
    assert gradient == [*[20 + 100 + 1000 + 5] * 4, 10 + 100 + 10000, 100000]
    assert added == [0] * 5
    assert StageTensors.of(TENSORS, [3, 4], 5).read_elsewhere(3, 5) == 0
    assert StageTensors.of(TENSORS, [3], 5).read_elsewhere(3, 4) == 10, "a crosses the end of layer 3, unread here"


def test_what_goes_over_each_pair_of_stages() -> None:
    """Each reader sends one gradient, over the same pairs as the tensor. The dead end reaches the loss through 3."""
    first, middle, last = frozenset({0, 1}), frozenset({2}), frozenset({3, 4})
    link_bytes = LinkBytes.of(TENSORS, [(first, middle), (first, last), (middle, last)], 5)
    assert link_bytes.activations == [100, 10 + 100 + 7 + 5, 1000]
    assert link_bytes.gradients == [100, 2 * 10 + 100 + 5, 1000]
    assert sorted(link_bytes.together) == sorted([(10 + 7 + 5, (1,)), (100, (0, 1)), (1000, (2,))])


def test_gradients_come_back_only_from_where_the_loss_is_reached() -> None:
    tensors = (*TENSORS[:1], TensorRecord("a", 10, True, 0, (1, 2)), TensorRecord("b", 1, True, 1, (3,)))
    link_bytes = LinkBytes.of(tensors, [(frozenset({0}), frozenset({1})), (frozenset({0}), frozenset({2}))], 3)
    assert link_bytes.gradients == [10, -1], "nothing reads what layer 2 makes"
