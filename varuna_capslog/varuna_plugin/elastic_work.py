"""`Work` of an elastic run that trains on Varuna, with new cuts for every generation, in the same processes.

Members exchange the model's pieces. Each generation is a `VarunaPart`. Copies of a piece repeat the owner's steps, with
the owner's final gradients and the same optimizer.
"""

from __future__ import annotations

import contextlib
import datetime
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.utils import _pytree as pytree

from varuna_capslog.base import files
from varuna_capslog.base.clock import wall_seconds
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.processes import OwnedThread, logged
from varuna_capslog.elastic.member.start_up import MemberStart
from varuna_capslog.elastic.member.work import Followed, LayerState, Opening, Outcome, Work
from varuna_capslog.engine.communicator import Communicator, PeerLost
from varuna_capslog.membership.generation import Generation, MemberLayout, Stamp
from varuna_capslog.membership.layout_candidates import LayoutCandidates
from varuna_capslog.membership.placing import Placer
from varuna_capslog.membership.recovery import Seat
from varuna_capslog.plans.plan import Plan
from varuna_capslog.schedules import RunShape
from varuna_capslog.training.journal import RecentSteps
from varuna_capslog.training.layer_state import cloned
from varuna_capslog.varuna_plugin import checkpoint
from varuna_capslog.varuna_plugin.checkpoint import RESUMED, read_held, read_tensors, write_held
from varuna_capslog.varuna_plugin.elastic_pieces import ElasticTraining, ModelPieces, PieceFollower, capture, install
from varuna_capslog.varuna_plugin.executor import Microbatches
from varuna_capslog.varuna_plugin.install import silent
from varuna_capslog.varuna_plugin.options import configure
from varuna_capslog.varuna_plugin.stages import ANCHOR, Draws

__all__ = ["VarunaPart", "VarunaWork"]


# -- A rank's part of a generation of an elastic run on Varuna: a new Varuna over a fresh model.
#
# The states of this rank's pieces are loaded into it. A copy of the buffers is kept until the vote on a step, so that
# the step can be discarded. All `torch.distributed` groups of the process belong to one part at a time: the default
# group, which Varuna needs, and the groups that Varuna makes.


_JOIN_SECONDS = 10.0


