"""Which of two scores is the better one: more, except of losses, which are known by their names."""

from __future__ import annotations

__all__ = ["goodness"]


def goodness(name: str, value: float) -> float:
    """The score, or its negative where less is better: of "loss", "perplexity" and names that end in "_loss"."""
    return -value if name in ("loss", "perplexity") or name.endswith("_loss") else value
