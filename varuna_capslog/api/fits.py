"""`capslog.fits`: whether the training of a model fits devices, by how much, and which other sizes and devices fit."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.gpus import GPUS, NamedDevices, parse_devices
from varuna_capslog.base.units import format_bytes, with_unit
from varuna_capslog.config import defaults
from varuna_capslog.config.settings import Config
from varuna_capslog.memory.costs import Headroom
from varuna_capslog.memory.range_bytes import kinds_on
from varuna_capslog.planning.largest import MOST_SAMPLES, MOST_TOKENS, TOKENS_STEP, coarse_sizes, largest_by_bytes
from varuna_capslog.planning.simulation import treatments
from varuna_capslog.planning.verdict import MemoryVerdict, is_certain, judge_plan, judge_ranks
from varuna_capslog.plans.parts import spans_of
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiles.record import Profile
from varuna_capslog.reports.markup import plural
from varuna_capslog.schedules import RunShape
from varuna_capslog.start.ordinary import OrdinaryModel, folder_keys, held_types, ordinary_config

if TYPE_CHECKING:
    from varuna_capslog.api.planning import Model, Sample
    from varuna_capslog.model.sized import SizedWorkload
    from varuna_capslog.profiling.estimate import Memo

__all__ = ["Answer", "Fit", "Largest", "PlannedRun", "Question", "fits"]

# -- One question of `capslog.fits`: does this run fit? Questions with other sizes and devices share the captured model.


_CAPACITY_DIVISOR = 1024
"""Divisor of capacities; with so little memory, planners look for the smallest peak."""
_NEAR = 0.02
"""Share of the capacity: if a plan's lack or margin is smaller, the planner, with its rehearsal, decides if it fits."""


