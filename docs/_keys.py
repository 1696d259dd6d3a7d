"""The page "Config keys": every key of a config with its type, default and meaning, from the models that read it.

`python docs/_keys.py` prints it, and `_site` makes it a page of the site. The meaning is the docstring below a field.
"""

from __future__ import annotations

import html
import inspect
import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

from detr_pipeline.config import ModelConfig
from detr_pipeline.data import DataConfig
from detr_pipeline.rt_detr.chain import RtDetrModel
from varuna_capslog.config import defaults
from varuna_capslog.config.reading import section_of
from varuna_capslog.config.settings import Config
from varuna_capslog.model.model_workload import ModelSection
from varuna_capslog.own_data.handed import DataSection

__all__ = ["WORKLOADS", "page", "table"]

_MODEL, _OWN = "varuna_capslog.model.model_workload:workload", "varuna_capslog.own_data:workload"
_DETR, _RT_DETR = "detr_pipeline:workload", "detr_pipeline.rt_detr:workload"
WORKLOADS: tuple[tuple[str, str, type[BaseModel], tuple[str, ...]], ...] = (
    ("an ordinary model", "model", ModelSection, (_MODEL, _OWN)),
    ("own data", "data", DataSection, (_OWN,)),
    ("DETR", "model", ModelConfig, (_DETR,)),
    ("RT-DETR", "model", RtDetrModel, (_RT_DETR,)),
    ("DETR and RT-DETR", "data", DataConfig, (_DETR, _RT_DETR)),
)
"""What a section of a workload is for, its key, its model, and the values of `workload` that it belongs to."""
_NAMES: dict[Any, str] = {bool: "true or false", int: "whole number", float: "number", str: "text", Path: "path"}
_NAMES |= {Any: "any value", NoneType: "null"}
_BOUNDS = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most", "multiple_of": "a multiple of"}
_INTRODUCTION = """# Config keys

A config is a YAML file. A key of a section stands below the section's name:

```yaml
workload: detr_pipeline:workload
train:
  max_steps: 100
  lr: 1e-4
```

On the command line, `key=value` after the file sets a key: `capslog train run.yaml train.max_steps=100`. The value is
YAML too, so `null`, `true`, `'[1, 2]'` and `'{a: 1}'` work; the quotes are for the shell. A key left out has its
default. An unknown key is an error. On this page, `list[].key` is a key of every entry of a list."""


def page() -> str:
    """Return the page as markdown. Raises ValueError for a key without a docstring."""
    sections = {name: inner for name, field in Config.model_fields.items() if (inner := section_of(field))}
    parts = [_INTRODUCTION, _text(Config.__doc__), "## Keys outside sections", table(Config, "", leave_out=sections)]
    for name, model in sections.items():
        parts += [f"## {name}", _text(model.__doc__), table(model, f"{name}.")]
    for title, name, model, workloads in WORKLOADS:
        whose = " or ".join(f"`workload: {workload}`" for workload in workloads)
        parts += [f"## {name}: {title}", f"With {whose}. {_text(model.__doc__)}", table(model, f"{name}.")]
        if model is DataSection:
            parts.append(_own_defaults())
    return "\n\n".join(parts) + "\n"


def table(model: type[BaseModel], prefix: str, leave_out: Iterable[str] = ()) -> str:
    """Return the table of a section's keys, with those of the sections in it. Raises ValueError as `page`."""
    return "\n".join(["| key | type | default | meaning |", "|---|---|---|---|", *_rows(model, prefix, set(leave_out))])


def _rows(model: type[BaseModel], prefix: str, leave_out: set[str]) -> Iterator[str]:
    for name, field in model.model_fields.items():
        if name in leave_out:
            continue
        key, inner = f"{prefix}{name}", section_of(field)
        if not (field.description or "").strip():
            raise ValueError(f"{key} of {model.__name__} has no docstring below it; say there what the key means")
        kind = _kind(field.annotation, field.metadata)
        yield f"| `{key}` | {kind} | {_default(field)} | {_text(field.description)} |"
        if inner is not None:
            yield from _rows(inner, f"{key}[]." if get_origin(field.annotation) is list else f"{key}.", set())


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "must be given"
    value = to_jsonable_python(field.get_default(call_default_factory=True))
    if isinstance(value, dict) and section_of(field):
        return "those of its keys"
    return _code(value if isinstance(value, str) else json.dumps(value))


def _kind(annotation: Any, rules: Sequence[Any] = ()) -> str:
    """Return a field's type in words, with the bounds that its rules set."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _kind(arguments[0], [each for rule in arguments[1:] for each in getattr(rule, "metadata", [rule])])
    if origin in (Union, UnionType):
        return ", or ".join(_kind(choice, () if choice is NoneType else rules) for choice in arguments)
    if origin is Literal:
        return f"one of {', '.join(_code(str(choice)) for choice in arguments)}"
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        return "section of keys"
    if origin is dict:
        return "keys and values" + ("" if arguments[1] is Any else f" (each value: {_kind(arguments[1])})")
    names = (*_BOUNDS, "min_length", "max_length")
    limits = {name: getattr(rule, name) for rule in rules for name in names if hasattr(rule, name)}
    if origin in (list, tuple):
        fixed = limits.get("max_length") if limits.get("max_length") == limits.get("min_length") else None
        count = len(arguments) if origin is tuple and ... not in arguments else fixed
        return f"list ({f'{count} entries, each' if count else 'each entry'}: {_kind(arguments[0])})"
    bounds = " and ".join(f"{words} {limits[name]:,}" for name, words in _BOUNDS.items() if name in limits)
    unit = annotation in (int, float) and any(isinstance(rule, BeforeValidator) for rule in rules)
    return _NAMES[annotation] + (f", {bounds}" if bounds else "") + (" or text with a unit" if unit else "")


def _text(docstring: str | None) -> str:
    """Return a docstring on one line, safe in a table: its signs mean themselves, and the pages it names are links."""
    pieces = re.split(r"(`[^`]*`)", " ".join((docstring or "").split()))
    for place, piece in enumerate(pieces):
        plain = re.sub(r"([\\*<{|]|(?<!\w)_|_(?!\w))", r"\\\1", piece)
        linked = re.sub(r"\bdocs/([\w-]+\.md)", r"[\1](\1)", plain)
        pieces[place] = _code(piece.strip("`")) if place % 2 else linked
    return "".join(pieces)


def _code(text: str) -> str:
    """Return text as code; one with a pipe as HTML, since an escaped pipe in backticks keeps its backslash."""
    return f"<code>{html.escape(text).replace('|', '&#124;')}</code>" if "|" in text else f"`{text}`"


def _own_defaults() -> str:
    sizes = {"minibatch_size": defaults.OWN_MINIBATCH, "microbatch_size": defaults.OWN_MICROBATCH}
    shown = ", ".join(f"`train.{name}` {value}" for name, value in {**defaults.OWN_TRAIN, **sizes}.items())
    return f"With this workload some keys of `train` have other defaults: {shown} (sizes: less where data are few)."


if __name__ == "__main__":
    sys.stdout.write(page())
