"""One pool of worker processes for all engine tests of a session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.engine.pool import WorkerPool


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Oracles run like the workers: two threads sum a convolution in another order (a random ResNet-50 with frozen,
    that is absent, normalisation is so ill-conditioned that this alone moved gradients by 8e-5)."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    workers = WorkerPool()
    yield workers
    workers.close()
