"""Patches of Varuna's executor: its tasks, its messages, each forward, recomputation and backward.

`Pipeline.run` and its loop over the schedule stay Varuna's. The thread of the stage itself sends all messages and
receives activations; the thread that receives gradients puts its error into the queue that the stage reads. In the
original every message passed through a thread, and if a thread failed, it ended silently and its stage waited forever.
"""

from __future__ import annotations

import functools
import itertools
import math
import queue
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from varuna_capslog import accelerator
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.processes import OwnedThread
from varuna_capslog.varuna_plugin import wire
from varuna_capslog.varuna_plugin.options import current
from varuna_capslog.varuna_plugin.tracing import copied_buffers, refuse_phantom

__all__ = [
    "BoundedDistributed",
    "Microbatches",
    "WatchedQueue",
    "forward",
    "grads_receiver",
    "restore_random_state",
    "run",
    "save_random_state",
    "scatter",
    "spawn_receive_workers",
    "spawn_send_workers",
    "varuna_tasks",
    "worker",
]


# -- A minibatch's inputs cut into microbatches: tensors, lists of targets, nested structures.
#
# Replaces Varuna's `scatter`, which takes dictionaries of tensors only. Sizes are checked: a batch of another size
# than Varuna was built for would run with missing microbatches.


class Microbatches(dict[int, dict[str, Any]]):
    """Inputs for `Varuna.step` that the user has cut into microbatches, by number; shapes may differ between them.

    batches: one dictionary of model inputs per microbatch, as many as Varuna was built for. sizes: samples in each, the
    weights of a mean loss; default: equal weights.
    """

    def __init__(self, batches: Sequence[Mapping[str, Any]], sizes: Sequence[int] | None = None) -> None:
        super().__init__(enumerate(map(dict, batches)))
        self.sizes = [1] * len(self) if sizes is None else list(sizes)
        if not self or len(self.sizes) != len(self) or min(self.sizes) < 1:
            raise CapslogError(
                f"{len(self)} microbatches with sizes {self.sizes}: at least one microbatch, and one positive "
                "size for each, are needed"
            )


def scatter(inputs: Mapping[str, Any] | Microbatches, batch_size: int, microbatch_size: int) -> Microbatches:
    """Return the inputs of each microbatch of `microbatch_size` samples; the last one may be shorter.

    A tensor of `batch_size` rows and a list of `batch_size` entries are cut (such a list has one entry per sample,
    whatever the entries are). Dictionaries, tuples and other lists are cut entry by entry. A tensor with one row or
    without dimensions, and any other value, go to every microbatch unchanged.

    Raises CapslogError for a tensor with another number of rows, or for another number of `Microbatches`.
    """
    count = math.ceil(batch_size / microbatch_size)
    if isinstance(inputs, Microbatches):
        if len(inputs) != count:
            raise CapslogError(
                f"{len(inputs)} microbatches were given, but Varuna was built for {count} "
                f"(batch size {batch_size} per replica, chunk size {microbatch_size})"
            )
        return inputs
    bounds = [(start, min(start + microbatch_size, batch_size)) for start in range(0, batch_size, microbatch_size)]
    batches = [
        {name: _part(value, start, end, batch_size, name) for name, value in inputs.items()} for start, end in bounds
    ]
    return Microbatches(batches, [end - start for start, end in bounds])


