"""Makes a workload around a model that a program has as an object, for `capslog.plan(model, sample)`.

It is the workload of an ordinary model, whose factory copies the object without memory for its weights. Called by
`start.ordinary`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.model.chain import Chain
from varuna_capslog.model.hollow import hollow_copy
from varuna_capslog.model.model_workload import INPUT_GRAMMAR, ModelSection, ModelWorkload, parse_input

__all__ = ["workload_of_model"]


def workload_of_model(
    model: nn.Module | Chain, sample: Any, cut_points: Sequence[str] | None = None
) -> tuple[ModelWorkload, int]:
    """Return the workload around a model object, and its microbatch size: the batch size of the sample.

    The model is not changed: every chain is one of a copy whose parameters have shapes only, so that it can be planned
    and estimated, but not trained.

    Args:
        model: on any device, the meta device too.
        sample: its example inputs, batch first: a tensor, a tuple of them in the order of its `forward`, a mapping by
            name; or input specs as text (`x=float32[8,3,224,224]`), one or a list.
        cut_points: as `ModelSection.cut_points`.

    Raises:
        CapslogError: a model or a sample of another kind; a sample without a batch.
    """
    if not isinstance(model, (nn.Module, Chain)):
        raise CapslogError(
            f"the model is a {type(model).__name__}; give an nn.Module, a Chain, or the name of a function that "
            "returns one, as 'package.module:function'"
        )
    texts = [sample] if isinstance(sample, str) else sample
    example: Any = None
    if isinstance(texts, (list, tuple)) and texts and all(isinstance(text, str) for text in texts):
        size = parse_input(texts[0]).shape[0]
    else:
        texts, example = [], (sample,) if isinstance(sample, Tensor) else sample
        size = _batch_of(example)
    factory = f"{type(model).__module__}:{type(model).__name__}"
    settings = ModelSection(
        factory=factory, inputs=list(texts), cut_points=None if cut_points is None else [*cut_points]
    )

    def made() -> Any:
        return model if isinstance(model, Chain) else (hollow_copy(model), example)

    workload = ModelWorkload(settings, size, made)
    workload.name = type(model).__name__
    if isinstance(model, Chain):
        workload.take_example(model, example)
    return workload, size


def _batch_of(example: Any) -> int:
    """Return the first size of the first tensor, in dicts and lists too. Raises CapslogError where there is none."""
    values = list(example.values()) if isinstance(example, Mapping) else example
    if not isinstance(values, (list, tuple)):
        raise CapslogError(
            f"the sample is {'missing' if example is None else f'a {type(example).__name__}'}; give a tensor, a tuple "
            f"or a dict of tensors, batch first, or text: {INPUT_GRAMMAR}"
        )
    first = next((leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)), None)
    if first is None or first.dim() == 0 or 0 in first.shape:
        raise CapslogError(
            "the sample holds no tensor whose first size is a batch; give the model's inputs, batch first"
        )
    return int(first.shape[0])
