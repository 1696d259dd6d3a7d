"""What would stop a run, or teach it wrong things, told before it begins: `capslog check`.

It goes the way of `prepare`, on estimates and in a stand-in for the run's folder: no run is measured, no worker is
started, and the run's own folder stays as it is, or is not made.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import shutil
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from varuna_capslog import accelerator
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.findings import Finding, findings_of
from varuna_capslog.base.machine_memory import granted_bytes
from varuna_capslog.base.supervisor import check_unused, usable
from varuna_capslog.base.units import format_bytes
from varuna_capslog.config.settings import Config
from varuna_capslog.engine.recipe import Recipe
from varuna_capslog.model.chain import Chain
from varuna_capslog.model.workload import Workload, load_workload
from varuna_capslog.plans.parts import grains_of
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiling.skeleton import skeleton
from varuna_capslog.start.first_checks import check_names, check_optimizer, data_findings
from varuna_capslog.start.given_plan import given_plan
from varuna_capslog.start.prepare import needs_profile, profile_run, settled_plan
from varuna_capslog.start.resuming import newest_checkpoint
from varuna_capslog.training.checkpoint import passed_over
from varuna_capslog.training.constants import check_folder
from varuna_capslog.training.devices import check_devices, check_room, choose_device
from varuna_capslog.training.run_setup import check_keys

__all__ = ["READ_SECONDS", "check_run"]

READ_SECONDS = 20.0
"""In which a sample of each source must have been read."""
_SEARCH_SECONDS = 15.0
"""In which a planner must have ended that can be told so."""


def check_run(
    config: Config, say: Callable[[str], object], show: bool = True, read_seconds: float = READ_SECONDS
) -> Iterator[Finding]:
    """What is found of a run of this config, part by part, each sentence once.

    Args:
        say: told which part comes next.
        show: draw a progress bar where something takes long.
        read_seconds: in which a sample of each source must have been read.
    """
    with _stand_in(config) as stand_in, _warnings() as warned:
        check = _Check(config, stand_in, show, read_seconds)
        parts = {
            "config": check.config_keys,
            "data": check.data,
            "model": check.model,
            "plan": check.plan,
            "checkpoint": check.checkpoint,
            "devices": check.devices,
            "disk": check.disk,
        }

        def findings(part: str) -> Iterator[Finding]:
            say(f"checking: {part}")
            yield from (dataclasses.replace(finding, part=part) for finding in findings_of(parts[part]))
            yield from (Finding(line, part=part) for line in warned)
            warned.clear()

        told: set[str] = set()
        for part in parts:
            for finding in findings(part):
                if finding.text not in told:
                    told.add(finding.text)
                    yield finding


class _Check:
    """The parts of a check, which are asked in their order: each knows what those before it found out.

    Args:
        stand_in: the config with another run_dir, and with an estimated profile.
    """

    def __init__(self, config: Config, stand_in: Config, show: bool, read_seconds: float) -> None:
        self._config, self._stand_in, self._show, self._read_seconds = config, stand_in, show, read_seconds
        self._workload: Workload | None = None
        self._readable = False
        self._chain: Chain | None = None
        self._plan: Plan | None = None
        self._on_cpu = False

    def config_keys(self) -> Iterable[Finding]:
        check_names(self._config)
        check_optimizer(self._config)
        self._workload = load_workload(self._stand_in)
        return ()

    def data(self) -> Iterator[Finding]:
        workload = self._workload
        if workload is None:
            return
        counts = _within(workload.read_samples, self._read_seconds)
        if isinstance(counts, _Hangs):  # who asks for more would wait, too
            raise CapslogError(
                f"the first sample of each source was not read within {self._read_seconds:g} s, so that the rest of "
                "the data and the model were not checked; see what the data set waits for"
            )
        self._readable = True
        if isinstance(counts, CapslogError):
            yield Finding.of_error(counts)
        else:
            yield from (
                Finding(f"{count} {name} samples, of which one was read", "fact") for name, count in counts.items()
            )
        yield from data_findings(self._config, workload)

    def model(self) -> Iterator[Finding]:
        if self._workload is None or not self._readable:
            return
        self._workload.hand_over()
        chain = skeleton(load_workload(self._stand_in))
        check_keys(self._config.train, chain, Recipe.of_config(self._config.train))
        self._chain = chain
        parameters = list(chain.named_parameters().values())
        count, trained = (
            sum(one.numel() for one in some) for some in (parameters, [one for one in parameters if one.requires_grad])
        )
        frozen = "" if count == trained else f", of which {trained:,} are trained"
        yield Finding(f"{chain.name}: {len(chain)} layers, {count:,} parameters{frozen}", "fact")

    def plan(self) -> Iterator[Finding]:
        if self._chain is None:
            return
        config, measured = self._stand_in, self._config.profile.source == "measured"
        if measured and needs_profile(config, given_plan(config)):
            try:
                profile_run(config, self._show)
            except CapslogError as error:
                yield Finding(f"no plan is known, since the model cannot be estimated: {error}; the run measures it")
                return
        notes: list[str] = []
        settled, profile, plan = settled_plan(config, self._show, notes.append)
        self._plan = plan
        self._on_cpu = profile is not None and bool(profile.observations) and profile.observations[0].device == "cpu"
        if plan.fits is False:
            yield Finding("; ".join(plan.notes) or "no plan fits; add devices or capacity", "does_not_fit")
        else:
            yield from map(Finding, plan.notes)
            yield Finding(_told(plan, settled, measured), "fact")
        yield from map(Finding, notes)

    def checkpoint(self) -> Iterator[Finding]:
        config = self._config
        check_unused(config.run_dir)
        if config.init_from is not None and not config.init_from.exists():
            raise CapslogError(
                f"init_from={str(config.init_from)!r} does not exist; give a checkpoint folder or a weights file"
            )
        if self._workload is None or self._plan is None:
            return
        check_folder(config, self._plan.model, grains_of(self._plan.stages), self._workload.data_facts())
        if config.resume == "auto":
            newest, skipped = newest_checkpoint(config.run_dir)
            yield from map(Finding, passed_over(newest, skipped))
            if newest is not None:
                yield Finding(f"the run goes on after step {newest.step}, from {newest.path}", "fact")

    def devices(self) -> Iterator[Finding]:
        config, ranks = self._config, self._config.world_size
        device = choose_device(config.device, 0)
        if config.elastic.enabled:
            yield Finding(f"{ranks} workers on {device.type}, here or on several machines", "fact")
            return
        check_devices(config.pipeline.transport, device, ranks - 1)
        there = accelerator.all_devices(device.type)
        cores, threads = len(os.sched_getaffinity(0)), config.train.threads
        if device.type == "cpu":
            yield Finding(f"{ranks} workers with {threads} threads each on {cores} cores", "fact")
        else:
            yield Finding(f"{ranks} workers on {len(there)} devices ({accelerator.device_name(device.type)})", "fact")
        crowded = ranks * threads > cores if device.type == "cpu" else ranks > len(there)
        if crowded:
            what = f"{cores} cores" if device.type == "cpu" else f"{len(there)} devices"
            yield Finding(f"{ranks} workers share {what} and wait for each other; set pipeline.devices lower")
        yield from self._memory(there)

    def _memory(self, there: list[Any]) -> Iterator[Finding]:
        """Whether the devices have what the plan predicts, where it is predicted for such devices."""
        sizes = [] if self._plan is None else _bytes_of_ranks(self._plan, self._config.world_size)
        if self._on_cpu is not (there[0].type == "cpu"):
            return
        together: dict[Any, int] = defaultdict(int)
        for rank, size in enumerate(sizes):
            together[there[rank % len(there)]] += size
        for device, size in together.items():
            if device.type != "cpu":
                check_room(device, size, f"the plan's part on {device}")
            elif size > granted_bytes():
                yield Finding(
                    f"the workers need {format_bytes(size)} together, but this machine grants "
                    f"{format_bytes(granted_bytes())} of memory; set pipeline.devices or train.microbatch_size lower",
                    "does_not_fit",
                )

    def disk(self) -> Iterator[Finding]:
        folder = next(
            path
            for path in (self._config.run_dir.absolute(), *self._config.run_dir.absolute().parents)
            if path.exists() or path.is_symlink()
        )
        if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
            why = "cannot be written" if folder.is_dir() else "is no folder"
            raise CapslogError(f"run_dir={self._config.run_dir}: {folder} {why}; choose another run_dir")
        if self._chain is None:
            return
        with usable(folder):
            usage = shutil.disk_usage(folder)
        size, count = checkpoint_bytes(self._chain, self._config), _kept_checkpoints(self._config)
        before = sum(file.stat().st_size for file in (self._config.run_dir / "checkpoints").glob("step-*/*"))
        needed = max(0, size * count - before)
        if needed > usage.free > 0:
            raise CapslogError(
                f"run_dir={self._config.run_dir} is to keep {count} checkpoints of about {format_bytes(size)}, but "
                f"only {format_bytes(usage.free)} are free there; free space, choose another run_dir, or set "
                "train.checkpoint_keep lower"
            )
        yield Finding(
            f"checkpoints take about {format_bytes(size)} each, {count} of them are there at once, and "
            f"{format_bytes(usage.free)} are free",
            "fact",
        )


def checkpoint_bytes(chain: Chain, config: Config) -> int:
    """About what a checkpoint takes: parameters, buffers, and what the optimizer keeps."""
    recipe = Recipe.of_config(config.train)
    parameters = chain.named_parameters()
    kept = sum(sum(recipe.kept(one).values()) for one in parameters.values() if one.requires_grad)
    return kept + sum(tensor.nbytes for tensor in chain.named_tensors().values())


def _kept_checkpoints(config: Config) -> int:
    """The most that are there at once: those kept, the best one, and the one that is being written."""
    train = config.train
    most = train.checkpoint_keep + 1 + (train.evaluate_every is not None)
    if train.max_steps is None or train.evaluate_every:
        return most
    return min(most, 1 if train.checkpoint_every is None else 1 + (train.max_steps - 1) // train.checkpoint_every)


def _told(plan: Plan, config: Config, measured: bool) -> str:
    sizes = _bytes_of_ranks(plan, config.world_size)
    most = f", at most {format_bytes(max(sizes))} on a rank" if sizes else ""
    by = f" by planner {plan.planner}" if plan.planner else ""
    fits = {True: "; it fits", None: "; whether it fits is not known"}[plan.fits]
    why = " (pipeline.capacity is not set)" if plan.fits is None and config.pipeline.capacity is None else ""
    how = "; this is of an estimate, and the run measures" if measured and sizes else ""
    return f"{len(plan.stages)} stages on {config.world_size} ranks{by}{most}{fits}{why}{how}"


def _bytes_of_ranks(plan: Plan, ranks: int) -> list[int]:
    """The predicted bytes of each rank; [] where they are not known."""
    sizes = [one.bytes for one in plan.ranks] or list(plan.stage_bytes or ()) * (ranks // max(1, len(plan.stages)))
    return [] if None in sizes else [size for size in sizes if size is not None]


class _Hangs:
    """What `_within` returns where time is up."""


def _within(read: Callable[[], Mapping[str, int]], seconds: float) -> Mapping[str, int] | CapslogError | _Hangs:
    """What a function returned, or why it could not, in so many seconds; its thread ends with the process at last."""
    answers: list[Mapping[str, int] | CapslogError] = []

    def run() -> None:
        try:
            answers.append(read())
        except CapslogError as error:
            answers.append(error)
        except NotImplementedError as error:
            answers.append(CapslogError(f"{error}; a training needs some"))
        except Exception as error:  # of the user's own code
            told = " ".join(f"{type(error).__name__}: {error}".split())
            answers.append(CapslogError(f"the first sample of each source cannot be read ({told}); mend the data set"))

    thread = threading.Thread(target=run, name="reading a sample", daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else _Hangs()


@contextlib.contextmanager
def _stand_in(config: Config) -> Iterator[Config]:
    """The config with a folder that begins as its run_dir and is gone afterwards, with an estimated profile, and with
    an end of every search that can have one.
    """
    with tempfile.TemporaryDirectory(prefix="capslog-check-") as name:
        folder = Path(name)
        with contextlib.suppress(OSError):
            shutil.copyfile(config.run_dir / "config.yaml", folder / "config.yaml")
        if (config.run_dir / "checkpoints").is_dir():
            (folder / "checkpoints").symlink_to((config.run_dir / "checkpoints").absolute())
        pipeline = config.pipeline
        search = {"search_seconds": min(pipeline.search_seconds or _SEARCH_SECONDS, _SEARCH_SECONDS)}
        changes = {
            "run_dir": folder,
            "profile": config.profile.model_copy(update={"source": "estimated"}),
            "pipeline": pipeline.model_copy(update=search),
        }
        yield config.model_copy(update=changes)


class _Lines(logging.Handler):
    """Keeps what is logged, a line each."""

    def __init__(self, level: int) -> None:
        super().__init__(level)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(" ".join(record.getMessage().split()))


@contextlib.contextmanager
def _warnings() -> Iterator[list[str]]:
    """What the package and the workloads that come with it warn of meanwhile, a line each."""
    handler = _Lines(logging.WARNING)
    loggers = [logging.getLogger(name) for name in ("varuna_capslog", "detr_pipeline")]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield handler.lines
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
