"""Scores of the validation set, computed by the pipeline that trains; every rank gets the same ones."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from varuna_capslog.config.settings import Config
from varuna_capslog.engine.interface import Engine
from varuna_capslog.model.workload import Minibatch, Workload
from varuna_capslog.training.feed import evaluation_groups

__all__ = ["Judging"]


class Judging:
    """The validation data of a run, opened when it is first asked for, and the workload's evaluator."""

    def __init__(self, config: Config, workload: Workload) -> None:
        self._config, self._workload = config, workload
        self._val: Any = None

    def scores(self, engine: Engine) -> Mapping[str, Any] | None:
        """Runs the validation set through `engine`; None where the workload has no evaluator or no such data.

        Raises:
            PeerLost: another rank is gone.
        """
        evaluator = self._workload.evaluator()
        if evaluator is None:
            return None
        communicator, config = engine.communicator, self._config
        # asked by all ranks together, also where some have opened the data in an earlier generation
        self._val = communicator.together(lambda: self._workload.val_data() if self._val is None else self._val)
        if self._val is None:
            return None
        results: list[Any] = []
        replicas = engine.layout.replicas
        if communicator.rank < replicas * engine.layout.devices:  # the others are idle
            groups = evaluation_groups(
                len(self._val), config.train.microbatch_size, config.num_microbatches, engine.replica, replicas
            )
            for group in groups:
                minibatch = self._val.minibatch(group, 0)

                def take(microbatch: int, outputs: dict[str, Tensor], minibatch: Minibatch = minibatch) -> None:
                    host = {name: tensor.cpu() for name, tensor in outputs.items()}
                    results.extend(evaluator.collect(host, minibatch, microbatch))

                engine.evaluate(minibatch, functools.partial(self._val.load, minibatch), take)
        # replicas finish at different times, and scoring takes as long as it takes
        communicator.together(lambda: None)
        everything = [result for theirs in communicator.gather(results) for result in theirs]
        mine = communicator.together(lambda: evaluator.summarize(everything) if communicator.rank == 0 else None)
        return communicator.gather(mine)[0]
