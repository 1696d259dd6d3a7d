"""`capslog profile`: what each layer of the configured model costs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.commands import shared
from varuna_capslog.commands.ordinary_model import ModelFlags, announced, config_of_model, overrides_of
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


@shared.options_of(ProfileFlags)
def profile(given: ProfileFlags) -> None:
    """Measure memory and seconds of every layer with real runs of one- and two-layer stages, or estimate them."""
    from varuna_capslog.profiles.record import write_profile
    from varuna_capslog.start.prepare import profile_run

    settings = _config(given)
    with announced(None if given.model is None else settings):
        result = profile_run(settings, show=not given.as_json)
    path = given.output
    if path is None and given.model is None:
        path = settings.run_dir / "profile.json"
    if path is not None:
        write_profile(path, result)
    if given.as_json:
        shared.print_json(result.to_json())
    else:
        _print(result, "not written; -o FILE keeps it" if path is None else f"written to {path}")


def _config(given: ProfileFlags) -> Config:
    if (given.config is None) == (given.model is None):
        raise CapslogError("nothing to profile, or too much: give a CONFIG file or --model package.module:function")
    if given.config is not None:
        changes = [] if given.order is None else [f"profile.order={given.order}"]
        return shared.load(given.config, given.overrides, *changes, *overrides_of(given))
    if given.order is not None:
        raise CapslogError("--order is of measured runs of a CONFIG; leave it out with --model")
    return config_of_model(given, {"devices": 1})


def _print(result: Profile, where: str) -> None:
    from varuna_capslog.base.units import format_bytes

    rows, notes = [], []
    for index, layer in enumerate(result.layers):
        sizes = ["" if size is None else format_bytes(size) for size in (layer.isolated_bytes, layer.added_bytes)]
        times = ["" if t is None else f"{t * 1e3:.1f} ms" for t in (layer.forward_seconds, layer.backward_seconds)]
        rows.append([str(index), layer.name, *sizes, *times])
    headings = ["", "layer", "alone (M_i)", "added (M_a)", "forward", "backward"]
    if result.edges != [(index, index + 1) for index in range(result.num_layers - 1)]:
        headings.append("reads from")
        for reader, row in enumerate(rows):
            row.append(", ".join(str(writer) for writer, other in result.edges if other == reader))
    if "input_sizes" in result.conditions:
        notes.append(_sizes(result.conditions["input_sizes"]))
    if "headroom" in result.conditions:
        room = result.conditions["headroom"]
        notes.append(
            f"a device needs {room['fragmentation']:.3g} times a stage's peak, and {format_bytes(room['fixed_bytes'])}"
        )
    for limit in result.conditions.get("limits", []):
        notes.append(f"bytes are too low for {limit}: measure them (--measure)")
    if "profiling" in result.conditions:
        notes.append(_launches(result.conditions["profiling"]))
    title = f"{result.model or 'model'}: {result.num_layers} layers, {result.source}"
    shared.print_table(title, headings, rows, left=(1, 6), notes=[*notes, where])


def _sizes(sizes: Mapping[str, Any]) -> str:
    """The largest microbatch, which the bytes are for, and the median of those that training meets."""

    def text(shapes: Mapping[str, list[int]]) -> str:
        name, shape = max(shapes.items(), key=lambda item: math.prod(item[1]))
        return f"{name} {'x'.join(map(str, shape))}"

    if sizes["sampled"] == 1:
        return f"every microbatch: {text(sizes['largest'])}"
    return f"largest {text(sizes['largest'])}, median {text(sizes['median'])} of {sizes['sampled']} sampled minibatches"


def _launches(runs: Mapping[str, Any]) -> str:
    return (
        f"order {runs['order']}: {runs['launches']} launch(es) on {runs['workers']} workers, {runs['rounds']} rounds "
        f"of {runs['mean_seconds']:.2f} s for {runs['stage_runs']} stage runs, {runs['total_seconds']:.1f} s in all, "
        f"{runs['end_to_end_seconds']:.1f} s end to end"
    )
