"""`capslog.train`: a run on this machine, from a config, a workload, or a model with a data set."""

from __future__ import annotations

import inspect
import json
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from varuna_capslog.base import files
from varuna_capslog.base.errors import CapslogError, needed
from varuna_capslog.base.fields import refuse_unknown
from varuna_capslog.base.tables import Table, printable
from varuna_capslog.config.reading import Config, assign, load_config, section
from varuna_capslog.config.settings import FUNCTION
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiles.record import Profile
from varuna_capslog.start.callbacks import Callback, Callbacks
from varuna_capslog.start.choices import OWN_DATA, fill_defaults, with_checked_variants, with_given_plan
from varuna_capslog.start.ordinary import with_choices_of

if TYPE_CHECKING:
    from varuna_capslog.model.chain import Chain
    from varuna_capslog.model.workload import Workload
    from varuna_capslog.reports.run import RunRecord

__all__ = ["TrainedRun", "draw_predictions", "peaks_of_stages", "script_module", "train", "write_run_report"]

# -- Names by which the processes of a run find functions of the program that starts it.


def function_name(function: Callable[..., Any]) -> str:
    """Return `package.module:function`. Raises CapslogError for a function in no module that a worker can import."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if module == "__main__" and name.isidentifier() and inspect.isroutine(function):
        module = script_module(name)
    if module is None or not name.isidentifier() or not inspect.isroutine(function):
        raise CapslogError(
            f"the workers of a training are processes of their own and cannot import {name or function!r} of "
            f"{module or 'no module'}; put the function into a file and give 'module:function'"
        )
    return f"{module}:{name}"


def script_module(name: str) -> str:
    """Return the module name of the program's script, by which a worker started in the same folder imports it.

    name: the function that the worker needs, for the error. Raises CapslogError where the program is no file below the
    current folder, such as a notebook.
    """
    main = sys.modules["__main__"]
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if spec is not None:
        return str(spec.name)
    try:
        path = Path(file or "").resolve().relative_to(Path.cwd().resolve()).with_suffix("")
    except ValueError:
        path = Path()
    if file is None or not path.parts or not all(part.isidentifier() for part in path.parts):
        raise CapslogError(
            f"the workers of a training are processes of their own and cannot import {name!r} of __main__; put it into "
            "a file whose name is a Python name, in the folder that the program is started from"
        )
    return ".".join(path.parts)


# -- Makes the config for a model and a data set: `capslog.train(model, dataset, ...)`.
#
# So that every process of the run has them, functions are passed by name, and objects in a file of the run's folder.


_FUNCTIONS = ("collate", "loss", "metric", "sample")
"""Keys of the `data` section whose values are functions or callable objects."""
_SETTINGS = (str, bytes, list, tuple, Mapping)
"""Types of settings besides numbers; no data set has one of these types."""


def refuse_splits(dataset: Any, name: str = "dataset") -> None:
    """Raise CapslogError for a mapping that holds data sets, such as a `DatasetDict` of Hugging Face."""
    if not isinstance(dataset, Mapping):
        return
    splits = [
        key for key, split in dataset.items() if not isinstance(split, _SETTINGS) and hasattr(split, "__getitem__")
    ]
    if splits:
        raise CapslogError(
            f"the {type(dataset).__name__} given as {name} holds several data sets "
            f"({', '.join(map(repr, splits))}); give one of them as dataset, such as splits[{splits[0]!r}], and "
            "another one as val"
        )


def own_data_values(model: Any, dataset: Any, data: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config's keys.

    Args:
        data: further keys of its `data` section, with functions and objects as values, too.
        settings: the call's settings; only `run_dir` is read here.

    Raises:
        CapslogError: a model or data set of another kind; something that no other process can import.
    """
    _refuse_import()
    from torch import nn

    from varuna_capslog.model.chain import Chain
    from varuna_capslog.model.model_workload import kind_of_model
    from varuna_capslog.own_data.handed import hand_over

    handed: dict[str, Any] = {}
    keys: dict[str, Any] = {name: value for name, value in data.items() if name not in (*_FUNCTIONS, "val")}
    for name, value in {"dataset": dataset, **data}.items():
        if name in keys or value is None:
            continue
        if isinstance(value, str):
            keys[name] = value
        elif inspect.isroutine(value):
            keys[name] = function_name(value)
        else:
            handed[name] = value
    section: dict[str, Any] = {}
    name = type(model).__name__
    if isinstance(model, str):
        section["factory"], name = model, model.partition(":")[0].rpartition(".")[2]
    elif isinstance(model, (nn.Module, Chain)):
        handed["model"] = model
    elif inspect.isroutine(model):
        section["factory"] = function_name(model)
        name = section["factory"].partition(":")[0].rpartition(".")[2]
    else:
        raise CapslogError(
            f"the model is {kind_of_model(model)}; give an nn.Module, a Chain, or a function that makes one, with a "
            "dataset after it"
        )
    run_dir = Path(settings.get("run_dir", f"runs/{name}"))
    if handed:
        path = run_dir / "handed.pkl"
        hand_over(path, handed, script_module)
        keys["given"] = str(path)
        if "model" in handed:
            section |= {
                "factory": "varuna_capslog.own_data.handed:model",
                "arguments": {"path": str(path)},
                "name": name,
            }
    return {"workload": OWN_DATA, "model": section, "data": keys, "run_dir": str(run_dir)}


