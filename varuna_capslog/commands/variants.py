"""`capslog variants`: which way to compute each layer is fastest on this machine."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from varuna_capslog.commands import shared
from varuna_capslog.commands.shared import option

__all__ = ["variants"]


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
    from varuna_capslog.profiles.variants import compile_seconds
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
