"""Comparison of scores."""

from __future__ import annotations

__all__ = ["goodness"]


def goodness(name: str, value: float) -> float:
    """Return the score, or its negative where less is better: "loss", "perplexity" and names that end in "_loss"."""
    return -value if name in ("loss", "perplexity") or name.endswith("_loss") else value
