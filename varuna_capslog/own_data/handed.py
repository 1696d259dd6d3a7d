"""A user's data: the keys of a config's `data` section, and objects that a program passes to its run.

Objects are pickled into one file of the run's folder. A class or function of the program's own script is found by the
script's name as a module, since in another process `__main__` is another program.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FunctionType
from typing import Annotated, Any

from pydantic import Field, model_validator

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.files import whole_file
from varuna_capslog.base.functions import users_module
from varuna_capslog.config.settings import FUNCTION, Section

__all__ = ["DataSection", "hand_over", "handed", "model"]

# -- Keys of a config's `data` section for `workload: varuna_capslog.own_data:workload`.


_Function = Annotated[str, Field(pattern=f"^{FUNCTION}$")]


class DataSection(Section):
    """A data set of the user's, or a ready-made one, and what is done with its samples."""

    dataset: _Function | None = None
    """`package.module:function`, or a class; called with `arguments`, it returns a map-style dataset."""

    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of dataset, such as {path: book.txt, length: 64}."""

    val: _Function | None = None
    """As dataset, for the validation data; null means no evaluation."""

    val_arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of val."""

    collate: _Function | None = None
    """Function from a list of samples to a batch; null means torch's default_collate."""

    inputs: list[str] | None = None
    """Keys of the batch that the model takes (one that its forward does not name is taken by its place); where a batch
    is a tuple, names of its first entries. null means all keys that forward names, or all entries but the last."""

    loss: str | None = Field(None, pattern=f"^(cross_entropy|chunked_cross_entropy|mse|{FUNCTION})$")
    """cross_entropy, chunked_cross_entropy (half its memory, other rounding), mse, or a function f(outputs, batch) that
    returns the mean loss of a microbatch, or a mapping of parts with that as its entry "loss"; null means the output
    `loss` of the model itself."""

    metric: str | None = Field(None, pattern=f"^(accuracy|{FUNCTION})$")
    """accuracy, or a function f(outputs, batch) that returns scores by name; evaluations give their means."""

    sample: _Function | None = None
    """Function from the trained model to a text, which the report shows."""

    workers: int = Field(0, ge=0)
    """Processes of every rank that reads samples; with 0 the rank reads them itself, between its computations."""

    prefetch: int = Field(2, gt=0)
    """Microbatches that each of these processes reads ahead."""

    given: Path | None = None
    """File in which `capslog.train` hands over what it was given as an object."""

    @model_validator(mode="after")
    def _has_data(self) -> DataSection:
        if self.dataset is None and self.given is None:
            raise ValueError("data.dataset is missing; name a function that returns the dataset, as module:function")
        return self


# -- Objects that are handed over


def hand_over(path: Path, objects: Mapping[str, Any], script: Callable[[str], str]) -> None:
    """Write the objects by name.

    Args:
        script: returns the module name of the script that defines an object of this name; raises CapslogError where it
            has none.

    Raises:
        CapslogError: an object cannot be pickled; the message names it.
    """
    pickled = {name: _pickled(name, payload, script) for name, payload in objects.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as file:
        pickle.dump(pickled, file)


def handed(path: Path, name: str) -> Any:
    """Return the object of this name; None without one. Raises CapslogError for a file that cannot be unpickled."""
    try:
        data = pickle.loads(path.read_bytes()).get(name)
        return None if data is None else pickle.loads(data)
    except CapslogError:
        raise
    except Exception as error:
        raise CapslogError(
            f"{path}: the {name} that was handed over cannot be read ({type(error).__name__}: {error}); start the run "
            "again with capslog.train"
        ) from error


def model(path: str) -> Any:
    """Return the model that was passed; the factory in the config's `model` section."""
    return handed(Path(path), "model")


class _ScriptPickler(pickle.Pickler):
    script: Callable[[str], str]

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, (type, FunctionType)) and value.__module__ == "__main__":
            if _part_of(sys.modules["__main__"], value.__qualname__) is not value:
                raise pickle.PicklingError(
                    f"no other process finds {value.__qualname__} in the script: a lambda, something that a function "
                    "defines, or a name that has another meaning by now"
                )
            return _of_script, (self.script(value.__qualname__), value.__qualname__)
        return NotImplemented


def _of_script(module: str, name: str) -> Any:
    definition = _part_of(users_module(module, f"the script {module!r}"), name)
    if definition is None:
        raise AttributeError(f"{module} has no {name}")
    return definition


def _part_of(module: Any, name: str) -> Any:
    """Return the definition with a qualified name in a module; None where it has none."""
    for part in name.split("."):
        module = getattr(module, part, None)
    return module


def _pickled(name: str, value: Any, script: Callable[[str], str]) -> bytes:
    buffer = io.BytesIO()
    pickler = _ScriptPickler(buffer, protocol=5)
    pickler.script = script
    try:
        pickler.dump(value)
    except CapslogError:
        raise
    except Exception as error:
        raise CapslogError(
            f"the {name} is a {type(value).__name__} that cannot be handed to the workers "
            f"({type(error).__name__}: {error}); give the name of a function that makes it, as 'module:function'"
        ) from error
    return buffer.getvalue()
