"""`capslog check`: finds faults that would stop a run or spoil its training, before it begins. The check makes the
steps of `prepare` with estimates, in a temporary copy of the run's folder: no run is measured, no worker is started,
and the run's own folder is neither changed nor made.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import torch

from varuna_capslog import accelerator
from varuna_capslog.base.errors import CapslogError, RunFinding, findings_of
from varuna_capslog.base.fork_server import ForkServer, NoAnswer
from varuna_capslog.base.machine_memory import granted_bytes
from varuna_capslog.base.supervisor import check_unused
from varuna_capslog.base.units import format_bytes
from varuna_capslog.config.settings import Config
from varuna_capslog.engine.recipe import Recipe
from varuna_capslog.model.chain import Chain
from varuna_capslog.model.workload import Workload, load_workload
from varuna_capslog.plans.parts import grains_of
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiling.conditions import conditions_of_run, kind_here
from varuna_capslog.profiling.trim import skeleton
from varuna_capslog.start.choices import given_plan
from varuna_capslog.start.elastic_host import check_elastic, newest_checkpoint
from varuna_capslog.start.prepare import (
    check_names,
    check_optimizer,
    data_findings,
    disk_findings,
    needs_profile,
    profile_run,
    settled_plan,
)
from varuna_capslog.training.checkpoint import open_checkpoint, passed_over
from varuna_capslog.training.manifest import folder_findings
from varuna_capslog.training.run_setup import check_devices, check_keys, check_room, choose_device

__all__ = ["check_run"]

READ_SECONDS = 20.0
"""Limit for reading a sample of each source."""
_SEARCH_SECONDS = 15.0
"""Limit of a planner's search, for planners that have one."""


def check_run(
    config: Config, say: Callable[[str], object], show: bool = True, read_seconds: float = READ_SECONDS
) -> Iterator[RunFinding]:
    """Yield the findings about a run of this config, part by part, each sentence once.

    Args:
        say: called with the name of the next part.
        show: draw a progress bar during long steps.
        read_seconds: limit for reading a sample of each source.
    """
    nobody = lambda what: None  # noqa: E731
    with (
        ForkServer(f"{__name__}:read_samples", nobody, None, prepared=True) as server,
        _stand_in(config) as stand_in,
        _warnings(config) as warned,
    ):
        check = _Check(config, stand_in, server, show, read_seconds)
        parts = {
            "config": check.config_keys,
            "data": check.data,
            "model": check.model,
            "plan": check.plan,
            "checkpoint": check.checkpoint,
            "devices": check.devices,
            "disk": check.disk,
        }

        def findings(part: str) -> Iterator[RunFinding]:
            say(f"checking: {part}")
            yield from (dataclasses.replace(finding, part=part) for finding in findings_of(parts[part]))
            yield from (RunFinding(line, part=part) for line in warned)
            warned.clear()

        yield from findings_of(*(partial(findings, part) for part in parts))


