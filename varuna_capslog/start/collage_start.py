"""`capslog variants`: measures a model's layers in every variant that the config allows, places them as Collage does,
and names the fastest choice whose layers pass their check.
"""

from __future__ import annotations

import contextlib
import functools
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from varuna_capslog.base import files
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.config.settings import Config
from varuna_capslog.model.workload import load_workload
from varuna_capslog.planners.collage import Bits, evolved, patterns_of, placed, seconds_under
from varuna_capslog.profiles.conditions import JOINED
from varuna_capslog.profiles.record import Profile
from varuna_capslog.profiles.runs import alternatives_of
from varuna_capslog.profiling import cache
from varuna_capslog.profiling.conditions import conditions_of_run
from varuna_capslog.profiling.measure import WholeRuns, profile_config
from varuna_capslog.profiling.variant_check import check_variants, plain_chain

__all__ = ["Collaged", "MeasuredChoice", "collage", "second_level"]

LEAST_GAIN = 0.02
"""Least gain in seconds of the whole model, over the configured layers, for which other results are accepted."""

Choice = Mapping[int, str]


@dataclass(frozen=True)
class MeasuredChoice:
    """Measured choice of variants.

    Attributes:
        name: "as configured", "VARIANT wherever it can", "level 1", or "level 2, VARIANT".
        chosen: layer -> variant.
        predicted_seconds: sum of the seconds that each layer takes alone.
        measured_seconds: of the whole model, in each round.
    """

    name: str
    chosen: Choice
    predicted_seconds: float
    measured_seconds: tuple[float, ...]

    def ratio(self, plain: MeasuredChoice) -> float:
        """Return this choice's seconds divided by those of the layers as configured: the median over rounds."""
        pairs = zip(self.measured_seconds, plain.measured_seconds, strict=True)
        return statistics.median(seconds / plain_seconds for seconds, plain_seconds in pairs)


@dataclass(frozen=True)
class Collaged:
    """All candidates, the first as configured."""

    candidates: tuple[MeasuredChoice, ...]
    profile: Profile = field(repr=False)

    @property
    def best(self) -> MeasuredChoice:
        """Fastest candidate on the whole model; the configured layers where no candidate gains `LEAST_GAIN`."""
        plain = self.candidates[0]
        fastest = min(self.candidates, key=lambda choice: choice.ratio(plain))
        return fastest if fastest.ratio(plain) <= 1 - LEAST_GAIN else plain


def collage(
    config: Config, rounds: int = 5, generations: int = 4, seed: int = 0, say: Callable[[str], object] = print
) -> Collaged:
    """Measure the layers in every allowed variant, and place the variants.

    Args:
        config: without `variants`; `numerics` says which variants are allowed.
        rounds: runs of the whole model for each candidate, interleaved.
        generations, seed: of the search of level 2, which is skipped with 0 generations.
        say: called with a sentence on each variant that fails its check and is left out.

    Raises:
        CapslogError: the config allows no variants or names some, or factories make its model's layers.
    """
    if config.variants or config.numerics == "same":
        raise CapslogError(
            "there is nothing to choose: leave variants out of the config, and set numerics to close or loose"
        )
    sizes = load_workload(config).profile_inputs(config.train.microbatch_size)
    profile = profile_config(config, 1, variants=config.numerics)
    refused = _refused(config, profile, say)
    patterns = [
        pattern for pattern in patterns_of(profile) if not any((at, pattern.name) in refused for at in pattern.layers)
    ]
    variants = {
        at: [name for name in names if (at, name) not in refused] for at, names in alternatives_of(profile).items()
    }
    joined = profile.conditions.get(JOINED, ())

    def level_1(without: str | None = None) -> Choice:
        allowed = [pattern for pattern in patterns if pattern.name != without]
        return placed(profile.num_layers, profile.edges, allowed, joined=joined).chosen

    first = level_1()
    names = list(dict.fromkeys(name for some in variants.values() for name in some))
    choices: dict[str, Choice] = {"as configured": {}}
    choices |= {
        f"{name} wherever it can": {at: name for at, some in variants.items() if name in some} for name in names
    }
    choices["level 1"] = first
    source = functools.partial(load_workload, config)
    with WholeRuns(source, conditions_of_run(config, sizes), config.train.threads) as whole_runs:
        log = _Log(whole_runs, first, profile.digest)
        for name in joined if generations else ():
            parts = [at for at, some in variants.items() if name in some]
            second = second_level(log.ratios, first, level_1(name), parts, name, seed, generations)
            choices[f"level 2, {name}"] = second
        measured = whole_runs.seconds(list(choices.values()), rounds)
    candidates = [
        MeasuredChoice(name, chosen, sum(seconds_under(profile, chosen)), tuple(seconds))
        for (name, chosen), seconds in zip(choices.items(), measured, strict=True)
    ]
    return Collaged(tuple(candidates), profile)


