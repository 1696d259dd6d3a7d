"""Workers import ahead the modules that their run uses, and no other slow module."""

from __future__ import annotations

import importlib

import pytest

from varuna_capslog.config.settings import Config
from varuna_capslog.start.elastic_host import member_modules, training_modules


@pytest.mark.parametrize("loggers", [[], ["tensorboard"]])
def test_loggers_are_imported_where_they_are_used(loggers: list[str]) -> None:
    config = Config.model_validate({"workload": "tests.engine.workload:workload", "train": {"loggers": loggers}})
    modules = training_modules(config)
    assert ("torch.utils.tensorboard" in modules) is bool(loggers)
    assert "tests.engine.workload" in modules
    assert set(modules) < set(member_modules(config))
    for name in member_modules(config):
        importlib.import_module(name)
