"""What the process that all others are forked from does once: a first trace takes seconds, to measure the CPU a part
of one.
"""

from __future__ import annotations

import contextlib

import torch

from tests.engine import cases, models
from varuna_capslog.profiling.estimation.rates import speed_of

torch.set_num_threads(1)
with contextlib.suppress(Exception):  # a failure here happens in a worker again, which reports it
    for step in (1, 2):
        for values in models.make_minibatch(4, step)[0].inputs:
            cases.shapes_of().boundaries(values)
speed_of("cpu")
