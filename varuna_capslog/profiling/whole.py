"""Runs of a whole model on one device with choices of variants, with which sums over layers are compared.

`start/collage_start` asks for the seconds. A run is a trimmed run (`trim`) of which nothing is trimmed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import TracebackType

from varuna_capslog.model.trace import ShapeTable
from varuna_capslog.model.workload import Workload
from varuna_capslog.profiles.variants import PLAIN
from varuna_capslog.profiling import admission
from varuna_capslog.profiling.admission import BoundTable
from varuna_capslog.profiling.conditions import RunConditions
from varuna_capslog.profiling.launches import LaunchTimes, devices_of, failures_named, in_one_launch
from varuna_capslog.profiling.measure import modules_of
from varuna_capslog.profiling.skeleton import skeleton
from varuna_capslog.profiling.trim import TrimmedRun
from varuna_capslog.profiling.worker import Workers

__all__ = ["WholeRuns"]


class WholeRuns:
    """A process that trains the whole chain again and again; a context manager that ends it.

    Args:
        source: makes the workload, whose own `variants` must be empty, in every process.
        threads: CPU threads.
    """

    def __init__(self, source: Callable[[], Workload], conditions: RunConditions, threads: int = 1) -> None:
        workload = source()
        self._chain = skeleton(workload)
        inputs = workload.profile_inputs(conditions.microbatch_size)
        types = conditions.precision, conditions.weights
        self._specs = ShapeTable(self._chain, conditions.device, *types).boundaries(inputs)
        self._goal = workload.profile_targets(conditions.microbatch_size)
        recipe, blocks = conditions.recipe, conditions.blocks
        table = BoundTable(self._chain, self._specs, conditions.device, types[0], blocks, recipe, types[1])
        self._bound = table.bound_bytes(0, len(self._chain))
        self._names = [layer.name for layer in self._chain.layers]
        devices, modules = devices_of(conditions.device, 1), modules_of(workload, self._chain)
        self._workers = Workers(source, devices, threads, modules, conditions, admission.free_bytes, self._names)
        self._group = self._workers.group(1)

    def __enter__(self) -> WholeRuns:
        self._group.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._group.__exit__(kind, error, trace)

    def seconds(self, choices: Sequence[Mapping[int, str]], rounds: int = 1) -> list[list[float]]:
        """Return, for each choice (layer -> variant), the seconds of forward and backward of one microbatch in each
        round. Every round runs all choices, in another order.

        Raises CapslogError where one of them cannot run.
        """
        names = [tuple(choice.get(at, PLAIN) for at in range(len(self._chain))) for choice in choices]
        seconds_of: dict[tuple[str, ...], list[float]] = {names_of_choice: [] for names_of_choice in names}
        size, (targets, normalisers) = len(self._chain), self._goal
        for number in range(rounds):
            turns = list(seconds_of)
            for names_of_choice in turns[number % len(turns) :] + turns[: number % len(turns)]:
                run = TrimmedRun(0, size, size, tuple(self._specs), targets, normalisers, names_of_choice)
                with failures_named(self._names):
                    told = in_one_launch(
                        [(run, self._bound)], self._group, self._workers, LaunchTimes(), lambda *_: None
                    )
                row = told[run.key]
                seconds_of[names_of_choice].append((row.forward_seconds or 0.0) + (row.backward_seconds or 0.0))
        return [seconds_of[names_of_choice] for names_of_choice in names]
