"""`capslog.fits`: whether a training fits devices, by how much, and what else would."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from varuna_capslog.api.planning import with_units
from varuna_capslog.base.errors import CapslogError, needed
from varuna_capslog.base.gpus import GPUS, NamedDevices, parse_devices
from varuna_capslog.base.units import format_bytes
from varuna_capslog.config import defaults
from varuna_capslog.memory.headroom import Headroom
from varuna_capslog.memory.kinds import bytes_by_kind
from varuna_capslog.planning.largest import largest
from varuna_capslog.planning.simulation import treatments
from varuna_capslog.planning.verdict import MemoryVerdict, judge_plan, judge_ranks
from varuna_capslog.plans.parts import spans_of
from varuna_capslog.reports.markup import plural
from varuna_capslog.schedules import RunShape
from varuna_capslog.start.ordinary import OrdinaryModel, folder_keys, ordinary_config

if TYPE_CHECKING:
    from varuna_capslog.api.estimating import Model, Sample
    from varuna_capslog.config.settings import Config
    from varuna_capslog.plans.plan import Plan
    from varuna_capslog.profiles.record import Profile

__all__ = ["Fit", "fits"]

_MOST_SAMPLES = 1 << 16
"""Of a microbatch; the end of the search for the largest."""
_TOKENS_STEP, _MOST_TOKENS = 64, 1 << 20
"""Between the lengths of sequences that come into question; the end of their search where the model names none."""
_NOT_OFFLOADED = "1B"
"""`pipeline.host_capacity` that no tensor keeps to."""


@dataclass(frozen=True)
class _Question:
    """What is asked, so that it can be asked again with one part changed.

    model, sample: as of `fits`. devices: with or without kinds. pipeline, settings: keys of the config.
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
        settings = {"pipeline.host_capacity": _NOT_OFFLOADED, "train.microbatch_size": 1} | settings
        settings |= {key: size for key, size in sizes.items() if size is not None}
        device = self.device if self.devices.fastest is None else f"cuda:{self.devices.fastest}"
        return ordinary_config(model, pipeline, None, device, settings=settings)

    def changed(self, **parts: Any) -> _Question:
        """Return the question with other parts."""
        return _Question(**{**vars(self), **parts})

    def answer(self) -> tuple[Config, Profile, Plan]:
        """Return the run, its costs and its plan. Raises CapslogError where its memory cannot be predicted."""
        from varuna_capslog.start.prepare import estimate_memo, plan_run, profile_run

        config = self.config()
        memo = estimate_memo(config)
        profile = profile_run(config, show=False, memo=memo)
        plan = plan_run(config, profile, memo)
        if plan.fits is None:
            raise CapslogError(f"whether it fits cannot be predicted: {'; '.join(plan.notes)}")
        return config, profile, plan


