"""`capslog.train`: a run on this machine, from a config or a workload to its trained weights and metrics."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from varuna_capslog.api.naming import function_name
from varuna_capslog.api.own_data import own_data_values, refuse_splits
from varuna_capslog.api.reporting import write_run_report
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.tables import Table, printable
from varuna_capslog.config.reading import Config, assign, load_config, section
from varuna_capslog.config.settings import FUNCTION
from varuna_capslog.start.chosen_variants import with_checked_variants
from varuna_capslog.start.given_plan import fill_defaults, with_given_plan

if TYPE_CHECKING:
    from varuna_capslog.plans.plan import Plan
    from varuna_capslog.profiles.record import Profile
    from varuna_capslog.reports.run import RunRecord

__all__ = ["TrainedRun", "train"]


@dataclass(frozen=True)
class TrainedRun:
    """A run that has ended; everything is read from its folder.

    run_dir: config, profile, plans, metrics and checkpoints.
    """

    run_dir: Path

    @property
    def record(self) -> RunRecord:
        """Record of the folder: `steps`, `evaluations`, `plans`, `events`."""
        from varuna_capslog.reports.run import read_run

        return read_run(self.run_dir)

    @property
    def losses(self) -> list[float | None]:
        """Losses of the whole minibatch, for every optimizer step."""
        return [step.loss for step in self.record.steps]

    @property
    def plan(self) -> Plan | None:
        """The newest plan of the run."""
        return self.record.plan

    def report(self) -> Path:
        """Writes the page that `capslog report` writes, and returns its path; needs the extra `report`."""
        from varuna_capslog.config.reading import load_config

        return write_run_report(load_config(self.run_dir / "config.yaml"))[0]

    def _table(self) -> Table:
        from varuna_capslog.reports.changes import account_of

        steps = self.record.steps
        first, last = (steps[0], steps[-1]) if steps else (None, None)
        numbers = [["steps", str(len(steps))]]
        for name, step in (("first loss", first), ("last loss", last)):
            numbers.append([name, "unknown" if step is None or step.loss is None else f"{step.loss:.5g}"])
        if last is not None and last.samples_per_second is not None:
            numbers.append(["samples/s of the last step", f"{last.samples_per_second:.4g}"])
        if (account := account_of(self.record)) is not None:
            numbers.append(["productive", account.sentence()])
        if (share := self.record.waited_share()) is not None:
            numbers.append(["waited for data", f"{100 * share:.1f} % of the time in steps"])
        return Table(str(self.run_dir), ("", ""), numbers, (0,))

    def __str__(self) -> str:
        return self._table().text()

    def _repr_html_(self) -> str:
        return self._table().html()


def train(
    run: Path | str | Mapping[str, Any] | Config | Callable[..., Any],
    dataset: Any = None,
    settings: Mapping[str, Any] | None = None,
    *,
    show: bool = True,
    **data: Any,
) -> TrainedRun:
    """Profile, plan and train on this machine; return when the training has ended.

    Every rank is a process of its own, so the workload must be importable: it is named, not handed over. Ranks import
    the model, data set and functions of your own script by its file's name, so the call stands under
    `if __name__ == "__main__":`.

    With a data set, `train` has AdamW, lr 1e-3, no clipping, minibatches of 32 samples and microbatches of at most 8
    where the settings say nothing else; a line says which of these were not given.

    Args:
        run: a YAML file; the keys of a config as a dict; a `Config`; or a workload as `"package.module:function"` or as
            that function itself. With a data set: the model, as an nn.Module, a Chain, or a function that makes it.
        dataset: a map-style dataset, or a function that makes it. (Settings may stand here where there is none.)
        settings: keys to change, such as `{"train.max_steps": 10, "run_dir": "runs/mine"}`.
        data: further keys of the config's `data` section: val, collate, loss, metric, sample, inputs, workers,
            prefetch; functions as themselves or by name.
        show: print the plan, notes and the progress of profiling; the workers' own lines appear in any case, where the
            standard output of this process goes (in a notebook, that of its server).

    Returns:
        The run: losses, plan, report.

    Raises:
        DoesNotFit: no plan fits the capacity; no worker was started.
        CapslogError: a key, the model, or a worker failed; several data sets in place of one.
        KeyboardInterrupt: the run was interrupted; the same call continues it.
    """
    from varuna_capslog.start.local_run import train_here

    def tell(line: str) -> None:
        if show:
            print(printable(line), file=sys.stderr)  # noqa: T201  # as the command does

    def show_plan(plan: Plan, profile: Profile | None) -> None:
        from varuna_capslog.reports.tables import plan_table

        if show:
            print(plan_table(plan, profile).text())  # noqa: T201
        for note in plan.notes:
            tell(f"note: {note}")

    refuse_splits(dataset)
    refuse_splits(data.get("val"), "val")
    if settings is None and isinstance(dataset, Mapping):
        dataset, settings = None, dataset
    settings = dict(settings or {})
    if dataset is not None:
        run = own_data_values(run, dataset, data, settings)
    elif data:
        raise CapslogError(f"{next(iter(data))} goes with a dataset, and there is none; give it after the model")
    config = with_checked_variants(with_given_plan(_config(run, settings, tell), tell), tell)
    train_here(config, show_plan, tell, show)
    return TrainedRun(config.run_dir)


def _config(run: Any, settings: dict[str, Any], say: Callable[[str], None]) -> Config:
    if callable(run) and not isinstance(run, type):
        run = function_name(run)
    if isinstance(run, str) and re.match(f"^{FUNCTION}$", run) and not Path(run).exists():
        run = {"workload": run}
    if isinstance(run, (str, Path)):
        changes = [f"{key}={json.dumps(value, default=str)}" for key, value in settings.items()]
        return load_config(run, changes, lambda values: fill_defaults(values, say))
    if isinstance(run, Config):
        if run.given_workload is not None:
            raise CapslogError("the workers of a training cannot have a workload that is an object; name its function")
        run = run.model_dump(mode="json")
    if not isinstance(run, Mapping):
        raise CapslogError(
            f"there is nothing to train in a {type(run).__name__}; give a config file, its keys as a dict, or the name "
            "of a workload's function, 'package.module:function'"
        )
    values: dict[str, Any] = json.loads(json.dumps(run, default=str))  # a copy, all of it
    for key, value in settings.items():
        assign(values, key, value, f"settings {key!r}")
    if "run_dir" not in values:
        values["run_dir"] = f"runs/{str(values.get('workload', 'run')).partition(':')[0].rpartition('.')[2]}"
    fill_defaults(values, say)
    return section(Config, values, "")
