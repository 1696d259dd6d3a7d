"""A config names code to run. This module lists that code, and decides whether it may run without the option `--trust`.

Commands call `check_run` or `check_config` before they import code that a run's folder names; `start/prepare` marks the
folder of every run that it starts. The mark is an HMAC under a key that only this user can read: a file's owner or mode
is no proof. The Python API and workers, which this user starts, check nothing.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import re
import stat
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from varuna_capslog.base import files
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.functions import add_current_folder
from varuna_capslog.base.secret import FILE_VARIABLE, run_secret
from varuna_capslog.config.reading import Config, load_config

__all__ = ["OFFERED", "check_config", "check_run", "mark_run"]

OFFERED = frozenset(
    """
    detr_pipeline:workload
    detr_pipeline.rt_detr:workload
    varuna_capslog.model.hugging_face:model
    varuna_capslog.model.model_workload:workload
    varuna_capslog.own_data:ImageFolder
    varuna_capslog.own_data:TextFile
    varuna_capslog.own_data:TokenFile
    varuna_capslog.own_data:workload
    """.split()  # noqa: SIM905 (as single texts, tests/test_rooms.py would take these names for imports)
)
"""Functions that our packages offer to configs. They are listed, because our packages also have functions that could be
misused with other arguments (`base.files:write_text`), and imported modules (`base.processes:subprocess`)."""

_NAME = re.compile(r"[^\s:=/\\\[]+:[^\s:=/\\\[]+")
"""Any text that can name a function of a module, in any alphabet. Texts such as cuda:0 need `--trust`, too."""

_HANDED = "varuna_capslog.own_data.handed:model"
_MARK = "mark.json"
_FILES_OF_RUNS = ("plan-*.json", "events.jsonl", "metrics.jsonl", "checkpoints/step-*", "handed.pkl")
_MOST_MARK_BYTES = 1 << 20


def check_run(run_dir: Path, config: Config, trust: bool = False) -> None:
    """Raise CapslogError, which lists the code, unless the code that a run folder's config names may run: it is all
    `OFFERED`, or this user started the run and its files have not changed since, or `trust` is set.
    """
    code = _code(config)
    if code and not trust and (doubt := _doubt(run_dir, config)) is not None:
        raise CapslogError(_sentence(run_dir / "config.yaml", code, doubt))


def check_config(path: Path, overrides: Sequence[str], trust: bool = False) -> None:
    """Check the config that a command is called with. Raises like `check_run` and `load_config`.

    A user who names a config of their own wants to run its code, as with a script. So only the config.yaml of a run's
    folder is checked, and a config that names a pickle, whose code nobody can read.
    """
    if trust:
        return
    place, checked = Path(os.path.realpath(path)), set[str]()
    if place.name == "config.yaml" and any(any(place.parent.glob(pattern)) for pattern in _FILES_OF_RUNS):
        resolved = load_config(path)
        check_run(place.parent, resolved)
        checked = {*_pickles(resolved)}
    if pickles := {*_pickles(load_config(path, overrides))} - checked:
        pickle_names = [f"the pickle {pickle}" for pickle in sorted(pickles)]
        raise CapslogError(_sentence(path, pickle_names, "nobody can read in a pickle what it will do"))


def mark_run(run_dir: Path) -> None:
    """Mark a run that this user starts; the mark covers config.yaml and the pickles that it names. Without a key, such
    as where HOME is not set, there is no mark, and later commands need `--trust`.
    """
    config = load_config(run_dir / "config.yaml")
    modules = {name: _file_of(name) for name in _names(config)}
    with contextlib.suppress(CapslogError, OSError):
        if (key := _key(create=True)) is not None:
            mark = _mark(key, run_dir, config, modules)
            files.write_json(run_dir / _MARK, {"mark": mark, "modules": modules})


def _code(config: Config) -> list[str]:
    """List the code besides `OFFERED` that the config would run, in words."""
    places = {f"{key}={name}": _file_of(name) for key, name in _leaves(config) if _is_code(name)}
    names = [setting if file is None else f"{setting} ({file})" for setting, file in places.items()]
    return [*names, *(f"the pickle {path}" for path in _pickles(config))]


def _names(config: Config) -> list[str]:
    return sorted({name for _, name in _leaves(config) if _is_code(name)})


def _is_code(text: str) -> bool:
    return text not in OFFERED and _NAME.fullmatch(text) is not None


def _pickles(config: Config) -> list[str]:
    """Paths of the files from which own data and handed models are unpickled."""
    leaves = list(_leaves(config))
    keys = ("given", "path") if any(text == _HANDED for _, text in leaves) else ("given",)
    return sorted({text for key, text in leaves if key.endswith(keys)})


def _leaves(config: Config) -> Iterator[tuple[str, str]]:
    """Yield (key, text) of every text in the config, keys of mappings included, except `run_dir` and the profile's
    device, which are checked to be no code.
    """
    for key, content in config.model_dump(mode="json", exclude={"run_dir": True, "profile": {"device"}}).items():
        yield from _texts(key, content)


def _texts(key: str, content: Any) -> Iterator[tuple[str, str]]:
    if isinstance(content, str):
        yield key, content
    elif isinstance(content, Mapping):
        for name, inner in content.items():
            yield key, name
            yield from _texts(f"{key}.{name}", inner)
    elif isinstance(content, list):
        for inner in content:
            yield from _texts(key, inner)


def _file_of(name: str) -> str | None:
    """Return the module's file for `package.module:function` without any import of it; None: built in or not found."""
    add_current_folder()
    spec, path, so_far = None, None, ""
    with contextlib.suppress(Exception):  # finders of other packages may raise any error
        for part in name.partition(":")[0].split("."):
            so_far = f"{so_far}.{part}" if so_far else part
            specs = (finder.find_spec(so_far, path) for finder in sys.meta_path)
            spec = next(filter(None, specs), None)
            if spec is None:
                return None
            path = None if spec.submodule_search_locations is None else [*spec.submodule_search_locations]
    return None if spec is None or not spec.has_location else spec.origin


