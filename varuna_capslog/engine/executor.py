"""Runs one rank's program of a step; called by `pipeline.PipelineEngine`'s `compute` and `evaluate`.

For an action it calls the `stage.Stage` that the action names. Sends and receives move tensors between ranks: receives
are posted ahead, sends never block. The executor knows neither models nor optimizers.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import accumulate
from typing import Any, TypeAlias

import torch
from torch import Tensor

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.engine.communicator import Communicator, Pending
from varuna_capslog.engine.grains import Joining
from varuna_capslog.engine.layout import Routes, value_of
from varuna_capslog.engine.stage import CallContext, Stage
from varuna_capslog.model.chain import TensorSpec
from varuna_capslog.schedules import Action, Lowered, Message, Recv, SendInstruction, backwards_at_once
from varuna_capslog.schedules.lower import Instruction
from varuna_capslog.schedules.traffic import POSTED_AHEAD, POSTED_AHEAD_BYTES

__all__ = ["Executor", "Observer", "Stopwatch"]


# -- Time that a rank computes in a step, without its waits for messages and data.


class Stopwatch:
    """Context manager around each action, which sums the seconds of all actions on one device.

    On a CPU these are wall seconds, which other programs lengthen. On an accelerator they are the seconds between
    events on the current stream, which is not synchronized before `take`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._on_cpu = device, device.type == "cpu"
        self._seconds = self._began = 0.0
        self._events: list[torch.Event] = []

    def __enter__(self) -> None:
        if self._on_cpu:
            self._began = time.perf_counter()
        else:
            self._record()

    def __exit__(self, *error: object) -> None:
        if self._on_cpu:
            self._seconds += time.perf_counter() - self._began
        else:
            self._record()

    def _record(self) -> None:
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        self._events.append(event)

    def take(self) -> float:
        """Return the seconds of computation since the last call, after waiting for the device to end it."""
        for begun, ended in zip(self._events[::2], self._events[1::2], strict=False):
            ended.synchronize()
            self._seconds += begun.elapsed_time(ended) / 1000
        seconds = self._seconds
        self.reset()
        return seconds

    def reset(self) -> None:
        """Drop the measurements without waiting for the device, which may have failed."""
        self._seconds = 0.0
        self._events.clear()


# -- a step's actions on one rank


_TENSORS_PER_MESSAGE = 64
Contexts: TypeAlias = "Callable[[tuple[int, ...]], CallContext]"
"""Maps the microbatches of a call to their context."""
_UNOBSERVED: AbstractContextManager[None] = contextlib.nullcontext()


class Observer:
    """Base class for observers of an engine; its methods do nothing. An observer must not change any tensor."""

    def instruction(self, position: int, instruction: Instruction) -> None:
        """Called before each instruction of this rank's program, also in an evaluation; `position` counts from 0."""

    def working(self, kind: str, stage: Stage, context: CallContext) -> AbstractContextManager[None]:
        """Context manager that is open during one training action of `stage`; `kind` is F, R, B, I or W."""
        return _UNOBSERVED


def acknowledgements(lowered: Lowered, rank: int) -> dict[Message, int]:
    """Map each message that `rank` receives to the number of `rank`'s messages that its sender had received by then.
    The number follows from the sender's program, so no acknowledgement is ever sent.
    """
    arrived: dict[Message, int] = {}
    for peer in range(len(lowered.programs)):
        received = 0
        for instruction in lowered.programs[peer]:
            if isinstance(instruction, Recv) and instruction.peer == rank:
                received += 1
            elif isinstance(instruction, SendInstruction) and instruction.peer == rank:
                arrived[instruction.message] = received
    return arrived


