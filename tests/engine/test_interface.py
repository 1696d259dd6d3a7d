"""Both engines keep the protocol without a base class, and a run finds one by the name in its config."""

from __future__ import annotations

import pytest

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.engine.interface import Engine, EngineKind, Engines
from varuna_capslog.engine.pipeline import PipelineEngine
from varuna_capslog.start import ENGINES
from varuna_capslog.varuna_plugin.engine import VarunaEngine

# mypy compares the signatures, where `engines` returns either as an Engine
METHODS = [name for name in vars(Engine) if not name.startswith("_")]


@pytest.mark.parametrize("engine", [PipelineEngine, VarunaEngine])
def test_an_engine_has_all_of_the_protocol_and_no_base(engine: type) -> None:
    """VarunaEngine once inherited methods of ours that would have met attributes which it never set."""
    assert engine.__bases__ == (object,)
    assert "apply" in METHODS
    # a property may be an attribute that is set at once
    attributes = {*vars(engine), *engine.__init__.__code__.co_names}
    assert [name for name in METHODS if name not in attributes] == []


def test_a_name_that_no_engine_has_is_refused_with_those_there_are() -> None:
    with pytest.raises(CapslogError, match=r"engine='varuna' is unknown here; choose one of capslog"):
        Engines({"capslog": EngineKind(lambda parts: pytest.fail("built"))})["varuna"]
    assert ENGINES["varuna"].check is not ENGINES["capslog"].check
    ENGINES["capslog"].check()
