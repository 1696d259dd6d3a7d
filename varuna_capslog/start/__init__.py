"""Turns a config into a profile, a plan, a run folder and running workers. Only this room names both engines, ours and
Varuna's. An engine is imported when it is used: Varuna's needs an installed Varuna, and both need torch, which planning
does not.
"""

from __future__ import annotations

from varuna_capslog.engine.interface import Engine, EngineKind, EngineParts, Engines

__all__ = ["ENGINES"]


def _build_capslog(parts: EngineParts) -> Engine:
    from varuna_capslog.engine.pipeline import build

    return build(parts)


def _build_varuna(parts: EngineParts) -> Engine:
    from varuna_capslog.varuna_plugin.engine import VarunaEngine

    return VarunaEngine(parts)


def _find_varuna() -> None:
    from varuna_capslog.varuna_plugin import find_varuna

    find_varuna()


ENGINES = Engines({"capslog": EngineKind(_build_capslog), "varuna": EngineKind(_build_varuna, _find_varuna)})
