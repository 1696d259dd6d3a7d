"""Bytes that are read from the errors of failed allocations."""

from __future__ import annotations

import pytest
import torch

from varuna_capslog.base.errors import CapslogError, HostTierFailed
from varuna_capslog.elastic.member.training import Lack, lack_of


def test_an_allocation_that_really_fails_on_the_cpu_says_how_much_lacks() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert lack_of(caught.value) == Lack(1 << 60)


@pytest.mark.parametrize(
    ("error", "size"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total"), 5 << 29),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."), 20 << 20),
        (torch.OutOfMemoryError("CUDA out of memory."), 1 << 20),
        (MemoryError(), 1 << 20),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), None),
        (RuntimeError("Tried to allocate 20.00 MiB."), None),
        (ValueError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes"), None),
    ],
)
def test_other_errors_are_none_of_it(error: Exception, size: int | None) -> None:
    assert lack_of(error) == (None if size is None else Lack(size))


def test_a_copy_of_the_host_tier_that_failed_lacks_no_bytes_of_the_device() -> None:
    failed = HostTierFailed("a copy to or from the host tier (memory) failed: OSError: broken")
    lack = lack_of(failed)
    assert lack == Lack(0, str(failed))
    assert lack.sentence("m1", 3) == f"m1 could not make step 3, since {failed}"
    assert lack_of(CapslogError("the host tier is full")) is None