@dataclass(frozen=True)
class Question:
    """Inputs of an estimate, of which `dataclasses.replace` changes a part for the next estimate.

    model, sample, capacity, device, sequence, settings: as for `fits`. devices: with or without kinds. microbatch,
    batch: samples; None: those of settings. memo, captured: shared by questions about one model; None: in the first.
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
        """Return the config of the question's run."""
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
        """Return the run, its costs and its plan. Raises CapslogError where the memory of the run cannot be predicted.
        longest: as for `PlannedRun.of`.
        """
        from varuna_capslog.start.prepare import estimate_memo

        config, captured = self._captured()
        memo = self.memo or estimate_memo(config)
        run = PlannedRun.of(config, memo, longest)
        return Answer(**vars(run), question=replace(self, memo=memo, captured=captured))

    def answer_of_fastest(self, say: Callable[[str], object]) -> Answer:
        """Return the answer for the fastest microbatch size: it doubles from 1 as long as the plan fits and the step
        does not become slower. A `train.microbatch_size` of settings is used as it is.

        say: called with the size before each estimate. Raises like `answer`.
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
        """Return the config with its model, which keeps its captures, and the first question's model."""
        from varuna_capslog.model.sized import SizedWorkload

        config = self.config()
        if self.captured is None:
            first = SizedWorkload.of_config(config)
            return config.with_workload(first), first
        first, size, length = self.captured, config.train.microbatch_size, self.sequence
        model = first.at(None if size == first.batch else size, None if length in (None, first.length) else length)
        return config.with_workload(model), first

    def lacking_bytes(self) -> int:
        """Return the bytes that the device with the smallest margin lacks in the plan of the smallest peak; 0 or less:
        the run fits. Near the capacity, the planner decides, as for `answer`.
        """
        from varuna_capslog.start.prepare import plan_run, profile_run

        config, _ = self._captured()
        profile, capacity = profile_run(config, show=False, memo=self.memo), config.pipeline.capacity
        missing_bytes = _smallest_run(config, profile, self.memo).lacking_real_bytes()
        alike = isinstance(capacity, int) or capacity is None or len(set(capacity)) == 1
        largest_capacity = capacity if isinstance(capacity, int) else max(capacity or [0])
        if abs(missing_bytes) > _NEAR * largest_capacity and (alike or missing_bytes <= 0):
            return missing_bytes
        plan = _predicted(plan_run(config, profile, self.memo))
        return min(missing_bytes, 0) if plan.fits else max(missing_bytes, 1)


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

        longest: seconds of a step; a plan with a longer step is not rehearsed, since that makes no step shorter.
        """
        from varuna_capslog.start.prepare import plan_run, profile_run

        profile = profile_run(config, show=False, memo=memo)
        if longest is not None:
            plan = _predicted(plan_run(config, profile, memo, longest=longest))
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
        """True where twice the microbatch size divides the step, and twice the activations fit at the smallest peak."""
        train, pipeline = self.config.train, self.config.pipeline
        if train.minibatch_size % (2 * train.microbatch_size * pipeline.replicas):
            return False
        near_bytes, lacking_bytes = _NEAR * max(self.memory.capacities), -min(self.memory.margins)
        if 2 * lacking_bytes - self._static_lack(lacking_bytes) <= near_bytes:  # the smallest peak takes its own search
            return True
        lacking_bytes, static_bytes = self.smallest_peak_lack()
        return 2 * lacking_bytes - static_bytes <= near_bytes

    def lacking_real_bytes(self) -> int:
        """Return the bytes of real capacity that the worst device lacks, in a plan made `_with_tiny_capacity`."""
        needed, capacities = self.memory.needed, self.memory.capacities
        return max(need - _CAPACITY_DIVISOR * has for need, has in zip(needed, capacities, strict=True))

    def lacking_bytes(self) -> int:
        """Return the bytes that the device with the smallest margin lacks in the plan of the smallest peak; 0 or less:
        the run fits.
        """
        if not self.plan.fits:  # then this plan has the smallest peak
            return max(1, -min(self.memory.margins))
        return min(0, self._smallest.lacking_real_bytes())

    @functools.cached_property
    def _smallest(self) -> PlannedRun:
        return _smallest_run(self.config, self.profile, self.memo)

    def least_needed(self) -> int:
        """Return the bytes that the fullest device needs in the plan of the smallest peak; for unequal devices, whose
        shares of that plan are unequal, the mean.
        """
        needed, capacities = self._smallest.memory.needed, self.memory.capacities
        return max(needed) if len(set(capacities)) == 1 else sum(needed) // len(needed)

    def smallest_peak_lack(self) -> tuple[int, int]:
        """Return the lack of the plan with the smallest peak, and that lack without activations (at most 0)."""
        lacking_bytes = self._smallest.lacking_real_bytes()
        return lacking_bytes, self._smallest._static_lack(lacking_bytes)

    def _static_lack(self, lacking_bytes: int) -> int:
        """Return the lack that would remain without activations, at most 0."""
        headroom, peak = Headroom.of(self.profile), max(self.memory.peaks)
        activations = self.kinds().get("activations and workspaces", peak // 2)
        return min(0, lacking_bytes - headroom.device(peak) + headroom.device(peak - activations))


@dataclass(frozen=True)
class Answer(PlannedRun):
    """A question and its run."""

    question: Question


def _smallest_run(config: Config, profile: Profile, memo: Memo | None) -> PlannedRun:
    """Return the run with the plan of the smallest peak, made `_with_tiny_capacity`."""
    from varuna_capslog.start.prepare import plan_run

    tiny_config = _with_tiny_capacity(config)
    return PlannedRun(tiny_config, profile, plan_run(tiny_config, profile, memo), memo)


def _predicted(plan: Plan) -> Plan:
    """Return the plan. Raises CapslogError where it is not known whether it fits."""
    if plan.fits is None:
        raise CapslogError(f"whether it fits cannot be predicted: {'; '.join(plan.notes)}")
    return plan


def _with_tiny_capacity(config: Config) -> Config:
    """Return the config with so little memory that planners look for the smallest peak."""
    capacity = config.pipeline.capacity
    if isinstance(capacity, int):
        tiny_capacity: Any = max(1, capacity // _CAPACITY_DIVISOR)
    else:
        tiny_capacity = None if capacity is None else [max(1, size // _CAPACITY_DIVISOR) for size in capacity]
    return config.model_copy(update={"pipeline": config.pipeline.model_copy(update={"capacity": tiny_capacity})})


# -- `capslog.fits`


_SEARCH_SECONDS = 90.0
"""Time after which a search starts no further estimate."""
_ALIKE = 0.9
"""Kinds of GPU with less than this share of the needed memory are not tried."""


@dataclass(frozen=True)
class Largest:
    """Largest size that fits.

    size: None where no tried size fits. stopped_after: seconds after which the search ended at its time limit; None:
    no larger size fits.
    """

    size: int | None
    stopped_after: float | None = None

    def text(self, unit: str = "") -> str:
        """Return the size in words, such as "at least 4096 tokens (stopped after 130 s)"."""
        stop = "" if self.stopped_after is None else f" (stopped after {self.stopped_after:.0f} s)"
        if self.size is None:
            return f"not known{stop}" if stop else "none"
        return f"{'at least ' if stop else ''}{self.size}{unit}{stop}"


class _Late(Exception):
    """A search has reached its time limit."""


@dataclass(frozen=True)
class Fit:
    """Verdict on whether a training fits its devices; prints as text. Its properties search for other sizes and devices
    that fit, with an estimate for each that they try.

    Attributes:
        fits: True where no device needs more than its memory.
        plan: the fastest plan that fits, else the plan with the smallest peak.
        memory: bytes of every device: peaks (allocated), needed (with the memory of allocator and driver) and
            capacities.
        kinds: bytes on the fullest device, by kind: weights, gradients, optimizer states, activations and workspaces.
    """

    fits: bool
    plan: Plan
    memory: MemoryVerdict
    kinds: Mapping[str, int]
    _answer: Answer = field(repr=False)
    _say: Callable[[str], object] = field(repr=False, default=lambda line: None)

    @property
    def verdict(self) -> str:
        """One sentence: fits or not, and by how much."""
        replicas = self._answer.config.pipeline.replicas
        where = _where(self._answer.question.devices, self.memory)
        where = where if replicas == 1 else f"{replicas} pipelines of {where}"
        size = format_bytes(abs(min(self.memory.margins)))
        if self.fits:
            return f"fits: {self.plan.model} trains on {where}, with {size} to spare on the fullest"
        return f"does not fit: {self.plan.model} on {where} lacks {size} on the fullest"

    @property
    def split(self) -> str:
        """One line: the layers of every device, which of them are recomputed, and the microbatches."""
        device = str(self._answer.profile.conditions.get("device", "cpu"))
        stages = []
        for stage, treatment in zip(
            self.plan.stages, treatments(self.plan, RunShape.of_config(self._answer.config), device), strict=True
        ):
            recomputed_spans = f" ({spans_of(treatment.recomputed)} recomputed)" if treatment.recomputed else ""
            stages.append(f"{stage.spans} on {', '.join(map(str, stage.ranks))}{recomputed_spans}")
        train = self._answer.config.train
        count = plural(train.minibatch_size // train.microbatch_size, "microbatch", "es")
        samples = plural(train.minibatch_size, "sample")
        return f"layers {'; '.join(stages)}; {samples} per step in {count} of {train.microbatch_size}"

    @property
    def takes_sequence(self) -> bool:
        """True where the model reads tokens, in sequences whose length `fits` can choose."""
        question, inputs = self._answer.question, self._answer.profile.conditions.get("input", {})
        return question.of_folder and not question.sample and "input_ids" in inputs

    @functools.cached_property
    def largest_batch(self) -> Largest:
        """Largest microbatch, in samples, at this sequence length and number of microbatches; sizes above 32 are tried
        at distances of at most a sixteenth.
        """
        train = self._answer.config.train
        size, count = train.microbatch_size, train.minibatch_size // train.microbatch_size

        def lacking_bytes(size: int) -> int:
            return self._lacking_bytes(f"microbatches of {size}", microbatch=size, batch=size * count)

        return self._search(sorted({size, *coarse_sizes(1, MOST_SAMPLES)}), size, lacking_bytes)

    @functools.cached_property
    def largest_sequence(self) -> Largest | None:
        """Longest sequence, in tokens, at this batch, tried as for `largest_batch`; None without `takes_sequence`."""
        if not self.takes_sequence:
            return None
        from varuna_capslog.model.hugging_face import most_tokens

        tokens = self._answer.profile.conditions["input"]["input_ids"][-1]
        most = max(tokens, most_tokens(self._answer.question.model, {}) or MOST_TOKENS)
        sizes = sorted({tokens, *coarse_sizes(TOKENS_STEP, most)})
        return self._search(sizes, tokens, lambda size: self._lacking_bytes(f"{size} tokens", sequence=size))

    @functools.cached_property
    def _smallest_peak_lack(self) -> tuple[int, int]:
        return self._answer.smallest_peak_lack()

    def _search(self, sizes: Sequence[int], size: int, lacking_bytes: Callable[[int], int]) -> Largest:
        """Search from the question's size. For size 0, the bytes without activations count."""
        begun, largest = time.perf_counter(), size if self.fits else None
        missing_bytes, static_bytes = self._smallest_peak_lack
        known = {0: static_bytes, size: min(0, missing_bytes) if self.fits else max(1, missing_bytes)}

        def timed(value: int) -> int:
            if time.perf_counter() - begun > _SEARCH_SECONDS:
                raise _Late
            return lacking_bytes(value)

        try:
            for size_that_fits in largest_by_bytes([0, *sizes], timed, known):
                largest = size_that_fits
        except _Late:
            return Largest(largest or None, time.perf_counter() - begun)
        return Largest(largest or None)

    def _lacking_bytes(self, tried: str, **parts: Any) -> int:
        self._say(tried)
        return replace(self._answer.question, **parts).lacking_bytes()

    @functools.cached_property
    def cards(self) -> tuple[str, ...]:
        """Kinds of GPU that would fit in the same number, smallest memory first: the first kind that an estimate finds
        to fit, and all larger kinds. Kinds with far less memory than needed are not tried.
        """
        low = self._answer.config.train.precision in ("bfloat16", defaults.BF16_WEIGHTS)
        kinds = [name for name, gpu in GPUS.items() if gpu.has_bfloat16 or not low]
        kinds.sort(key=lambda name: GPUS[name].memory_bytes)
        need = self._answer.least_needed()
        count, begun = self._answer.question.devices.count, time.perf_counter()
        for first, name in enumerate(kinds):
            if GPUS[name].memory_bytes < _ALIKE * need:
                continue
            late = time.perf_counter() - begun > _SEARCH_SECONDS and GPUS[name].memory_bytes > need
            devices = NamedDevices(count, (name,) * count)
            if late or self._lacking_bytes(f"{count}x {name}", devices=devices, capacity=None, device=None) <= 0:
                return tuple(kinds[first:])
        return ()

    def to_json(self) -> dict[str, Any]:
        """Return fields for programs: bytes, samples and tokens. Runs all searches."""
        train = self._answer.config.train
        return {
            "fits": self.fits,
            "verdict": self.verdict,
            "model": self.plan.model,
            "devices": [
                {"peak_bytes": peak, "needed_bytes": need, "capacity_bytes": has, "margin_bytes": has - need}
                for peak, need, has in zip(self.memory.peaks, self.memory.needed, self.memory.capacities, strict=True)
            ],
            "bytes_by_kind": dict(self.kinds),
            "precision": train.precision,
            "weights": train.weights,
            "optimizer": train.optimizer,
            "minibatch_size": train.minibatch_size,
            "microbatch_size": train.microbatch_size,
            "split": self.split,
            "plan": self.plan.to_json(),
            "largest_microbatch": vars(self.largest_batch),
            "largest_sequence": None if self.largest_sequence is None else vars(self.largest_sequence),
            "cards": list(self.cards),
        }

    def lines(self) -> list[str]:
        """Return the results that need no further estimate, as lines."""
        train = self._answer.config.train
        rows = [self.verdict]
        for rank, margin in enumerate(self.memory.margins):
            peak, needs, has = (
                sizes[rank] for sizes in (self.memory.peaks, self.memory.needed, self.memory.capacities)
            )
            word = "to spare" if margin >= 0 else "too little"
            rows.append(
                f"device {rank}: needs {format_bytes(needs)} of {format_bytes(has)} ({format_bytes(peak)} allocated), "
                f"{format_bytes(abs(margin))} {word}"
            )
        arguments = self._answer.config.model.get("arguments", {})
        lora, base = arguments.get("lora"), arguments.get("base")
        frozen = "" if base is None else f", those of linear layers in {base}"
        adapters = "" if lora is None else f" (adapters of rank {lora} in float32, other weights frozen{frozen})"
        kinds = ", ".join(f"{name} {format_bytes(size)}" for name, size in self.kinds.items())
        return [
            *rows,
            *([f"allocated on the fullest: {kinds}"] if kinds else []),
            f"split: {self.split}",
            f"assumed: {held_types(self._answer.config)}{adapters}, optimizer {train.optimizer}, "
            "activations recomputed where memory asks for it",
        ]

    def __str__(self) -> str:
        return "\n".join(self.lines())


