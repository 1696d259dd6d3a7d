"""`python -m varuna_capslog.varuna_plugin.launch`: Varuna's launcher with a cut list and a correct exit status.

It takes the launcher's options and gives scripts the same arguments; Varuna's launcher computes the layout of ranks.
When a process fails, the others are ended, and the command ends with that process's status. No manager, no daemon, no
`pkill`: only processes that were started here are ended.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from typing import Any

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.processes import free_port, heard_signals
from varuna_capslog.engine.communicator import PeerLost
from varuna_capslog.varuna_plugin.install import find_varuna, silent
from varuna_capslog.varuna_plugin.options import CUTS_VARIABLE, Search, parse_cuts

__all__ = ["main", "split_arguments", "watch"]

_GRACE_SECONDS = 5.0
_POLL_SECONDS = 0.05


def main(arguments: Sequence[str] | None = None) -> int:
    """Start a job as Varuna's launcher would; see `--help` there for its options.

    Additional options: `--cuts`, a plan file or a list such as 0,3,7; or `--profile`, a profile from which cuts for
    `--nstages` are searched, with `--planner` and `--capacity` as for `capslog plan`. Without `--master_port` a single
    host gets a free port.

    Returns:
        0 when every process ended with 0; else the status of the process that failed (not of processes that only lost
        a peer), 128 + n after signal n; 2 for a wrong command line, 3 when no cut list keeps within the capacity.
    """
    try:
        return _launch(*split_arguments(sys.argv[1:] if arguments is None else arguments))
    except CapslogError as error:
        sys.stderr.write(f"launch: {error}\n")
        return error.exit_status


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], Namespace]:
    """Return the arguments of Varuna's launcher, with the script and its arguments, and the plugin's options."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--cuts")
    parser.add_argument("--profile")
    parser.add_argument("--planner", default="exact")
    parser.add_argument("--capacity")
    options = _options(list(arguments))
    ours, varuna_arguments = parser.parse_known_args(options)
    return [*varuna_arguments, *arguments[len(options) :]], ours


def _options(arguments: list[str]) -> list[str]:
    """Return the options before the training script, whose own arguments may have the same names as ours."""
    return list(itertools.takewhile(lambda argument: not argument.endswith(".py"), arguments))


def _cuts(ours: Namespace, num_stages: int) -> str | None:
    """Return the cut list or plan file for the workers; None without `--cuts` and `--profile`."""
    if ours.profile is not None:
        if ours.cuts is not None:
            raise CapslogError("both --cuts and --profile are given; leave one out")
        search = Search(ours.profile, num_stages, ours.planner, capacity=ours.capacity)
        cuts = ",".join(map(str, search.plan(num_stages).cut_list))
        sys.stderr.write(f"launch: cuts {cuts} from {ours.profile}\n")
        return cuts
    if ours.cuts is not None:
        first, _ = parse_cuts(ours.cuts)
        if first is not None and len(first) != num_stages:
            raise CapslogError(f"--cuts {ours.cuts} makes {len(first)} stages, but --nstages is {num_stages}")
    return ours.cuts


def _launch(arguments: list[str], ours: Namespace) -> int:
    find_varuna()
    with silent():
        from varuna import launcher
    args = _parsed(launcher, arguments)
    cuts = _cuts(ours, args.nstages)
    try:
        world_size, stages, ranks, batch_size, depth = launcher.calculate_config(args)
    except AssertionError as error:
        raise CapslogError(f"{error}; use fewer --gpus_per_stage or more servers") from error
    if world_size % args.nstages or batch_size < 1:
        raise CapslogError(
            f"--batch_size {args.batch_size} and --nstages {args.nstages} do not fit {world_size} ranks; each stage "
            "needs as many as the others, each replica a sample"
        )
    port = args.master_port
    if args.nservers == 1 and not any(argument.startswith("--master_port") for argument in arguments):
        port = free_port()
    environment = {
        "OMP_NUM_THREADS": "1",
        **os.environ,
        "MASTER_ADDR": args.master_addr,
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(world_size),
    }
    if cuts is not None:
        environment[CUTS_VARIABLE] = cuts if cuts.replace(",", "").isdigit() else os.path.abspath(cuts)
    mapping = "".join(",".join(map(str, members)) + ";" for _, members in sorted(stages.items()))
    jobs = [
        (
            [
                *(sys.executable, "-u", "-m", "varuna_capslog.varuna_plugin.script", args.training_script),
                f"--rank={rank}",
                f"--chunk_size={args.chunk_size}",
                f"--local_rank={rank % args.ngpus_per_server}",
                f"--stage_to_rank_map={mapping}",
                f"--batch-size={batch_size // depth}",
                *args.training_script_args,
            ],
            environment | {"RANK": str(rank), "LOCAL_RANK": str(rank % args.ngpus_per_server)},
        )
        for rank in ranks
    ]

    def start(workers: list[subprocess.Popen[bytes]]) -> None:
        for command, variables in jobs:
            workers.append(subprocess.Popen(command, env=variables, cwd=args.code_dir))

    return watch(start, lambda index: f"rank {list(ranks)[index]}")


def _parsed(launcher: Any, arguments: list[str]) -> Any:
    """Parse with the launcher's own parser, which reads `sys.argv`."""
    before = sys.argv
    sys.argv = ["varuna_capslog.varuna_plugin.launch", *arguments]
    try:
        return launcher.parse_args()
    finally:
        sys.argv = before


def watch(start: Callable[[list[subprocess.Popen[bytes]]], None], name: Callable[[int], str]) -> int:
    """Start processes, wait, and end the others when one fails. SIGINT, SIGTERM and Varuna's SIGUSR1 are passed on.

    start: called with a list, to which it adds each process. name: returns a process's name by its index in that list.
    Returns 0, the status of the process that failed, as `main` does, or 128 + n after SIGINT or SIGTERM.
    """
    workers: list[subprocess.Popen[bytes]] = []
    heard: list[int] = []  # SIGINT and SIGTERM

    def pass_on(number: int) -> None:
        if number != signal.SIGUSR1:
            heard.append(number)
        for worker in workers:
            if worker.poll() is None:
                worker.send_signal(number)

    try:
        with heard_signals((signal.SIGINT, signal.SIGTERM, signal.SIGUSR1), pass_on):
            start(workers)
            while True:
                states = [worker.poll() for worker in workers]
                failed = next((index for index, state in enumerate(states) if state), None)
                if failed is not None and not heard:
                    # a process that only lost its peer may end first: wait for the process that failed
                    time.sleep(0.5)
                    failed = _cause([worker.poll() for worker in workers])
                    status = int(workers[failed].returncode)
                    how = f"signal {-status}" if status < 0 else f"status {status}"
                    sys.stderr.write(f"launch: {name(failed)} ended with {how}; the others are stopped\n")
                    return 128 - status if status < 0 else status
                if all(state is not None for state in states):
                    return 128 + heard[0] if heard else 0
                time.sleep(_POLL_SECONDS)
    finally:
        _end(workers)


def _cause(states: Sequence[int | None]) -> int:
    """Return the index of the process that failed: the first whose status is not that of a lost peer."""
    failed = [index for index, state in enumerate(states) if state]
    return min(failed, key=lambda index: states[index] == PeerLost.exit_status)


def _end(workers: list[subprocess.Popen[bytes]]) -> None:
    for worker in workers:
        if worker.poll() is None:
            worker.terminate()
    deadline = time.monotonic() + _GRACE_SECONDS
    for worker in workers:
        try:
            worker.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.wait()


if __name__ == "__main__":
    sys.exit(main())
