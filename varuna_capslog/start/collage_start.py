"""`capslog variants`: measures the layers of a config's model in every way it allows, and places them as Collage does.

What comes back names the fastest choice whose layers pass their check; the caller writes it.
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
from varuna_capslog.profiles.variants import alternatives_of
from varuna_capslog.profiling import cache
from varuna_capslog.profiling.conditions import conditions_of_run
from varuna_capslog.profiling.measure import profile_config
from varuna_capslog.profiling.variant_check import check_variants, plain_chain
from varuna_capslog.profiling.whole import WholeRuns

__all__ = ["Collaged", "MeasuredChoice", "collage"]

LEAST_GAIN = 0.02
"""What a choice must gain over the layers as configured, measured whole, to be worth other results."""

Choice = Mapping[int, str]


@dataclass(frozen=True)
class MeasuredChoice:
    """One choice.

    Attributes:
        name: "as configured", "VARIANT wherever it can", "level 1", or "level 2, VARIANT".
        chosen: layer -> variant.
        predicted_seconds: sum over its layers of what each takes alone.
        measured_seconds: of the whole model, in each round.
    """

    name: str
    chosen: Choice
    predicted_seconds: float
    measured_seconds: tuple[float, ...]

    def ratio(self, plain: MeasuredChoice) -> float:
        """Median over rounds of its seconds by those of the layers as configured."""
        pairs = zip(self.measured_seconds, plain.measured_seconds, strict=True)
        return statistics.median(one / other for one, other in pairs)


@dataclass(frozen=True)
class Collaged:
    """What was found: all candidates, the first as configured, and the best one."""

    candidates: tuple[MeasuredChoice, ...]
    profile: Profile = field(repr=False)

    @property
    def best(self) -> MeasuredChoice:
        """The fastest one, measured whole; as configured where none gains 2 %."""
        plain = self.candidates[0]
        found = min(self.candidates, key=lambda one: one.ratio(plain))
        return found if found.ratio(plain) <= 1 - LEAST_GAIN else plain


def collage(
    config: Config, rounds: int = 5, generations: int = 4, seed: int = 0, say: Callable[[str], object] = print
) -> Collaged:
    """Measures and places.

    Args:
        config: without `variants`; `numerics` says which are allowed.
        rounds: whole runs of each candidate, interleaved.
        generations: of level 2; 0 leaves it out.
        seed: of level 2.
        say: told what fails its check and is left out.

    Raises:
        CapslogError: the config allows none or names some, or its model's layers are those of factories.
    """
    if config.variants or config.numerics == "same":
        raise CapslogError(
            "there is nothing to choose: leave variants out of the config, and set numerics to close or loose"
        )
    sizes = load_workload(config).profile_inputs(config.train.microbatch_size)
    profile = profile_config(config, 1, variants=config.numerics)
    refused = _refused(config, profile, say)
    patterns = [one for one in patterns_of(profile) if not any((at, one.name) in refused for at in one.layers)]
    own = {at: [name for name in names if (at, name) not in refused] for at, names in alternatives_of(profile).items()}
    first = placed(profile.num_layers, profile.edges, patterns).chosen
    names = list(dict.fromkeys(name for some in own.values() for name in some))
    choices: dict[str, Choice] = {"as configured": {}}
    choices |= {f"{name} wherever it can": {at: name for at, some in own.items() if name in some} for name in names}
    choices["level 1"] = first
    source = functools.partial(load_workload, config)
    with WholeRuns(source, conditions_of_run(config, sizes), config.train.threads) as whole:
        log = _Log(whole, first, profile.digest)
        for name in profile.conditions.get(JOINED, ()) if generations else ():
            second = _second(log, own, name, seed, generations)
            choices[f"level 2, {name}"] = second
        measured = whole.seconds(list(choices.values()), rounds)
    found = [
        MeasuredChoice(name, chosen, sum(seconds_under(profile, chosen)), tuple(seconds))
        for (name, chosen), seconds in zip(choices.items(), measured, strict=True)
    ]
    return Collaged(tuple(found), profile)


def _refused(config: Config, profile: Profile, say: Callable[[str], object]) -> set[tuple[int, str]]:
    """(layer, variant) that fail their check."""
    workload, found = load_workload(config), set[tuple[int, str]]()
    chain, own = plain_chain(workload), alternatives_of(profile)
    for name in dict.fromkeys(name for names in own.values() for name in names):
        chosen = {layer: name for layer, names in own.items() if name in names}
        for one in check_variants(chain, chosen, workload.profile_inputs(config.train.microbatch_size)):
            if one.fault:
                say(one.sentence())
                found |= {(layer, name) for layer in one.layers}
    return found


def _second(log: _Log, own: Mapping[int, Sequence[str]], name: str, seed: int, generations: int) -> Choice:
    """Level 2: which of the layers that level 1 gave to others go to this variant as well."""
    parts = [at for at, some in own.items() if name in some and log.first.get(at) != name]

    def choice(bits: Bits) -> Choice:
        return {**log.first, **{at: name for at, bit in zip(parts, bits, strict=True) if bit}}

    if not parts:
        return log.first
    return choice(evolved(len(parts), lambda strings: log.ratios([choice(one) for one in strings]), seed, generations))


class _Log:
    """Choices that were measured whole, kept between calls, so that none is measured twice.

    It holds ratios to the choice of level 1, measured in the same launch, since a machine is not always as fast.

    Args:
        first: the choice of level 1.
        digest: of the profile.
    """

    def __init__(self, whole: WholeRuns, first: Choice, digest: str) -> None:
        self._whole, self.first = whole, first
        folder = cache.folder()
        self._path = None if folder is None else folder / "whole" / f"{digest.rpartition(':')[2][:32]}.json"
        self._known: dict[str, float] = {}
        if self._path is not None and self._path.exists():
            self._known = files.read_json(self._path)

    def ratios(self, choices: Sequence[Choice]) -> list[float]:
        """Of each choice, from the log or from a run now."""
        texts = [json.dumps([sorted(self.first.items()), sorted(one.items())]) for one in choices]
        new = {text: one for text, one in zip(texts, choices, strict=True) if text not in self._known}
        if new:
            (first, *_), *others = self._whole.seconds([self.first, *new.values()])
            self._known |= {text: one[0] / first for text, one in zip(new, others, strict=True)}
            if self._path is not None:
                with contextlib.suppress(CapslogError):  # then it is measured again the next time
                    files.write_text(self._path, json.dumps(self._known))
        return [self._known[text] for text in texts]
