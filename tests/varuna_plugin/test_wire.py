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


def through(tensors: list[Tensor | None], frame_bytes: int, microbatch: int = 3) -> list[Tensor | None]:
    """Return the tensors as the receiver sees them. Only bytes are passed on."""
    sent = pack(tensors, microbatch, frame_bytes)
    received = unpack(sent.frame.clone(), len(tensors), microbatch)
    assert received.frame_bytes == sent.frame_bytes
    assert [len(part) for part in sent.apart] == [len(part) for part in received.apart]
    assert not sent.apart or sent.frame_bytes > frame_bytes
    for buffer, part in zip(received.apart, sent.apart, strict=True):
        assert buffer.dtype == torch.uint8
        buffer.copy_(part.clone())
    return received.tensors


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


@given(st.lists(tensors(), max_size=4), st.sampled_from([0, 1600, 1 << 14]))
@settings(max_examples=160, deadline=None)
def test_any_tensors_arrive_as_they_were(sent: list[Tensor | None], frame_bytes: int) -> None:
    received = through(sent, frame_bytes)
    assert len(received) == len(sent)
    for ours, theirs in zip(sent, received, strict=True):
        if ours is None or theirs is None:
            assert ours is theirs
            continue
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        assert torch.equal(ours, theirs)


def test_the_memory_format_travels() -> None:
    sent = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    (received,) = through([sent], frame_bytes=0)
    assert received is not None
    assert received.stride() == sent.stride()


def test_overlapping_memory_is_made_dense() -> None:
    (received,) = through([torch.arange(3.0).expand(4, 3)], frame_bytes=0)
    assert received is not None
    assert received.is_contiguous()
    assert received[3].tolist() == [0, 1, 2]


@pytest.mark.parametrize("frame_bytes", [0, 1 << 10])
def test_values_that_torch_would_conjugate_or_negate_later_arrive_as_they_are(frame_bytes: int) -> None:
    """Regression: their bytes in memory were sent, which are those of other values."""
    number = torch.tensor([1 + 2j, 3 - 4j]).conj()
    received = through([number, number.imag], frame_bytes)
    assert [tensor.tolist() for tensor in received if tensor is not None] == [[1 - 2j, 3 + 4j], [-2.0, 4.0]]


def test_a_message_out_of_step_is_refused() -> None:
    frame = pack([torch.ones(1)], 4, 0).frame
    with pytest.raises(CapslogError, match="microbatch 4 came where microbatch 5 was due"):
        unpack(frame, 1, 5)
    for spoilt in (torch.zeros_like(frame), torch.cat([pack([], 4, 0).frame, torch.zeros_like(frame)])):
        with pytest.raises(CapslogError, match="no header of this plugin"):
            unpack(spoilt, 1, 4)


def test_what_the_format_has_no_place_for_is_refused() -> None:
    for tensor in (torch.ones([1] * 9), torch.eye(2).to_sparse(), torch.ones(2).to(torch.float8_e5m2)):
        with pytest.raises(CapslogError, match="cannot cross a cut"):
            pack([tensor], 0, 0)


def test_a_stage_never_works_on_what_waits_for_recomputation() -> None:
    waiting = Bundle((torch.ones(3), None))
    given_to_stage = waiting.to("cpu")
    assert given_to_stage.tensors[0] is not None
    given_to_stage.tensors[0].mul_(5)
    assert given_to_stage.cpu() is waiting
    assert waiting.tensors[0] is not None
    assert waiting.tensors[0].tolist() == [1, 1, 1]
