"""Storages tracked on fake tensors, against the CPU allocator's own events for the same program."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from varuna_capslog.engine.probe import PeakProbe
from varuna_capslog.profiling.estimation.lifetimes import Lifetimes, Recipes
from varuna_capslog.profiling.estimation.quirks import Quirks


def followed(program: Callable[[], object], **options: object) -> Lifetimes:
    with FakeTensorMode(allow_non_fake_inputs=True), Lifetimes(**options) as lifetimes:  # type: ignore[arg-type]
        program()
    return lifetimes


def real_peak(program: Callable[[], object]) -> int:
    with PeakProbe(torch.device("cpu")):  # the first probe of a process also sees its own allocations
        program()
    with PeakProbe(torch.device("cpu")) as probe:
        program()
    return probe.peak_bytes


def chain() -> None:
    x = torch.ones(1 << 16)
    y = x.exp()
    del x
    z = y.neg().abs()
    assert z.view(256, 256).t().shape == (256, 256)


def summed(kept: list[Tensor] | None = None) -> None:
    """Two gradients meet at `a`: autograd adds the second to the first in place, if nobody else holds the first."""
    x = torch.ones(1 << 16, requires_grad=True)
    a = x * 2
    first, second = a.neg(), a.neg()
    if kept is not None:
        for part in (first, second):
            part.grad_fn.register_hook(lambda inputs, _: kept.append(inputs[0]))  # type: ignore[union-attr]
    y = first + second
    del a, first, second
    y.backward(torch.ones(1 << 16))


def summed_and_held() -> None:
    """A hook keeps both gradients, so the sum must be a separate tensor."""
    summed([])


def accumulated() -> None:
    w = torch.ones(256, 256, requires_grad=True)
    for _ in range(3):
        (torch.ones(64, 256) @ w).sum().backward()


def saved_and_freed() -> None:
    x = torch.ones(1 << 14, requires_grad=True)
    first = (x * 2).exp().sin()
    second = (x * 3).exp().sin()
    first.sum().backward()
    del first
    second.sum().backward()


def indexed() -> None:
    """Rows of a table by their numbers: the gradient's formula writes into zeros of the table's size."""
    table = torch.ones(512, 256, requires_grad=True)
    for _ in range(2):
        table[torch.zeros(64, dtype=torch.int64)].sum().backward()


@pytest.mark.parametrize("program", [chain, summed, summed_and_held, accumulated, saved_and_freed, indexed])
def test_peaks_are_those_of_the_real_allocator(program: Callable[[], None]) -> None:
    # a scalar such as the 2 in `x * 2` takes eight bytes itself
    lifetimes = followed(program, temporary=Quirks("cpu").temporary)
    assert lifetimes.peak_bytes == pytest.approx(real_peak(program), abs=64)


def test_events_come_in_order_and_release_what_they_allocated() -> None:
    lifetimes = followed(chain)
    live: dict[int, int] = {}
    most = 0
    for key, size in lifetimes.events:
        if size:
            assert key not in live
            live[key] = size
        else:
            del live[key]
        most = max(most, sum(live.values()))
    assert not live
    assert most == lifetimes.peak_bytes
    assert lifetimes.live_bytes == 0


def test_what_is_held_counts_once_from_the_beginning_and_views_count_nothing() -> None:
    with FakeTensorMode():
        held = torch.empty(100)
        with Lifetimes(held=[held, held[:50]]) as lifetimes:
            assert lifetimes.live_bytes == 400
            view = held.view(10, 10).t()
            assert lifetimes.live_bytes == 400
            del held
            assert lifetimes.live_bytes == 400, "the view still holds the storage"
            del view
            assert lifetimes.live_bytes == 0


def test_temporaries_lie_on_top_of_results() -> None:
    def temporary(func: object, args: object, kwargs: object, result: object) -> tuple[int, ...]:
        return (1000, 24) if func is torch.ops.aten.exp.default else ()

    lifetimes = followed(lambda: torch.ones(100).exp().sin(), temporary=temporary)
    assert lifetimes.peak_bytes == 400 + 400 + 1000 + 24
    # separate blocks, which an allocator places one by one, and which are live at once
    sizes = [size for _, size in lifetimes.events]
    assert sizes[sizes.index(1000) :][:4] == [1000, 24, 0, 0]
    assert lifetimes.live_bytes == 0


def test_reading_a_number_gives_one_that_optimizers_can_divide_by() -> None:
    seen = []
    followed(lambda: seen.extend([float(torch.ones(3).sum()), bool(torch.ones(3).any()), torch.arange(2).tolist()]))
    assert seen == [1.5, True, [1, 1]]


def test_recipes_give_what_torch_gives() -> None:
    recipes = Recipes()
    operators = torch.ops.aten
    with FakeTensorMode() as mode:
        a, b = mode.from_tensor(torch.empty(4, 6)), mode.from_tensor(torch.empty(6, 5, dtype=torch.float64))
        calls: list[tuple[object, tuple[object, ...]]] = [
            (operators.mm.default, (a, a.t())),
            (operators.t.default, (a,)),
            (operators.split.Tensor, (a, 3, 1)),
            (operators.select.int, (a, 0, 2)),
            (operators._to_copy.default, (b,)),
            (operators.add.Tensor, (a, 1)),
            (operators.add.Tensor, (a, 1.0)),
            (operators.div.Tensor, (operators.ones.default([3], dtype=torch.int64), 2)),
            (operators.native_layer_norm.default, (a, [6], None, None, 1e-5)),
        ]
        for func, args in calls:
            plain = func(*args)  # type: ignore[operator]
            for _ in range(2):  # the second time from the recipe
                again = recipes.call(func, args, {})
                assert type(again) is type(plain)
                pairs = zip(again, plain, strict=True) if isinstance(plain, (tuple, list)) else [(again, plain)]
                for replayed, computed in pairs:
                    assert (replayed.shape, replayed.stride(), replayed.dtype, replayed.storage_offset()) == (
                        computed.shape,
                        computed.stride(),
                        computed.dtype,
                        computed.storage_offset(),
                    )
                    mine, theirs = replayed.untyped_storage()._cdata, a.untyped_storage()._cdata
                    assert (mine == theirs) == (computed.untyped_storage()._cdata == theirs)
    assert len(recipes._known) == len(calls)
