"""One rank's part of one generation of an elastic run on Varuna: a new Varuna over a fresh model.

It is filled with the states of this rank's pieces. A copy of the buffers is kept until a step is voted, so that the
step can be discarded. All `torch.distributed` groups of the process belong to one part at a time: the default group,
which Varuna needs, and the groups that Varuna makes.
"""

from __future__ import annotations

import datetime
import threading
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.utils import _pytree as pytree

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.threads import OwnedThread, logged
from varuna_capslog.elastic.member.work import LayerState
from varuna_capslog.engine.communicator import Communicator, PeerLost
from varuna_capslog.training.layer_state import cloned
from varuna_capslog.varuna_plugin.elastic.pieces import ElasticTraining, ModelPieces, capture, install
from varuna_capslog.varuna_plugin.inputs import Microbatches
from varuna_capslog.varuna_plugin.install import silent
from varuna_capslog.varuna_plugin.options import configure
from varuna_capslog.varuna_plugin.splitting.stage_run import Draws
from varuna_capslog.varuna_plugin.splitting.stages import ANCHOR

__all__ = ["VarunaPart"]

_THREADS = ("acts_receive_thread", "grads_receive_thread", "acts_send_thread", "grads_send_thread")
_JOIN_SECONDS = 10.0


class VarunaPart:
    """A stage that trains.

    Args:
        cuts: first piece of each stage.
        rank: also the number of its stage.
    """

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
        """Open the default group.

        Args:
            store: a client that nothing else uses.
            prefix: never used twice in a store.
            seconds: longest wait for the others, and for messages that have no other bound.

        Raises:
            PeerLost: not all ranks came in time.
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
        """Abort all communication under way, here and at the peers; from any thread, also after the end."""
        with self._ending:
            if self._joined:
                _abort(_all_groups())

    def build(self, model: nn.Module, seconds: float) -> None:
        """Build Varuna's trainer over this rank's pieces of `model`.

        Args:
            seconds: longest wait for the others while it is built.
        """
        import varuna

        job = self._job
        self._configure(seconds)
        with silent():
            self.trainer = varuna.Varuna(
                model,
                "".join(f"{stage};" for stage in range(len(self._cuts))),
                lambda size, device=None: {},  # the trace is known
                job.batch_size,
                job.chunk_size,
                local_rank=self._rank,
                device=self._device,
            )
        self._configure(job.timeout_seconds)
        for group in _all_groups():  # longest wait of sums and barriers from now on
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
        for piece in reversed(self.own):  # state that several pieces share is in all of them: the first one's counts
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
        """Apply the optimizer update of a step that was voted."""
        optimizer = self.trainer.optimizer
        self._job.set_rates(optimizer, step)
        optimizer.step()
        self.trainer.zero_grad()
        self.trainer.iteration = step
        self._settle()

    def discard(self) -> None:
        """Discard a step that was computed."""
        for name, buffer in self._buffers.items():
            buffer.copy_(self._settled[name])
        self.trainer.zero_grad()

    # -- states -------------------------------------------------------------------------------------------------------

    def _part(self, piece: int) -> tuple[dict[str, nn.Parameter], dict[str, Tensor]]:
        parameters, buffers = self._pieces.names[piece]
        return {name: self._parameters[name] for name in parameters}, {name: self._buffers[name] for name in buffers}

    def state(self, piece: int, copy: bool) -> LayerState:
        """Return a piece's state at the present boundary; without `copy` the live tensors."""
        parameters, buffers = self._part(piece)
        settled = {name: self._settled[name] for name in buffers}
        state = capture(parameters, settled, self.trainer.optimizer)
        return cloned(state) if copy else state

    def update(self, piece: int) -> Mapping[str, Tensor]:
        """Return the gradients and buffers that a `Follower` of this piece needs for the computed step."""
        parameters, buffers = self._part(piece)
        gradients = {f"gradients/{name}": p.grad for name, p in parameters.items() if p.grad is not None}
        return gradients | {f"buffers/{name}": buffer for name, buffer in buffers.items()}

    def close(self) -> None:
        """End the generation, also one that could not be built; the next one may begin at once."""
        self._leave()
        if self.trainer is not None:
            _join_threads(self.trainer)
            # modules refer to each other in circles; their tensors must not wait for a collection
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


def _join_threads(trainer: Any) -> None:
    """Join Varuna's message threads of a broken-off step, since they use the default group, which will be the next
    generation's.
    """
    pipeline = getattr(trainer, "pipeline", None)
    for name in _THREADS:
        thread = getattr(pipeline, name, None)
        if thread is not None:
            thread.join(_JOIN_SECONDS)
            if thread.is_alive():
                raise CapslogError(f"Varuna's {name} did not end {_JOIN_SECONDS:g} s after its generation had")