def _doubt(run_dir: Path, config: Config) -> str | None:
    """Return a reason to doubt that this user started a folder's run as it is now; None where it is certain."""
    try:
        key, written = _key(), _written_mark(run_dir / _MARK)
        if key is None or written is None:
            return "the folder bears no mark of a run that you started"
        mark, modules = written
        if not hmac.compare_digest(mark.encode("utf-8", "replace"), _mark(key, run_dir, config, modules).encode()):
            return "this is not, or no longer, the run that you started (config.yaml or what it names was changed)"
    except (CapslogError, OSError) as error:
        return f"whether you started that run cannot be known: {error}"
    for name in _names(config):
        file = _file_of(name)
        if file is not None and file != modules.get(name) and Path.cwd() in Path(file).parents:
            return f"{file} of the current folder is not what the run was started with ({modules.get(name)})"
    return None


def _written_mark(path: Path) -> tuple[str, dict[str, Any]] | None:
    """Return the mark in a file, and the files of modules that it covers; None where it holds none."""
    if not path.is_file() or path.is_symlink() or path.stat().st_size > _MOST_MARK_BYTES:
        return None
    match files.read_json(path):
        case {"mark": str(mark), "modules": dict(modules)}:
            return mark, modules
    return None


def _mark(key: bytes, run_dir: Path, config: Config, modules: Mapping[str, Any]) -> str:
    paths = (run_dir / "config.yaml", *map(Path, _pickles(config)))
    digests = [files.digest_of(path) if path.is_file() else None for path in paths]
    return hmac.new(key, json.dumps([digests, modules], sort_keys=True).encode(), "sha256").hexdigest()


def _key(create: bool = False) -> bytes | None:
    """Return the key of this user's marks, if there is one. Raises CapslogError where others may have access to it."""
    state, home = os.environ.get("XDG_STATE_HOME", ""), os.environ.get("HOME", "")
    if not os.path.isabs(state):  # the XDG specification says to ignore a relative path
        if not os.path.isabs(home):
            raise CapslogError("there is no folder for the key of your marks: neither XDG_STATE_HOME nor HOME is set")
        state = os.path.join(home, ".local", "state")
    path = Path(state, "varuna-capslog", "key")
    if create and not os.path.lexists(path):
        run_secret("", create=True, environment={FILE_VARIABLE: str(path)})
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CapslogError(f"the key of your marks, {path}, cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise CapslogError(
            f"the key of your marks, {path}, is a link, another user's, or readable by others; remove it, and the next "
            "run makes a new one"
        )
    return run_secret("", environment={FILE_VARIABLE: str(path)}).key("capslog: this user started this run")


def _sentence(path: Path, code: Sequence[str], doubt: str) -> str:
    more = f" and {len(code) - 5} more" if len(code) > 5 else ""
    clause = f"{path} is code and would run {', '.join(code[:5])}{more}"
    return f"{clause}, but {doubt}; read that code, then give --trust to have it run"
