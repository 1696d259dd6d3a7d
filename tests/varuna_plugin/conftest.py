"""Where the real Varuna is importable its tests run on a pool of workers; elsewhere they say why they do not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.engine.pool import WorkerPool
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.varuna_plugin import FoundVaruna, find_varuna


@pytest.fixture(scope="session")
def varuna() -> FoundVaruna:
    """The right Varuna; a test that asks for it is skipped with the reason where there is none."""
    try:
        return find_varuna()
    except CapslogError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def pool(varuna: FoundVaruna) -> Iterator[WorkerPool]:
    torch.set_num_threads(1)
    workers = WorkerPool()
    yield workers
    workers.close()
