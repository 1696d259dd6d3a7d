"""`capslog profile`: what each layer of the configured model costs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.commands import shared
from varuna_capslog.commands.ordinary_model import (
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

__all__ = ["profile"]


@dataclass(frozen=True)
class ProfileFlags(ModelFlags):
    """The command line of `profile`."""

    output: Annotated[
        Path | None, shared.output_option("File for the profile.", "profile.json in the run_dir; with --model none")
    ] = None
    order: Annotated[
        str | None,
        option(
            "Launches of the runs: packed (one), capslog (trimmed pipelines) or mcap (whole pipelines).",
            "profile.order, or packed",
        ),
    ] = None
    as_json: shared.AsJson = False
    trust: shared.Trust = False


@shared.options_of(ProfileFlags)
def profile(given: ProfileFlags) -> None:
    """Measure memory and seconds of every layer with real runs of one- and two-layer stages, or estimate them."""
    from varuna_capslog.profiles.record import write_profile
    from varuna_capslog.start.prepare import profile_run

    given = settled(given)
    settings = _config(given)
    with announced(None if given.model is None else settings):
        result = profile_run(settings, show=not given.as_json)
    learned = _learned(settings, result)
    path = given.output
    if path is None and given.model is None:
        path = settings.run_dir / "profile.json"
    if path is not None:
        write_profile(path, result)
    if given.as_json:
        shared.print_json(result.to_json())
    else:
        from varuna_capslog.reports.tables import profile_table

        where = "not written; -o FILE keeps it" if path is None else f"written to {path}"
        profile_table(result, where, *learned).print()


def _learned(settings: Config, profile: Profile) -> list[str]:
    """Corrects the seconds of later estimates by a measured profile; a sentence that says how."""
    if profile.source != "measured":
        return []
    from varuna_capslog.profiling.calibration import learn
    from varuna_capslog.profiling.estimate import StageEstimator

    try:
        estimator = StageEstimator.of_config(settings)
        work = {row.layers: estimator.stage(*row.layers).work for row in profile.observations if row.variant is None}
    except CapslogError as error:
        return [f"estimates are not corrected by this profile: {error}"]
    known = learn(profile, work)
    if known is None:
        return []
    shown = ", ".join(f"{group} {factor:.2f}" for group, factor in known.factors().items())
    before, after = (known.error(speed) for speed in (known.uncorrected, known.speed))
    return [
        f"estimates for {known.device} are corrected from now on, by measured profiles of {len(known.models)} models: "
        f"{shown}; median error of a run {before:.0%} before, {after:.0%} after"
    ]


def _config(given: ProfileFlags) -> Config:
    if given.config is None and given.model is None:
        raise CapslogError("nothing to profile: give a CONFIG file, --model package.module:function or --hf FOLDER")
    if given.config is not None:
        changes = [] if given.order is None else [f"profile.order={given.order}"]
        return shared.load(given.config, given.overrides, *changes, *overrides_of(given), trust=given.trust)
    if given.order is not None:
        raise CapslogError("--order is of measured runs of a CONFIG; leave it out with --model")
    return config_of_model(given, {"pipeline.devices": 1} | keys_of(given.overrides))
