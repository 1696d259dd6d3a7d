"""What a run trains and what no change of cuts alters: the chain, the data, the loss and the engine's options.

A process builds it once, `run.set_up_run` from config and plan; every engine of the process is made over it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from varuna_capslog.config.settings import Config
from varuna_capslog.engine.options import EngineOptions
from varuna_capslog.model.chain import Chain
from varuna_capslog.model.workload import DataSource, Workload
from varuna_capslog.training.feed import Feed

__all__ = ["RunSetup"]


@dataclass(frozen=True)
class RunSetup:
    """The parts of a run.

    Attributes:
        chain: whole, with the weights that the run begins from; alike on every rank.
        source: the training data.
        total_steps: number of the last step; None where only time limits the run.
        left_out: one line per entry of `init_from` that was not taken over.
    """

    config: Config
    workload: Workload
    chain: Chain
    source: DataSource
    options: EngineOptions
    total_steps: int | None
    left_out: Sequence[str] = ()

    @property
    def run_dir(self) -> Path:
        """The run's folder."""
        return Path(self.config.run_dir)

    @property
    def checkpoints(self) -> Path:
        """The folder of the run's checkpoints."""
        return self.run_dir / "checkpoints"

    def feed(self, local: Sequence[int] = ()) -> Feed:
        """The minibatches by step, on a rank that loads the microbatches `local`.

        Raises:
            CapslogError: fewer samples than one minibatch.
        """
        train = self.config.train
        return Feed(self.source, train.minibatch_size, train.microbatch_size, train.seed, local)