def fits(
    model: Model | str,
    sample: Sample | None = None,
    *,
    devices: int | str,
    capacity: int | str | Sequence[int | str] | None = None,
    device: str | None = None,
    sequence: int | None = None,
    settings: Mapping[str, Any] | None = None,
    say: Callable[[str], object] = lambda line: None,
) -> Fit:
    """Say whether a training step of a model fits devices, by the default planner and estimates alone.

    *Fits*: the bytes of every device (allocated, reserved, context) are at most its memory. Activations may be
    recomputed; nothing is offloaded unless `settings` has a `pipeline.host_capacity`.

    Args:
        model: as for `capslog.plan`; or a folder with a Hugging Face config.json, or a name of its hub.
        sample: as for `capslog.plan`; a folder needs none.
        devices: their number, or their kinds, such as `"2x rtx4090"`.
        capacity, device: memory of each device, and the device of the costs, where `devices` is a number.
        sequence: tokens of a sequence, for a folder; default: 1024, or fewer where the model takes no more.
        settings: further keys of a config, such as `{"train.optimizer": "sgd"}`; with `{"model.arguments.lora": 8}` a
            folder's model trains adapters of peft of that rank in place of its weights. Defaults: `train.precision` of
            `bf16-weights` where config.json says bfloat16, else `fp32`; `train.minibatch_size` of four samples for each
            device, `train.microbatch_size` of the fastest step that fits (ties are broken by the larger size).
        say: called with a few words before each estimate.

    Raises:
        CapslogError: no capacity is known, the memory cannot be predicted, or an error of `capslog.plan`.
    """
    named = parse_devices(devices)
    named.refuse_beside({"capacity": capacity, "device": device}, f"devices={devices!r}", f"devices={named.count}")
    if isinstance(model, str) and ":" not in model:
        from varuna_capslog.model.hugging_face import folder_of

        model = folder_of(model)
    question = Question(model, sample, named, with_unit(capacity), device, sequence, settings=settings or {})
    say("the layers")
    answer = question.answer_of_fastest(say)
    memory = answer.memory
    return Fit(answer.plan.fits is True, answer.plan, memory, answer.kinds(), answer, say)


def _where(devices: NamedDevices, memory: MemoryVerdict) -> str:
    counts = {kind: devices.kinds.count(kind) for kind in devices.kinds}
    if counts:
        return ", ".join(f"{count}x {kind}" for kind, count in counts.items())
    return f"{plural(devices.count, 'device')} of {' and '.join(map(format_bytes, sorted(set(memory.capacities))))}"