class Executor:
    """Executor of one rank's program. stages: the rank's, by number."""

    def __init__(
        self,
        communicator: Communicator,
        lowered: Lowered,
        stages: Mapping[int, Stage],
        routes: Routes,
        observer: Observer | None = None,
        joining: Joining | None = None,
    ) -> None:
        self._communicator, self._stages = communicator, stages
        self._program = lowered.programs[communicator.rank]
        self._routes, self._graph = routes, lowered.graph
        counts = [max(len(self._graph.calls[stage]) for stage in edge) for edge in self._graph.edges]
        # number of the first message over each edge; the messages of one direction are numbered edge by edge
        self._first_message = dict(zip(self._graph.edges, accumulate([0, *counts]), strict=False))
        self._observer, self._joining = observer, joining or Joining({})
        self._device = next(iter(stages.values())).device
        self.stopwatch = Stopwatch(self._device)
        self._acknowledged = acknowledgements(lowered, communicator.rank)
        actions = [action for action in self._program if isinstance(action, Action)]
        self._at_once = backwards_at_once(actions)
        self._offloaded = {(action.stage, action.microbatch) for action in actions if action.kind == "O"}
        self._offloading: list[Callable[[], None]] = []
        self.doing = "idle"

    def run(
        self,
        contexts: Contexts,
        load: Callable[[int], dict[str, Tensor]],
        after_backward: Callable[[Stage, int], None] | None = None,
        evaluate: Callable[[CallContext, dict[str, Tensor]], None] | None = None,
    ) -> None:
        """Run the program once.

        Args:
            load: maps a microbatch to the inputs of the chain.
            after_backward: called after each B or W with the stage and the last microbatch of the call.
            evaluate: if given, stages keep nothing, and the outputs of the chain are passed to it with their context.
        """
        transfers = _Transfers(self, contexts)
        arrived: dict[Message, dict[Any, Tensor]] = {}
        observer = self._observer
        for position, instruction in enumerate(self._program):
            if observer is not None:
                observer.instruction(position, instruction)
            if isinstance(instruction, SendInstruction):
                transfers.send(instruction, arrived.pop(instruction.message))
            elif isinstance(instruction, Recv):
                self.doing = str(instruction)
                arrived[instruction.message] = transfers.receive(instruction)
            else:
                self.doing = str(instruction)
                self._act(instruction, contexts, arrived, load, after_backward, evaluate)
        transfers.finish()
        self._offloading.clear()
        self.doing = "idle"

    def _act(
        self,
        action: Action,
        contexts: Contexts,
        arrived: dict[Message, dict[Any, Tensor]],
        load: Callable[[int], dict[str, Tensor]],
        after_backward: Callable[[Stage, int], None] | None,
        evaluate: Callable[[CallContext, dict[str, Tensor]], None] | None,
    ) -> None:
        if action.microbatch is None:
            return  # U: the update is the caller's, after the vote
        number, call = place = action.stage, action.microbatch
        stage, microbatches = self._stages[number], self._graph.calls[number][call]
        context = contexts(microbatches)
        if action.kind == "O":
            self._offloading.append(stage.offload(context))
            return
        if action.kind == "L":
            stage.load(context)
            return
        settles, self._offloading = self._offloading, []
        before, after = self._graph.upstream[number][call], self._graph.downstream[number][call]
        if action.kind == "F":
            values = self._inputs(stage, context, load)
            values |= self._joined(arrived, [Message("activation", peer, place) for peer in before], context)
            if evaluate is not None:
                outgoing, outputs = stage.evaluate(context, values)
                if outputs is not None:
                    evaluate(context, outputs)
            else:
                with self._working("F", stage, context):
                    outgoing = stage.forward(
                        context, values, (number, call) in self._at_once, (number, call) in self._offloaded
                    )
            self._fill_messages(arrived, [Message("activation", place, peer) for peer in after], outgoing, contexts)
        elif action.kind == "R":
            with self._working("R", stage, context):
                stage.recompute(context)
        elif action.kind == "W":
            with self._working("W", stage, context):
                stage.backward_weights(context)
        else:
            gradients = self._joined(arrived, [Message("gradient", place, peer) for peer in after], context)
            with self._working(action.kind, stage, context):
                handed_back = stage.backward(context, gradients, action.kind == "I")
            self._fill_messages(arrived, [Message("gradient", peer, place) for peer in before], handed_back, contexts)
        if action.kind in "BW" and after_backward is not None:
            after_backward(stage, microbatches[-1])
        # storages that were offloaded during this action are freed here, so that memory does not depend on timing
        for settle in settles:
            settle()

    def _inputs(
        self, stage: Stage, context: CallContext, load: Callable[[int], dict[str, Tensor]]
    ) -> dict[Any, Tensor]:
        """Inputs of the chain that this stage reads, on its device."""
        if not stage.ports.inputs:
            return {}
        rows = [load(microbatch) for microbatch in context.microbatches]
        names = [value.name for value in stage.ports.inputs]
        tensors = rows[0] if len(rows) == 1 else {name: torch.cat([row[name] for row in rows]) for name in names}
        return {value: tensors[value.name].to(self._device, non_blocking=True) for value in stage.ports.inputs}

    def _joined(
        self,
        arrived: dict[Message, dict[Any, Tensor]],
        messages: Sequence[Message],
        context: CallContext,
    ) -> dict[Any, Tensor]:
        """Tensors that a call gets from calls of other stages, joined; they are removed from `arrived`."""
        joined: dict[Any, Tensor] = {}
        pieces: dict[Any, list[Tensor]] = {}
        for message in messages:
            tensors = arrived.pop(message, {})
            if len(self.microbatches_of(message)) == len(context.microbatches):
                joined |= tensors
                continue
            for key in list(tensors):
                pieces.setdefault(key, []).append(tensors.pop(key))
        for key in list(pieces):
            joined[key] = self._joining.join(key, pieces.pop(key), context.specs[value_of(key)])
        return joined

    def _fill_messages(
        self,
        arrived: dict[Message, dict[Any, Tensor]],
        messages: Sequence[Message],
        outgoing: Mapping[Any, Tensor],
        contexts: Contexts,
    ) -> None:
        """Put the tensors that a call made into the messages to calls of other stages, as entries of `arrived`."""
        for message in messages:
            gradient = message.kind == "gradient"
            keys = self._routes.gradients[message.edge] if gradient else self._routes.activations[message.edge]
            tensors = {key: outgoing[key] for key in keys if key in outgoing}
            stage, call = message.end(sends=True)
            microbatches, common = self._graph.calls[stage][call], self.microbatches_of(message)
            if len(common) < len(microbatches):
                specs, place = contexts(common).specs, microbatches.index(common[0]) // len(common)
                tensors = {
                    key: self._joining.part(key, tensor, place, specs[value_of(key)]) for key, tensor in tensors.items()
                }
            if tensors:
                arrived[message] = tensors

    def microbatches_of(self, message: Message) -> tuple[int, ...]:
        """Microbatches that a message carries: those of the smaller call of the two."""
        calls = self._graph.calls
        return min((calls[stage][call] for stage, call in (message.upstream, message.downstream)), key=len)

    def _working(self, kind: str, stage: Stage, context: CallContext) -> AbstractContextManager[Any]:
        if self._observer is None:
            return self.stopwatch
        both = contextlib.ExitStack()
        both.enter_context(self.stopwatch)
        both.enter_context(self._observer.working(kind, stage, context))
        return both