@dataclass(frozen=True)
class Fit:
    """Whether a training fits its devices. It prints as the verdict; its methods ask what else would fit, with an
    estimate for every size that they try.

    Attributes:
        fits: True where every device holds what it needs at most.
        plan: the fastest that fits, else the one with the smallest peak.
        memory: bytes of every device: peaks (allocated), needed (also what the allocator and the driver hold besides)
            and capacities.
        kinds: bytes on the fullest device, by kind: weights, gradients, optimizer states, activations and workspaces.
    """

    fits: bool
    plan: Plan
    memory: MemoryVerdict
    kinds: Mapping[str, int]
    _config: Config = field(repr=False)
    _profile: Profile = field(repr=False)
    _question: _Question = field(repr=False)
    _say: Callable[[str], object] = field(repr=False, default=lambda line: None)

    @property
    def verdict(self) -> str:
        """One sentence: fits or not, and by how much."""
        where = _where(self._question.devices, self.memory)
        size = format_bytes(abs(min(self.memory.margins)))
        if self.fits:
            return f"fits: {self.plan.model} trains on {where}, with {size} to spare on the fullest"
        return f"does not fit: {self.plan.model} on {where} lacks {size} on the fullest"

    @property
    def split(self) -> str:
        """One line: the layers of every device, which of them run again, and the microbatches."""
        device = str(self._profile.conditions.get("device", "cpu"))
        stages = []
        for stage, treatment in zip(
            self.plan.stages, treatments(self.plan, RunShape.of_config(self._config), device), strict=True
        ):
            again = f" ({spans_of(treatment.recomputed)} recomputed)" if treatment.recomputed else ""
            stages.append(f"{stage.spans} on {', '.join(map(str, stage.ranks))}{again}")
        train = self._config.train
        count = plural(train.minibatch_size // train.microbatch_size, "microbatch", "es")
        return f"layers {'; '.join(stages)}; {plural(train.minibatch_size, 'sample')} per step in {count}"

    @property
    def takes_sequence(self) -> bool:
        """True where the model reads tokens, of a length that is chosen here."""
        question = self._question
        return question.of_folder and not question.sample and "input_ids" in self._profile.conditions.get("input", {})

    @functools.cached_property
    def largest_batch(self) -> int | None:
        """Largest microbatch, in samples, at this sequence; None where one sample does not fit."""
        train = self._config.train
        count = train.minibatch_size // train.microbatch_size

        def holds(size: int) -> bool:
            if size == train.microbatch_size:
                return self.fits
            self._say(f"microbatches of {size}")
            return self._holds(microbatch=size, batch=size * count)

        return largest(range(1, _MOST_SAMPLES + 1), holds)

    @functools.cached_property
    def largest_sequence(self) -> int | None:
        """Longest sequence, in tokens, at this batch; None where none fits, or `takes_sequence` is False."""
        if not self.takes_sequence:
            return None
        from varuna_capslog.model.hugging_face import most_tokens

        most = most_tokens(self._question.model, {}) or _MOST_TOKENS

        def holds(tokens: int) -> bool:
            self._say(f"{tokens} tokens")
            return self._holds(sequence=tokens)

        step = min(_TOKENS_STEP, most)
        return largest(range(step, most + 1, step), holds)

    @functools.cached_property
    def cards(self) -> tuple[str, ...]:
        """Kinds of GPU of which as many would do, the smallest memory first. Found by bisection: kinds with as much
        memory as one that fits are taken to fit.
        """
        low = self._config.train.precision in ("bfloat16", defaults.BF16_WEIGHTS)
        names = sorted(
            (name for name, gpu in GPUS.items() if gpu.has_bfloat16 or not low), key=lambda name: GPUS[name].memory_gib
        )
        first, end = 0, len(names)
        while first < end:
            middle = (first + end) // 2
            self._say(f"{self._question.devices.count}x {names[middle]}")
            kinds = NamedDevices(self._question.devices.count, (names[middle],) * self._question.devices.count)
            if self._holds(devices=kinds, capacity=None):
                end = middle
            else:
                first = middle + 1
        return tuple(names[first:])

    def _holds(self, **parts: Any) -> bool:
        return self._question.changed(**parts).answer()[2].fits is True

    def to_json(self) -> dict[str, Any]:
        """Return fields for programs: bytes, samples and tokens. It asks all questions."""
        train = self._config.train
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
            "largest_microbatch": self.largest_batch,
            "largest_sequence": self.largest_sequence,
            "cards": list(self.cards),
        }

    def lines(self) -> list[str]:
        """Return what is known without further estimates, a line each."""
        train = self._config.train
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
        kinds = ", ".join(f"{name} {format_bytes(size)}" for name, size in self.kinds.items())
        return [
            *rows,
            f"allocated on the fullest: {kinds}",
            f"split: {self.split}",
            f"assumed: {train.types}, optimizer {train.optimizer}, activations recomputed where memory asks for it",
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
        model: as `capslog.plan` takes it; or a folder with a Hugging Face config.json, or a name of its hub.
        sample: as of `capslog.plan`; a folder needs none.
        devices: how many, or of which kinds, such as `"2x rtx4090"`.
        capacity, device: memory of each device, and the device of the costs, where `devices` is a number.
        sequence: tokens of a sequence, of a folder; default: 1024, or as many as it takes.
        settings: further keys of a config, such as `{"train.optimizer": "sgd"}`. Defaults: `train.precision` of
            `bf16-weights` where config.json says bfloat16, else `fp32`; `train.minibatch_size` of four samples for each
            device, in microbatches of one.
        say: called with what is tried, before each estimate of a search.

    Raises:
        CapslogError: no capacity is known, its memory cannot be predicted, and as `capslog.plan`.
    """
    named = parse_devices(devices)
    named.refuse_beside({"capacity": capacity, "device": device}, f"devices={devices!r}", f"devices={named.count}")
    if isinstance(model, str):
        model = _located(model)
    question = _Question(model, sample, named, with_units(capacity), device, sequence, settings=settings or {})
    config, profile, plan = question.answer()
    known = [rank.bytes for rank in plan.ranks if rank.bytes is not None]
    whole = len(known) == len(plan.ranks) > 0
    memory = judge_ranks(plan, known, Headroom.of(profile)) if whole else judge_plan(plan, profile)
    if memory is None:
        raise CapslogError(
            "there is no memory to fit: name kinds of GPUs, devices='2x rtx4090', or give the capacity of each device"
        )
    return Fit(plan.fits is True, plan, memory, _kinds(plan, profile, memory), config, profile, question, say)


def _where(devices: NamedDevices, memory: MemoryVerdict) -> str:
    counts = {kind: devices.kinds.count(kind) for kind in devices.kinds}
    if counts:
        return ", ".join(f"{count}x {kind}" for kind, count in counts.items())
    return f"{plural(devices.count, 'device')} of {' and '.join(map(format_bytes, sorted(set(memory.capacities))))}"


def _kinds(plan: Plan, profile: Profile, memory: MemoryVerdict) -> dict[str, int]:
    """Return the allocated bytes of the fullest device by kind."""
    worst = memory.worst
    layers = {
        layer
        for number, stage in enumerate(plan.stages)
        if (worst in stage.ranks if memory.of == "rank" else number == worst)
        for layer in stage.numbers
    }
    return bytes_by_kind(profile, layers, memory.peaks[worst])


def _located(model: str) -> str:
    """Return the folder of a model, or `module:function` as it is; a name of the hub is looked up there.

    Raises CapslogError where it is none of these, or the hub cannot be asked.
    """
    if ":" in model and not Path(model).exists():
        return model
    if Path(model).is_dir() or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", model):
        return model  # what its folder lacks is said when it is read
    with needed("a model of the Hugging Face hub"):
        from transformers.utils import cached_file
    try:
        return str(Path(str(cached_file(model, "config.json"))).parent)
    except Exception as error:  # no network, no such model, no permission
        reason = " ".join(str(error).split())[:200]
        raise CapslogError(
            f"{model} is no folder here, and the Hugging Face hub does not give its config.json ({reason}); give a "
            "folder with config.json, or package.module:function"
        ) from error
