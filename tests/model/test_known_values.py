"""Modules whose code decides by values of the inputs are planned with their true costs, and train as they are."""

from __future__ import annotations

import copy
import logging
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from tests.model import unusual
from varuna_capslog import plan
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.model.capture import Kept
from varuna_capslog.model.capture.python_calls import PythonCall, values_last
from varuna_capslog.model.chain import Chain
from varuna_capslog.model.hollow import NeedsValues, hollow_copy
from varuna_capslog.model.known_values import KnownValues

WIDTH, TOKENS = 8, 12


class Tower(nn.Module):
    """Attends within pieces whose lengths are values, and changes the rows that a mask selects."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Linear(WIDTH, WIDTH)
        self.gate = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor, lengths: Tensor, big: Tensor, by_weights: bool = False) -> Tensor:
        sizes = torch.tensor([length + 0 for length in lengths]).tolist()
        pieces = [(self.query(piece) @ piece.mT).softmax(-1) @ piece for piece in x.split(sizes)]
        y = torch.cat(pieces)
        mask = torch.arange(len(y)) < lengths.max()
        if not torch.all(big == 0):
            y = y + 1
        picked = self.scale(y[mask])
        if by_weights:
            return picked[: int((self.gate > 0).nonzero().sum())]
        y = y.clone()
        y[mask] = picked * 2
        return y


class Picked(nn.Module):
    def __init__(self, by_weights: bool = False) -> None:
        super().__init__()
        self.tower = Tower()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.by_weights = by_weights

    def forward(self, x: Tensor, lengths: Tensor, big: Tensor) -> Tensor:
        x = self.tower(x, lengths, big, self.by_weights)
        for block in self.blocks:
            x = block(x).relu()
        return x


class Whole(Picked):
    """Decides by values in its own outermost code."""

    def forward(self, x: Tensor, lengths: Tensor, big: Tensor) -> Tensor:
        return super().forward(x[: int(lengths.sum())], lengths, big) if lengths[0] > 0 else x


def example(*lengths: int) -> dict[str, Tensor]:
    torch.manual_seed(1)
    big = torch.randn(1 << 10, 1 << 9)
    return {"x": torch.randn(TOKENS, WIDTH), "lengths": torch.tensor(lengths), "big": big}


def costs(run: object, weights: object) -> tuple[int, int]:
    """Return FLOPs of forward and backward, and the bytes that the forward saves beside weights."""
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with FlopCounterMode(display=False) as counter:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = run()  # type: ignore[operator]
        output.sum().backward()
    held = {weight.untyped_storage()._cdata for weight in weights}  # type: ignore[attr-defined]
    return counter.get_total_flops(), sum(
        tensor.untyped_storage().nbytes() for key, tensor in saved.items() if key not in held
    )


@pytest.mark.parametrize(("kind", "layers"), [(Picked, 4), (Whole, 1)])
@pytest.mark.parametrize("lengths", [(12,), (7, 5), (1, 2, 9)])
def test_costs_of_a_hollow_model_are_those_of_the_real_one(
    kind: type[Picked], layers: int, lengths: tuple[int, ...]
) -> None:
    inputs, model = example(*lengths), kind()
    chain = Chain.from_module(hollow_copy(model), None, inputs, evaluates=False, compares=False)
    assert len(chain) == layers
    assert chain.kept_whole[0].endswith("its costs are those for the values of the example inputs")
    wanted = costs(lambda: model(**inputs), [*model.parameters()])
    modules = [layer.module for layer in chain.layers]
    with FakeTensorMode(allow_non_fake_inputs=True), values_last(modules):
        for module in modules:
            module.to_empty(device="cpu")
        fakes = {name: torch.empty_like(tensor) for name, tensor in inputs.items()}
        assert costs(lambda: chain.run(fakes)["output"], [*chain.named_parameters().values()]) == wanted


@pytest.mark.parametrize("kind", [Picked, Whole])
def test_a_plan_counts_what_the_values_cost(kind: type[Picked], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        one, many = (plan(kind(), example(*lengths), devices=1) for lengths in ((12,), (4, 4, 4)))
    assert one.peak_bytes != many.peak_bytes
    part = "tower" if kind is Picked else "all of it"
    assert f"planned for the values of the example inputs: {part}" in caplog.text


class TwoTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.towers = nn.ModuleList(Tower() for _ in range(2))

    def forward(self, x: Tensor, lengths: Tensor, others: Tensor, big: Tensor) -> Tensor:
        return self.towers[1](self.towers[0](self.first(x), lengths, big), others, big)


@pytest.mark.parametrize(("others", "equal"), [((7, 5), True), ((11, 1), False)])
def test_equal_towers_are_equal_layers_for_equal_values_alone(others: tuple[int, ...], equal: bool) -> None:
    inputs = example(7, 5)
    inputs = {"x": inputs["x"], "lengths": inputs["lengths"], "others": torch.tensor(others), "big": inputs["big"]}
    chain = Chain.from_module(hollow_copy(TwoTowers()), None, inputs, evaluates=False, compares=False)
    calls = [part for layer in chain.layers for part in layer.module.modules() if isinstance(part, PythonCall)]
    assert len(calls) == 2
    assert (calls[0].shape.key == calls[1].shape.key) is equal


def test_what_depends_on_weights_is_refused() -> None:
    with pytest.raises(NeedsValues, match="module 'tower' cannot run on tensors without values"):
        Chain.from_module(hollow_copy(Picked(by_weights=True)), None, example(7, 5), evaluates=False, compares=False)


@pytest.mark.parametrize("kind", [Picked, Whole])
@pytest.mark.parametrize("lengths", [(7, 5), (3, 9)])
def test_in_training_the_values_of_each_step_count(kind: type[Picked], lengths: tuple[int, ...]) -> None:
    model, batch = kind(), example(*lengths)
    chain = Chain.from_module(copy.deepcopy(model), None, example(7, 5), evaluates=False)
    wanted = model(**batch).square().mean()
    wanted.backward()
    loss, gradients, _ = unusual.engine_step(chain, [tuple(batch.values())], False)
    assert loss == wanted.item()
    named = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    unusual.assert_close(gradients, named, 1e-6)


def test_a_kept_capture_has_the_values(tmp_path: Path) -> None:
    kept, inputs, model = Kept(tmp_path), example(7, 5), Picked()
    kept.writes = True
    Chain.from_module(model, None, inputs, evaluates=False, kept=kept)
    kept.writes = False
    made, read = (
        Chain.from_module(copy.deepcopy(model), None, inputs, evaluates=False, kept=store) for store in (None, kept)
    )
    values = [
        [part.shape.values for layer in chain.layers for part in layer.module.modules() if isinstance(part, PythonCall)]
        for chain in (made, read)
    ]
    assert values[0] == values[1]
    assert [known and known.tensor.tolist() for known in values[1][0]][1:2] == [[7, 5]]


def test_unknown_numbers_make_known_tensors_unknown() -> None:
    values, mode = torch.arange(4), KnownValues()
    with FakeTensorMode() as fake:
        known, weight = fake.from_tensor(values), torch.ones(4)
        mode.add(known, values)
        with mode, mode.learning():
            view = known[1:]
            assert view.tolist() == [1, 2, 3]
            known.add_(1)
            assert view.tolist() == [2, 3, 4]
            large, drawn = torch.zeros(1 << 21), torch.rand(2)
            for unknown in (weight, large, drawn, known * weight):
                with pytest.raises(Exception, match="_local_scalar_dense"):
                    unknown[0].item()
                mode._guesses = False
            known[0] = weight[0].long()
            with pytest.raises(Exception, match="_local_scalar_dense"):
                view.tolist()


class Deepstack(nn.Module):
    """Adds features of pictures to the rows that a mask selects, as a Qwen3-VL does between its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, mask: Tensor, pictures: Tensor) -> Tensor:
        features = self.tower(pictures)
        for block in self.blocks:
            x = block(x).relu()
            rows = x[mask, :] + features
            x = x.clone()
            x[mask, :] = rows
        return x