class VarunaPart:
    """Stage of a rank in one generation. cuts: first piece of each stage. rank: also the stage's number."""

    def __init__(
        self, job: ElasticTraining, pieces: ModelPieces, device: torch.device, cuts: tuple[int, ...], rank: int
    ) -> None:
        self._job, self._pieces, self._device = job, pieces, device
        self._cuts, self._rank = cuts, rank
        self._ending = threading.Lock()
        self._joined = False
        self._store: dist.Store | None = None
        self.trainer: Any = None
        self._parameters: dict[str, nn.Parameter] = {}
        self._buffers: dict[str, Tensor] = {}
        self._settled: dict[str, Tensor] = {}  # buffers as they were before the step under way
        self.own: tuple[int, ...] = ()

    def join(self, store: dist.Store, prefix: str, seconds: float) -> None:
        """Open torch's default group.

        Args:
            store: a client that nothing else uses.
            prefix: prefix of keys in the store, never used twice.
            seconds: longest wait for the other ranks, and for messages that have no other timeout.

        Raises:
            PeerLost: not all ranks joined in time.
        """
        rank, world_size = self._rank, len(self._cuts)
        self._store = store  # torch keeps only the C++ half of it alive
        try:
            dist.init_process_group(
                "gloo",
                store=dist.PrefixStore(prefix, store),
                rank=rank,
                world_size=world_size,
                timeout=datetime.timedelta(seconds=seconds),
            )
        except (RuntimeError, ValueError) as error:
            text = str(error).splitlines()[0]
            raise PeerLost(f"rank {rank} could not join {world_size} ranks of Varuna: {text}", None) from error
        self._joined = True

    def abort(self) -> None:
        """Abort all communication under way, here and at the peers. Safe from any thread, also after `close`."""
        with self._ending:
            if self._joined:
                _abort(_all_groups())

    def build(self, model: nn.Module, seconds: float) -> None:
        """Build Varuna's trainer over this rank's pieces of `model`. seconds: longest wait for the other ranks."""
        import varuna

        job = self._job
        self._configure(seconds)
        with silent():
            self.trainer = varuna.Varuna(
                model,
                "".join(f"{stage};" for stage in range(len(self._cuts))),
                lambda size, device=None: {},  # not called: the trace is known
                job.batch_size,
                job.chunk_size,
                local_rank=self._rank,
                device=self._device,
            )
        self._configure(job.timeout_seconds)
        for group in _all_groups():  # timeout of later collectives
            dist.set_timeout(datetime.timedelta(seconds=job.timeout_seconds), group)
        partitioned = self.trainer.partitioned_model
        partitioned.capslog.draws = Draws(partitioned.ordered_modules.values(), self._device, job.seed)
        self._parameters = {name: p for name, p in partitioned.module.named_parameters() if name != ANCHOR}
        self._buffers = dict(partitioned.module.named_buffers())
        self.trainer.set_optimizer(self._pieces.recipe.build(self._parameters))

    def _configure(self, seconds: float) -> None:
        configure(cuts=self._cuts, loss=self._job.loss, timeout_seconds=seconds, trace=self._pieces.trace)

    def install(self, states: Mapping[int, LayerState], base: int) -> None:
        """Load the states of this rank's pieces after step `base`."""
        self.own = tuple(sorted(states))
        for piece in reversed(self.own):  # shared state is in several pieces: the first piece's counts
            install(states[piece], *self._part(piece), self.trainer.optimizer)
        self._settle()
        self.trainer.iteration = base

    def _settle(self) -> None:
        self._settled = {key: buffer.clone() for key, buffer in self._buffers.items()}

    # -- a step -------------------------------------------------------------------------------------------------------

    def compute(self, step: int) -> tuple[float, float]:
        """Run Varuna's forwards and backwards; return the loss and the norm of the gradients."""
        everything = self._job.microbatches(step)
        moved = pytree.tree_map_only(Tensor, lambda tensor: tensor.to(self._device), list(everything.values()))
        ready = Microbatches(moved, everything.sizes)
        self.trainer.partitioned_model.capslog.draws.begin_step(step, ready)
        loss, _, _ = self.trainer.step(ready, self._job.clip_grad_max_norm)
        return float(loss), float(self.trainer.capslog_grad_norm)

    def apply(self, step: int) -> None:
        """Apply the optimizer update of a step for which all members voted."""
        optimizer = self.trainer.optimizer
        self._job.set_rates(optimizer, step)
        optimizer.step()
        self.trainer.zero_grad()
        self.trainer.iteration = step
        self._settle()

    def discard(self) -> None:
        """Discard a computed step: restore buffers and clear gradients."""
        for name, buffer in self._buffers.items():
            buffer.copy_(self._settled[name])
        self.trainer.zero_grad()

    # -- states -------------------------------------------------------------------------------------------------------

    def _part(self, piece: int) -> tuple[dict[str, nn.Parameter], dict[str, Tensor]]:
        parameters, buffers = self._pieces.names[piece]
        return {name: self._parameters[name] for name in parameters}, {name: self._buffers[name] for name in buffers}

    def state(self, piece: int, copy: bool) -> LayerState:
        """Return the state of a piece at the present boundary; without `copy` the live tensors."""
        parameters, buffers = self._part(piece)
        settled = {name: self._settled[name] for name in buffers}
        state = capture(parameters, settled, self.trainer.optimizer)
        return cloned(state) if copy else state

    def update(self, piece: int) -> Mapping[str, Tensor]:
        """Return gradients and buffers that a `Follower` of this piece needs for the computed step."""
        parameters, buffers = self._part(piece)
        gradients = {f"gradients/{name}": p.grad for name, p in parameters.items() if p.grad is not None}
        return gradients | {f"buffers/{name}": buffer for name, buffer in buffers.items()}

    def close(self) -> None:
        """End the generation, even if it could not be built; the next generation may begin at once."""
        self._leave()
        if self.trainer is not None:
            _join_thread(self.trainer)
            # modules form reference cycles; their tensors must not wait for garbage collection
            for module in self.trainer.partitioned_model.module.modules():
                module._parameters.clear()
                module._buffers.clear()

    def _leave(self) -> None:
        """Abort all groups and release them; without the abort gloo may wait for peers."""
        with self._ending:
            if not self._joined:
                return
            self._joined = False
            groups = _all_groups()
            _abort(groups)
            dist.destroy_process_group()
        # dropping the last reference waits for gloo's threads, so another thread does it
        OwnedThread("end-varuna-groups", groups.clear, logged).start()


