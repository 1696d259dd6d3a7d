"""The page of config keys has every key with its default and its meaning, whatever signs these hold."""

from __future__ import annotations

import ast
import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal

import pytest
from pydantic import BeforeValidator, Field
from pydantic_core import to_jsonable_python

from tests.source_trees import nodes_of, programs
from varuna_capslog.config.reading import section_of
from varuna_capslog.config.settings import Config, Section

ROOT = Path(__file__).parents[1]
Row = tuple[str, str, str, str]
"""Key, type, default and meaning."""


def of_docs(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "docs")
    return importlib.import_module(name)


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return of_docs("_keys", monkeypatch)


def rows(text: str) -> list[Row]:
    """Return the rows of all tables; each line of a table must have four cells."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [tuple(cell.strip() for cell in re.split(r"(?<!\\)\|", line)) for line in lines]
    for line, parts in zip(lines, cells, strict=True):
        assert parts[0] == parts[-1] == "", f"no whole line of a table: {line}"
        assert len(parts) == 6, f"{len(parts) - 2} cells: {line}"
        assert all(parts[1:-1]), f"an empty cell: {line}"
        assert not re.search(r"`[^`]*\\\|[^`]*`", line), f"this pipe keeps its backslash: {line}"
        assert line.count("`") % 2 == 0, f"code without an end: {line}"
    return [(key, kind, default, meaning) for _, key, kind, default, meaning, _ in cells if key not in ("key", "---")]


def fields_in_source() -> Iterator[tuple[str, str, str, str]]:
    """Yield module, class, name and docstring of each field of a `Section`, as the source files have them."""
    for path in programs(ROOT):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for node in nodes_of(path.read_text(encoding="utf-8")):
            if module.startswith("tests.") or not isinstance(node, ast.ClassDef):
                continue
            if not any(isinstance(base, ast.Name) and base.id == "Section" for base in node.bases):
                continue
            for field, below in zip(node.body, [*node.body[1:], None], strict=True):
                name = ast.unparse(field.target) if isinstance(field, ast.AnnAssign) else "_"
                if not name.startswith("_"):
                    described = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
                    yield module, node.name, name, " ".join(below.value.value.split()) if described else ""


def plain(meaning: str) -> str:
    """Return a meaning without what the page adds to the docstring."""
    return re.sub(r"\[([\w-]+\.md)\]\(\1\)", r"docs/\1", re.sub(r"\\(.)", r"\1", meaning))


def shows(shown: str, model: type[Section], name: str) -> bool:
    field = model.model_fields[name]
    if field.is_required():
        return shown == "must be given"
    default, text = to_jsonable_python(field.get_default(call_default_factory=True)), shown.strip("`")
    if isinstance(default, dict) and section_of(field) is not None:
        return text == "those of its keys"
    return text == default if isinstance(default, str) else json.loads(text) == default


def test_every_field_of_every_section_is_on_the_page(keys: ModuleType) -> None:
    shown, missing = rows(keys.page()), []
    fields = list(fields_in_source())
    assert len(fields) > 140
    for module, owner, name, docstring in fields:
        model = getattr(importlib.import_module(module), owner)
        if model is Config and section_of(Config.model_fields[name]) is not None:
            continue  # a heading
        here = [row for row in shown if re.search(rf"[`.]{name}`$", row[0]) and plain(row[3]) == docstring]
        if not any(shows(default, model, name) for _, _, default, _ in here):
            missing.append(f"{owner}.{name}")
    assert missing == []


def test_keys_are_named_as_a_config_has_them(keys: ModuleType) -> None:
    text = keys.page()
    shown = [row[0].strip("`") for row in rows(text)]
    for name, field in Config.model_fields.items():
        section = section_of(field)
        assert (f"\n## {name}\n" in text) == (section is not None)
        expected = [name] if section is None else [f"{name}.{key}" for key in section.model_fields]
        assert [key for key in expected if shown.count(key) != 1] == []
    assert {"train.parameter_groups[].match", "data.augment.flip", "data.digits.canvas"} <= {*shown}


def test_workloads_of_the_page_exist(keys: ModuleType) -> None:
    for _, _, _, workloads in keys.WORKLOADS:
        for workload in workloads:
            module, _, function = workload.partition(":")
            assert callable(getattr(importlib.import_module(module), function))


def test_types_are_in_words(keys: ModuleType) -> None:
    kinds = {key.strip("`"): kind for key, kind, _, _ in rows(keys.page())}
    assert kinds["train.max_steps"] == "whole number, above 0, or null"
    assert kinds["train.lr_final_factor"] == "number, at least 0 and at most 1"
    assert kinds["train.loss_scale"] == "one of `dynamic`, or number"
    assert kinds["pipeline.bandwidth"] == "whole number or text with a unit, or null"
    assert kinds["profile.image_size"] == "list (2 entries, each: whole number, above 0), or null"
    assert kinds["profile.device"] == "text, or null"
    assert kinds["variants"] == "keys and values (each value: text)"


def test_a_field_without_a_docstring_is_refused(keys: ModuleType) -> None:
    class Bare(Section):
        described: int = 1
        """A number."""

        bare: int = 2

    with pytest.raises(ValueError, match=r"train\.bare of Bare has no docstring"):
        keys.table(Bare, "train.")


def test_signs_of_tables_and_emphasis_mean_themselves(keys: ModuleType) -> None:
    class Odd(Section):
        way: Literal["a|b", "c"] = "a|b"
        """Either `a|b` or a|c,
        with *stars*, _lines_ of some_name, <tags> and {braces}, as docs/plans.md says."""

        size: Annotated[Any, BeforeValidator(str)] = Field(default_factory=lambda: {"a": "|"})
        """What it says."""

    way, size = rows(keys.table(Odd, "odd."))
    assert way == (
        "`odd.way`",
        "one of <code>a&#124;b</code>, `c`",
        "<code>a&#124;b</code>",
        r"Either <code>a&#124;b</code> or a\|c, with \*stars\*, \_lines\_ of some_name, \<tags> and \{braces}, as "
        "[plans.md](plans.md) says.",
    )
    assert size[1:3] == ("any value", "<code>{&quot;a&quot;: &quot;&#124;&quot;}</code>")


def test_links_to_the_module_lead_to_the_page_on_the_site(monkeypatch: pytest.MonkeyPatch) -> None:
    site = of_docs("_site", monkeypatch)
    text = "[keys](_keys.py), [benchmarks](../benchmarks), [a test](../tests/test_docs.py)"
    assert site.on_page_markdown(text) == "[keys](config-keys.md), `benchmarks`, a test (`tests/test_docs.py`)"
