"""The processes of a profile on Varuna: workers that measure one trimmed job after another, and their neighbours.

A worker builds the model's skeleton once and forks the two processes that play the stages before and behind. Every run
is a Varuna job of its own, built anew, since Varuna cuts a model up for good.
"""

from __future__ import annotations

import contextlib
import copy
import io
import multiprocessing
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from varuna_capslog.engine.communicator import PeerLost, connect
from varuna_capslog.profiles.record import Observation
from varuna_capslog.profiling.conditions import RunConditions
from varuna_capslog.profiling.skeleton import hollow_module, real_parameter
from varuna_capslog.profiling.trim import MICROBATCHES, TrimmedRun
from varuna_capslog.profiling.worker import WorkerGroup, belong_to_parent, end_with_client, sentence
from varuna_capslog.varuna_plugin import options
from varuna_capslog.varuna_plugin.inputs import Microbatches
from varuna_capslog.varuna_plugin.install import install, uninstall
from varuna_capslog.varuna_plugin.profiling.meter import STEPS, observe
from varuna_capslog.varuna_plugin.splitting.partition import Partition, tie_groups

if TYPE_CHECKING:
    from varuna_capslog.varuna_plugin.profiling.measure import Subject

__all__ = ["VarunaWorkers"]

_BEFORE, _MEASURED, _BEHIND = range(3)


class VarunaWorkers(WorkerGroup):
    """`profiles.worker`'s group with Varuna jobs for work; its source gives a `Subject`."""

    @staticmethod
    def target() -> Callable[..., None]:
        return _work


def _work(
    pipe: Connection, source: Callable[[], Subject], number: int, port: int, device: torch.device, threads: int
) -> None:
    """A worker: measures the runs that come through `pipe`, until it closes."""
    belong_to_parent()
    torch.set_num_threads(1)
    pipes: list[tuple[Connection, Connection]] = [multiprocessing.Pipe(), multiprocessing.Pipe()]
    try:
        subject = source()
        with contextlib.redirect_stdout(io.StringIO()):  # Varuna prints while it is imported
            model = hollow_module(subject.build)
        # before any thread or CUDA context exists here
        for role, (_, theirs) in zip((_BEFORE, _BEHIND), pipes, strict=True):
            foreign = [pipe, *(end for pair in pipes for end in pair if end is not theirs)]
            arguments = (theirs, foreign, subject, model, role, number, port)
            multiprocessing.get_context("fork").Process(target=_neighbour, args=arguments, daemon=True).start()
        for _, theirs in pipes:
            theirs.close()
        threading.Thread(target=end_with_client, daemon=True).start()
        torch.set_num_threads(threads)
        pipe.send(("ready", None))
        count = 0
        while True:
            run, conditions = pipe.recv()
            count += 1
            for ours, _ in pipes:
                ours.send((run, conditions))
            pipe.send(("done", _play(subject, model, run, conditions, _MEASURED, f"{number}-{count}", port, device)))
    except (EOFError, BrokenPipeError):
        return
    except PeerLost as error:
        # the neighbour knows why it left
        told = [ours.recv() for ours, _ in pipes if ours.poll(1.0)]
        pipe.send(("failed", told[0] if told else str(error)))
    except Exception as error:
        pipe.send(("failed", sentence(error)))


def _neighbour(
    tasks: Connection,
    foreign: Sequence[Connection],
    subject: Subject,
    model: nn.Module,
    role: int,
    number: int,
    port: int,
) -> None:
    """What plays the stage before or behind a worker's runs; `foreign` are the worker's own ends of pipes."""
    belong_to_parent()
    for connection in foreign:
        connection.close()
    count = 0
    try:
        while True:
            run, conditions = tasks.recv()
            count += 1
            _play(subject, model, run, conditions, role, f"{number}-{count}", port, torch.device("cpu"))
    except (EOFError, PeerLost):
        return  # the worker is gone or has failed, and says why itself
    except Exception as error:
        tasks.send(sentence(error))


def _play(
    subject: Subject,
    model: nn.Module,
    run: TrimmedRun,
    conditions: RunConditions,
    role: int,
    generation: str,
    port: int,
    device: torch.device,
) -> Observation | None:
    """One rank of a run: None on neighbours, and where the run has no stage for this role."""
    cuts = [0] if run.first == 0 else [0, run.first]
    cuts += [run.end] if run.has_downstream else []
    stage = role - 1 + run.has_upstream
    if not 0 <= stage < len(cuts):
        return None
    interest = int(run.has_upstream)
    with contextlib.redirect_stdout(io.StringIO()):  # Varuna prints as it goes
        communicator = connect(stage, len(cuts), "127.0.0.1", port, f"varuna-{generation}", subject.timeout_seconds)
        try:
            install()
            options.configure(
                cuts=cuts, stages_of_interest=[interest], loss=subject.loss, timeout_seconds=subject.timeout_seconds
            )
            options.know_trace(subject.trace)
            trainer = _built(subject, model, stage, interest, len(cuts), device)
            inputs = Microbatches([_moved(subject.batch, device)] * MICROBATCHES, [subject.chunk_size] * MICROBATCHES)
            if stage == interest:
                return observe(trainer, inputs, (run.first, run.end), conditions)
            for _ in range(STEPS):
                trainer.step(inputs)
                trainer.optimizer.step()
                trainer.zero_grad()
            return None
        finally:
            uninstall()
            communicator.close()


def _built(subject: Subject, model: nn.Module, stage: int, interest: int, stages: int, device: torch.device) -> Any:
    """This rank's Varuna around a copy of the model, of which what the stage holds has memory."""
    import varuna

    partition = Partition(subject.trace, tuple(options.current().cuts or ()))
    shared = {name for tie in tie_groups(partition) if interest in tie.stages for name in tie.names}
    memo: dict[int, Any] = {}
    for name, parameter in model.named_parameters():
        held = stage in partition.stages_of[name] and (stage == interest or name in shared)
        # Varuna takes the others away for good, so they must not be the skeleton's own
        hollow = nn.Parameter(torch.empty_like(parameter), requires_grad=parameter.requires_grad)
        memo[id(parameter)] = real_parameter(parameter) if held else hollow
    torch.manual_seed(0)
    own = copy.deepcopy(model, memo)
    size = MICROBATCHES * subject.chunk_size
    kind = "cpu" if device.type == "cpu" else device.index
    mapping = "".join(f"{rank};" for rank in range(stages))
    trainer = varuna.Varuna(own, mapping, lambda *_, **__: subject.batch, size, subject.chunk_size, device=kind)
    trainer.set_optimizer(subject.optimizer(list(trainer.parameters())))
    return trainer


def _moved(value: Any, device: torch.device) -> Any:
    """The batch on a device, as scripts bring it there."""
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), value)
