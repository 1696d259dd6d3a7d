"""A model given as an object: its chains share nothing with it, and models that cannot be copied are refused."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.model.model_workload import workload_of_model


def test_a_chain_of_an_object_shares_neither_weights_nor_buffers_with_it() -> None:
    """Otherwise a model on a GPU would meet example inputs on the CPU, and a capture would need all of its weights."""
    first, last = nn.Linear(4, 4), nn.Linear(4, 4)
    last.weight = first.weight
    net = nn.Sequential(first, nn.BatchNorm1d(4), last)
    workload, size = workload_of_model(net, torch.zeros(3, 4))
    assert (size, workload.name) == (3, "Sequential")
    chain = workload.build_chain()
    assert all(parameter.is_meta for layer in chain.layers for parameter in layer.module.parameters())
    addresses = {buffer.data_ptr() for buffer in net.buffers()}
    assert not addresses & {buffer.data_ptr() for layer in chain.layers for buffer in layer.module.buffers()}
    assert [shared.layers for shared in chain.shared] == [(0, 2)]


def test_a_model_that_cannot_be_copied_is_refused_in_a_sentence() -> None:
    net = nn.Linear(4, 4)
    net.held = threading.Lock()
    workload, _ = workload_of_model(net, torch.zeros(3, 4))
    with pytest.raises(
        CapslogError, match=r"Linear cannot be copied \(cannot pickle '_thread.lock' object\); give a function"
    ):
        workload.build_chain()