class _Transfers:
    """Sends and receives of one step on one rank. A sent tensor is freed when a later message proves its arrival."""

    def __init__(self, executor: Executor, contexts: Contexts) -> None:
        self._of = executor
        self._contexts = contexts
        self._pending = deque(instruction for instruction in executor._program if isinstance(instruction, Recv))
        self._posted: dict[Message, list[tuple[Any, Pending]]] = {}
        self._posted_bytes = 0
        self._under_way: dict[int, deque[list[Pending]]] = {}
        self._confirmed: dict[int, int] = {}
        self._post()

    def _specs(self, message: Message) -> list[tuple[Any, TensorSpec]]:
        """Keys of a message's tensors in sending order, each with its spec: values, or the gradients that exist."""
        routes, context = self._of._routes, self._contexts(self._of.microbatches_of(message))
        if message.kind == "activation":
            return [(value, context.specs[value]) for value in routes.activations[message.edge]]
        return [(key, context.specs[key[0]]) for key in routes.carried(message.edge, context.reach)]

    def _tag(self, message: Message) -> int:
        # the higher call number is that of the call with fewer microbatches, which has one message over this edge
        number = self._of._first_message[message.edge] + max(message.upstream[1], message.downstream[1])
        return (number * 2 + (message.kind == "gradient") + 1) * max(_TENSORS_PER_MESSAGE, self._of._routes.most)

    def _post(self) -> None:
        while self._pending:
            instruction = self._pending[0]
            message, peer = instruction.message, instruction.peer
            size = sum(spec.num_bytes for _, spec in self._specs(message))
            if len(self._posted) >= POSTED_AHEAD and self._posted_bytes + size > POSTED_AHEAD_BYTES:
                return
            self._pending.popleft()
            self._posted_bytes += size
            tag = self._tag(message)
            self._posted[message] = [
                (name, self._of._communicator.receive(spec, peer, tag + position, self._of._device))
                for position, (name, spec) in enumerate(self._specs(message))
            ]

    def receive(self, instruction: Recv) -> dict[Any, Tensor]:
        posted = self._posted[instruction.message]
        tensors = {name: receive.wait() for name, receive in posted}
        del self._posted[instruction.message]
        self._posted_bytes -= sum(spec.num_bytes for _, spec in self._specs(instruction.message))
        self._post()
        self._release(instruction.peer, self._of._acknowledged[instruction.message])
        return tensors

    def _release(self, peer: int, count: int) -> None:
        """Free the first `count` messages sent to `peer`, which have arrived."""
        queue = self._under_way.get(peer)
        while queue and self._confirmed.get(peer, 0) < count:
            for send in queue.popleft():
                send.wait()
            self._confirmed[peer] = self._confirmed.get(peer, 0) + 1

    def send(self, instruction: SendInstruction, tensors: Mapping[Any, Tensor]) -> None:
        """Begin to send a message's tensors in their specs' layout. Raises CapslogError for another dtype or shape."""
        message, peer = instruction.message, instruction.peer
        tag = self._tag(message)
        sends = []
        for position, (key, spec) in enumerate(self._specs(message)):
            tensor = tensors[key]
            if tensor.dtype != spec.dtype or tuple(tensor.shape) != spec.shape:
                raise CapslogError(
                    f"{value_of(key).name!r} goes to stage {message.downstream[0]} as "
                    f"{tensor.dtype}{list(tensor.shape)}, but the trace of the model says {spec.dtype}"
                    f"{list(spec.shape)}: shapes must follow from the input shapes alone"
                )
            if tensor.stride() != spec.stride:
                tensor = spec.empty(tensor.device).copy_(tensor)
            sends.append(self._of._communicator.send(tensor, peer, tag + position))
        self._under_way.setdefault(instruction.peer, deque()).append(sends)

    def finish(self) -> None:
        """Wait for all pending sends."""
        for peer, queue in self._under_way.items():
            self._release(peer, self._confirmed.get(peer, 0) + len(queue))
