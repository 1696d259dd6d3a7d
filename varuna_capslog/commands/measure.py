"""Commands that measure: `capslog profile` a model's layers, `capslog variants` the kernel choices of each layer."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.commands import shared
from varuna_capslog.commands.help import SEARCH
from varuna_capslog.commands.questions import (
    ModelFlags,
    announced,
    config_of_model,
    keys_of,
    overrides_of,
    settled,
)
from varuna_capslog.commands.shared import option

if TYPE_CHECKING:
    from varuna_capslog.config.settings import Config
    from varuna_capslog.profiles.record import Profile

__all__ = ["profile", "variants"]


# -- `capslog profile`: memory and seconds of each layer of the configured model.


@dataclass(frozen=True)
class ProfileFlags(ModelFlags):
    """The command line of `profile`."""

    output: Annotated[
        Path | None, shared.output_option("File for the profile.", "profile.json in the run_dir; with --model none")
    ] = None
    order: Annotated[
        str | None,
        option(
            "Order of the runs: packed (one launch), capslog (trimmed pipelines) or mcap (whole pipelines).",
            "profile.order, or packed",
            panel=SEARCH,
        ),
    ] = None
    degrees: Annotated[
        str | None,
        option(
            "Also profile stages that several devices share, by data and tensor parallelism, such as 1,2,4.",
            "none",
            panel=SEARCH,
        ),
    ] = None
    as_json: shared.AsJson = False
    trust: shared.Trust = False


@shared.options_of(ProfileFlags)
def profile(flags: ProfileFlags) -> None:
    """Measure memory and seconds of every layer by real runs of one and two layers, or estimate them."""
    from varuna_capslog.profiles.record import write_profile
    from varuna_capslog.start.prepare import profile_degrees, profile_run

    flags = settled(flags)
    settings = _config(flags)
    with announced(None if flags.model is None else settings):
        result = profile_run(settings, show=not flags.as_json)
    learned = _learned(settings, result)
    if flags.degrees is not None:
        result = profile_degrees(settings, result, _numbers(flags.degrees), show=not flags.as_json)
    path = flags.output
    if path is None and flags.model is None:
        path = settings.run_dir / "profile.json"
    if path is not None:
        write_profile(path, result)
    if flags.as_json:
        shared.print_json(result.to_json())
    else:
        from varuna_capslog.reports.tables import degrees_table, profile_table

        where = "not written; -o FILE keeps it" if path is None else f"written to {path}"
        profile_table(result, where, *learned).print()
        if result.by_degree:
            degrees_table(result, settings.train.microbatch_size).print()


def _numbers(text: str) -> list[int]:
    if not all(word.isdecimal() for word in text.split(",")):
        raise CapslogError(f"--degrees is {text!r}; write numbers of devices with commas, such as 1,2,4")
    return [int(word) for word in text.split(",")]


def _learned(settings: Config, profile: Profile) -> list[str]:
    """Store a measured profile to correct the seconds of later estimates; return a sentence on the correction."""
    if profile.source != "measured":
        return []
    from varuna_capslog.profiling.calibration import learn
    from varuna_capslog.profiling.estimate import StageEstimator

    try:
        estimator = StageEstimator.of_config(settings)
        work = {row.layers: estimator.stage(*row.layers).work for row in profile.observations if row.variant is None}
    except CapslogError as error:
        return [f"estimates are not corrected by this profile: {error}"]
    calibration = learn(profile, work)
    if calibration is None:
        return []
    shown = ", ".join(f"{group} {factor:.2f}" for group, factor in calibration.factors().items())
    before, after = (calibration.error(speed) for speed in (calibration.uncorrected, calibration.speed))
    return [
        f"estimates for {calibration.device} are corrected from now on, by measured profiles of "
        f"{len(calibration.models)} models: {shown}; median error of a run {before:.0%} before, {after:.0%} after"
    ]


def _config(flags: ProfileFlags) -> Config:
    if flags.config is None and flags.model is None:
        raise CapslogError("nothing to profile: give a CONFIG file, --model package.module:function or --hf FOLDER")
    if flags.config is not None:
        changes = [] if flags.order is None else [f"profile.order={flags.order}"]
        return shared.load(flags.config, flags.overrides, *changes, *overrides_of(flags), trust=flags.trust)
    if flags.order is not None:
        raise CapslogError("--order is of measured runs of a CONFIG; leave it out with --model")
    return config_of_model(flags, {"pipeline.devices": 1} | keys_of(flags.overrides))


# -- `capslog variants`: the fastest kernel choices on this machine.


@dataclass(frozen=True)
class VariantFlags:
    """The command line of `variants`."""

    config: shared.ConfigFile
    overrides: shared.Overrides = None
    numerics: Annotated[
        str | None, option("Tolerance for results: close (1e-5) or loose (1e-2).", "numerics of CONFIG")
    ] = None
    output: Annotated[
        Path | None, shared.output_option("File for CONFIG with the variants that were chosen.", "not written")
    ] = None
    rounds: Annotated[int, option("Runs of the whole model for each candidate, interleaved.", min=1)] = 5
    generations: Annotated[
        int, option("Generations of level 2, the search that measures whole models; 0: none.", min=0)
    ] = 4
    seed: Annotated[int, option("Random seed of level 2.")] = 0
    as_json: shared.AsJson = False
    trust: shared.Trust = False


@shared.options_of(VariantFlags)
def variants(flags: VariantFlags) -> None:
    """Measure the kernels that each layer may use, and find the fastest choice, as Collage does."""
    from varuna_capslog.base import files
    from varuna_capslog.config.reading import dump_config
    from varuna_capslog.profiles.runs import compile_seconds
    from varuna_capslog.start.collage_start import collage

    changes = [] if flags.numerics is None else [f"numerics={flags.numerics}"]
    config = shared.load(flags.config, flags.overrides, *changes, trust=flags.trust)
    measured = collage(config, flags.rounds, flags.generations, flags.seed, shared.tell)
    plain, best = measured.candidates[0], measured.best
    chosen = {f"#{layer}": name for layer, name in best.chosen.items()}
    if flags.output is not None:
        files.write_text(flags.output, dump_config(config.model_copy(update={"variants": chosen})))
    if flags.as_json:
        rows = [
            {
                "name": candidate.name,
                "variants": {f"#{layer}": name for layer, name in candidate.chosen.items()},
                "predicted_seconds": candidate.predicted_seconds,
                "measured_seconds": list(candidate.measured_seconds),
            }
            for candidate in measured.candidates
        ]
        shared.print_json({"best": best.name, "candidates": rows})
        return
    table = [
        (
            candidate.name,
            str(len(candidate.chosen)),
            f"{candidate.predicted_seconds:.4g}",
            f"{statistics.median(candidate.measured_seconds):.4g}",
            f"{candidate.ratio(plain):.3f}",
        )
        for candidate in measured.candidates
    ]
    spent = compile_seconds(measured.profile, set(best.chosen.values()))
    notes = (
        [f"compiling took {spent:.0f} s while the layers were measured; torch keeps the code on disk"] if spent else []
    )
    written = "not written; -o FILE keeps it" if flags.output is None else f"written to {flags.output}"
    shared.print_table(
        "ways to compute the layers",
        ("choice", "layers", "sum of layers, s", "whole, s", "of as configured"),
        table,
        left=(0,),
        notes=(f"best: {best.name}; {written}", f"variants: {chosen or 'none'}", *notes),
    )
