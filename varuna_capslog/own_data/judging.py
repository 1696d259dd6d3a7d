"""Losses and scores that a config may name, and the form of a model's outputs for a user's loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.nn import functional as F

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.variants.chunked_loss import chunked_cross_entropy

__all__ = ["COUNTS", "LOSSES", "METRICS", "returned"]


class Outputs(dict[str, Tensor]):
    """Outputs of a model that names them: `outputs.logits` is `outputs["logits"]`."""

    def __getattr__(self, name: str) -> Tensor:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the model has no output {name!r}; it has {', '.join(self)}") from None


def returned(outputs: Mapping[str, Tensor]) -> Any:
    """Return the outputs as the model returned them: one tensor, a tuple, or `Outputs` where they have names."""
    if set(outputs) <= {"output", "x"} and len(outputs) == 1:
        return next(iter(outputs.values()))
    if all(name.isdigit() for name in outputs):
        return tuple(outputs.values())
    return Outputs(outputs)


def _scores_and_classes(outputs: Any, batch: Any) -> tuple[Tensor, Tensor]:
    scores = _main(outputs)
    classes = _target(batch)
    if scores.dim() < 2 or classes.is_floating_point():
        raise CapslogError(
            f"classes are compared here, but the model returned a tensor of shape {list(scores.shape)} and the batch's "
            f"target is of {classes.dtype}; name a function of your own as loss or metric"
        )
    return scores.reshape(-1, scores.shape[-1]), classes.reshape(-1)


def _main(outputs: Any) -> Tensor:
    if isinstance(outputs, Mapping):
        scores = outputs.get("logits", next(iter(outputs.values())))
    else:
        scores = outputs[0] if isinstance(outputs, tuple) else outputs
    return scores


def _target(batch: Any) -> Tensor:
    target = None
    if isinstance(batch, Mapping):
        target = next((batch[name] for name in ("labels", "label", "target") if name in batch), None)
    elif isinstance(batch, (tuple, list)):
        target = batch[-1]
    if not isinstance(target, Tensor):
        raise CapslogError(
            "the batch has no target: its last entry, or its entry labels, label or target, must be a tensor; name a "
            "function of your own as loss or metric"
        )
    return target


def _cross_entropy(outputs: Any, batch: Any) -> Tensor:
    return F.cross_entropy(*_scores_and_classes(outputs, batch))


def _chunked_cross_entropy(outputs: Any, batch: Any) -> Tensor:
    return chunked_cross_entropy(*_scores_and_classes(outputs, batch))


def _mse(outputs: Any, batch: Any) -> Tensor:
    return F.mse_loss(_main(outputs), _target(batch))


def _accuracy(outputs: Any, batch: Any) -> dict[str, float]:
    scores, classes = _scores_and_classes(outputs, batch)
    return {"accuracy": float((scores.argmax(-1) == classes).float().mean())}


def counted_part(batch: Any) -> float:
    """Return the part of a batch's targets that cross entropy does not ignore; 1 where they have no values."""
    classes = _target(batch)
    if isinstance(classes, FakeTensor):
        return 1.0
    with unset_fake_temporarily():  # an estimate has the values of its first batch
        return float((classes != _IGNORED).sum()) / max(classes.numel(), 1)


_IGNORED = -100
"""Default `ignore_index` of torch's `cross_entropy`."""
LOSSES = {"cross_entropy": _cross_entropy, "chunked_cross_entropy": _chunked_cross_entropy, "mse": _mse}
COUNTS = {"cross_entropy": counted_part, "chunked_cross_entropy": counted_part}
"""Part of a batch's targets over which a loss takes its mean, by the loss's name."""
METRICS = {"accuracy": _accuracy}
