"""What the process that all others are forked from does once: a first trace takes seconds, to measure the CPU a part
of one.
"""

from __future__ import annotations

import contextlib

import torch

from tests.engine import models
from tests.engine.shapes import trace_tiny
from varuna_capslog.profiling.estimation.rates import speed_of

torch.set_num_threads(1)
with contextlib.suppress(Exception):  # a failure here happens in a worker again, which reports it
    trace_tiny(models.build_chain(), 1, 2)
speed_of("cpu")