class _Check:
    """Parts of a check, called in order; each uses the results of earlier parts. stand_in: the config with another
    run_dir and an estimated profile. server: reads samples in a fork, which may hang or die.
    """

    def __init__(self, config: Config, stand_in: Config, server: ForkServer, show: bool, read_seconds: float) -> None:
        self._config, self._stand_in, self._server = config, stand_in, server
        self._show, self._read_seconds = show, read_seconds
        self._workload: Workload | None = None
        self._readable = False
        self._chain: Chain | None = None
        self._plan: Plan | None = None
        self._on_cpu = False

    def config_keys(self) -> Iterator[RunFinding]:
        def load() -> None:
            self._workload = load_workload(self._stand_in)

        checks = [check_names, check_optimizer, *([check_elastic] if self._config.elastic.enabled else [])]
        yield from findings_of(*(partial(check, self._config) for check in checks), load)

    def data(self) -> Iterator[RunFinding]:
        workload = self._workload
        if workload is None:
            return
        try:
            entry = f"{__name__}:read_samples"
            yield from self._server.call(entry, self._stand_in, seconds=self._read_seconds)
        except NoAnswer as error:  # the same data would hang or end this process, too
            raise CapslogError(
                f"the process that was to open the data and read the first samples gave none ({error.how}), so that "
                "the rest and the model were not checked; mend the data set, or see what it waits for"
            ) from error
        self._readable = True
        yield from data_findings(self._config, workload)

    def model(self) -> Iterator[RunFinding]:
        if self._workload is None or not self._readable:
            unchecked = "data and model" if self._workload is None else "the model"
            yield RunFinding(f"{unchecked} can be checked when what stands above is mended")
            return
        self._workload.hand_over()
        chain = skeleton(load_workload(self._stand_in))
        check_keys(self._config.train, chain, Recipe.of_config(self._config.train))
        self._chain = chain
        parameters = list(chain.named_parameters().values())
        count, trained = (
            sum(parameter.numel() for parameter in some)
            for some in (parameters, [parameter for parameter in parameters if parameter.requires_grad])
        )
        frozen = "" if count == trained else f", of which {trained:,} are trained"
        yield RunFinding(f"{chain.name}: {len(chain)} layers, {count:,} parameters{frozen}", "fact")

    def plan(self) -> Iterator[RunFinding]:
        if self._chain is None:
            yield RunFinding("plan, memory and bytes on disk are known when what stands above is mended")
            return
        config, measured = self._stand_in, self._config.profile.source == "measured"
        if measured and needs_profile(config, given_plan(config)):
            try:
                profile_run(config, self._show)
            except CapslogError as error:
                yield RunFinding(f"no plan is known, since the model cannot be estimated: {error}; the run measures it")
                return
        notes: list[str] = []
        settled, profile, plan = settled_plan(config, self._show, notes.append)
        self._plan = plan
        self._on_cpu = profile is not None and bool(profile.observations) and profile.observations[0].device == "cpu"
        if plan.fits is False:
            yield RunFinding("; ".join(plan.notes) or "no plan fits; add devices or capacity", "does_not_fit")
        else:
            yield from map(RunFinding, plan.notes)
            yield RunFinding(_plan_sentence(plan, settled, measured), "fact")
        yield from map(RunFinding, notes)

    def checkpoint(self) -> Iterator[RunFinding]:
        config = self._config
        check_unused(config.run_dir)
        if config.init_from is not None and not config.init_from.exists():
            raise CapslogError(
                f"init_from={str(config.init_from)!r} does not exist; give a checkpoint folder or a weights file"
            )
        if self._workload is None or self._plan is None:
            return
        grains, facts = grains_of(self._plan.stages), self._workload.data_facts()
        yield from folder_findings(config, self._plan.model, grains, facts)
        if config.resume not in ("auto", "never"):
            open_checkpoint(Path(config.resume))
        if config.resume == "auto":
            newest, skipped = newest_checkpoint(config.run_dir)
            yield from map(RunFinding, passed_over(newest, skipped))
            if newest is not None:
                yield RunFinding(f"the run goes on after step {newest.step}, from {newest.path}", "fact")

    def devices(self) -> Iterator[RunFinding]:
        config, ranks = self._config, self._config.world_size
        device = choose_device(config.device, 0)
        planned = conditions_of_run(config, {})
        if config.profile.device is not None and (planned.device, planned.gpu) != (device.type, kind_here()):
            for_what = f"profile.device={config.profile.device}"
            yield RunFinding(f"the plan is for {for_what}, and this machine computes on {_kind_of(device)}")
        if config.elastic.enabled:
            yield RunFinding(f"{ranks} workers on {device.type}, here or on several machines", "fact")
            return
        check_devices(config.pipeline.transport, device, ranks - 1)
        there = accelerator.all_devices(device.type)
        cores, threads = len(os.sched_getaffinity(0)), config.train.threads
        if device.type == "cpu":
            yield RunFinding(f"{ranks} workers with {threads} threads each on {cores} cores", "fact")
        else:
            yield RunFinding(f"{ranks} workers on {len(there)} devices ({_kind_of(device)})", "fact")
        crowded = ranks * threads > cores if device.type == "cpu" else ranks > len(there)
        if crowded:
            shared_devices = f"{cores} cores" if device.type == "cpu" else f"{len(there)} devices"
            yield RunFinding(
                f"{ranks} workers share {shared_devices} and wait for each other; set pipeline.devices lower"
            )
        yield from self._memory(there)

    def _memory(self, there: list[torch.device]) -> Iterator[RunFinding]:
        """Check that the devices have the memory that the plan needs, if its profile is for such devices."""
        sizes = [] if self._plan is None else _bytes_of_ranks(self._plan, self._config.world_size)
        if self._on_cpu is not (there[0].type == "cpu"):
            return
        together: dict[torch.device, int] = defaultdict(int)
        for rank, size in enumerate(sizes):
            together[there[rank % len(there)]] += size
        for device, size in together.items():
            if device.type != "cpu":
                check_room(device, size, f"the plan's part on {device}")
            elif size > granted_bytes():
                yield RunFinding(
                    f"the workers need {format_bytes(size)} together, but this machine grants "
                    f"{format_bytes(granted_bytes())} of memory; set pipeline.devices or train.microbatch_size lower",
                    "does_not_fit",
                )

    def disk(self) -> Iterable[RunFinding]:
        return disk_findings(self._config, None if self._chain is None else checkpoint_bytes(self._chain, self._config))


