"""A plan as a small Python file for DeepSpeed: a `PipelineModule` whose stages are the plan's.

DeepSpeed 0.19 has no option for a list of cuts: `partition_method` knows uniform, by parameters, and by type
(`deepspeed/runtime/pipe/module.py`). `PipelineModule._partition_layers` is the one place where it decides, so that the
exported class overrides it. The user's own list of layers must have an entry for each layer of the chain.
"""

from __future__ import annotations

import json

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.tables import printable
from varuna_capslog.model.names import ModelNames
from varuna_capslog.planning.export.stage_line import StageLine, check_names, number_of, run_of, stage_line
from varuna_capslog.plans.parts import MemoryInterval, with_memory
from varuna_capslog.plans.plan import Plan
from varuna_capslog.schedules import RunShape, from_strings

__all__ = ["deepspeed"]

_FILE = '''"""The stages of a plan of varuna-capslog for DeepSpeed. Written by `capslog export --to deepspeed`.

{stages}
"""

from deepspeed.pipe import PipelineModule
{imports}
PARTS = {parts}
"""Stage s holds the layers PARTS[s] to PARTS[s + 1] - 1 of the list that is given to PlannedPipelineModule."""


class PlannedPipelineModule(PipelineModule):
    """A PipelineModule of {layers} in {count}; takes what PipelineModule takes, without partition_method."""

    def __init__(self, layers, **options):
        layers = list(layers)
        if len(layers) != PARTS[-1]:
            raise ValueError(f"the plan is for {{PARTS[-1]}} layers, but {{len(layers)}} are given")
        if options.get("topology") is None:
            options.setdefault("num_stages", len(PARTS) - 1)
{defaults}        super().__init__(layers, **options)

    def _partition_layers(self, method=None):
        if self._topo.get_dim("pipe") != len(PARTS) - 1:
            raise ValueError(f"the plan has {{len(PARTS) - 1}} stages, but the topology {{self._topo.get_dim('pipe')}}")
        stage = self._topo.get_coord(self.global_rank).pipe
        self.parts = list(PARTS)
        self._set_bounds(start=PARTS[stage], stop=PARTS[stage + 1])
'''

# DeepSpeed's default function, the reentrant one, gives no gradient to a first stage whose inputs are token numbers.
_RECOMPUTING = """        options.setdefault("activation_checkpoint_interval", {interval})
        options.setdefault("activation_checkpoint_func", non_reentrant_checkpoint)
"""


def deepspeed(plan: Plan, run: RunShape, names: ModelNames | None = None) -> str:
    """The text of a Python file with the class `PlannedPipelineModule`.

    run: says whether stages recompute whose memory the plan leaves open.
    names: of the layers, for comments; None: not known.

    A plan that recomputes gets DeepSpeed's `activation_checkpoint_interval`: of each stage, so many layers at a time.

    Raises CapslogError for a plan that DeepSpeed cannot run.
    """
    system = "DeepSpeed"
    line = stage_line(plan, system, one_stage_per_rank=True, intervals=True)
    interval = _checkpoint_interval(plan, line, run)
    labels = [f"{number}" for number in range(plan.num_layers)]
    lines = []
    if names is not None:
        check_names(names, plan)
        labels = [f"{number} ({_in_docstring(name)})" for number, name in enumerate(names.layers)]
        lines = [
            f"Layers {', '.join(map(str, layers))} share the parameter {_in_docstring(name)}: give them as "
            "TiedLayerSpec of one key."
            for name, layers in names.shared
        ]
    stages = [
        f"stage {stage}: layer {labels[first]}" + (f" to layer {labels[end - 1]}" if end > first + 1 else "")
        for stage, (first, end) in enumerate(line.stages)
    ]
    imported = "from deepspeed.runtime.activation_checkpointing.checkpointing import non_reentrant_checkpoint\n"
    return _FILE.format(
        stages="\n".join([*stages, *lines]),
        imports=imported if interval else "",
        parts=[first for first, _ in line.stages] + [plan.num_layers],
        layers=number_of(plan.num_layers, "layer"),
        count=number_of(len(line.stages), "stage"),
        defaults=_RECOMPUTING.format(interval=interval) if interval else "",
    )


def _in_docstring(name: str) -> str:
    """Return a name without quotation marks that would end the docstring in which it stands."""
    return printable(json.dumps(name, ensure_ascii=False)[1:-1])


def _checkpoint_interval(plan: Plan, line: StageLine, run: RunShape) -> int:
    """Layers that are recomputed together, counted from the first one of each stage; 0: nothing is.

    DeepSpeed has one such number for all stages.
    """
    actions = None if plan.actions is None else from_strings(plan.actions)
    stages = with_memory(plan.stages, run_of(plan, run), actions)
    intervals = {stage.first: stage.memory or () for stage in stages}  # replicas are equal
    memory = [intervals[first] for first, _ in line.stages]
    if not any(memory):
        return 0
    sizes = [end - first for first, end in line.stages]
    for interval in range(1, max(sizes) + 1):
        expected = [
            tuple(MemoryInterval(at, min(at + interval, end), "recompute") for at in range(first, end, interval))
            for first, end in line.stages
        ]
        if memory == expected:
            return interval
    stage = next(number for number, row in enumerate(memory) if row)
    raise CapslogError(
        f"stage {stage} has the memory intervals {[[part.first, part.end, part.kind] for part in memory[stage]]}, but "
        "DeepSpeed recomputes equal numbers of layers, in all stages, and offloads none; export a plan that keeps "
        "everything, or whose stages recompute as a whole"
    )
