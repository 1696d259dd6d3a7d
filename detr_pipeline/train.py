"""`torchrun ... -m detr_pipeline.train CONFIG [key=value ...]`: one rank of a run over one node or many.

The ranks connect first. Rank 0 then profiles, plans and writes the run's folder, and all ranks train as the workers of
`capslog train` do. After a worker failure torchrun restarts all ranks, and the run resumes from its last checkpoint:
live morphing is off, since torchrun's agent ends the other workers when a worker is lost.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one rank; return the exit status (a failure ends the process with another status)."""
    from varuna_capslog.base.errors import CapslogError
    from varuna_capslog.base.supervisor import reserve
    from varuna_capslog.config.reading import load_config
    from varuna_capslog.elastic.member.holdings import recover
    from varuna_capslog.start.choices import load_run_config
    from varuna_capslog.start.prepare import prepare_run
    from varuna_capslog.start.worker import run_worker

    command_line = list(sys.argv[1:] if arguments is None else arguments)
    if not command_line or command_line[0].startswith("-"):
        sys.stderr.write("usage: torchrun --nproc-per-node N -m detr_pipeline.train CONFIG [key=value ...]\n")
        return 2
    rank = int(os.environ.get("RANK", "0"))
    try:
        say = lambda line: sys.stdout.write(f"{line}\n") if rank == 0 else None  # noqa: E731
        if load_config(command_line[0], command_line[1:]).elastic.enabled:
            say("elastic.enabled is ignored here; launch/elastic.sh starts a run that goes on live")
        # rank 0 checks the variants, and the other ranks read the variants that have passed
        more = ["elastic.enabled=false", *(["variants={}"] if rank else [])]
        config = load_run_config(command_line[0], [*command_line[1:], *more], say)
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        if world_size != config.world_size:
            raise CapslogError(
                f"torchrun started {world_size} ranks, but the config wants {config.world_size} (pipeline.devices="
                f"{config.pipeline.devices} x pipeline.replicas={config.pipeline.replicas}); change one of the two"
            )
    except CapslogError as error:
        sys.stderr.write(f"rank {rank}: {error}\n")
        return error.exit_status
    if rank == 0 and "TORCHELASTIC_RUN_ID" in os.environ:
        sys.stdout.write("under torchrun a lost worker restarts all from the last checkpoint; live morphing is off\n")
    with contextlib.ExitStack() as stack:

        def prepare() -> None:
            stack.enter_context(reserve(config.run_dir))
            for note in prepare_run(config, show=False).notes:
                sys.stderr.write(f"note: {note}\n")
            if config.resume == "auto":
                recover(config.run_dir)  # state of an elastic run that stopped between two checkpoints

        return run_worker(config.run_dir, prepare=prepare)


if __name__ == "__main__":
    from varuna_capslog.base.failures import leave

    leave(main())
