"""Memory intervals in one autograd graph, bit for bit beside the module itself."""

from __future__ import annotations

import copy
import random
import weakref
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.fitting import models
from varuna_capslog.fitting.segments import SegmentedChain
from varuna_capslog.model.capture import captured_result
from varuna_capslog.model.chain import Chain
from varuna_capslog.plans.parts import INTERVAL_KINDS, MemoryInterval


def step(run: Any, module: nn.Module, x: Tensor, loss: Any) -> list[Tensor]:
    """Loss, gradients and buffers of two steps' accumulation."""
    torch.manual_seed(3)
    found = []
    for _ in range(2):
        part = loss(run(x))
        part.backward()
        found.append(part.detach())
    gradients = [one.grad for one in module.parameters() if one.grad is not None]
    return [*found, *gradients, *module.buffers(), torch.get_rng_state()]


@pytest.mark.parametrize("name", ["skips", "images"])
def test_any_intervals_give_the_bits_of_the_module(name: str) -> None:
    module, x = getattr(models, name)()
    loss, draw = getattr(models, f"{name}_loss"), random.Random(name)
    plain, began = copy.deepcopy(module), copy.deepcopy(module.state_dict())
    expected = step(plain, plain, x, loss)
    chain = Chain.from_module(module, None, (x,), evaluates=False)
    size = len(chain)
    for _ in range(8):
        places = sorted({0, size, *(draw.randrange(size + 1) for _ in range(3))})
        intervals = [MemoryInterval(*part, draw.choice(INTERVAL_KINDS)) for part in pairwise(places)]
        chosen = SegmentedChain(chain, [one for one in intervals if draw.random() < 0.8], size)

        def run(x: Tensor, chosen: SegmentedChain = chosen) -> Any:
            return captured_result(chain.layers, chosen.run({chain.inputs[0]: x}))

        module.zero_grad()
        module.load_state_dict(began)
        for ours, theirs in zip(step(run, module, x, loss), expected, strict=True):
            assert torch.equal(ours, theirs), intervals


@pytest.mark.parametrize("kind", ["offload", "recompute+offload"])
def test_what_is_offloaded_leaves_the_device(kind: str) -> None:
    """On a CPU the host is the same memory, so that copies are made of what is saved; the saved tensors themselves are
    let go, but for parameters.
    """
    module, x = models.images()
    chain = Chain.from_module(module, None, (x,), evaluates=False)
    made: list[weakref.ref[torch.UntypedStorage]] = []

    def note(module: nn.Module, args: Any, found: Tensor) -> None:
        made.append(weakref.ref(found.untyped_storage()))

    for part in (module[0], module[4], module[6]):
        part.register_forward_hook(note)
    kept = SegmentedChain(chain, [], len(chain)).run({"x": x})
    assert [one() is not None for one in made] == [True] * 3
    made.clear()
    away = SegmentedChain(chain, [MemoryInterval(0, len(chain), kind)], len(chain)).run({"x": x})
    assert [one() is None for one in made] == [True] * 3
    assert torch.equal(kept["x"] * 0, away["x"] * 0)
