"""Which runs of an estimate do the same work, so that each is run once, also across models.

The key must hold all that a result depends on: what it leaves out would be taken for equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import nn

from varuna_capslog.model.chain import Chain
from varuna_capslog.model.trace import layer_signature
from varuna_capslog.model.workload import Workload
from varuna_capslog.profiling.conditions import RunConditions
from varuna_capslog.profiling.estimation.recipes import Recipes
from varuna_capslog.profiling.trim import TrimmedRun

if TYPE_CHECKING:
    from varuna_capslog.profiling.estimation.hollow import HollowRun

__all__ = ["Memo", "run_key"]


class Memo:
    """Results of runs by key. Keeps alive what keys name by identity, so that no identity comes twice.

    Attributes:
        recipes: for the operators of runs that are not known yet.
    """

    def __init__(self) -> None:
        self._found: dict[object, HollowRun] = {}
        self._alive: dict[int, object] = {}
        self.recipes = Recipes()

    def __len__(self) -> int:
        return len(self._found)

    def find(self, key: object) -> HollowRun | None:
        """The result under this key, or None."""
        return self._found.get(key)

    def keep(self, key: object, run: HollowRun, named: Sequence[object]) -> None:
        """Keeps a result; `named`: whose parts the key names by identity."""
        self._found[key] = run
        self._alive |= {id(item): item for item in named}


def run_key(chain: Chain, run: TrimmedRun, conditions: RunConditions, workload: Workload) -> object:
    """Equal for runs that do the same work.

    It holds: the layers' classes, attributes (dilation, stride, dropout), parameter shapes and hooks, what they read
    and write; the tensors at every cut (shape, dtype, stride, requires_grad); whether there are stages before and
    after; which parameters are shared, within and with layers elsewhere; the conditions; and for the last stage what
    the workload says of its loss.
    """
    layers = chain.layers[run.first : run.end]
    inside = set(range(run.first, run.end))
    ties = tuple(
        (
            tuple((index - run.first, name) for index, name in shared.uses if index in inside),
            # uses elsewhere send their gradients here
            tuple(index < run.first for index in shared.layers if index not in inside),
        )
        for shared in chain.shared
        if inside & set(shared.layers)
    )
    return (
        tuple((layer.reads, layer.writes, layer_signature(layer), _kinds(layer.module)) for layer in layers),
        tuple(tuple(sorted(cut.items())) for cut in run.specs),
        (run.has_upstream, run.has_downstream, ties),
        (conditions.device, conditions.precision, conditions.recompute, conditions.stage_inputs, conditions.blocks),
        None if run.has_downstream else (workload.loss_key(), conditions.microbatch_size),
    )


def _kinds(module: nn.Module) -> tuple[object, ...]:
    """The very classes of all parts (a name may stand for two), and what is hooked on them."""
    return tuple(
        (type(part), tuple(map(id, (*part._forward_hooks.values(), *part._forward_pre_hooks.values()))))
        for part in module.modules()
    )
