"""Imports and calls the user's functions and classes that a config names as `package.module:function`."""

from __future__ import annotations

import difflib
import importlib
import re
import sys
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

from varuna_capslog.base.errors import CapslogError, ConfigError, extra_of, install_sentence

__all__ = ["add_current_folder", "call_function", "import_function", "users_module"]

_OURS = re.compile("varuna_capslog|detr_pipeline")
"""This project's packages. An installed copy may hide the copy in the current folder, such as a clone: no error."""
_INSTALLED = {"site-packages", "dist-packages", sysconfig.get_path("stdlib")}


def import_function(name: str, title: str) -> Any:
    """Return the function or class that `package.module:function` names; its module may lie in the current folder.

    Args:
        title: the user's term for the function; every message begins with it.

    Raises:
        ConfigError: no such module or function, or it is not callable.
    """
    module_name, _, function_name = name.partition(":")
    if not function_name:
        raise ConfigError(f"{title} is not of the form package.module:function")
    try:
        module = users_module(module_name, title)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name + ".").startswith(error.name + "."):
            raise _lacks(title, error) from error
        advice = "install its package or start from the folder that holds it"
        if module_name.endswith(".py"):
            advice = f"a module is named without .py: write {module_name[:-3].replace('/', '.')}:{function_name}"
        raise ConfigError(f"{title}: there is no module {error.name!r}; {advice}") from None
    function = getattr(module, function_name, None)
    if not callable(function):
        near = difflib.get_close_matches(
            function_name, [member for member in vars(module) if not member.startswith("_")]
        )
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"{title}: {module_name!r} has no function {function_name!r}{hint}")
    return function


def users_module(name: str, title: str) -> ModuleType:
    """Import a user's module, installed or in the current folder.

    Raises:
        ConfigError: an installed module of this name hides the module of the current folder.
        Exception: whatever the import raises.
    """
    add_current_folder()
    module, top = importlib.import_module(name), name.partition(".")[0]
    file = Path(getattr(sys.modules[top], "__file__", None) or "")
    if not _OURS.fullmatch(top) and _INSTALLED & {str(file.parent), *file.parts}:
        for file_path in (Path(f"{top}.py"), Path(top, "__init__.py")):
            if file_path.is_file() and not file_path.samefile(file):
                raise ConfigError(
                    f"{title}: the installed module {top!r}, {file}, comes before {file_path} of the current folder; "
                    "rename yours, or set PYTHONPATH=. to have it come first"
                )
    return module


def add_current_folder() -> None:
    """Add the current folder to the end of sys.path: a user's rich.py must not replace rich."""
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))


def call_function(name: str, title: str, /, *arguments: Any, **keywords: Any) -> Any:
    """Call a user's `package.module:function`; see `import_function`.

    Raises:
        ConfigError: the function cannot be imported, or raised an error other than CapslogError.
        CapslogError: raised by the function itself.
    """
    function = import_function(name, title)
    try:
        return function(*arguments, **keywords)
    except CapslogError:
        raise
    except ModuleNotFoundError as error:
        raise _lacks(title, error) from error
    except (Exception, SystemExit) as error:  # any function may be named here, such as os.system or sys.exit
        raise ConfigError(
            f"{title} failed with {type(error).__name__}: {error}; name another function, or mend this one or what "
            "it is given (CAPSLOG_DEBUG=1 shows where)"
        ) from error


def _lacks(title: str, error: ModuleNotFoundError) -> ConfigError:
    hint = "install it" if (extra := extra_of(error)) is None else install_sentence(extra)
    return ConfigError(f"{title} needs the module {error.name!r}, which is not installed; {hint}")
