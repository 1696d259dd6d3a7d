"""One call offloads every storage once and no parameters; every tensor comes back as it was."""

from __future__ import annotations

import os
import weakref

import pytest
import torch
from torch import nn

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.engine.offload import HostTier, OffloadedCall, TierOptions, entered

CPU = torch.device("cpu")


def test_a_storage_leaves_once_and_every_tensor_on_it_comes_back_with_its_strides() -> None:
    tier = HostTier(CPU)
    call = OffloadedCall(tier)
    matrix = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    halves = torch.arange(7, dtype=torch.bfloat16)  # 14 bytes: no multiple of 4
    flags, nothing = torch.tensor([True, False, True]), torch.empty(0, 3)
    tensors = [matrix, matrix.t(), matrix[1:3, ::2], matrix[0].expand(5, 6), halves[2:], flags, nothing]
    expected = [(tensor.clone(), tensor.stride(), tensor.dtype) for tensor in tensors]
    taken = [call.take(tensor) for tensor in tensors]
    storages = [weakref.ref(tensor.untyped_storage()) for tensor in (matrix, halves, flags)]
    del matrix, halves, flags, tensors
    call.offload(overlap=True)
    call.settle()
    assert [storage() for storage in storages] == [None] * 3
    assert tier.bytes == 96 + 14 + 3
    call.load_back(overlap=True)
    for handle, (value, stride, dtype) in zip(taken, expected, strict=True):
        restored = handle.get()
        assert (restored.stride(), restored.dtype) == (stride, dtype)
        assert torch.equal(restored, value)
    call.end()
    assert (tier.bytes, tier.peak_bytes) == (0, 113)


def test_what_autograd_saves_leaves_but_not_the_parameters() -> None:
    torch.manual_seed(0)
    tier, line, x = HostTier(CPU), nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)), torch.randn(3, 4)
    kept = x.clone().requires_grad_()
    line(kept).square().sum().backward()
    gradients = [parameter.grad for parameter in line.parameters()]
    line.zero_grad()
    call = OffloadedCall(tier)
    start, box = entered(x)
    with call.taking_what_is_saved(line.parameters()):
        result = line(start)
    del start
    call.offload(overlap=True)
    call.settle()
    assert tier.bytes == 4 * (3 * 4 + 3 * 8)  # the input, and the output of tanh, which both of its neighbours save
    call.load_back(overlap=True)
    torch.autograd.backward(result, 2 * result.detach())
    assert kept.grad is not None
    assert box.grad is not None
    assert torch.equal(box.grad, kept.grad)
    for parameter, gradient in zip(line.parameters(), gradients, strict=True):
        assert torch.equal(parameter.grad, gradient)
    call.end()
    assert tier.bytes == 0


def test_what_is_not_needed_any_more_does_not_leave() -> None:
    tier = HostTier(CPU)
    call = OffloadedCall(tier)
    needed = call.take(torch.ones(4))
    call.take(torch.ones(1000))
    call.offload(overlap=False)
    assert tier.bytes == 16
    call.load_back(overlap=False)
    assert needed.get().sum() == 4


def test_memory_that_was_given_back_is_used_again_and_a_bound_holds(tmp_path) -> None:
    tier = HostTier(CPU, TierOptions(str(tmp_path), capacity=100))
    first, wait = tier.offload(torch.zeros(10), overlap=True)
    wait()
    tier.give_back(first)
    again, _ = tier.offload(torch.zeros(10), overlap=False)
    assert again is first
    tier.give_back(again)
    # 40 bytes are mapped and free, and must make place for 80
    larger, _ = tier.offload(torch.zeros(20), overlap=False)
    with pytest.raises(CapslogError, match=r"may hold 100 bytes .* 80 are in use and 40 more are needed"):
        tier.offload(torch.zeros(10), overlap=False)
    tier.give_back(larger)
    assert os.listdir(tmp_path) == []


def test_a_folder_that_cannot_take_the_bytes_is_named(tmp_path) -> None:
    tier = HostTier(CPU, TierOptions(str(tmp_path / "missing")))
    with pytest.raises(CapslogError, match=r"missing cannot take 40 bytes more: No such file .*pipeline.host_tier"):
        tier.offload(torch.zeros(10), overlap=False)


def test_a_copy_that_does_not_end_is_given_up() -> None:
    tier = HostTier(CPU, TierOptions(bandwidth=100.0, timeout_seconds=0.05))
    with pytest.raises(CapslogError, match=r"has not ended within 0\.05 s"):
        tier.offload(torch.zeros(10), overlap=False)