def pictures(places: list[int], count: int = 5) -> dict[str, Tensor]:
    torch.manual_seed(3)
    mask = torch.zeros(2, 6, dtype=torch.bool)
    mask.view(-1)[places] = True
    return {"x": torch.randn(2, 6, WIDTH), "mask": mask, "pictures": torch.randn(count, WIDTH)}


def test_rows_that_a_mask_selects_have_the_number_of_what_is_added_to_them() -> None:
    model, example = Deepstack(), pictures([0, 3, 4, 8, 9])
    hollow = Chain.from_module(hollow_copy(model), None, example, evaluates=False, compares=False)
    assert len(hollow) > 1
    assert not hollow.kept_whole
    assert plan(model, example, devices=1).peak_bytes > 0
    chain, batch = Chain.from_module(copy.deepcopy(model), None, example, evaluates=False), pictures([1, 2, 5, 6, 11])
    wanted = model(**batch).square().mean()
    wanted.backward()
    loss, gradients, _ = unusual.engine_step(chain, [tuple(batch.values())], False)
    assert loss == wanted.item()
    named = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    assert all(torch.equal(gradients[name], gradient) for name, gradient in named.items())
    with pytest.raises(CapslogError, match=r"a mask selects 5 rows, but it selects 4; capture the model again"):
        chain.run(pictures([1, 2, 5, 6]))


def test_a_number_that_a_graph_fixes_is_compared_with_the_tensors() -> None:
    number_of = torch.ops.capslog.number_of
    with pytest.raises(CapslogError, match=r"reads the number 3 from a tensor, but got 4"):
        number_of(torch.tensor(4), 3)
    assert number_of(torch.tensor(3), 3) == 3
    with FakeTensorMode():
        assert number_of(torch.tensor(4), 3) == 3
