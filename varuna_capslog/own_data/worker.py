"""Program of a loader process; `loader.Loader` starts it with the parent's process id as the argument. The process
reads tasks from standard input, answers each with a batch or an error's text, and ends with its parent.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.processes import JOB_SIGNALS, ends_forks_as_usual, killed_with, outlives


def main() -> None:
    """Serve until the parent closes the pipe or ends."""
    killed_with(int(sys.argv[1]))()
    outlives((*JOB_SIGNALS, signal.SIGINT))  # they reach the whole job; only the parent ends this process
    ends_forks_as_usual()
    answers = os.fdopen(os.dup(1), "wb")
    tasks = os.fdopen(os.dup(0), "rb", buffering=0)
    os.dup2(2, 1)  # prints of a data set must not get between the answers
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    import torch

    from varuna_capslog.own_data.reading import SampleReader, receive, send

    torch.set_num_threads(1)
    try:
        keys, seed, path = receive(tasks)
        sys.path[:] = path
        reader = SampleReader(keys, seed)
        while True:
            split, epoch, samples = receive(tasks)
            try:
                send(answers, (True, reader.read(split, epoch, samples)))
            except CapslogError as error:
                if os.environ.get("CAPSLOG_DEBUG"):
                    traceback.print_exc()
                send(answers, (False, str(error)))
            except (EOFError, BrokenPipeError):
                raise
            except Exception as error:
                cause = " ".join(f"{type(error).__name__}: {error}".split())
                send(answers, (False, f"the batch of the samples {samples} cannot leave its loader process ({cause})"))
    except (EOFError, BrokenPipeError):
        os._exit(0)  # the parent has ended or closed the pipe
