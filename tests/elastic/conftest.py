"""One fork server and one uninterrupted run for all tests of live members."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.elastic.live import Cradle, Truth, truth_of


@pytest.fixture(scope="session")
def fork_server_of_all(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cradle]:
    shared_cradle = Cradle(tmp_path_factory.mktemp("cradle"))
    yield shared_cradle
    shared_cradle.close()


@pytest.fixture
def cradle(fork_server_of_all: Cradle) -> Iterator[Cradle]:
    yield fork_server_of_all
    fork_server_of_all.sweep()


@pytest.fixture(scope="session")
def truth(tmp_path_factory: pytest.TempPathFactory) -> Truth:
    torch.set_num_threads(1)  # as in the members: sums have other bits otherwise
    return truth_of(tmp_path_factory.mktemp("truth"))
