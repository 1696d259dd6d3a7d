"""`capslog largest`: the largest microbatch, minibatch, image or sequence that fits, by estimates alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from varuna_capslog.base import fields
from varuna_capslog.base.errors import CapslogError, DoesNotFit
from varuna_capslog.commands import shared
from varuna_capslog.commands.questions import PlannerFlags, keys_of, question_of, say_assumptions, settled
from varuna_capslog.commands.shared import print_json, print_table, say

if TYPE_CHECKING:
    from varuna_capslog.api.fits import PlannedRun
    from varuna_capslog.config.settings import Config
    from varuna_capslog.model.sized import SizedWorkload
    from varuna_capslog.plans.plan import Plan

__all__ = ["largest"]

KEYS = {
    "microbatch": "train.microbatch_size",
    "minibatch": "train.minibatch_size",
    "image-size": "profile.image_size",
    "sequence": "model.arguments.sequence",
}
"""Word for the size that grows -> its config key."""

_MOST_MICROBATCHES = 1024
"""Most microbatches of a step in the search for a minibatch, where memory grows with it."""
_LARGEST_SIDE = 4096
"""Most pixels of a side in the search for an image size."""
_FIRST = 15
"""Index of the value that is tried first: 16 samples, images of 512 pixels, 1024 tokens."""


@dataclass(frozen=True)
class _Search:
    """The candidate values of a search.

    values: rising. changed: maps a value to the config's keys and values for it. end: clause of the answer on why there
    is no larger value to try. every: True where every larger value fits if the last value does. opens: the model's size
    that changes, if a capture can leave it open. power: bytes grow about as the value to this power.
    """

    values: Sequence[int]
    changed: Callable[[int], dict[str, Any]]
    end: str
    every: bool = False
    opens: Literal["batch", "length"] | None = None
    power: int = 1

    @property
    def first(self) -> int:
        """The value that is tried first: large enough that most bytes of activations grow with it."""
        return self.values[min(_FIRST, len(self.values) - 1)]

    def config(self, config: Config, value: int) -> Config:
        """Return the config with the value."""
        for key, changed in self.changed(value).items():
            config = _with(config, key.split("."), changed)
        return config


def _with(section: Any, parts: Sequence[str], value: Any) -> Any:
    """Return a config, or a part of it, in which the key of these parts has the value."""
    name, *inner_parts = parts
    inner = section[name] if isinstance(section, dict) and inner_parts else getattr(section, name, None)
    changed = _with(inner, inner_parts, value) if inner_parts else value
    return section | {name: changed} if isinstance(section, dict) else section.model_copy(update={name: changed})


@dataclass(frozen=True)
class _Trial:
    """A tried value, and the plan that was estimated for it."""

    shown: Any
    config: Config
    plan: Plan

    @property
    def samples_per_second(self) -> float | None:
        seconds = self.plan.step_seconds
        return self.config.train.minibatch_size / seconds if seconds else None

    def to_json(self) -> dict[str, Any]:
        """Return fields for programs; bytes and seconds."""
        plan = self.plan
        return {
            "value": self.shown,
            "fits": plan.fits,
            "peak_bytes": plan.peak_bytes,
            "lacking_bytes": None if plan.shortfall is None else plan.shortfall.bytes,
            "step_seconds": plan.step_seconds,
            "samples_per_second": self.samples_per_second,
        }


@dataclass(frozen=True)
class LargestFlags(PlannerFlags):
    """The command line of `largest`."""

    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="WORD [KEY=VALUE]",
            help=f"Size to enlarge: {', '.join(KEYS)} (of --hf); and config keys to change, such as train.epochs=10.",
        ),
    ] = None
    output: Annotated[Path | None, shared.output_option("File for the plan of the largest value.")] = None


@shared.options_of(LargestFlags)
def largest(flags: LargestFlags) -> None:
    """Find the largest microbatch, minibatch, image size or sequence that fits, by estimates."""
    word, flags = _word_of(flags)
    flags = settled(flags)
    if flags.config is None and flags.model is None:
        raise CapslogError("largest estimates a model for every value it tries: give a CONFIG file, --model or --hf")
    if flags.estimate is False:
        raise CapslogError("largest estimates, and never measures; leave --measure out")
    if word == "minibatch" and flags.minibatch is not None:
        raise CapslogError("largest minibatch looks for the samples of a step; leave --minibatch out")
    if word == "sequence" and (flags.folder is None or flags.inputs):
        raise CapslogError("largest sequence changes the inputs that --hf makes itself; give --hf FOLDER, no --input")
    config = question_of(replace(flags, estimate=True), flags.planner)
    keeps_samples = flags.config is not None or flags.minibatch is not None
    keeps_samples |= "train.minibatch_size" in keys_of(flags.overrides)
    search = _sequences(flags) if word == "sequence" else _search_of(word, config, keeps_samples)
    best_config = _find(word, search, config, flags)
    if flags.model is not None:
        say_assumptions(best_config)


def _word_of(flags: LargestFlags) -> tuple[str, LargestFlags]:
    """Return the word for the size that grows, wherever it stands among the arguments, and the flags without it."""
    words = [] if flags.config is None else [str(flags.config)]
    words += flags.overrides or []
    named = next((text for text in words if text in KEYS), None)
    if named is None:
        unknown = [text for text in words if "=" not in text and not Path(text).is_file()]
        fields.refuse_unknown(unknown, list(KEYS), "word of largest")
        raise CapslogError(f"largest needs a word that says what grows: {', '.join(KEYS)}")
    words.remove(named)
    config, overrides = shared.words_of(None, words)
    return named, replace(flags, config=config, overrides=overrides)


def _find(word: str, search: _Search, config: Config, flags: LargestFlags) -> Config:
    """Print every value that was tried and the answer, and write the plan of the largest value; return its config.

    Args:
        word: one of KEYS.
        config: all keys except the value; its profile is an estimate.

    Raises:
        DoesNotFit: not even the smallest value fits.
        CapslogError: there is no capacity; the memory cannot be predicted.
    """
    from varuna_capslog.planners import JOINT
    from varuna_capslog.planning.largest import largest_by_bytes

    if config.pipeline.planner == JOINT:
        raise CapslogError(f"largest plans for one pipeline and its copies; choose another planner than {JOINT}")
    if config.pipeline.capacity is None:
        raise CapslogError(
            f"largest {word} looks for the largest value that fits, but there is no capacity; give --capacity SIZE, "
            "pipeline.capacity, --device cuda:KIND, or kinds of devices"
        )
    key, trials = KEYS[word], _Trials(KEYS[word], search, config)
    amounts = {0: 0} | {value**search.power: value for value in search.values}
    try:
        known = trials.first()
        fitting = largest_by_bytes([*amounts], lambda amount: trials.lacking_bytes(amounts[amount]), known)
        best = amounts[max(fitting, default=0)] or None
    except KeyboardInterrupt:
        if trials and not flags.as_json:
            _print(key, trials, [])
        raise
    answer = _answer(key, search, trials, best)
    if flags.output is not None and best is not None:
        from varuna_capslog.plans.plan import write_plan

        write_plan(flags.output, trials[best].plan)
    if flags.as_json:
        print_json(
            {
                "key": key,
                "capacity_bytes": config.pipeline.capacity,
                "tried": [trial.to_json() for trial in trials.values()],
                "largest": None if best is None else trials[best].shown,
                "every_larger_fits": search.every and best == search.values[-1],
                "answer": answer,
            }
        )
    else:
        notes = [] if best is None else [answer]
        if best is not None and (skipped := sum(value < max(trials) for value in search.values) + 1 - len(trials)):
            notes.insert(0, f"that a value fits wherever a larger one does is assumed; not tried: {skipped}")
        _print(key, trials, notes)
    if best is None:
        raise DoesNotFit(answer)
    return trials[best].config


class _Trials(dict[int, _Trial]):
    """Tried values -> trials, in the order of the search. An ordinary model is captured once for all values."""

    def __init__(self, key: str, search: _Search, config: Config) -> None:
        from varuna_capslog.start.prepare import estimate_memo

        super().__init__()
        self._key, self._search, self._config = key, search, config
        self._memo = estimate_memo(config)
        self._sized: SizedWorkload | None = None

    def first(self) -> dict[int, int]:
        """Try the first value; return the lacking bytes for it, and for 0 those without activations."""
        value = self._search.first
        run = self._run(value)
        missing_bytes, static_bytes = run.smallest_peak_lack()
        lacking_bytes = min(0, missing_bytes) if run.plan.fits else max(1, missing_bytes)
        return {0: static_bytes, value**self._search.power: lacking_bytes}

    def lacking_bytes(self, value: int) -> int:
        """Try a value; return the bytes that are lacking; 0 or less: the value fits."""
        return self._run(value).lacking_bytes()

    def _run(self, value: int) -> PlannedRun:
        from varuna_capslog.api.fits import PlannedRun

        shown = self._search.changed(value)[self._key]
        say(f"capslog: estimating {self._key}={shown}", err=True)
        run = PlannedRun.of(self._with_model(value), self._memo)
        self[value] = _Trial(shown, run.config, run.plan)
        return run

    def _with_model(self, value: int) -> Config:
        """Return the config with the value and, for an ordinary model, with the model that keeps its captures."""
        from varuna_capslog.model.model_workload import ModelWorkload
        from varuna_capslog.model.sized import SizedWorkload
        from varuna_capslog.model.workload import load_workload

        config, opens = self._search.config(self._config, value), self._search.opens
        if opens is None:
            return config
        if not self and type(load_workload(config)) is ModelWorkload:
            self._sized = SizedWorkload.of_config(config, opens)
            return config.with_workload(self._sized)
        if self._sized is None:
            return config
        size = config.train.microbatch_size
        return config.with_workload(self._sized.at(size) if opens == "batch" else self._sized.at(length=value))


def _search_of(word: str, config: Config, keeps_samples: bool) -> _Search:
    from varuna_capslog.planning.largest import IMAGE_STEP, MOST_SAMPLES, coarse_sizes, image_of, microbatch_sizes

    train, count = config.train, config.num_microbatches
    if word == "minibatch":
        return _minibatches(config)
    if word == "image-size":
        aspect = config.profile.image_size
        search = _Search(
            range(IMAGE_STEP, _LARGEST_SIDE + 1, IMAGE_STEP),
            lambda side: {"profile.image_size": image_of(side, aspect)},
            f"and the search ends at sides of {_LARGEST_SIDE} pixels",
            power=2,
        )
        _check_has_images(config, search)
        return search
    if keeps_samples:
        return _Search(
            microbatch_sizes(train.minibatch_size, config.num_blocks),
            lambda size: {"train.microbatch_size": size},
            f"and none is larger that divides the {train.minibatch_size} samples of a step (train.minibatch_size) into "
            f"{'microbatches' if config.num_blocks == 1 else f'{config.num_blocks} blocks of microbatches'}",
            opens="batch",
        )
    return _Search(
        coarse_sizes(1, MOST_SAMPLES),
        lambda size: {"train.microbatch_size": size, "train.minibatch_size": size * count},
        f"and the search ends at {MOST_SAMPLES} samples",
        opens="batch",
    )


def _minibatches(config: Config) -> _Search:
    """Return all sizes up to the end of the search, or up to the size above which memory does not grow."""
    from varuna_capslog.planning.largest import enough_microbatches, microbatch_step
    from varuna_capslog.profiling.conditions import conditions_of_run
    from varuna_capslog.schedules import RunShape

    pipeline, size, run = config.pipeline, config.train.microbatch_size, RunShape.of_config(config)
    step = microbatch_step(run, config.world_size)
    cpu = conditions_of_run(config, {}).device == "cpu"
    enough = enough_microbatches(run, pipeline.replicas, pipeline.devices * pipeline.rounds, step, cpu)
    multiples = range(step * size, (enough or max(step, _MOST_MICROBATCHES)) * size + 1, step * size)
    if enough is None:
        end = f"and the search ends at {_MOST_MICROBATCHES} microbatches of a step"
    else:
        end = (
            f"and so does every larger multiple of {step * size}: with schedule {pipeline.schedule} no stage has more "
            f"microbatches in flight in a step of more than {enough}"
        )
    every = enough is not None
    return _Search(multiples, lambda samples: {"train.minibatch_size": samples}, end, every=every, opens="batch")


def _sequences(flags: LargestFlags) -> _Search:
    """Return lengths up to the model's limit."""
    from varuna_capslog.config.reading import assignments
    from varuna_capslog.model.hugging_face import most_tokens
    from varuna_capslog.planning.largest import MOST_TOKENS, TOKENS_STEP, coarse_sizes

    changes = assignments(flags.arguments or [], "--model-arg")
    changes.pop("dtype", None)
    model_limit = most_tokens(str(flags.folder), changes)
    end = f"and the search ends at {MOST_TOKENS}" if model_limit is None else "and the model takes no more tokens"
    most = model_limit or MOST_TOKENS
    step = min(TOKENS_STEP, most)
    return _Search(coarse_sizes(step, most), lambda tokens: {KEYS["sequence"]: tokens}, end, opens="length")