def _all_groups() -> list[Any]:
    return list(distributed_c10d._world.pg_map)


def _abort(groups: list[Any]) -> None:
    for group in groups:
        Communicator(group.rank(), group.size(), "varuna", datetime.timedelta(seconds=1), group).abort()


def _join_thread(trainer: Any) -> None:
    """Join the receiving thread of an interrupted step: it uses the default group, soon that of a new generation."""
    thread = getattr(getattr(trainer, "pipeline", None), "grads_receive_thread", None)
    if thread is not None:
        thread.join(_JOIN_SECONDS)
        if thread.is_alive():
            raise CapslogError(
                f"the thread that receives gradients did not end {_JOIN_SECONDS:g} s after its generation had"
            )


# -- A training on Varuna as the `Work` of an elastic run


_CONNECT_SECONDS = 3.0
"""Longest wait of the first attempt to open a generation; each failure doubles the wait."""


class VarunaWork(Work):
    """Work of a member in an elastic run on Varuna. rendezvous: makes a store client that nothing else uses."""

    def __init__(
        self, start: MemberStart, job: ElasticTraining, rendezvous: Callable[[], dist.Store], device: torch.device
    ) -> None:
        import varuna

        self.start, self.job, self.device = start, job, device
        self._rendezvous = rendezvous
        self.pieces = ModelPieces(job, varuna.CutPoint)
        self.layer_bytes = self.pieces.state_bytes
        count = job.num_microbatches
        candidates = LayoutCandidates(
            job.profile,
            self.layer_bytes,
            RunShape(count, microbatch_size=job.chunk_size if job.profile is not None else None),
            job.planner,
            job.memory,
            max_replicas=1,
            beside=self.layer_bytes,
        )
        self.placer = Placer(candidates, job.elastic)
        self.checkpoints = job.run_dir / "checkpoints"
        self._part: VarunaPart | None = None
        self._communicator: Communicator | None = None
        self._cuts: tuple[int, ...] = ()
        self._number = self._base = self._saved = 0
        self._connect_seconds = _CONNECT_SECONDS
        self._first = False
        self._measured: tuple[float, float] = (0.0, 0.0)
        self._recent: RecentSteps[dict[str, Any]] = RecentSteps(job.run_dir / "metrics.jsonl")
        self._began = 0.0

    def place(self, seats: Sequence[Seat], plan: Plan | None = None) -> MemberLayout | str:
        return self.placer(seats, plan)

    # -- generations --------------------------------------------------------------------------------------------------

    def open(self, opening: Opening, communicator: Communicator, states: Mapping[int, LayerState]) -> None:
        assert opening.layout.plan is not None
        cuts, rank, job = opening.layout.plan.cut_list, communicator.rank, self.job
        self._end()
        torch.set_grad_enabled(True)  # an interrupted forward may have left it off
        self._communicator, self._cuts = communicator, cuts
        self._number, self._base = opening.number, opening.base.step
        self._saved = self._saved if self._saved <= self._base else 0
        self._first = rank == 0
        if rank < len(cuts):
            model = self.pieces.take()
            with self._breakable(communicator):
                communicator.gather(None)  # notices a member lost meanwhile, instead of a long wait below
                name = f"varuna/{communicator.generation}"
                seconds = min(self._connect_seconds, job.timeout_seconds)
                self._connect_seconds *= 2
                self._part = VarunaPart(job, self.pieces, self.device, cuts, rank)
                self._part.join(self._rendezvous(), name, seconds)
                communicator.abort_with(self._part.abort)
                self._part.build(model, seconds)
                self._connect_seconds = _CONNECT_SECONDS
            self._part.install(states, self._base)
        else:
            communicator.gather(None)
        if self._first:
            for record in self._recent.missing(self._base):
                files.append_jsonl(job.run_dir / "metrics.jsonl", record)

    @contextlib.contextmanager
    def _breakable(self, communicator: Communicator) -> Any:
        """Turn an error after the end of this generation into PeerLost, since that end has caused the error."""
        try:
            yield
        except PeerLost:
            raise
        except Exception as error:
            if communicator.aborted:
                raise PeerLost(f"{self.start.me} was on Varuna when its generation was ended: {error}", None) from error
            raise

    def shelve(self) -> Mapping[int, LayerState]:
        part = self._part
        states = {piece: part.state(piece, copy=False) for piece in part.own} if part is not None else {}
        self._end()
        return states

    def _end(self) -> None:
        """End the generation, even if it could not be opened."""
        if self._part is not None:
            self._part.close()
        self._part = self._communicator = None

    # -- a step -------------------------------------------------------------------------------------------------------

    def is_done(self, step: int) -> bool:
        return step >= self.job.steps

    def compute(self, step: int) -> bool:
        self._began = time.monotonic()
        if self._part is None:
            return True
        assert self._communicator is not None
        with self._breakable(self._communicator):
            self._measured = self._part.compute(step)
        torch.set_grad_enabled(True)
        return all(map(math.isfinite, self._measured))

    def vote(self, step: int, ballot: bytes) -> Outcome:
        assert self._communicator is not None
        mine = (ballot, self.start.stop_wished(), self._measured)
        gathered = self._communicator.gather(mine)
        self._measured = gathered[0][2]
        finite = all(map(math.isfinite, self._measured))
        return Outcome(finite, [votes for votes, _, _ in gathered], any(stop for _, stop, _ in gathered), 1.0)

    def apply(self, step: int) -> None:
        if self._part is not None:
            self._part.apply(step)
        loss, norm = self._measured
        seconds = round(time.monotonic() - self._began, 6)
        record = {"step": step, "loss": loss, "grad_norm": norm, "seconds": seconds, "generation": self._number}
        self._recent.add(step, record)
        if self._first:
            files.append_jsonl(self.job.run_dir / "metrics.jsonl", record)
            if self.job.on_step is not None:
                self.job.on_step(step, loss, norm)

    def discard(self, step: int) -> str:
        if self._part is not None:
            self._part.discard()
        loss, norm = self._measured
        return (
            f"step {step}: not finite: loss {loss:g}, gradient norm {norm:g}; nothing was applied: lower the learning "
            "rate or look at the inputs of this step"
        )

    # -- states -------------------------------------------------------------------------------------------------------

    def state(self, layer: int, copy: bool) -> LayerState:
        assert self._part is not None
        return self._part.state(layer, copy)

    def update(self, layer: int) -> Mapping[str, Tensor]:
        assert self._part is not None
        return self._part.update(layer)

    def follow(self, layer: int, state: LayerState) -> Followed:
        return PieceFollower(state, self.pieces.recipe, self.pieces.frozen, self.job.set_rates)

    def initial(self, layer: int) -> LayerState:
        return self.pieces.initial(layer)

    def load(self, layer: int, stamp: Stamp) -> LayerState:
        place = self.start.resumed.get(stamp, self.checkpoints / f"varuna_ckpt_{stamp.step}")
        if place.name.startswith(RESUMED):
            return read_held(place, layer)
        initial = self.initial(layer)  # has the buffers that no checkpoint holds, since the model makes them
        return initial | read_tensors(place, *self.pieces.names[layer])

    def persist(self, held: Mapping[tuple[int, Stamp], LayerState], record: Generation) -> None:
        write_held(self.job.run_dir, held, record, self.pieces.trace.num_pieces)

    # -- boundaries ---------------------------------------------------------------------------------------------------

    def between(self, stamp: Stamp, save: bool = False) -> Stamp | None:
        interval, step = self.job.checkpoint_every, stamp.step
        if step > self._base:
            self.pieces.prepare()  # so that the next change need not wait for a model
        due = interval is not None and step % interval == 0
        if step == 0 or not (due or save):
            return None
        return stamp if self._save(step) else None

    def _save(self, step: int) -> bool:
        """Write a checkpoint together with all members; return False where it has been written already."""
        assert self._communicator is not None
        self._saved = max(self._communicator.gather(self._saved))
        if self._saved >= step:
            return False
        problem = None
        if self._part is not None:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            with self._breakable(self._communicator):
                try:
                    checkpoint.save(self._part.trainer, self.checkpoints, step)
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
        self.asked = stopped and any(self._communicator.gather(self.start.stop_wished()))
        if stamp.step > 0:
            self._save(stamp.step)
        if self._first:
            self.note("stop", step=stamp.step, asked=self.asked)

    # -- events -------------------------------------------------------------------------------------------------------

    def note(self, kind: str, **details: Any) -> None:
        if kind in ("begin", "morph"):
            details["cuts"] = list(self._cuts)
        content = {"kind": kind, "time": wall_seconds(), **details}
        files.append_jsonl(self.job.run_dir / "events.jsonl", content)

    def close(self) -> None:
        """End an open generation."""
        self._end()
