"""State that a model's code keeps and reads outside the attributes of its modules: changes are noticed."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from tests.model import hostile
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.fitting import fit
from varuna_capslog.model.chain import Chain
from varuna_capslog.model.python_state import PythonState

FACTOR, SETTINGS = 1.0, SimpleNamespace(shift=0.0, step=0)
X = torch.randn(64, hostile.WIDTH, generator=torch.Generator().manual_seed(0))


class Slotted:
    __slots__ = ("alpha",)

    def __init__(self) -> None:
        self.alpha = 1.0


def helper(x: Tensor) -> Tensor:
    return x * FACTOR


class Hidden(hostile.Base):
    """Model whose numbers lie in a class, an object with slots, a closure, and in its file, which a helper reads."""

    temperature, made = 1.0, 0

    def __init__(self) -> None:
        super().__init__()
        type(self).made += 1
        self.schedule = Slotted()
        scale = 1.0

        def read() -> float:
            return scale

        def write(value: float) -> None:
            nonlocal scale
            scale = value

        self.read, self.write = read, write

    def block(self) -> nn.Module:
        return nn.Sequential(nn.Linear(hostile.WIDTH, 64), nn.GELU(), nn.Linear(64, hostile.WIDTH))

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + self.schedule.alpha * block(helper(x)) * self.read() / self.temperature + SETTINGS.shift
        return x


def change_global(value: float) -> None:
    global FACTOR  # as a training loop does
    FACTOR = value


CHANGES: dict[str, Callable[[Any], object]] = {
    r"schedule\.alpha": lambda model: setattr(model.schedule, "alpha", 0.5),
    r"Hidden\.temperature": lambda model: setattr(type(model), "temperature", 2.0),
    r"read\.scale": lambda model: model.write(0.5),
    r"FACTOR": lambda model: change_global(0.5),
    r"SETTINGS\.shift": lambda model: setattr(SETTINGS, "shift", 0.5),
}


@pytest.fixture
def back() -> Any:
    yield
    change_global(1.0)
    Hidden.temperature, SETTINGS.shift = 1.0, 0.0


@pytest.mark.parametrize("named", CHANGES)
def test_numbers_beside_a_modules_attributes_are_noticed_where_a_loop_changes_them(named: str, back: Any) -> None:
    """The chain, and `fit`, continued with the old number without a warning; state that the code does not read may
    change.
    """
    torch.manual_seed(0)
    model = Hidden()
    chain = Chain.from_module(model, None, (X,), evaluates=False, compares=False)
    Hidden()  # increments a counter that no forward reads
    SETTINGS.step += 1
    chain.run({"x": X})
    CHANGES[named](model)
    with pytest.raises(CapslogError, match=f"{named} of the model was changed after the model was captured"):
        chain.run({"x": X})


def test_fit_captures_again_where_the_class_changed(back: Any) -> None:
    torch.manual_seed(0)
    model = Hidden()
    with pytest.raises(CapslogError) as refused:
        fit(model, X, 10)
    fitted = fit(model, X, int(str(refused.value).partition("smallest budget that does is ")[2].partition(" ")[0]))
    assert fitted.fits[0].intervals
    Hidden.temperature = 3.0
    assert torch.equal(fitted(X), model(X))


class Turns(hostile.Base):
    """Takes another branch at every third call, by an iterator."""

    def __init__(self, turns: Any) -> None:
        super().__init__()
        self.turns = turns

    def body(self, x: Tensor) -> Tensor:
        return super().body(x) * (2.0 if next(self.turns) % 3 else 1.0)


def numbers() -> Any:
    number = 0
    while True:
        yield number
        number += 1


@pytest.mark.parametrize("turns", [itertools.count, numbers, lambda: itertools.cycle(iter([0, 1, 2]))])
def test_an_iterator_that_goes_on_is_refused_by_name(turns: Any) -> None:
    """Its number during the capture was taken for a constant, as long as the next one happened to be equal."""
    model = Turns(turns())
    state = PythonState({"": model})
    assert state.changes() == []
    with pytest.raises(CapslogError, match=r"the model itself .* changes its iterator 'turns' in its forward"):
        Chain.from_module(model, None, (X,))


@functools.cache
def table(width: int) -> Tensor:
    return torch.arange(width, dtype=torch.float32).sin()


class Caching(hostile.Base):
    def body(self, x: Tensor) -> Tensor:
        return super().body(x + table(x.shape[1]))


def test_a_cache_of_the_users_holds_no_tensor_without_values_afterwards() -> None:
    """The next call got it: an error of torch, in every model of the process that used the cache."""
    table.cache_clear()
    model: nn.Module = Caching()
    chain = Chain.from_module(model, None, (X,))
    assert not isinstance(table(hostile.WIDTH), FakeTensor)
    assert torch.equal(chain.run({"x": X})["output"], model(X))
