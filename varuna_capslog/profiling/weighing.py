"""The bytes of each action of a stage, read from a step of a real run, or from a step on fake tensors.

`ActionWeights` makes an observation's `action_bytes` from the live bytes before, during and after every action;
`ActionProbe` reads these numbers from the device's allocator.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.profiler import record_function

from varuna_capslog import accelerator
from varuna_capslog.engine.offload import offloadable
from varuna_capslog.engine.pipeline import PipelineEngine
from varuna_capslog.engine.probe import PeakProbe, StageMeter, _allocations, storage_bytes, storages_of
from varuna_capslog.engine.stage import CallContext, Stage
from varuna_capslog.profiles.record import HALVES, ActionBytes, Observation

__all__ = ["ActionProbe", "ActionResidue", "ActionWeights", "HalfWeights", "Halves", "Window"]

_MARK = "capslog action "


class Window(NamedTuple):
    """Live bytes before an action, their peak during the action, and live bytes after it."""

    before: int
    peak: int
    after: int


class ActionResidue(NamedTuple):
    """Bytes that remain after an action of a microbatch.

    statistics: running statistics. noted: gradients that I keeps for W. seeds: the part of `noted` with which I began
        (with several graphs, only of the last graph: the gradients of the stage's outputs).
    """

    statistics: int
    noted: int = 0
    seeds: int = 0

    @classmethod
    def of(cls, kind: str, stage: Stage, context: CallContext) -> ActionResidue:
        """Return the bytes after an action of this kind."""
        statistics = storage_bytes(stage.statistics(context.index))
        if kind != "I":
            return cls(statistics)
        halves = stage.weight_halves(context.index)
        noted = storages_of([gradient for half in halves for gradient in half.gradients])
        return cls(statistics, sum(noted.values()), sum(noted.get(key, 0) for half in halves[:1] for key in half.seeds))


class ActionWeights:
    """Collects the windows of one stage's actions in a step after the first.

    engine: its options list the actions, and its layers hold the gradients.
    block_bytes: block size of the allocator in which the windows are measured.
    """

    def __init__(self, engine: PipelineEngine, block_bytes: int = 1) -> None:
        self._engine, self._block_bytes = engine, block_bytes
        self._rows = engine.options.actions or ()
        self._peaks = dict.fromkeys(("forward", "bare", "backward", "first_backward"), 0)
        self._gradient_bytes = self._moment_bytes = self._statistics_bytes = self._output_bytes = 0
        self._graph_bytes: int | None = None
        self._separate_bytes: int | None = None

    def add(self, kind: str, stage: Stage, context: CallContext, window: Window, statistics: int) -> None:
        """Add one action. `statistics`: bytes that remain after a forward of this microbatch until the commit."""
        first, last = context.index == 0, stage.ends_in_loss
        name = "first_backward" if first else "backward"
        if kind != "B":
            recompute = f"{stage.index}R{context.index}"
            name = "bare" if kind == "F" and any(recompute in row for row in self._rows) else "forward"
        statistics = statistics if kind == "F" else 0
        self._statistics_bytes = max(self._statistics_bytes, statistics)
        self._peaks[name] = max(self._peaks[name], window.peak - window.before - statistics)
        ends = [[context.specs[value] for value in row] for row in (stage.ports.enters, stage.ports.leaves)]
        if first and kind == "F" and name == "forward" and not last:
            before, self._output_bytes = (sum(spec.num_bytes for spec in specs) for specs in ends)
            self._separate_bytes = window.after - window.before - statistics + before
        elif kind == "B" and self._graph_bytes is None and context.index == 1:
            before, behind = (sum(spec.num_bytes for spec in specs if spec.requires_grad) for specs in ends)
            self._graph_bytes = max(0, window.before - window.after + before - (0 if last else behind))

    def count_gradients(self) -> None:
        """Count gradients and optimizer moments; called between backward and update, when all gradients exist."""
        parameters = [parameter for layer in self._engine.layers for parameter in layer.parameters.values()]
        gradients = (parameter.grad for parameter in parameters if parameter.grad is not None)
        self._gradient_bytes = storage_bytes(gradients, self._block_bytes)
        self._moment_bytes = storage_bytes(filter(offloadable, self._engine.optimizer.resident()))

    def result(self, update_bytes: int, meter: StageMeter, lasting_bytes: int | None) -> ActionBytes:
        """Return the bytes of each action.

        update_bytes: the peak after the last action, less static and lasting bytes.
        meter: has counted the tensors that the stage's forwards save. lasting_bytes: as in `ActionBytes`.
        """
        graph = meter.saved_bytes if self._graph_bytes is None else self._graph_bytes
        shared = 0 if self._separate_bytes is None else graph + self._output_bytes - self._separate_bytes
        # where every forward kept its graph, a forward without a graph needs no more; frozen layers have no graph
        bare, kept = self._peaks["bare"], self._peaks["forward"]
        peaks = {f"{name}_bytes": size for name, size in self._peaks.items()}
        peaks |= {"bare_bytes": bare or kept, "forward_bytes": max(bare, kept)}
        return ActionBytes(
            **peaks,
            update_bytes=max(0, update_bytes),
            gradient_bytes=self._gradient_bytes,
            shared_bytes=min(self._output_bytes, max(0, shared)),
            statistics_bytes=self._statistics_bytes,
            graph_bytes=graph,
            moved_bytes=meter.moved_bytes,
            staying_bytes=max(0, graph - meter.entered_bytes),
            moment_bytes=self._moment_bytes,
            lasting_bytes=lasting_bytes,
        )


@dataclass(frozen=True)
class Halves:
    """Bytes and seconds of the two halves of a stage's backward of one microbatch; fields as in `ActionBytes`.

    held_bytes: held between the halves and freed by W.
    """

    input_half_bytes: int
    weight_half_bytes: int
    first_weight_half_bytes: int
    noted_bytes: int
    noted_seed_bytes: int
    held_bytes: int
    input_seconds: float
    weight_seconds: float

    def added_to(self, row: Observation) -> Observation:
        """Return `row`, of the same stage, with these bytes and seconds added."""
        actions = row.action_bytes
        if actions is not None:
            actions = dataclasses.replace(actions, **{name: getattr(self, name) for name in HALVES})
        return dataclasses.replace(
            row,
            input_seconds=self.input_seconds,
            weight_seconds=self.weight_seconds,
            weight_bytes=self.held_bytes,
            action_bytes=actions,
        )


class HalfWeights:
    """Collects the windows of one stage's I and W in a step after the first, of at least two microbatches."""

    def __init__(self) -> None:
        self._windows: dict[tuple[str, int], Window] = {}
        self._ends = 0
        self._noted = (0, 0)

    def add(self, kind: str, stage: Stage, context: CallContext, window: Window, residue: ActionResidue) -> None:
        """Add one action, unless it is no half of a backward. residue: bytes that remain after the action."""
        if kind not in "IW":
            return
        before, behind = (
            sum(context.specs[value].num_bytes for value in values if context.specs[value].requires_grad)
            for values in (stage.ports.enters, stage.ports.leaves)
        )
        self._ends = before - (0 if stage.ends_in_loss else behind)
        self._windows[kind, context.index] = window
        self._noted = max(self._noted, (residue.noted, residue.seeds))

    def result(self, input_seconds: float, weight_seconds: float) -> Halves:
        """Return the bytes and seconds of the halves.

        The second W frees all that was held. Where the first I frees less than the second, the tensors that the first I
        made also count as held: in a part that torch differentiates as a whole, I makes the parameters' gradients.
        """
        peaks = {key: window.peak - window.before for key, window in self._windows.items()}
        freed = {key: window.before - window.after for key, window in self._windows.items()}
        graph = freed["I", 1] + freed["W", 1] + self._ends
        held = max(0, freed["W", 1], graph - freed["I", 0] - self._ends)
        inputs = max(size for (kind, _), size in peaks.items() if kind == "I")
        later = max(size for (kind, number), size in peaks.items() if kind == "W" and number)
        return Halves(max(0, inputs), later, peaks["W", 0], *self._noted, held, input_seconds, weight_seconds)


class ActionProbe(PeakProbe):
    """`PeakProbe` that also gives the window of every action inside it.

    lasting_bytes: bytes on the device beyond `held` when the probe was made, as in `ActionBytes`; None on the CPU,
        where they are no part of the peak.
    windows, end_bytes: the windows in the order of their begins, and the peak after the last window; complete at the
        block's end.
    """

    def __init__(self, device: torch.device, held: Sequence[Tensor] = ()) -> None:
        super().__init__(device, held)
        self.lasting_bytes: int | None = None
        if device.type != "cpu":
            gc.collect()  # frees layers of an earlier run, which would count in this run's peak
            held_bytes = storage_bytes(tensor for tensor in held if tensor.device.type == device.type)
            self.lasting_bytes = max(0, accelerator.allocated_bytes(device) - held_bytes)
        self._highest = 0
        self.windows: list[Window] = []
        self.end_bytes = 0

    @contextlib.contextmanager
    def action(self) -> Iterator[None]:
        """Record the window of the enclosed action."""
        if self._device.type == "cpu":
            self.windows.append(Window(0, 0, 0))
            with record_function(f"{_MARK}{len(self.windows) - 1}"):
                yield
            return
        self._since_reset()
        before = accelerator.allocated_bytes(self._device)
        yield
        peak = self._since_reset()
        self.windows.append(Window(before, peak, accelerator.allocated_bytes(self._device)))

    def __exit__(self, *raised: Any) -> None:
        profile, held = self._profile, dict(self._held)
        super().__exit__(*raised)
        self.end_bytes = self.peak_bytes
        self.peak_bytes = max(self.peak_bytes, self._highest)
        if profile is not None and profile.kineto_results is not None:
            self._read(profile.kineto_results.experimental_event_tree(), held)

    def _since_reset(self) -> int:
        """Return the peak since the last call, on accelerators."""
        peak = accelerator.peak_bytes(self._device)
        self._highest = max(self._highest, peak)
        accelerator.reset_peak(self._device)
        return peak

    def _read(self, tree: Any, held: dict[int, int]) -> None:
        """Read the windows between the marks from all allocations, on the CPU."""
        marks: dict[int, tuple[int, int]] = {}
        waiting = list(tree)
        while waiting:
            event = waiting.pop()
            waiting.extend(event.children)
            if event.name.startswith(_MARK):
                marks[int(event.name.removeprefix(_MARK))] = event.start_time_ns, event.end_time_ns
        # at equal times, begins of marks come before allocations, and ends of marks after them
        course = [(time, 1, address, size) for time, address, size in _allocations(tree)]
        course += [(begin, 0, number, 0) for number, (begin, _) in marks.items()]
        course += [(end, 2, number, 0) for number, (_, end) in marks.items()]
        live, current = dict(held), sum(held.values())
        peak, before = current, 0
        for _, kind, key, size in sorted(course, key=lambda moment: moment[:2]):
            if kind == 0:
                before = peak = current
            elif kind == 2:
                self.windows[key] = Window(before, peak, current)
                peak = current
            else:
                current -= live.pop(key, 0)
                if size > 0:
                    live[key] = size
                    current += size
                    peak = max(peak, current)
        self.end_bytes = peak