def _refuse_import() -> None:
    """Raise CapslogError where a process of the run imports the script that started it, which would train again."""
    for frame in inspect.stack(0)[2:]:
        if frame.function == "import_function" or frame.function == "_of_script":
            raise CapslogError(
                "the script calls capslog.train while a process of the run imports it; put the call under "
                'if __name__ == "__main__":'
            )


# -- `capslog.train`


@dataclass(frozen=True)
class TrainedRun:
    """A run that has ended, read from its folder `run_dir`: config, profile, plans, metrics and checkpoints."""

    run_dir: Path

    @property
    def record(self) -> RunRecord:
        """Content of the folder's files: `steps`, `evaluations`, `plans`, `events`."""
        from varuna_capslog.reports.run import read_run

        return read_run(self.run_dir)

    @property
    def losses(self) -> list[float | None]:
        """Losses of the whole minibatch, for every optimizer step."""
        return [step.loss for step in self.record.steps]

    @property
    def plan(self) -> Plan | None:
        """Newest plan of the run."""
        return self.record.plan

    def report(self) -> Path:
        """Write the report page like `capslog report`, and return its path; needs the extra `report`."""
        return write_run_report(load_config(self.run_dir / "config.yaml"))[0]

    def _table(self) -> Table:
        from varuna_capslog.reports.changes import account_of

        steps = self.record.steps
        first, last = (steps[0], steps[-1]) if steps else (None, None)
        numbers = [["steps", str(len(steps))]]
        for name, step in (("first loss", first), ("last loss", last)):
            numbers.append([name, "unknown" if step is None or step.loss is None else f"{step.loss:.5g}"])
        if (rate := self.record.samples_per_second) is not None:
            numbers.append(["samples/s (median of the last 100 steps)", f"{rate:.3g}"])
        if (account := account_of(self.record)) is not None:
            numbers.append(["productive", account.sentence()])
        if (share := self.record.waited_share()) is not None:
            numbers.append(["waited for data", f"{100 * share:.1f} % of the time in steps"])
        return Table(str(self.run_dir), ("", ""), numbers, (0, 1))

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
    on_step: Callback | None = None,
    on_evaluation: Callback | None = None,
    on_checkpoint: Callback | None = None,
    **data: Any,
) -> TrainedRun:
    """Profile, plan and train on this machine; return when the training has ended.

    Every rank is a process of its own, which imports the workload by its name. Ranks import the model, data set and
    functions of your own script by its file's name, so put the call under `if __name__ == "__main__":`.

    With a data set, the defaults of the section `train` are AdamW, lr 1e-3, no clipping, minibatches of 32 samples and
    microbatches of at most 8; a printed line lists the defaults that were used.

    Args:
        run: a YAML file; the keys of a config as a dict; a `Config`; or a workload as `"package.module:function"` or as
            that function itself. With a data set: the model, as an nn.Module, a Chain, or a function that makes it.
        dataset: a map-style dataset, or a function that makes it. (Without a data set, settings may be given here.)
        settings: keys to change, such as `{"train.max_steps": 10, "run_dir": "runs/mine"}`.
        data: further keys of the config's `data` section: val, collate, loss, metric, sample, inputs, workers,
            prefetch; functions as themselves or by name.
        show: print the plan, notes and the progress of profiling; the workers print their own lines in any case, on the
            standard output of this process (in a notebook, on that of its server).
        on_step: called in this process with each new row of metrics.jsonl, a dict, while the run goes on. Where it
            returns `capslog.STOP`, the run ends after the current step, and saves it. Training does not wait for a slow
            function; Ctrl-C interrupts it.
        on_evaluation: the same with each row of evaluations.jsonl.
        on_checkpoint: the same with step, generation, time and path of each new checkpoint.

    Returns:
        The run: losses, plan, report.

    Raises:
        DoesNotFit: no plan fits the capacity; no worker was started.
        CapslogError: a key or the model is invalid, a worker failed, or several data sets are given in place of one.
        KeyboardInterrupt: the run was interrupted; the same call continues it.
        Exception: of a callback; the run was stopped and saved before, as by `capslog.STOP`.
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

    functions = {"on_step": on_step, "on_evaluation": on_evaluation, "on_checkpoint": on_checkpoint}
    refuse_unknown([name for name in data if name.startswith("on_")], list(functions), "callback")
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
    train_here(config, show_plan, tell, show, Callbacks(config.run_dir, functions))
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
    values: dict[str, Any] = json.loads(json.dumps(run, default=str))  # a deep copy
    for key, value in settings.items():
        assign(values, key, value, f"settings {key!r}")
    if "run_dir" not in values:
        values["run_dir"] = f"runs/{str(values.get('workload', 'run')).partition(':')[0].rpartition('.')[2]}"
    fill_defaults(values, say)
    return section(Config, values, "")


# -- Report page of a run with drawn samples, and drawn predictions


_NUM_SAMPLES = 8


def write_run_report(config: Config, refusal: str | None = None) -> tuple[Path, str | None, RunRecord]:
    """Write the report page into the folder of a run. Returns its path, a sentence on what is missing in it (else
    None), and the folder's record.

    refusal: why the code that the config names may not run; the page then shows only the folder's data. Raises
    CapslogError where matplotlib or plotly is not installed (the extra `report` installs them), or the folder cannot be
    read or written.
    """
    with needed("a report"):
        from varuna_capslog.reports.page import write_report
        from varuna_capslog.reports.run import read_run

    problems = []

    def rehearse(config: Config, plan: Plan, shapes: Mapping[str, Sequence[int]]) -> list[int]:
        try:
            return peaks_of_stages(config, plan, shapes)
        except (CapslogError, OSError) as error:
            problems.append(f"no peaks predicted at the measured sizes: {error}")
            raise

    try:
        if refusal is None:
            _draw_samples(config)
        else:
            problems.append(f"no new sample predictions, and no peaks predicted at the measured sizes: {refusal}")
    except CapslogError as error:
        problems.append(f"no sample predictions: {error}")  # a page without pictures is better than none
    run = read_run(config.run_dir)
    page = write_report(run, rehearse if refusal is None else None)
    return page, "; ".join(problems) or None, run


def peaks_of_stages(config: Config, plan: Plan, shapes: Mapping[str, Sequence[int]]) -> list[int]:
    """Return the peak bytes of every stage of a run's plan for inputs of these shapes, by a rehearsal of every rank.
    The plan's values, such as the schedule, replace those that the config leaves to its planner. Raises like
    `profiling/rehearsal.rehearse_plan`.
    """
    from varuna_capslog.profiling.rehearsal import rehearse_plan

    peaks = rehearse_plan(with_choices_of(config, plan), plan, shapes)
    return [peaks[rank] for rank in plan.placement()]


def draw_predictions(config: Config, images: Sequence[Path], out: Path) -> list[Path]:
    """Run the best checkpoint (the newest, if the run was never evaluated) on pictures; return the drawn pictures in
    `out`. Raises CapslogError without a checkpoint, for another model's checkpoint, or for an unreadable picture.
    """
    from varuna_capslog.model.workload import load_workload

    workload = load_workload(config)
    return workload.predict(_trained(config, workload), images, out)


def _trained(config: Config, workload: Workload) -> Chain:
    from varuna_capslog.training.checkpoint import best_checkpoint
    from varuna_capslog.training.stored_layers import load_chain

    checkpoint = best_checkpoint(config.run_dir / "checkpoints")
    chain = workload.chosen_chain()
    load_chain(checkpoint, chain)
    return chain


def _draw_samples(config: Config) -> None:
    """Draw a few validation pictures into `predictions/`, where there is a checkpoint and the workload has pictures."""
    from varuna_capslog.model.workload import load_workload

    if not any((config.run_dir / "checkpoints").glob("step-*")):
        return
    workload, folder = load_workload(config), config.run_dir / "predictions"
    samples = workload.sample_files(_NUM_SAMPLES)
    files.refuse_link(folder)
    if samples:
        shutil.rmtree(folder, ignore_errors=True)
        draw_predictions(config, samples, folder)
    elif (text := workload.sample_text(lambda: _trained(config, workload))) is not None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        files.write_text(folder / "sample.txt", text)
