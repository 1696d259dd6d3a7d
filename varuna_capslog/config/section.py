"""The base of every section of a config."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

__all__ = ["FUNCTION", "Section"]

FUNCTION = r"[A-Za-z_][\w.]*:[A-Za-z_]\w*"
"""The pattern of `package.module:function`."""


class Section(BaseModel):
    """Base of every config section, also a workload's own: unknown keys are refused, docstrings describe the fields."""

    model_config = ConfigDict(
        extra="forbid",
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        protected_namespaces=(),
    )