def _part(value: Any, start: int, end: int, batch_size: int, name: str) -> Any:
    if isinstance(value, Tensor):
        if value.dim() == 0 or (value.shape[0] == 1 and batch_size != 1):
            return value
        if value.shape[0] != batch_size:
            raise CapslogError(
                f"input {name!r} has {value.shape[0]} rows, but Varuna was built for {batch_size} samples per replica; "
                "give whole batches (drop_last), a tensor of one row for all samples, or plugin.Microbatches"
            )
        return value[start:end]
    if isinstance(value, list) and len(value) == batch_size:
        return value[start:end]
    if isinstance(value, Mapping):
        return {key: _part(item, start, end, batch_size, f"{name}[{key!r}]") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        parts = [_part(item, start, end, batch_size, f"{name}[{index}]") for index, item in enumerate(value)]
        if hasattr(value, "_fields"):  # a named tuple
            return type(value)(*parts)
        return parts if isinstance(value, list) else tuple(parts)
    return value


# -- Patches of Varuna's executor


FORWARD, RECOMPUTE, BACKWARD = 0, 1, 2
"""Task numbers of Varuna's executor."""

_WEIGHTS = 3
"""Second half of a backward: takes one quantum of time, but is no task of Varuna's lists."""

_AFTER_RECEIVER = 1.0
"""Seconds that a stage waits longer than its receiving thread, since that thread's error says more."""

_AHEAD = 5
"""Receives that are posted at a time, as in Varuna."""

_UNDER_WAY = 4
"""Messages that may be under way before a sender waits for the oldest, as in Varuna."""


class WatchedQueue(queue.Queue[Any]):
    """Queue into which a failing writer puts its error, and whose reader waits for the configured timeout at most."""

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Get like `Queue.get()`. Raises the writer's error, or CapslogError after the configured timeout."""
        limit = current().timeout.total_seconds() + _AFTER_RECEIVER
        try:
            item = super().get(timeout=limit)
        except queue.Empty:
            raise CapslogError(f"waited {limit:g} s for a microbatch of another stage; its rank hangs") from None
        if isinstance(item, BaseException):
            self.put(item)
            raise item
        return item


class BoundedDistributed:
    """`torch.distributed` for Varuna's executor, with its barrier bounded by the configured timeout."""

    def __init__(self) -> None:
        self.world: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def barrier(self, group: Any = None) -> None:
        """Wait like `torch.distributed.barrier`; by default in the group of all ranks that has the timeout."""
        with wire.peer_errors("waiting for all ranks at the end of a step", None, current().timeout):
            dist.barrier(group=self.world if group is None else group)


# -- tasks of a stage


def varuna_tasks(num_microbatches: int, stage: int, num_stages: int) -> list[tuple[int, int]]:
    """Return a stage's pairs (task, microbatch) in the order of Varuna's `genschedule`; microbatches count from 0.

    Replaces the call of that binary, which an ordinary installation does not contain: Varuna's list would be empty and
    a step would train nothing. The rules are those of Microsoft's generator (time in equal quanta, one task per stage
    and quantum); tests compare with lists that the binary printed. Our own generator, `schedules.generators`, follows
    the paper and gives other lists.

    In each quantum a stage takes its most urgent waiting task: the weight half of a backward (`_WEIGHTS`), else a
    backward, a recomputation, a forward; of each kind the oldest. The task makes others wait from the next quantum on:

    - a forward: the next stage's forward, on the last stage its own backward;
    - a backward: its own weight half, and the recomputation of the stage before;
    - a recomputation: its own backward.

    Raises CapslogError for numbers that make no pipeline.
    """
    if num_microbatches < 1 or not 0 <= stage < num_stages:
        raise CapslogError(
            f"{num_microbatches} microbatches, stage {stage} of {num_stages}: at least one microbatch and a stage "
            "below the number of stages are needed"
        )
    last = num_stages - 1
    waiting: list[dict[int, deque[int]]] = [
        {kind: deque() for kind in (_WEIGHTS, BACKWARD, RECOMPUTE, FORWARD)} for _ in range(num_stages)
    ]
    waiting[0][FORWARD].extend(range(num_microbatches))
    tasks: list[tuple[int, int]] = []
    while True:
        taken: list[tuple[int, int, int]] = []
        for place, queues in enumerate(waiting):
            kind = next((kind for kind, queue in queues.items() if queue), None)
            if kind is not None:
                taken.append((place, kind, queues[kind].popleft()))
        if not taken:
            return tasks
        for place, kind, microbatch in taken:
            if place == stage and kind != _WEIGHTS:
                tasks.append((kind, microbatch))
            if kind == FORWARD:
                waiting[min(place + 1, last)][FORWARD if place < last else BACKWARD].append(microbatch)
            elif kind == RECOMPUTE:
                waiting[place][BACKWARD].append(microbatch)
            elif kind == BACKWARD:
                waiting[place][_WEIGHTS].append(microbatch)
                if place > 0:
                    waiting[place - 1][RECOMPUTE].append(microbatch)


# -- messages


class Outbox:
    """Sender of a stage's bundles in one direction, in place of Varuna's queue and sending thread: to begin a send
    takes 20 microseconds for any size, less than to pass a bundle to another thread.
    """

    def __init__(self, pipeline: Any, kind: int) -> None:
        self._peer = pipeline.send_rank if kind == FORWARD else pipeline.receive_rank
        self._gradients, self._room = kind == BACKWARD, pipeline.partitioned_model.capslog.rooms[kind, "out"]
        self._microbatches = iter(_microbatches(pipeline, kind))
        self._under_way: deque[wire.Sending] = deque()
        # the schedule runs this stage that many microbatches ahead of the next, so it must not wait for them here
        ahead = sum(1 for _ in itertools.takewhile(lambda task: task[0] == FORWARD, pipeline.schedule))
        self._most_under_way = max(_UNDER_WAY, ahead) if kind == FORWARD else _UNDER_WAY

    def put(self, bundle: wire.Bundle) -> None:
        """Begin to send the next microbatch's bundle. Raises PeerLost."""
        sending = wire.send(bundle, next(self._microbatches), self._peer, self._gradients, self._room)
        self._under_way.append(sending)
        if len(self._under_way) > self._most_under_way:
            self._under_way.popleft().wait(current().timeout)

    def end_step(self) -> None:
        """Wait until all bundles are sent. Raises PeerLost."""
        for sending in self._under_way:
            sending.wait(current().timeout)
        self._room.end_step()


class Inbox:
    """Receiver of a stage's bundles in one direction. Posts receives ahead, since each receive that is posted in the
    middle of a computation wakes gloo's thread.
    """

    def __init__(self, pipeline: Any, kind: int) -> None:
        stage, forward = pipeline.partitioned_model.capslog, kind == FORWARD
        tensors = (stage.entry if forward else stage.exit).spec.tensors
        count = len(tensors) if forward else sum(spec.requires_grad for spec in tensors)
        peer = pipeline.receive_rank if forward else pipeline.send_rank
        self._room = stage.rooms[kind, "in"]
        self._expected = functools.partial(wire.Expected, count, peer, not forward, self._room)
        self._microbatches = deque(_microbatches(pipeline, kind))
        self._posted = deque(self._expected() for _ in range(min(_AHEAD, len(self._microbatches))))

    def __len__(self) -> int:
        """Number of bundles that are still to come in this step."""
        return len(self._microbatches)

    def get(self) -> wire.Bundle:
        """Wait for the next microbatch's bundle. Raises PeerLost, and CapslogError as `wire.Expected.take`."""
        bundle = self._posted.popleft().take(self._microbatches.popleft(), current().timeout)
        if len(self._microbatches) > len(self._posted):
            self._posted.append(self._expected())
        if not self._microbatches:
            self._room.end_step()
        return bundle


def _microbatches(pipeline: Any, kind: int) -> list[int]:
    return [microbatch for task, microbatch in pipeline.schedule if task == kind]


def spawn_send_workers(self: Any) -> None:
    """Replace `Pipeline.spawn_send_workers`, which starts two threads."""
    self.acts_send_thread = self.grads_send_thread = None
    self.acts_send_queue = Outbox(self, FORWARD) if self.stage < self.partitions - 1 else None
    self.grads_send_queue = Outbox(self, BACKWARD) if self.stage > 0 else None


def spawn_receive_workers(self: Any) -> None:
    """Replace `Pipeline`'s method: only gradients have a thread, since their arrival changes the order of tasks."""
    self.acts_receive_thread = self.grads_receive_thread = None
    if self.stage > 0:
        self.acts_queue = self.partitioned_model.acts_queue = Inbox(self, FORWARD)
    if self.stage < self.partitions - 1:
        self.grads_receive_thread = OwnedThread("gradients", self.grads_receiver, self.grads_queue.put)
        self.grads_receive_thread.start()


def grads_receiver(self: Any) -> None:
    """Replace `Pipeline.grads_receiver`, which receives only float tensors of one shape."""
    inbox = Inbox(self, BACKWARD)
    while inbox:
        self.grads_queue.put(inbox.get())


def run(original: Callable[[Any], Any], self: Any) -> Any:
    """Wrap `Pipeline.run`: wait until its messages are sent, and name a lost rank."""
    with wire.peer_errors("waiting for its pipeline at the end of a step", None, current().timeout):
        result = original(self)
    for outbox in filter(None, (self.acts_send_queue, self.grads_send_queue)):
        outbox.end_step()
    return result


# -- a task


def worker(original: Callable[..., Any], self: Any, task: int, grad_mode: bool, inputs_as_dict: Any) -> Any:
    """Wrap `Pipeline.worker`: weight each microbatch by its samples; send one message back in every backward."""
    if task != BACKWARD:
        return original(self, task, grad_mode, inputs_as_dict)
    stage = self.partitioned_model.capslog
    stage.watch_backward("begun")
    # Varuna divides a microbatch's loss by `chunks`, its number of microbatches
    self.chunks = _divisor(self.batches, inputs_as_dict)
    stage.gradients_sent = False
    result = original(self, task, grad_mode, inputs_as_dict)
    if stage.entry is not None and not stage.gradients_sent:
        # the stage's output does not depend on the received tensors
        stage.entry.send_gradients((None,) * len(stage.entry.spec.tensors))
    stage.watch_backward("ended")
    return result


def _divisor(batches: Microbatches, inputs: Any) -> float:
    if current().loss == "sum":
        return 1.0
    mine = next(batches.sizes[index] for index, batch in batches.items() if batch is inputs)
    return sum(batches.sizes) / mine


def forward(original: Callable[..., Any], self: Any, inputs_as_dict: Any, recompute: bool = False, **flags: Any) -> Any:
    """Wrap `PartitionedModel.forward`. A recomputation leaves no traces: random numbers continue as if it had not
    happened, and running statistics keep their values of the first forward.
    """
    stage = self.capslog
    stage.begin()
    if stage.draws is not None:
        stage.draws.begin_forward(inputs_as_dict)
    if recompute:
        state = save_random_state(self.device)
        with copied_buffers(stage.norms):
            result = original(self, inputs_as_dict, recompute=True, **flags)
        restore_random_state(state, self.device)
    else:
        result = original(self, inputs_as_dict, **flags)
    if not stage.active or (stage.exit is not None and not stage.reached_exit):
        cut = stage.exit if stage.active else stage.entry
        raise CapslogError(
            f"the forward ended without reaching CutPoint {cut.spec.name!r}; it must pass every CutPoint each time"
        )
    refuse_phantom(result, "the model's result is")
    return result


def save_random_state(device: torch.device) -> tuple[Any, Any]:
    """Replace Varuna's `save_rng_states`, which calls CUDA also on the CPU."""
    return torch.get_rng_state(), None if device.type == "cpu" else accelerator.random_state(device)


def restore_random_state(state: tuple[Any, Any], device: torch.device) -> None:
    """Replace Varuna's `restore_rng_states`; the counterpart of `save_random_state`."""
    torch.set_rng_state(state[0])
    if state[1] is not None:
        accelerator.set_random_state(device, state[1])
