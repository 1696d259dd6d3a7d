"""The one comparison of two steps: gradients to a tolerance, or all bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

__all__ = ["differences", "gradient_error", "merged"]


def gradient_error(gradients: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> tuple[float, str]:
    """Largest `max|a-b| / max(max|b|, 1e-3 * the model's largest gradient)` and the parameter it belongs to.

    A parameter that only one side has counts as an error of infinity.
    """
    missing = set(gradients) ^ set(expected)
    if missing:
        return float("inf"), sorted(missing)[0]
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    errors = {
        name: float((gradients[name] - gradient).abs().max()) / max(float(gradient.abs().max()), 1e-3 * largest)
        for name, gradient in expected.items()
    }
    worst = max(errors, key=errors.__getitem__)
    return errors[worst], worst


def differences(results: list[dict[str, Any]], expected: Mapping[str, Any]) -> list[str]:
    """Names of the steps' numbers and of the tensors in which all ranks together differ from one rank in any bit."""
    numbers = [name for name in ("parts", "norms", "norm", "loss") if name in expected]
    different = [name for name in numbers for result in results if result[name] != expected[name]]
    for kind in (kind for kind in ("gradients", "state", "weights", "moments", "buffers") if kind in expected):
        ours: Mapping[str, Tensor] = merged(results, kind)
        different += [f"{kind} {name}" for name in sorted(expected[kind].keys() ^ ours.keys())]
        different += [
            f"{kind} {name}" for name in ours if name in expected[kind] and not ours[name].equal(expected[kind][name])
        ]
    return different


def merged(results: list[dict], key: str) -> dict[str, Tensor]:  # type: ignore[type-arg]
    """The tensors of all ranks under one name each; copies on several ranks must be equal to the bit."""
    together: dict[str, Tensor] = {}
    for result in results:
        for name, tensor in result[key].items():
            assert name not in together or together[name].equal(tensor), f"two ranks disagree about {name}"
            together[name] = tensor
    return together
