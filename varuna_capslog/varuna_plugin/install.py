"""The table of patches: what of Varuna is replaced or wrapped, by what, and how it is undone.

`install` and `uninstall` are the only ways in; no other module changes Varuna.
"""

from __future__ import annotations

import contextlib
import functools
import io
from collections.abc import Callable
from typing import Any

from varuna_capslog.varuna_plugin.options import reset
from varuna_capslog.varuna_plugin.recognise import FoundVaruna, find_varuna

__all__ = ["Patches", "install", "installed_patches", "silent", "uninstall"]

_ABSENT = object()


class Patches:
    """Attributes replaced in another package's modules and classes, put back exactly and in reverse order."""

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, Any]] = []

    def __len__(self) -> int:
        return len(self._undo)

    def replace(self, owner: Any, name: str, value: Any) -> Any:
        """Sets `owner.name` (a module's or a class's own attribute) and returns what it was.

        Raises AttributeError where the owner has no such attribute of its own: a patch must hit something.
        """
        before = vars(owner).get(name, _ABSENT)
        if before is _ABSENT:
            raise AttributeError(f"{owner!r} has no attribute {name!r} of its own to replace")
        self._undo.append((owner, name, before))
        setattr(owner, name, value)
        return before

    def add(self, owner: Any, name: str, value: Any) -> None:
        """Sets an attribute that `owner` does not have."""
        if name in vars(owner):
            raise AttributeError(f"{owner!r} already has an attribute {name!r}")
        self._undo.append((owner, name, _ABSENT))
        setattr(owner, name, value)

    def names(self) -> list[str]:
        """What is replaced, as `module.Class.attribute`, in order."""
        return [f"{_path(owner)}.{name}" for owner, name, _ in self._undo]

    def undo(self) -> None:
        """Puts everything back as it was."""
        while self._undo:
            owner, name, before = self._undo.pop()
            if before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)


def _path(owner: Any) -> str:
    return f"{owner.__module__}.{owner.__qualname__}" if isinstance(owner, type) else str(owner.__name__)


_patches = Patches()


def install() -> FoundVaruna:
    """Patches the Varuna that is importable here; a second call changes nothing.

    Returns:
        Where it was found, and its commit.

    Raises:
        CapslogError: there is no Varuna, it is the unrelated package of that name, or its code is not the one that the
            patches are written for.
    """
    found = find_varuna()
    if len(_patches):
        return found
    import varuna
    import varuna.checkpoint
    import varuna.partitioned_model
    import varuna.pipeline
    import varuna.utils
    import varuna.varuna

    try:
        _apply(varuna)
    except BaseException:
        _patches.undo()
        raise
    return found


def silent() -> contextlib.redirect_stdout[io.StringIO]:
    """Inside this context Varuna's own prints, of its import and of every model that it builds, are dropped."""
    return contextlib.redirect_stdout(io.StringIO())


def uninstall() -> None:
    """Puts every attribute of Varuna back as it was and forgets what was configured. Models that were built stay split
    and cannot be run by the unpatched Varuna.
    """
    _patches.undo()
    reset()


def installed_patches() -> list[str]:
    """What is replaced now, as `module.Class.attribute`; empty when nothing is installed."""
    return _patches.names()


def _apply(varuna: Any) -> None:
    from varuna_capslog.varuna_plugin import building, checkpoint, executor, gradients, inputs, schedule
    from varuna_capslog.varuna_plugin.splitting import boundary, stages

    models, pipeline, core, utils = varuna.partitioned_model, varuna.pipeline, varuna.varuna, varuna.utils
    # any cut list, owners from real use
    _patches.replace(models.CutPoint, "forward", boundary.cut_forward)
    _patches.replace(models.PartitionedModel, "initialize", stages.initialize)
    _patches.replace(models.PartitionedModel, "parameter_names_to_cuts", building.parameter_names_to_cuts)
    _around(models.PartitionedModel, "forward", executor.forward)
    # the CPU; random numbers
    for module in (utils, models):
        _patches.replace(module, "save_rng_states", executor.save_random_state)
        _patches.replace(module, "restore_rng_states", executor.restore_random_state)
    # messages
    _patches.replace(pipeline, "dist", executor.BoundedDistributed())
    _patches.replace(pipeline, "Queue", executor.WatchedQueue)
    for name, thread in executor.THREADS.items():
        _patches.replace(pipeline.Pipeline, name, thread)
    _around(pipeline.Pipeline, "worker", executor.worker)
    _around(pipeline.Pipeline, "run", executor.run)
    # inputs and schedule
    _patches.replace(utils, "scatter", inputs.scatter)
    _patches.replace(utils, "generate_schedule", schedule.varuna_tasks)
    # the step
    _around(core.Varuna, "__init__", building.build)
    _around(core.Varuna, "step", gradients.step_alone)
    _patches.replace(core.Varuna, "init_communication", building.init_communication)
    _patches.replace(core.Varuna, "init_distributed", gradients.init_distributed)
    _patches.replace(core.Varuna, "share_weight_grads", gradients.share_weight_grads)
    _patches.replace(core.Varuna, "sync_across_workers", gradients.sync_across_workers)
    _patches.replace(core.Varuna, "evaluate", building.evaluate)
    # checkpoints
    _patches.replace(core.Varuna, "checkpoint", checkpoint.save)
    _patches.replace(core.Varuna, "load_checkpoint", checkpoint.load)
    for module in (utils, models, varuna.checkpoint):
        _patches.replace(module, "VARUNA_TEMP_FOLDER", building.temporary_folder())


def _around(owner: type, name: str, wrapper: Callable[..., Any]) -> None:
    """Replaces a method by `wrapper(original, self, ...)`."""
    original = vars(owner)[name]

    @functools.wraps(original)
    def wrapped(self: Any, *arguments: Any, **keywords: Any) -> Any:
        return wrapper(original, self, *arguments, **keywords)

    _patches.replace(owner, name, wrapped)
