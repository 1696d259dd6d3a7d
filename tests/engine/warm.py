"""What the process that all others are forked from does once: a first trace takes seconds, to measure the CPU a part
of one.
"""

from __future__ import annotations

import contextlib

import torch

from tests.engine import cases, models
from tests.engine.shapes import trace_tiny
from varuna_capslog.profiling.estimation.rates import speed_of

torch.set_num_threads(1)
with contextlib.suppress(Exception):  # a failure here happens in a worker again, which reports it
    trace_tiny(models.build_chain(), 1, 2)
    for steps in (1, 2):
        for inputs in models.make_minibatch(4, steps)[0].inputs:
            for precision, weights in (("bfloat16", "bfloat16"), ("float16", "float16"), ("bfloat16", "float32")):
                cases.shapes_of(precision=precision, weights=weights).boundaries(inputs)
        for inputs in models.make_minibatch(4, steps, torch.float64)[0].inputs:
            cases.shapes_of(dtype=torch.float64).boundaries(inputs)
        for name, graph in models.GRAPHS.items():
            for inputs in graph.make_minibatch(3, steps)[0].inputs:
                cases.shapes_of(name).boundaries(inputs)
speed_of("cpu")
