"""A training on Varuna as the `Work` of an elastic run: cut anew for every generation, in the same processes.

The units that move are the model's pieces. A generation is a new Varuna over a fresh model from the user's factory,
filled with the states of this rank's pieces. Copies follow by the owners' final gradients and the same optimizer; the
forward's buffers are kept aside until the step is voted.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from varuna_capslog.base import files
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.elastic.member.work import Followed, LayerState, Opening, Outcome
from varuna_capslog.engine.communicator import Communicator, PeerLost
from varuna_capslog.membership.candidates import Steps
from varuna_capslog.membership.generation import Generation, Layout, Member, Stamp
from varuna_capslog.membership.placing import Placer
from varuna_capslog.membership.recovery import Seat
from varuna_capslog.training.layer_state import cloned
from varuna_capslog.varuna_plugin import building, checkpoint, piece_state
from varuna_capslog.varuna_plugin.checkpoint_files import read_tensors
from varuna_capslog.varuna_plugin.drawing import Draws
from varuna_capslog.varuna_plugin.elastic import disk as elastic_disk
from varuna_capslog.varuna_plugin.elastic.groups import VarunaGroups
from varuna_capslog.varuna_plugin.elastic.job import Job
from varuna_capslog.varuna_plugin.inputs import Microbatches
from varuna_capslog.varuna_plugin.options import configure, know_trace
from varuna_capslog.varuna_plugin.splitting.stages import ANCHOR
from varuna_capslog.varuna_plugin.splitting.tracing import trace_model

__all__ = ["VarunaWork"]

_CONNECT_SECONDS = 3.0
"""Of the first attempt; each that fails doubles it."""

_THREADS = ("acts_receive_thread", "grads_receive_thread", "acts_send_thread", "grads_send_thread")
_JOIN_SECONDS = 10.0


class VarunaWork:
    """One member's part.

    Args:
        rendezvous: gives a store client of the caller's own.
        resumed: where the boundary that the run begins with lies.
        stop_wished: asked once per step; True on any member stops all after it.
    """

    def __init__(
        self,
        me: Member,
        job: Job,
        rendezvous: Callable[[], dist.Store],
        device: torch.device,
        resumed: Mapping[Stamp, Path] | None = None,
        stop_wished: Callable[[], bool] = lambda: False,
    ) -> None:
        import varuna

        self.me, self.job, self.device = me, job, device
        self._varuna = varuna
        self._rendezvous, self._resumed, self._stop_wished = rendezvous, dict(resumed or {}), stop_wished
        self._spare: nn.Module | None = self._build()
        first = job.microbatches(1)
        if len(first.batches) != job.num_microbatches:
            raise CapslogError(
                f"get_batch gives {len(first.batches)} microbatches; batch_size={job.batch_size} with "
                f"chunk_size={job.chunk_size} make {job.num_microbatches}"
            )
        self.trace = trace_model(self._spare, first.batches[0], varuna.CutPoint)
        self._recipe = piece_state.OptimizerRecipe(job.build_optimizer(self._spare), self._spare)
        self._frozen = [name for name, p in self._spare.named_parameters() if not p.requires_grad]
        self.layer_bytes = piece_state.state_bytes(self._spare, self.trace)
        if job.profile is not None and job.profile.num_layers != self.trace.num_pieces:
            raise CapslogError(
                f"the profile is of {job.profile.num_layers} layers, the model has {self.trace.num_pieces} pieces; "
                "profile this model"
            )
        count = job.num_microbatches
        self.placer = Placer(
            job.profile,
            self.layer_bytes,
            Steps(count, 1, job.chunk_size if job.profile is not None else None),
            planner=job.planner,
            memory=job.memory,
            redundancy=job.elastic.redundancy,
            sync=job.elastic.protection == "sync",
            min_devices=job.elastic.min_devices,
            max_replicas=1,
        )
        self.checkpoints = job.run_dir / "checkpoints"
        os.makedirs(building.temporary_folder(), exist_ok=True)
        self._names = [piece_state.names_of(self.trace, piece) for piece in range(self.trace.num_pieces)]
        self._groups: VarunaGroups | None = None
        self._trainer: Any = None
        self._communicator: Communicator | None = None
        self._parameters: dict[str, nn.Parameter] = {}
        self._buffers: dict[str, Tensor] = {}
        self._settled: dict[str, Tensor] = {}  # buffers at the present boundary, whatever a forward does
        self._own: tuple[int, ...] = ()
        self._cuts: tuple[int, ...] = ()
        self._draws: Draws | None = None
        self._number = self._base = self._saved = 0
        self._connect_seconds = _CONNECT_SECONDS
        self._first = False
        self._measured: tuple[float, float] = (0.0, 0.0)
        self._records: deque[dict[str, Any]] = deque(maxlen=2)
        self._began = 0.0
        self.asked = False

    def _build(self) -> nn.Module:
        """A model as the user's factory makes it, whatever random numbers were drawn before."""
        with torch.random.fork_rng(), torch.enable_grad():
            torch.manual_seed(self.job.seed)
            return self.job.build_model()

    def _fresh(self) -> nn.Module:
        model, self._spare = self._spare, None
        return self._build() if model is None else model

    def place(self, seats: Sequence[Seat]) -> Layout | str:
        return self.placer(seats)

    def knows(self) -> None:
        return None

    # -- generations --------------------------------------------------------------------------------------------------

    def open(self, opening: Opening, communicator: Communicator, states: Mapping[int, LayerState]) -> None:
        cuts, stages, _ = self.placer.pipeline(opening.layout, opening.members)
        rank, job = communicator.rank, self.job
        self._end()
        torch.set_grad_enabled(True)  # whatever was broken off
        self._communicator, self._cuts = communicator, cuts
        self._own = tuple(sorted(states))
        self._number, self._base = opening.number, opening.base.step
        self._saved = self._saved if self._saved <= self._base else 0
        self._first = rank == 0
        if rank < stages:
            model = self._fresh()
            with self._breakable(communicator):
                communicator.gather(None)  # who was lost meanwhile is not waited for below
                name = f"varuna/{communicator.generation}"
                seconds = min(self._connect_seconds, job.timeout_seconds)
                self._connect_seconds *= 2
                self._groups = VarunaGroups(self._rendezvous(), name, rank, stages, seconds)
                communicator.abort_with(self._groups.abort)
                self._build_trainer(model, rank, stages, seconds)
                self._connect_seconds = _CONNECT_SECONDS
            for piece in reversed(self._own):  # what several pieces share is in all of them: the first one's counts
                piece_state.install(states[piece], *self._part(piece), self._trainer.optimizer)
            self._settled = {key: buffer.clone() for key, buffer in self._buffers.items()}
            self._trainer.iteration = self._base
        else:
            communicator.gather(None)
        if self._first:
            self._write_missing()

    def _build_trainer(self, model: nn.Module, rank: int, stages: int, seconds: float) -> None:
        """Varuna's part of this rank.

        Args:
            seconds: longest wait for the others while it is built.
        """
        job = self.job
        self._configure(seconds)
        with contextlib.redirect_stdout(io.StringIO()):  # Varuna prints as it goes
            self._trainer = self._varuna.Varuna(
                model,
                "".join(f"{stage};" for stage in range(stages)),
                lambda size, device=None: {},  # the trace is known
                job.batch_size,
                job.chunk_size,
                local_rank=rank,
                device="cpu" if self.device.type == "cpu" else self.device.index or 0,
            )
        self._configure(job.timeout_seconds)
        assert self._groups is not None
        self._groups.wait_for(job.timeout_seconds)
        partitioned = self._trainer.partitioned_model
        self._draws = Draws(partitioned.ordered_modules.values(), self.device, job.seed)
        partitioned.capslog.draws = self._draws
        self._parameters = {name: p for name, p in partitioned.module.named_parameters() if name != ANCHOR}
        self._buffers = dict(partitioned.module.named_buffers())
        self._trainer.set_optimizer(self._recipe.build(self._parameters))

    def _configure(self, seconds: float) -> None:
        configure(cuts=self._cuts, loss=self.job.loss, timeout_seconds=seconds)
        know_trace(self.trace)

    @contextlib.contextmanager
    def _breakable(self, communicator: Communicator) -> Any:
        """Whatever fails once the generation was ended here fails because of that."""
        try:
            yield
        except PeerLost:
            raise
        except Exception as error:
            if communicator.aborted:
                raise PeerLost(f"{self.me} was on Varuna when its generation was ended: {error}", None) from error
            raise

    def shelve(self) -> Mapping[int, LayerState]:
        states = {piece: self.state(piece, copy=False) for piece in self._own} if self._trainer is not None else {}
        self._end()
        return states

    def _end(self) -> None:
        """Nothing of a generation is left; also of one that could not be opened."""
        if self._groups is not None:
            self._groups.close()
        if self._trainer is not None:
            _join_threads(self._trainer)
            # modules refer to each other in circles; their tensors must not wait for a collection
            for module in self._trainer.partitioned_model.module.modules():
                module._parameters.clear()
                module._buffers.clear()
        self._groups = self._trainer = self._draws = self._communicator = None
        self._parameters, self._buffers, self._settled, self._own = {}, {}, {}, ()

    # -- a step -------------------------------------------------------------------------------------------------------

    def is_done(self, step: int) -> bool:
        return step >= self.job.steps

    def compute(self, step: int) -> bool:
        self._began = time.monotonic()
        if self._trainer is None:
            return True
        everything = self.job.microbatches(step)
        ready = Microbatches([self._on_device(batch) for batch in everything.batches], everything.sizes)
        assert self._draws is not None
        assert self._communicator is not None
        self._draws.begin_step(step, ready.batches)
        with self._breakable(self._communicator):
            loss, _, _ = self._trainer.step(ready, self.job.clip_grad_max_norm)
        torch.set_grad_enabled(True)
        self._measured = float(loss), float(self._trainer.capslog_grad_norm)
        return all(map(math.isfinite, self._measured))

    def _on_device(self, batch: dict[str, Any]) -> dict[str, Any]:
        if self.device.type == "cpu":
            return batch
        moved: dict[str, Any] = pytree.tree_map(lambda v: v.to(self.device) if isinstance(v, Tensor) else v, batch)
        return moved

    def vote(self, step: int, ballot: bytes) -> Outcome:
        assert self._communicator is not None
        mine = (ballot, self._stop_wished(), self._measured)
        gathered = self._communicator.gather(mine)
        self._measured = gathered[0][2]
        finite = all(map(math.isfinite, self._measured))
        return Outcome(finite, [votes for votes, _, _ in gathered], any(stop for _, stop, _ in gathered), 1.0)

    def apply(self, step: int) -> None:
        if self._trainer is not None:
            optimizer = self._trainer.optimizer
            self._prepare(optimizer, step)
            optimizer.step()
            self._trainer.zero_grad()
            self._trainer.iteration = step
            self._settled = {name: buffer.clone() for name, buffer in self._buffers.items()}
        loss, norm = self._measured
        seconds = round(time.monotonic() - self._began, 6)
        record = {"step": step, "loss": loss, "grad_norm": norm, "seconds": seconds, "generation": self._number}
        self._records.append(record)
        if self._first:
            files.append_jsonl(self.job.run_dir / "metrics.jsonl", record)
            if self.job.on_step is not None:
                self.job.on_step(step, loss, norm)

    def _prepare(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        if self.job.schedule is not None:
            self.job.schedule(optimizer, step)

    def _write_missing(self) -> None:
        """Whoever wrote before may have been lost between applying a step and writing its line."""
        path = self.job.run_dir / "metrics.jsonl"
        written = {line.get("step") for line in files.last_lines(path)} if self._records and path.exists() else set()
        for record in self._records:
            if record["step"] <= self._base and record["step"] not in written:
                files.append_jsonl(path, record)

    def discard(self, step: int) -> str:
        for name, buffer in self._buffers.items():
            buffer.copy_(self._settled[name])
        if self._trainer is not None:
            self._trainer.zero_grad()
        loss, norm = self._measured
        return (
            f"step {step}: not finite: loss {loss:g}, gradient norm {norm:g}; nothing was applied: lower the learning "
            "rate or look at the inputs of this step"
        )

    # -- states -------------------------------------------------------------------------------------------------------

    def _part(self, piece: int) -> tuple[dict[str, nn.Parameter], dict[str, Tensor]]:
        parameters, buffers = self._names[piece]
        return {name: self._parameters[name] for name in parameters}, {name: self._buffers[name] for name in buffers}

    def state(self, layer: int, copy: bool) -> LayerState:
        parameters, buffers = self._part(layer)
        settled = {name: self._settled[name] for name in buffers}
        state = piece_state.capture(parameters, settled, self._trainer.optimizer)
        return cloned(state) if copy else state

    def update(self, layer: int) -> Mapping[str, Tensor]:
        parameters, buffers = self._part(layer)
        found = {f"gradients/{name}": p.grad for name, p in parameters.items() if p.grad is not None}
        return found | {f"buffers/{name}": buffer for name, buffer in buffers.items()}

    def follow(self, layer: int, state: LayerState) -> Followed:
        return piece_state.PieceFollower(state, self._recipe, self._frozen, self._prepare)

    def initial(self, layer: int) -> LayerState:
        if self._spare is None:
            self._spare = self._build()
        parameters, buffers = dict(self._spare.named_parameters()), dict(self._spare.named_buffers())
        names = self._names[layer]
        part = {name: parameters[name] for name in names[0]}, {name: buffers[name] for name in names[1]}
        return cloned(piece_state.capture(*part, None))

    def load(self, layer: int, stamp: Stamp) -> LayerState:
        place = self._resumed.get(stamp, self.checkpoints / f"varuna_ckpt_{stamp.step}")
        if place.name.startswith(elastic_disk.RESUMED):
            return elastic_disk.read_held(place, layer)
        initial = self.initial(layer)  # buffers that no checkpoint holds, since the model makes them
        return initial | read_tensors(place, *self._names[layer])

    def persist(self, held: Mapping[tuple[int, Stamp], LayerState], record: Generation, why: str) -> None:
        elastic_disk.write_held(self.job.run_dir, held, record, self.trace.num_pieces)
        self.note("persisted", why=why, states=len(held), member=self.me, generation=record.number)

    # -- boundaries ---------------------------------------------------------------------------------------------------

    def between(self, stamp: Stamp, save: bool = False) -> Stamp | None:
        every, step = self.job.checkpoint_every, stamp.step
        if self._spare is None and step > self._base:
            self._spare = self._build()  # for the next change, which then needs not wait for it
        due = every is not None and step % every == 0
        if step == 0 or not (due or save):
            return None
        return stamp if self._save(step) else None

    def _save(self, step: int) -> bool:
        """Writes a checkpoint together with all members; False where somebody knows that it is there."""
        assert self._communicator is not None
        self._saved = max(self._communicator.gather(self._saved))
        if self._saved >= step:
            return False
        problem = None
        if self._trainer is not None:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            with self._breakable(self._communicator):
                try:
                    checkpoint.save(self._trainer, self.checkpoints, step)
                except PeerLost:
                    raise
                except CapslogError as error:
                    problem = str(error)
        problems = [text for text in self._communicator.gather(problem) if text]
        if problems:
            raise CapslogError(problems[0])
        self._saved = step
        return True

    def finish(self, stamp: Stamp, stopped: bool) -> None:
        assert self._communicator is not None
        self.asked = stopped and any(self._communicator.gather(self._stop_wished()))
        if stamp.step > 0:
            self._save(stamp.step)
        if self._first:
            self.note("stop", step=stamp.step, asked=self.asked)

    # -- words --------------------------------------------------------------------------------------------------------

    def note(self, kind: str, **details: Any) -> None:
        if kind in ("begin", "morph"):
            details["cuts"] = list(self._cuts)
        content = {"kind": kind, "time": time.time(), **details}
        files.append_jsonl(self.job.run_dir / "events.jsonl", content)

    def close(self) -> None:
        """Ends what is open."""
        self._end()


def _join_threads(trainer: Any) -> None:
    """Varuna's message threads of a broken-off step have ended when this returns: they ask for the default group, which
    will be the next generation's.
    """
    pipeline = getattr(trainer, "pipeline", None)
    for name in _THREADS:
        thread = getattr(pipeline, name, None)
        if thread is not None:
            thread.join(_JOIN_SECONDS)
            if thread.is_alive():
                raise CapslogError(f"Varuna's {name} did not end {_JOIN_SECONDS:g} s after its generation had")
