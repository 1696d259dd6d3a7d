"""Tests of the real Varuna run on a pool of workers. If it is not importable they are skipped with the reason."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.engine.pool import WorkerPool
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.varuna_plugin import FoundVaruna, find_varuna


@pytest.fixture(scope="session")
def varuna() -> FoundVaruna:
    """Installed Varuna of the right version. Tests that use it are skipped with the reason if there is none."""
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