def _check_has_images(config: Config, search: _Search) -> None:
    """Refuse a workload whose inputs do not depend on `profile.image_size`."""
    from varuna_capslog.model.workload import load_workload

    def inputs(side: int) -> Any:
        return load_workload(search.config(config, side)).profile_inputs(config.train.microbatch_size)

    if inputs(search.values[0]) == inputs(search.values[1]):
        raise CapslogError(
            f"image-size is profile.image_size, which the inputs of the workload {config.workload} do not depend on; "
            "choose microbatch or minibatch"
        )


def _answer(key: str, search: _Search, trials: dict[int, _Trial], best: int | None) -> str:
    """Return a sentence on the largest value, the memory that the next one lacks, and a faster value, if any."""
    if best is None:
        smallest = trials[search.values[0]]
        return f"not even {key}={smallest.shown} fits: {_notes(smallest.plan)}"
    best_trial, above = trials[best], [value for value in trials if value > best]
    if above:
        following = trials[min(above)]
        sentence = (
            f"{key}={best_trial.shown} is the largest that fits; {following.shown} does not: {_notes(following.plan)}"
        )
    else:
        sentence = f"{key}={best_trial.shown} fits, {search.end}"
    if key in (KEYS["image-size"], KEYS["sequence"]):
        return sentence
    rates = {value: trial.samples_per_second or 0.0 for value, trial in trials.items() if trial.plan.fits}
    fastest = max(rates, key=lambda value: rates[value])
    if rates[fastest] <= rates[best]:
        return sentence
    return f"{sentence}; of those tried that fit, {trials[fastest].shown} has the most samples per second"


def _notes(plan: Plan) -> str:
    """Return the notes of a plan that does not fit, as a clause after a colon."""
    return "; ".join(note.removeprefix("nothing fits: ").removeprefix("does not fit: ") for note in plan.notes)


def _print(key: str, trials: dict[int, _Trial], notes: Sequence[str]) -> None:
    from varuna_capslog.base.units import format_bytes, format_seconds

    def cells(trial: _Trial) -> list[str]:
        plan, rate = trial.plan, trial.samples_per_second
        return [
            str(trial.shown),
            "yes" if plan.fits else "no",
            "unknown" if plan.peak_bytes is None else format_bytes(plan.peak_bytes),
            "unknown" if plan.step_seconds is None else format_seconds(plan.step_seconds),
            "unknown" if rate is None else f"{rate:.4g}",
        ]

    headings = (key, "fits", "peak", "step", "samples/s")
    print_table("tried, in this order", headings, map(cells, trials.values()), notes=notes)
