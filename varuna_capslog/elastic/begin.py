"""An elastic run on this machine, from a prepared folder to its end: what `capslog train` does with `elastic.enabled`.

Finds out where the run goes on (a checkpoint, or what members left behind when they stopped), tells the store, and lets
a `Host` start and watch the workers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from varuna_capslog.elastic.generation import Stamp
from varuna_capslog.elastic.host import Host, HostEnd
from varuna_capslog.elastic.nursery import PRELOADED
from varuna_capslog.elastic.parked import recover
from varuna_capslog.errors import CapslogError
from varuna_capslog.prepare import latest_plan
from varuna_capslog.settings import Config

__all__ = ["run_here", "starting_point"]

_MODULES = (
    *PRELOADED,
    "varuna_capslog.elastic.runtime",
    "varuna_capslog.elastic.pipeline_work",
    "torch.utils.tensorboard",
    "torch._dynamo",  # the first optimizer imports it, in one to two seconds
    "torch._subclasses.fake_tensor",
    "rich.progress",
)


def starting_point(config: Config) -> tuple[dict[str, str], Stamp]:
    """What the store must say before the first worker looks, and the boundary that the run begins with.

    Raises:
        CapslogError: nothing is prepared, or there is no checkpoint where `resume` says.
    """
    from varuna_capslog.engine.checkpoint import Checkpoint, latest_checkpoint, open_checkpoint

    planned = latest_plan(config.run_dir)
    if planned is None:
        raise CapslogError(f"{config.run_dir} holds no plan-<generation>.json; start the run with `capslog train`")
    found: Checkpoint | None = None
    if config.resume == "auto":
        recover(config.run_dir)
        found, _ = latest_checkpoint(config.run_dir / "checkpoints")
    elif config.resume != "never":
        found = open_checkpoint(Path(config.resume))
    step = found.step if found is not None else 0
    keys = {
        "first-plan": str(planned[0]),
        "resumed-step": str(step),
        "resumed-path": str(found.path.absolute()) if found is not None else "",
    }
    return keys, Stamp(step, 0)


def run_here(config: Config, say: Callable[[str], None] = lambda line: None, modules: Sequence[str] = ()) -> HostEnd:
    """Trains on this machine's workers until the run ends.

    Args:
        say: prints one line for the user.
        modules: imported ahead for all workers, besides those of the engine and of the workload.

    Raises:
        WorkerFailed, Interrupted: see `Host.run`.
        CapslogError: `engine: varuna`, which has no part in this; or nothing to begin with.
    """
    if config.engine != "capslog":
        raise CapslogError(f"elastic.enabled needs engine=capslog; engine={config.engine} restarts from checkpoints")
    if config.pipeline.transport != "gloo":
        raise CapslogError(
            f"elastic.enabled needs pipeline.transport=gloo; {config.pipeline.transport} groups cannot be left alone"
        )
    keys, stamp = starting_point(config)
    workload = config.workload.partition(":")[0]
    return Host(
        config.run_dir,
        num_workers=config.world_size,
        keys=keys,
        first=stamp,
        environment={"OMP_NUM_THREADS": str(config.train.threads)},
        settings=config.elastic,
        say=say,
        modules=(*_MODULES, workload, *modules),
    ).run()
