"""Workers import ahead the modules that their run uses, and no other slow module."""

from __future__ import annotations

import importlib
from typing import Any

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


@pytest.mark.parametrize(
    ("keys", "imported"),
    [
        ({}, False),
        ({"train": {"optimizer": "AdamW"}}, False),
        ({"pipeline": {"devices": 2}}, True),
        ({"pipeline": {"devices": 1, "plan": "plan.json"}}, True),
        ({"train": {"optimizer": "sgd"}}, True),
        ({"train": {"optimizer_args": {"amsgrad": True}}}, True),
        ({"train": {"compile": "eager"}}, True),
        ({"workload": "varuna_capslog.model.model_workload:workload", "model": {"factory": "a:b"}}, True),
    ],
)
def test_torchs_compiler_is_imported_ahead_where_the_first_step_may_need_it(
    keys: dict[str, Any], imported: bool
) -> None:
    base = {"workload": "tests.engine.workload:workload", "pipeline": {"devices": 1, "replicas": 4}}
    assert ("torch._dynamo" in training_modules(Config.model_validate(base | keys))) is imported