def _refused(config: Config, profile: Profile, say: Callable[[str], object]) -> set[tuple[int, str]]:
    """Return the pairs (layer, variant) that fail their check."""
    workload, refused = load_workload(config), set[tuple[int, str]]()
    chain, variants = plain_chain(workload), alternatives_of(profile)
    for name in dict.fromkeys(name for names in variants.values() for name in names):
        chosen = {layer: name for layer, names in variants.items() if name in names}
        for check in check_variants(chain, chosen, workload.profile_inputs(config.train.microbatch_size)):
            if check.fault:
                say(check.sentence())
                refused |= {(layer, name) for layer in check.layers}
    return refused


def second_level(
    ratios: Callable[[Sequence[Choice]], Sequence[float]],
    first: Choice,
    without: Choice,
    parts: Sequence[int],
    name: str,
    seed: int,
    generations: int,
) -> Choice:
    """Choose which of the layers `parts` get variant `name`. The search may change each of them, since level 1 gives
    the variant to every layer that gains alone.

    ratios: measures choices on the whole model. first: the choice of level 1. without: the choice of level 1 without
    this variant, which other layers keep.
    """

    def choice(bits: Bits) -> Choice:
        layers = {at: name for at, bit in zip(parts, bits, strict=True) if bit}
        return dict(sorted({**without, **layers}.items()))

    if not parts:
        return first
    start = tuple(first.get(at) == name for at in parts)
    bits = evolved(
        len(parts), lambda strings: ratios([choice(bits) for bits in strings]), seed, generations, start=start
    )
    return choice(bits)


class _Log:
    """Ratios of whole-model seconds to those of level 1 in the same launch, since a machine's speed varies. The ratios
    are kept in a file, so that no choice is measured twice.

    first: the choice of level 1. digest: of the profile.
    """

    def __init__(self, whole_runs: WholeRuns, first: Choice, digest: str) -> None:
        self._whole, self.first = whole_runs, first
        folder = cache.folder()
        self._path = None if folder is None else folder / "whole" / f"{digest.rpartition(':')[2][:32]}.json"
        self._ratios: dict[str, float] = {}
        if self._path is not None and self._path.exists():
            self._ratios = files.read_json(self._path)

    def ratios(self, choices: Sequence[Choice]) -> list[float]:
        """Return the ratio of each choice, from the log or from a run now."""
        texts = [json.dumps([sorted(self.first.items()), sorted(choice.items())]) for choice in choices]
        new = {text: choice for text, choice in zip(texts, choices, strict=True) if text not in self._ratios}
        if new:
            (first, *_), *others = self._whole.seconds([self.first, *new.values()])
            self._ratios |= {text: seconds[0] / first for text, seconds in zip(new, others, strict=True)}
            if self._path is not None:
                with contextlib.suppress(CapslogError):  # then it is measured again the next time
                    files.write_text(self._path, json.dumps(self._ratios))
        return [self._ratios[text] for text in texts]
