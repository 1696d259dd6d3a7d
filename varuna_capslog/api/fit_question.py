"""The question of `capslog.fits`, asked again with other sizes and devices; captures of the model are shared."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.gpus import NamedDevices
from varuna_capslog.memory.headroom import Headroom
from varuna_capslog.memory.kinds import kinds_on
from varuna_capslog.planning.verdict import MemoryVerdict, is_certain, judge_plan, judge_ranks
from varuna_capslog.start.ordinary import OrdinaryModel, folder_keys, ordinary_config

if TYPE_CHECKING:
    from varuna_capslog.config.settings import Config
    from varuna_capslog.model.sized import SizedWorkload
    from varuna_capslog.plans.plan import Plan
    from varuna_capslog.profiles.record import Profile
    from varuna_capslog.profiling.estimate import Memo

__all__ = ["Answer", "PlannedRun", "Question"]

_PRESS = 1024
"""Times less memory than there is makes planners look for the smallest peak."""
_NEAR = 0.02
"""Part of the capacity within which a plan is rehearsed before its size is said to fit."""


@dataclass(frozen=True)
class Question:
    """What is asked, so that it can be asked again with one part changed.

    model, sample, capacity, device, sequence, settings: as of `fits`. devices: with or without kinds. microbatch,
    batch: samples; None: those of settings. memo, captured: shared by questions about one model; None: not asked yet.
    """

    model: Any
    sample: Any
    devices: NamedDevices
    capacity: int | str | Sequence[int | str] | None = None
    device: str | None = None
    sequence: int | None = None
    batch: int | None = None
    microbatch: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    memo: Memo | None = None
    captured: SizedWorkload | None = None

    @property
    def of_folder(self) -> bool:
        """True where the model is a folder with config.json."""
        return isinstance(self.model, str) and ":" not in self.model

    def config(self) -> Config:
        """Return the config of the run that is asked about."""
        pipeline = {name: value for name, value in self.devices.pipeline_keys.items() if value is not None}
        if self.capacity is not None:
            pipeline["capacity"] = self.capacity
        model, settings = OrdinaryModel(self.model, self.sample), dict(self.settings)
        if self.of_folder:
            from varuna_capslog.model.hugging_face import FACTORY

            arguments, settings = folder_keys(self.model, {}, settings)
            arguments |= {"sequence": self.sequence, "example": not self.sample}
            model = OrdinaryModel(FACTORY, self.sample, None, arguments)
            settings["model.name"] = Path(self.model).name
        elif self.sequence is not None:
            raise CapslogError(
                "a sequence is for the inputs of a folder with config.json; of other models give the sample its length"
            )
        sizes = {"train.microbatch_size": self.microbatch, "train.minibatch_size": self.batch}
        settings = {"pipeline.host_capacity": 0, "train.microbatch_size": 1} | settings
        settings |= {key: size for key, size in sizes.items() if size is not None}
        device = self.device if self.devices.fastest is None else f"cuda:{self.devices.fastest}"
        return ordinary_config(model, pipeline, None, device, settings=settings)

    def answer(self, longest: float | None = None) -> Answer:
        """Return the run, its costs and its plan. Raises CapslogError where its memory cannot be predicted. longest: as
        for `PlannedRun.of`.
        """
        from varuna_capslog.start.prepare import estimate_memo

        config, captured = self._captured()
        memo = self.memo or estimate_memo(config)
        run = PlannedRun.of(config, memo, longest)
        return Answer(**vars(run), question=replace(self, memo=memo, captured=captured))

    def answer_of_fastest(self, say: Callable[[str], object]) -> Answer:
        """Return the answer for the largest microbatch that makes the step no slower, of those that fit: sizes double
        from 1 as long as both is so. Where settings have a `train.microbatch_size`, that size is taken.

        say: called with what is estimated, before each estimate. Raises as `answer`.
        """
        answer = self.answer()
        if "train.microbatch_size" in self.settings:
            return answer
        while answer.plan.fits and answer.may_double():
            train = answer.config.train
            size = 2 * train.microbatch_size
            say(f"microbatches of {size}")
            seconds = answer.plan.step_seconds or 0.0
            larger = replace(answer.question, microbatch=size, batch=train.minibatch_size).answer(seconds)
            if not larger.plan.fits or (larger.plan.step_seconds or 0.0) > seconds:
                break
            answer = larger
        return answer

    def _captured(self) -> tuple[Config, SizedWorkload]:
        """Return the config with its model, of which captures are kept, and the model of the first question."""
        from varuna_capslog.model.sized import SizedWorkload

        config = self.config()
        if self.captured is None:
            first = SizedWorkload.of_config(config)
            return config.with_workload(first), first
        first, size, length = self.captured, config.train.microbatch_size, self.sequence
        model = first.at(None if size == first.batch else size, None if length in (None, first.length) else length)
        return config.with_workload(model), first

    def lack(self) -> int:
        """Return the bytes that the device with least to spare lacks in the plan of the smallest peak; 0 or less: it
        fits. Near the capacity, the planner decides as for `answer`.
        """
        from varuna_capslog.start.prepare import plan_run, profile_run

        config, _ = self._captured()
        profile, capacity = profile_run(config, show=False, memo=self.memo), config.pipeline.capacity
        missing = _smallest_run(config, profile, self.memo).pressed_lack()
        alike = isinstance(capacity, int) or capacity is None or len(set(capacity)) == 1
        most = capacity if isinstance(capacity, int) else max(capacity or [0])
        if abs(missing) > _NEAR * most and (alike or missing <= 0):
            return missing
        plan = _predicted(plan_run(config, profile, self.memo))
        return min(missing, 0) if plan.fits else max(missing, 1)


@dataclass(frozen=True)
class PlannedRun:
    """A run, its costs and its plan. memo: of the estimate; None where the profile is measured."""

    config: Config
    profile: Profile
    plan: Plan
    memo: Memo | None

    @classmethod
    def of(cls, config: Config, memo: Memo | None, longest: float | None = None) -> PlannedRun:
        """Profile and plan a config. Raises CapslogError where its memory cannot be predicted.

        longest: seconds of a step; a longer one is not rehearsed, since nothing that its ranks lack makes it shorter.
        """
        from varuna_capslog.start.prepare import plan_run, profile_run

        profile = profile_run(config, show=False, memo=memo)
        if longest is not None:
            plan = _predicted(plan_run(config, profile, memo, confirms=False))
            refused = not plan.fits or (plan.step_seconds or 0.0) > longest
            if refused or (plan.ranks and is_certain(plan, Headroom.of(profile))):
                return cls(config, profile, plan, memo)
        return cls(config, profile, _predicted(plan_run(config, profile, memo)), memo)

    @property
    def memory(self) -> MemoryVerdict:
        """Bytes of every device. Raises CapslogError where no capacity is known."""
        known = [rank.bytes for rank in self.plan.ranks if rank.bytes is not None]
        if len(known) == len(self.plan.ranks) > 0:
            memory = judge_ranks(self.plan, known, Headroom.of(self.profile))
        else:
            memory = judge_plan(self.plan, self.profile)
        if memory is None:
            raise CapslogError(
                "there is no memory to fit: name kinds of GPUs, devices='2x rtx4090', or give the capacity of each "
                "device"
            )
        return memory

    def kinds(self) -> dict[str, int]:
        """Return the allocated bytes of the fullest device by kind."""
        memory = self.memory
        return kinds_on(self.plan, self.profile, memory.worst, memory.of, memory.peaks[memory.worst])

    def may_double(self) -> bool:
        """True where the step can have microbatches of twice as many samples, and twice the least activations fit."""
        train, pipeline = self.config.train, self.config.pipeline
        if train.minibatch_size % (2 * train.microbatch_size * pipeline.replicas):
            return False
        most, lack = _NEAR * max(self.memory.capacities), -min(self.memory.margins)
        if 2 * lack - self._static_lack(lack) <= most:  # the plan of the smallest peak takes a search of its own
            return True
        lack, static = self.least()
        return 2 * lack - static <= most

    def pressed_lack(self) -> int:
        """Return the bytes that the worst device lacks, of a plan for `_pressed` devices."""
        memory = self.memory
        return max(need - _PRESS * has for need, has in zip(memory.needed, memory.capacities, strict=True))

    def lack(self) -> int:
        """Return the bytes that the device with least to spare lacks in the plan of the smallest peak; 0 or less: the
        run fits.
        """
        if not self.plan.fits:  # it is that plan
            return max(1, -min(self.memory.margins))
        return min(0, self._smallest.pressed_lack())

    @functools.cached_property
    def _smallest(self) -> PlannedRun:
        return _smallest_run(self.config, self.profile, self.memo)

    def least_needed(self) -> int:
        """Return the bytes that the fullest device needs in the plan of the smallest peak; of unequal devices, among
        which that divides unevenly, the mean.
        """
        needed, capacities = self._smallest.memory.needed, self.memory.capacities
        return max(needed) if len(set(capacities)) == 1 else sum(needed) // len(needed)

    def least(self) -> tuple[int, int]:
        """Return the lack of the plan with the smallest peak, and the same without activations, at most 0."""
        lack = self._smallest.pressed_lack()
        return lack, self._smallest._static_lack(lack)

    def _static_lack(self, lack: int) -> int:
        """Return what of a lack would remain without activations, at most 0."""
        headroom, peak = Headroom.of(self.profile), max(self.memory.peaks)
        activations = self.kinds().get("activations and workspaces", peak // 2)
        return min(0, lack - headroom.device(peak) + headroom.device(peak - activations))


@dataclass(frozen=True)
class Answer(PlannedRun):
    """A question and its run."""

    question: Question


def _smallest_run(config: Config, profile: Profile, memo: Memo | None) -> PlannedRun:
    """Return the run with the plan of the smallest peak, for `_pressed` devices."""
    from varuna_capslog.start.prepare import plan_run

    less = _pressed(config)
    return PlannedRun(less, profile, plan_run(less, profile, memo), memo)


def _predicted(plan: Plan) -> Plan:
    """Return the plan. Raises CapslogError where it is not known whether it fits."""
    if plan.fits is None:
        raise CapslogError(f"whether it fits cannot be predicted: {'; '.join(plan.notes)}")
    return plan


def _pressed(config: Config) -> Config:
    """Return the config with so little memory that planners look for the smallest peak."""
    capacity = config.pipeline.capacity
    if isinstance(capacity, int):
        less: Any = max(1, capacity // _PRESS)
    else:
        less = None if capacity is None else [max(1, size // _PRESS) for size in capacity]
    return config.model_copy(update={"pipeline": config.pipeline.model_copy(update={"capacity": less})})
