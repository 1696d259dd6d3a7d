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
        str | None, option("How far results may be from those as configured: close or loose.", "numerics of CONFIG")
    ] = None
    output: Annotated[
        Path | None, shared.output_option("File for CONFIG with the variants that were chosen.", "not written")
    ] = None
    rounds: Annotated[int, option("Runs of the whole model for each candidate, interleaved.", min=1)] = 5
    generations: Annotated[int, option("Of level 2, the search that measures whole models; 0: none.", min=0)] = 4
    seed: Annotated[int, option("Of level 2.")] = 0
    as_json: shared.AsJson = False
    trust: shared.Trust = False


@shared.options_of(VariantFlags)
def variants(given: VariantFlags) -> None:
    """Measure every layer in every way that numerics allows, and find the fastest choice, as Collage does."""
    from varuna_capslog.base import files
    from varuna_capslog.config.reading import dump_config
    from varuna_capslog.profiles.variants import compile_seconds
    from varuna_capslog.start.collage_start import collage

    changes = [] if given.numerics is None else [f"numerics={given.numerics}"]
    config = shared.load(given.config, given.overrides, *changes, trust=given.trust)
    found = collage(config, given.rounds, given.generations, given.seed, shared.tell)
    plain, best = found.candidates[0], found.best
    chosen = {f"#{layer}": name for layer, name in best.chosen.items()}
    if given.output is not None:
        files.write_text(given.output, dump_config(config.model_copy(update={"variants": chosen})))
    if given.as_json:
        rows = [
            {
                "name": one.name,
                "variants": {f"#{layer}": name for layer, name in one.chosen.items()},
                "predicted_seconds": one.predicted_seconds,
                "measured_seconds": list(one.measured_seconds),
            }
            for one in found.candidates
        ]
        shared.print_json({"best": best.name, "candidates": rows})
        return
    table = [
        (
            one.name,
            str(len(one.chosen)),
            f"{one.predicted_seconds:.4g}",
            f"{statistics.median(one.measured_seconds):.4g}",
            f"{one.ratio(plain):.3f}",
        )
        for one in found.candidates
    ]
    spent = compile_seconds(found.profile, set(best.chosen.values()))
    notes = (
        [f"compiling took {spent:.0f} s while the layers were measured; torch keeps the code on disk"] if spent else []
    )
    written = "not written; -o FILE keeps it" if given.output is None else f"written to {given.output}"
    shared.print_table(
        "ways to compute the layers",
        ("choice", "layers", "sum of layers, s", "whole, s", "of as configured"),
        table,
        left=(0,),
        notes=(f"best: {best.name}; {written}", f"variants: {chosen or 'none'}", *notes),
    )
