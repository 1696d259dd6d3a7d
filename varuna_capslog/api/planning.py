"""`capslog.estimate` and `capslog.plan`: the costs of a model's layers, where to cut it, and whether the plan fits."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from varuna_capslog.base import fields, files, units
from varuna_capslog.base.errors import CapslogError, needed
from varuna_capslog.base.gpus import parse_devices
from varuna_capslog.base.tables import Table
from varuna_capslog.config.settings import Config
from varuna_capslog.plans.plan import Plan, write_plan
from varuna_capslog.profiles.record import Profile, write_profile
from varuna_capslog.reports.tables import plan_table, profile_table
from varuna_capslog.schedules import RunShape
from varuna_capslog.start.ordinary import OrdinaryModel, check_kinds, config_of_profile, ordinary_config

if TYPE_CHECKING:
    from torch import Tensor, nn

    from varuna_capslog.model.chain import Chain

    Model = nn.Module | Chain | str
    Sample = Tensor | Sequence[Any] | Mapping[str, Any] | str
    from varuna_capslog.planning.simulation import Simulation

__all__ = ["Estimate", "ModelPlan", "Picture", "estimate", "estimated", "plan"]

# -- `capslog.estimate`


class Estimate(Profile):
    """A `Profile` that prints as a table, also in a notebook; `capslog.plan` takes it in place of a model."""

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a profile file, which `capslog plan --profile` and `read_profile` read."""
        write_profile(path, self)

    def __str__(self) -> str:
        return profile_table(self).text()

    def _repr_html_(self) -> str:
        return profile_table(self).html()


