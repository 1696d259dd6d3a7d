"""The config that a model and a data set stand for: `capslog.train(model, dataset, ...)`.

Functions are named, objects are handed over in a file of the run's folder, so that every process of the run has them.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from varuna_capslog.api.naming import function_name, script_module
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.start.given_plan import OWN_DATA

__all__ = ["own_data_values", "refuse_splits"]

_FUNCTIONS = ("collate", "loss", "metric", "sample")
"""Keys of the `data` section that are a function or an object that can be called."""
_SETTINGS = (str, bytes, list, tuple, Mapping)
"""Types of settings besides numbers; no data set is of one of them."""


def refuse_splits(dataset: Any, name: str = "dataset") -> None:
    """Raises CapslogError for a mapping that holds data sets, such as a `DatasetDict` of Hugging Face."""
    if not isinstance(dataset, Mapping):
        return
    splits = [
        key for key, split in dataset.items() if not isinstance(split, _SETTINGS) and hasattr(split, "__getitem__")
    ]
    if splits:
        raise CapslogError(
            f"the {type(dataset).__name__} given as {name} holds several data sets "
            f"({', '.join(map(repr, splits))}); give one of them as dataset, such as splits[{splits[0]!r}], and "
            "another one as val"
        )


def own_data_values(model: Any, dataset: Any, data: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of the config.

    Args:
        data: further keys of its `data` section, functions and objects among them.
        settings: those of the call; of them only `run_dir` is read here.

    Raises:
        CapslogError: a model or data set of another kind; something that no other process can import.
    """
    _refuse_import()
    from torch import nn

    from varuna_capslog.model.chain import Chain
    from varuna_capslog.own_data.handed import hand_over

    handed: dict[str, Any] = {}
    keys: dict[str, Any] = {name: value for name, value in data.items() if name not in (*_FUNCTIONS, "val")}
    for name, value in {"dataset": dataset, **data}.items():
        if name in keys or value is None:
            continue
        if isinstance(value, str):
            keys[name] = value
        elif inspect.isroutine(value):
            keys[name] = function_name(value)
        else:
            handed[name] = value
    section: dict[str, Any] = {}
    name = type(model).__name__
    if isinstance(model, str):
        section["factory"], name = model, model.partition(":")[0].rpartition(".")[2]
    elif isinstance(model, (nn.Module, Chain)):
        handed["model"] = model
    elif inspect.isroutine(model):
        section["factory"] = function_name(model)
        name = section["factory"].partition(":")[0].rpartition(".")[2]
    else:
        raise CapslogError(
            f"the model is a {name}; give an nn.Module, a Chain, or a function that makes one, with a dataset after it"
        )
    run_dir = Path(settings.get("run_dir", f"runs/{name}"))
    if handed:
        path = run_dir / "handed.pkl"
        hand_over(path, handed, script_module)
        keys["given"] = str(path)
        if "model" in handed:
            section |= {
                "factory": "varuna_capslog.own_data.handed:model",
                "arguments": {"path": str(path)},
                "name": name,
            }
    return {"workload": OWN_DATA, "model": section, "data": keys, "run_dir": str(run_dir)}


def _refuse_import() -> None:
    """Raise CapslogError where a process of the run imports the script that started it, which would train again."""
    for frame in inspect.stack(0)[2:]:
        if frame.function == "imported" or frame.function == "_of_script":
            raise CapslogError(
                "the script calls capslog.train while a process of the run imports it; put the call under "
                'if __name__ == "__main__":'
            )