def checkpoint_bytes(chain: Chain, config: Config) -> int:
    """Return the approximate bytes of a checkpoint: parameters, buffers and optimizer state."""
    recipe = Recipe.of_config(config.train)
    parameters = chain.named_parameters()
    kept = sum(sum(recipe.kept(parameter).values()) for parameter in parameters.values() if parameter.requires_grad)
    return kept + sum(tensor.nbytes for tensor in chain.named_tensors().values())


def read_samples(config: Config) -> list[RunFinding]:
    """Return the findings of reading the first samples of each source; called in a separate process."""
    os.dup2(2, 1)  # a data set's output must not mix with the command's

    def read() -> Iterator[RunFinding]:
        try:
            counts = load_workload(config).read_samples()
        except CapslogError:
            raise
        except Exception as error:  # of the user's own code
            sentence = " ".join(f"{type(error).__name__}: {error}".split())
            raise CapslogError(f"the first samples cannot be read ({sentence}); mend the data set") from error
        for name, count in counts.items():
            yield RunFinding(f"{count} {name} samples, the first can be read", "fact")

    with _warnings(config) as warned:
        findings = list(findings_of(read))
    return [dataclasses.replace(finding, error=None) for finding in (*findings, *map(RunFinding, warned))]


def _kind_of(device: torch.device) -> str:
    return "cpu" if device.type == "cpu" else accelerator.device_name(device.type)


def _plan_sentence(plan: Plan, config: Config, measured: bool) -> str:
    sizes = _bytes_of_ranks(plan, config.world_size)
    most = f", at most {format_bytes(max(sizes))} on a rank" if sizes else ""
    by = f" by planner {plan.planner}" if plan.planner else ""
    fits = {True: "; it fits", None: "; whether it fits is not known"}[plan.fits]
    why = " (pipeline.capacity is not set)" if plan.fits is None and config.pipeline.capacity is None else ""
    how = "; this is of an estimate, and the run measures" if measured and sizes else ""
    return f"{len(plan.stages)} stages on {config.world_size} ranks{by}{most}{fits}{why}{how}"


def _bytes_of_ranks(plan: Plan, ranks: int) -> list[int]:
    """Return the predicted bytes of each rank; [] where they are not known."""
    sizes = [rank.bytes for rank in plan.ranks] or list(plan.stage_bytes or ()) * (ranks // max(1, len(plan.stages)))
    return [] if None in sizes else [size for size in sizes if size is not None]


@contextlib.contextmanager
def _stand_in(config: Config) -> Iterator[Config]:
    """Yield the config with a temporary run_dir (a copy of config.yaml and a link to the checkpoints), an estimated
    profile, and a time limit for every search that can have one.
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
    def __init__(self, level: int) -> None:
        super().__init__(level)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(" ".join(record.getMessage().split()))


@contextlib.contextmanager
def _warnings(config: Config) -> Iterator[list[str]]:
    """Collect the log warnings of this package and the workload's package in the block, one line per warning."""
    handler = _Lines(logging.WARNING)
    packages = {name.partition(":")[0].partition(".")[0] for name in (__name__, config.workload)}
    loggers = [logging.getLogger(name) for name in packages]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield handler.lines
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