def estimate(
    model: Model,
    sample: Sample | None = None,
    *,
    device: str | None = None,
    cut_points: Sequence[str] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Estimate:
    """Estimate bytes and seconds of every layer for one training step, from the shapes alone.

    The model is neither run nor changed, and this machine need not have the `device`.

    Args:
        model: an nn.Module on any device (the meta device too: no memory is needed for weights), a `Chain`, or
            `"package.module:function"`, a function that returns such a model.
        sample: example inputs, batch first: a tensor, a tuple, or a dict by name; or their shapes as text, such as
            `"x=float32[8,3,224,224]"`, or a list of such texts. The batch is one microbatch. Values do not matter.
        device: `"cpu"`, `"cuda"`, or a kind of GPU such as `"cuda:a100-80gb"`; default: the GPU of this machine, or its
            CPU where it has none.
        cut_points: names of submodules to cut before; default: every repeated block.
        settings: further keys of a config, such as `{"train.precision": "bfloat16"}`.

    Returns:
        Bytes and seconds per layer. The loss is the model's output `loss`, or else the mean square of its output.

    Raises:
        CapslogError: the model cannot be captured, an input is missing or does not fit it, a key or device is unknown.
    """
    config = ordinary_config(OrdinaryModel(model, sample, cut_points), {"devices": 1}, device=device, settings=settings)
    return estimated(config)


def estimated(config: Config, memo: Any = None) -> Estimate:
    """Return the estimate for a config; memo: see `start.prepare.estimate_memo`."""
    from varuna_capslog.start.prepare import profile_run

    return Estimate(**vars(profile_run(config, show=False, memo=memo)))


# -- A picture as an object: a notebook draws it inline, a program saves it.


@dataclass(frozen=True)
class Picture:
    """A PNG picture. png: the file's content."""

    png: bytes = field(repr=False)

    def save(self, path: Path | str) -> Path:
        """Write the picture to a file and return its path. Raises CapslogError where it cannot be written."""
        path = Path(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with files.whole_file(path) as file:
                file.write(self.png)
        except OSError as error:
            raise files.write_failure(f"{path} cannot be written", error) from error
        return path

    def _repr_png_(self) -> bytes:
        return self.png


def drawn(draw: Callable[[Path], object]) -> Picture:
    """Return the picture that `draw` writes to a path. Raises CapslogError where matplotlib is not installed."""
    with needed("a picture"), tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "picture.png"
        draw(path)
        return Picture(path.read_bytes())


# -- `capslog.plan`


@dataclass(frozen=True, repr=False)
class ModelPlan(Plan):
    """`Plan` with its profile, which has the costs of each layer. It prints as a table, also in a notebook."""

    profile: Profile | None = field(default=None, compare=False)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a plan file, for `pipeline.plan=FILE`, `capslog export` and `read_plan`."""
        write_plan(path, self)

    def simulate(self) -> Simulation:
        """Simulate a step: its seconds, the idle time of ranks, their memory over time; see `simulate_plan`.

        Raises:
            CapslogError: the profile has no seconds.
        """
        from varuna_capslog.planning.simulation import simulate_plan

        return simulate_plan(self._profile, self, run=RunShape.of_conditions(self._profile.conditions))

    def plot(self, path: Path | str | None = None, what: str = "step") -> Picture:
        """Return a picture of the plan, which a notebook shows inline.

        Args:
            path: a PNG file to which the picture is also written.
            what: `"step"`: the actions and bytes of every rank over one step; `"layers"`: the bytes of every layer, and
                the cuts of a plan that is one pipeline.

        Raises:
            CapslogError: an unknown `what`; matplotlib is not installed (the extra `report` installs it); for a step,
                the profile has no seconds.
        """
        fields.refuse_unknown([what], ["step", "layers"], "picture")
        picture = drawn(self._draw_step if what == "step" else self._draw_layers)
        if path is not None:
            picture.save(path)
        return picture

    def _draw_step(self, path: Path) -> None:
        from varuna_capslog.reports.step import Limits, draw_simulation, simulation_title

        step = self.simulate()
        title = simulation_title(step, self, self._profile)
        draw_simulation(path, title, step, Limits.of(step, self, self._profile))

    def _draw_layers(self, path: Path) -> None:
        from varuna_capslog.reports.memory import draw_layers
        from varuna_capslog.reports.style import plan_title, schedules_text

        title = plan_title("Memory of each layer", self, self._profile, schedules_text([self.schedule]))
        draw_layers(path, title, self._profile.layers, self.cuts)

    @property
    def _profile(self) -> Profile:
        if self.profile is None:
            raise CapslogError("the plan was made without a profile, so nothing is known of its seconds and bytes")
        return self.profile

    def _table(self) -> Table:
        table = plan_table(self, self.profile)
        return dataclasses.replace(table, notes=[*table.notes, *self.notes])

    def __str__(self) -> str:
        return self._table().text()

    def __repr__(self) -> str:
        return f"ModelPlan(cuts={self.cuts}, fits={self.fits}, peak_bytes={self.peak_bytes})"

    def _repr_html_(self) -> str:
        return self._table().html()


def plan(
    model: Model | Profile,
    sample: Sample | None = None,
    *,
    devices: int | str,
    capacity: int | str | Sequence[int | str] | None = None,
    planner: str | None = None,
    device: str | None = None,
    minibatch_size: int | None = None,
    settings: Mapping[str, Any] | None = None,
) -> ModelPlan:
    """Divide a model over devices as pipeline stages, for the shortest step within the capacity.

    The costs are estimated (`capslog.estimate`); the model is neither run nor changed, and no device is needed.

    Args:
        model, sample: as for `capslog.estimate`; or a `Profile` (an `Estimate`, or `read_profile(...)`), then without a
            sample. Planning from a profile imports no torch.
        devices: their number, or their kinds: `"2x a100-80gb"`, `"2x rtx4090, rtx3090"`, which set `device`, `capacity`
            and relative speeds.
        capacity: memory of each device: `"16GiB"`, a number of bytes, or a list with one for each device. Default: no
            limit, or the memory of a kind of GPU named by `device`, here or in `capslog.estimate`.
        planner: default `budget`, the shortest step that fits, where it can plan the run, else `exact`, the smallest
            peak; docs/planners.md lists all. Planner `budget` may give stages replicas, unless `settings` has
            `{"train.accumulation_blocks": 1}`.
        device: the device that the costs are for; see `capslog.estimate`.
        minibatch_size: samples of one step; default: four microbatches (each the sample's batch) for each device.
        settings: further keys of a config, such as `{"pipeline.schedule": "1f1b"}`.

    Returns:
        The plan. A plan that does not fit raises no error: `fits` is False and `notes` say what is missing.

    Raises:
        CapslogError: more devices than layers, an unknown planner, or an error of `capslog.estimate`.
    """
    from varuna_capslog.start.prepare import divided_profile, estimate_memo, plan_run

    named = parse_devices(devices)
    named.refuse_beside({"capacity": capacity, "device": device}, f"devices={devices!r}", f"devices={named.count}")
    keys = {"capacity": units.with_unit(capacity), "planner": planner, **named.pipeline_keys}
    pipeline = {name: value for name, value in keys.items() if value is not None}
    if isinstance(model, Profile):
        model_options = {"sample": sample, "device": device}
        if refused := [name for name, value in model_options.items() if value is not None]:
            raise CapslogError(f"{refused[0]} goes with a model; a profile is of one model and device, so leave it out")
        check_kinds(named, model)
        config = config_of_profile(model, pipeline, minibatch_size, settings)
        model = divided_profile(config, model)
        return ModelPlan(**vars(plan_run(config, model)), profile=model)
    device = device if named.fastest is None else f"cuda:{named.fastest}"
    config = ordinary_config(OrdinaryModel(model, sample), pipeline, minibatch_size, device, settings=settings)
    memo = estimate_memo(config)
    costs = divided_profile(config, estimated(config, memo))
    return ModelPlan(**vars(plan_run(config, costs, memo)), profile=costs)
