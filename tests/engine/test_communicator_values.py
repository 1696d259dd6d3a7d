"""Values that ranks tell each other: the same on the other side, and nothing that arrives is run."""

from __future__ import annotations

import contextlib
import pickle
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.engine.communicator import pack, unpack


@dataclass
class Own:
    x: int


def same(first, second) -> bool:
    if type(first) is not type(second):
        return False
    if isinstance(first, torch.Tensor):
        return (
            first.dtype == second.dtype
            and first.shape == second.shape
            and first.numpy().tobytes() == second.numpy().tobytes()
        )
    if isinstance(first, np.ndarray):
        return first.dtype == second.dtype and first.shape == second.shape and first.tobytes() == second.tobytes()
    if isinstance(first, dict):
        return list(first) == list(second) and all(same(first[key], second[key]) for key in first)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(same, first, second))
    return repr(first) == repr(second)


@pytest.mark.parametrize(
    "value",
    [
        None,
        [True, 0, -(2**70), 0.1, -0.0, float("inf"), float("nan"), 5e-324, "é\ud800\n", b"\x00\xff"],
        {"a": (1, [2, ()]), 3: {"b": {}}, (1, "x"): None, None: b""},
        [set(), {7}, frozenset({"x"})],
        [
            np.float64(0.1),
            np.int8(-3),
            np.float32("nan"),
            np.bool_(True),
            np.arange(6.0).reshape(2, 3).T,
            np.zeros((0, 2)),
        ],
        [
            torch.arange(6).reshape(2, 3).t(),
            torch.zeros(0, 5),
            torch.tensor(2.5),
            torch.tensor([True]),
            torch.ones(3).half(),
        ],
        np.array(["ab", "c"]),
    ],
)
def test_a_value_is_the_same_on_the_other_side(value):
    assert same(unpack(pack(value)), value)


def test_other_types_are_refused_where_they_are_given():
    for value in (Own(1), object(), np.array([{}]), [1, {"a": Own(1)}]):
        with pytest.raises(CapslogError, match=r"ranks cannot tell each other a (Own|object|ndarray); use numbers"):
            pack(value)


def test_what_arrives_is_never_run(tmp_path):
    """A pickle that would make a file, and packed values that are damaged anywhere."""

    class Maker:
        def __reduce__(self):
            return (tmp_path.joinpath("made").touch, ())

    good = pack([1, b"two", torch.ones(3), {"a": np.ones(2)}])
    damaged = [good[:size] for size in range(0, len(good) - 16, 3)]
    for at in range(len(good)):
        changed = bytearray(good)
        changed[at] ^= 0x11
        damaged.append(bytes(changed))
    for data in (pickle.dumps(Maker()), b"", *damaged):
        with contextlib.suppress(CapslogError):  # damage in a number is another number
            unpack(data)
    with pytest.raises(CapslogError, match="that are no value"):
        unpack(pickle.dumps(Maker()))
    assert not (tmp_path / "made").exists()
