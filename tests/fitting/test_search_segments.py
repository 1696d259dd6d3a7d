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
from varuna_capslog.fitting.search import SegmentedChain
from varuna_capslog.model.capture import captured_result
from varuna_capslog.model.chain import Chain
from varuna_capslog.plans.parts import INTERVAL_KINDS, MemoryInterval


def step(run: Any, module: nn.Module, x: Tensor, loss: Any) -> list[Tensor]:
    """Accumulate two steps; return their losses, the gradients, the buffers and the RNG state."""
    torch.manual_seed(3)
    losses = []
    for _ in range(2):
        step_loss = loss(run(x))
        step_loss.backward()
        losses.append(step_loss.detach())
    gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    return [*losses, *gradients, *module.buffers(), torch.get_rng_state()]


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
        chosen = SegmentedChain(chain, [interval for interval in intervals if draw.random() < 0.8], size)

        def run(x: Tensor, chosen: SegmentedChain = chosen) -> Any:
            return captured_result(chain.layers, chosen.run({chain.inputs[0]: x}))

        module.zero_grad()
        module.load_state_dict(began)
        for ours, theirs in zip(step(run, module, x, loss), expected, strict=True):
            assert torch.equal(ours, theirs), intervals


@pytest.mark.parametrize("kind", ["offload", "recompute+offload"])
def test_what_is_offloaded_leaves_the_device(kind: str) -> None:
    """On a CPU the host tier is the same memory: saved tensors are copied, and the tensors themselves are freed, except
    parameters.
    """
    module, x = models.images()
    chain = Chain.from_module(module, None, (x,), evaluates=False)
    made: list[weakref.ref[torch.UntypedStorage]] = []

    def note(module: nn.Module, args: Any, output: Tensor) -> None:
        made.append(weakref.ref(output.untyped_storage()))

    for part in (module[0], module[4], module[6]):
        part.register_forward_hook(note)
    kept = SegmentedChain(chain, [], len(chain)).run({"x": x})
    assert [reference() is not None for reference in made] == [True] * 3
    made.clear()
    away = SegmentedChain(chain, [MemoryInterval(0, len(chain), kind)], len(chain)).run({"x": x})
    assert [reference() is None for reference in made] == [True] * 3
    assert torch.equal(kept["x"] * 0, away["x"] * 0)
