"""Several tensors of any kind in one message: unpacked tensors equal the packed ones in dtype, shape and layout."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.varuna_plugin.wire import Bundle, pack, unpack

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.bool, torch.uint8, torch.int64]


def through(tensors: list[Tensor | None], microbatch: int = 3) -> list[Tensor | None]:
    """Return the tensors as the receiver sees them. Only header and bytes are passed on."""
    header, payload = pack(tensors, microbatch)
    received, buffers = unpack(header.clone(), microbatch)
    assert [len(part) for part in payload] == [len(part) for part in buffers]
    for buffer, part in zip(buffers, payload, strict=True):
        assert buffer.dtype == torch.uint8
        buffer.copy_(part.clone())
    return received


@st.composite
def tensors(draw: st.DrawFn) -> Tensor | None:
    if draw(st.booleans()) and draw(st.booleans()):
        return None
    shape = draw(st.lists(st.integers(0, 4), max_size=5))
    tensor = (torch.randn(shape) * 3).to(draw(st.sampled_from(DTYPES)))
    if tensor.dim() == 4 and draw(st.booleans()):
        tensor = tensor.to(memory_format=torch.channels_last)
    if tensor.dim() > 1 and draw(st.booleans()):
        tensor = tensor.transpose(0, 1)
    if tensor.dim() and tensor.shape[0] > 1 and draw(st.booleans()):
        tensor = tensor[1:]
    return tensor


@given(st.lists(tensors(), max_size=4))
@settings(max_examples=80, deadline=None)
def test_any_tensors_arrive_as_they_were(sent: list[Tensor | None]) -> None:
    received = through(sent)
    assert len(received) == len(sent)
    for ours, theirs in zip(sent, received, strict=True):
        if ours is None or theirs is None:
            assert ours is theirs
            continue
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        assert torch.equal(ours, theirs)


def test_the_memory_format_travels() -> None:
    sent = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    (received,) = through([sent])
    assert received is not None
    assert received.stride() == sent.stride()


def test_overlapping_memory_is_made_dense() -> None:
    (received,) = through([torch.arange(3.0).expand(4, 3)])
    assert received is not None
    assert received.is_contiguous()
    assert received[3].tolist() == [0, 1, 2]


def test_a_message_out_of_step_is_refused() -> None:
    header, _ = pack([torch.ones(1)], 4)
    with pytest.raises(CapslogError, match="microbatch 4 came where microbatch 5 was due"):
        unpack(header, 5)
    with pytest.raises(CapslogError, match="no header of this plugin"):
        unpack(torch.zeros_like(header), 4)


def test_what_the_format_has_no_place_for_is_refused() -> None:
    for tensor in (torch.ones([1] * 9), torch.eye(2).to_sparse(), torch.ones(2).to(torch.float8_e5m2)):
        with pytest.raises(CapslogError, match="cannot cross a cut"):
            pack([tensor], 0)


def test_a_stage_never_works_on_what_waits_for_recomputation() -> None:
    waiting = Bundle((torch.ones(3), None))
    given_to_stage = waiting.to("cpu")
    assert given_to_stage.tensors[0] is not None
    given_to_stage.tensors[0].mul_(5)
    assert given_to_stage.cpu() is waiting
    assert waiting.tensors[0] is not None
    assert waiting.tensors[0].tolist() == [1, 1, 1]
