"""Names by which the processes of a run find functions of the program that starts it."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from varuna_capslog.base.errors import CapslogError

__all__ = ["function_name", "script_module"]


def function_name(function: Callable[..., Any]) -> str:
    """Return `package.module:function`, by which a worker finds the function.

    Raises:
        CapslogError: it stands in no module that a worker can import.
    """
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if module == "__main__" and name.isidentifier() and inspect.isroutine(function):
        module = script_module(name)
    if module is None or not name.isidentifier() or not inspect.isroutine(function):
        raise CapslogError(
            f"the workers of a training are processes of their own and cannot import {name or function!r} of "
            f"{module or 'no module'}; put the function into a file and give 'module:function'"
        )
    return f"{module}:{name}"


def script_module(name: str) -> str:
    """Return the module name of the program's script, by which a worker started in the same folder imports it.

    Args:
        name: the function to find in it, for the error.

    Raises:
        CapslogError: the program is no file below the current folder, such as a notebook.
    """
    main = sys.modules["__main__"]
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if spec is not None:
        return str(spec.name)
    try:
        path = Path(file or "").resolve().relative_to(Path.cwd().resolve()).with_suffix("")
    except ValueError:
        path = Path()
    if file is None or not path.parts or not all(part.isidentifier() for part in path.parts):
        raise CapslogError(
            f"the workers of a training are processes of their own and cannot import {name!r} of __main__; put it into "
            "a file whose name is a Python name, in the folder that the program is started from"
        )
    return ".".join(path.parts)
