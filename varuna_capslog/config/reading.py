"""Reads a run's YAML file and its `key=value` overrides into one validated `Config`. The error for a misspelled key
only suggests a known key. This module imports no torch and opens no data set.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, NoReturn, TypeVar, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from varuna_capslog.base import files
from varuna_capslog.base.errors import CapslogError, ConfigError
from varuna_capslog.config.settings import Config

__all__ = ["Config", "assign", "assignments", "dump_config", "load_config", "parse_override", "section", "section_of"]

Model = TypeVar("Model", bound=BaseModel)


_MOST_BYTES = 1 << 18
"""Limit of a config file; the longest config here has 4 kB."""
_MOST_NODES = 20_000
"""Most keys and values of a config, with aliases expanded: 403 bytes of aliases of aliases took 3 GiB."""
_MOST_PARTS = 20
"""Most parts of an override's key; the longest keys of a config have six."""
_ALIKE, _ALMOST = 0.6, 0.9
"""Least similarity (difflib's ratio) of a suggested key: for a misspelled key, and for a key that exists with exactly
that name in another section."""
_SECTION_KEYS = {
    "pipeline": "devices=4",
    "train": "max_steps=10",
    "profile": "source=estimated",
    "elastic": "enabled=true",
    "model": "factory=package.module:function",
    "data": "root=FOLDER",
}
"""An example key for each section, shown in the error for a section with a bare value."""
_KINDS: dict[str, type[yaml.Node]] = dict.fromkeys(("str", "int", "float", "bool", "null", "merge"), yaml.ScalarNode)
_KINDS |= {"seq": yaml.SequenceNode, "map": yaml.MappingNode}
_PREFIX = "tag:yaml.org,2002:"
_MERGE = f"{_PREFIX}merge"
_NO_TEXT = re.compile("[\0\ud800-\udfff]")


class _Loader(yaml.SafeLoader):
    """YAML loader for which 1e-4 is a number, dates and 12:30 are text, and a repeated key is an error.

    The loader accepts lists, keys, text, numbers, true, false and null. It refuses every other tag and, with aliases
    expanded, more nodes than `_MOST_NODES` and more levels than `files.MOST_LEVELS`.
    """

    def __init__(self, stream: str, depth: int = 0) -> None:
        super().__init__(stream)
        self._count, self._depth = 0, depth
        self._extents: dict[yaml.Node, tuple[int, int]] = {}  # nodes and levels, itself included

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node:
        mark, aliased = self.peek_event().start_mark, self.check_event(yaml.AliasEvent)
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        assert node is not None
        if not aliased:
            self._check(node)
            children = node.value if isinstance(node, yaml.SequenceNode) else []
            children = (
                [child for pair in node.value for child in pair] if isinstance(node, yaml.MappingNode) else children
            )
            extents = [self._extents[child] for child in children]
            levels = 1 + max((levels for _, levels in extents), default=0)
            self._extents[node] = (1 + sum(count for count, _ in extents), levels)
        elif node not in self._extents:
            raise yaml.MarkedYAMLError(problem="an alias stands inside what it stands for", problem_mark=mark)
        count, levels = self._extents[node]
        self._count += count if aliased else 1
        if self._count > _MOST_NODES:
            problem = f"more than {_MOST_NODES} keys and values, with what aliases stand for"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=mark)
        if self._depth + levels > files.MOST_LEVELS:
            raise yaml.MarkedYAMLError(problem=f"nested more than {files.MOST_LEVELS} deep", problem_mark=mark)
        return node

    def _check(self, node: yaml.Node) -> None:
        """Raise MarkedYAMLError for a tag that configs do not have, invalid text, and wrong keys."""

        def refuse(problem: str, node: yaml.Node) -> NoReturn:
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)

        if not isinstance(node, _KINDS.get(node.tag.removeprefix(_PREFIX), ())):
            refuse(f"the tag {node.tag!r} is unknown or does not fit; write plain text, numbers, lists and keys", node)
        if isinstance(node, yaml.ScalarNode) and _NO_TEXT.search(node.value):
            refuse("a NUL character or half of a surrogate pair, which is no text", node)
        seen = set()
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if key.tag not in (f"{_PREFIX}str", _MERGE):
                refuse(f"the key {key.value if isinstance(key, yaml.ScalarNode) else '[...]'} is not text", key)
            if key.value in seen:
                refuse(f"the key {key.value!r} is there twice", key)
            seen.add(key.value)

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Replace `<<` by the keys that it merges; direct keys win. (PyYAML's own mixes up keys of one character.)"""
        merged: dict[str, Any] = {}
        direct: dict[str, Any] = {}
        for key, value in node.value:
            if key.tag != _MERGE:
                direct[key.value] = (key, value)
                continue
            for source in reversed(value.value) if isinstance(value, yaml.SequenceNode) else [value]:
                if not isinstance(source, yaml.MappingNode):
                    problem = "<< merges something without keys"
                    raise yaml.MarkedYAMLError(problem=problem, problem_mark=source.start_mark)
                self.flatten_mapping(source)
                merged |= {pair[0].value: pair for pair in source.value}
        node.value = list((merged | direct).values())

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            value = super().construct_object(node, deep)
            overflows = isinstance(value, float) and math.isinf(value) and ".inf" not in node.value.lower()
            wrong = overflows or (isinstance(value, int) and abs(value) >= 1 << 63)
        except (LookupError, ValueError):  # of a tag that does not fit, such as !!int x
            wrong = True
        if wrong:
            problem = f"{node.value[:50]!r} is not of the type {node.tag.removeprefix(_PREFIX)}, or beyond 64 bits"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
        return value


class _Dumper(yaml.SafeDumper):
    """Quotes every text that `_Loader` or another reader would read as another type."""


_OTHERS = tuple(_PREFIX + name for name in ("timestamp", "float", "int", "value"))
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in _OTHERS]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _reader in (_Loader, _Dumper):
    _reader.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"^[-+]?(\d+\.\d*([eE][-+]?\d+)?|\.\d+([eE][-+]?\d+)?|\d+[eE][-+]?\d+|\.inf|\.nan)$"),
        list("-+0123456789."),
    )
    _reader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"^[-+]?(0|[1-9]\d*)$"), list("-+0123456789"))


def load_config(
    path: Path | str, overrides: Sequence[str] = (), fill: Callable[[dict[str, Any]], object] = lambda values: None
) -> Config:
    """Load the validated config of a YAML file with `a.b=value` overrides (values are YAML: `null` and `[1, 2]` work).

    The default `run_dir` is `runs/<name of the file>`. fill: sets defaults in the values that were read.

    Raises:
        ConfigError: unreadable file, broken YAML, unknown key (with the nearest known key), wrong value, keys that
            disagree.
    """
    path = Path(path)
    values = _read(path)
    values.setdefault("run_dir", str(Path("runs") / path.stem))
    for override in overrides:
        assign(values, *parse_override(override), f"override {override!r}")
    fill(values)
    try:
        config = section(Config, values, where="")
    except ConfigError as error:
        raise ConfigError(f"{_origin(str(error), path, overrides)}: {error}") from None
    config._source = str(path)
    return config


def dump_config(config: Config) -> str:
    """Return the resolved config as YAML that `load_config` reads back into an equal one."""
    # Escapes instead of Unicode: PyYAML does not read back all that it would write (U+0085 becomes a space).
    return yaml.dump(config.model_dump(mode="json"), Dumper=_Dumper, sort_keys=False, width=120)


def section(model: type[Model], values: Mapping[str, Any], where: str) -> Model:
    """Validate a part of a config, with the config's errors; workloads call this for their sections `model` and `data`.

    Args:
        model: the section's class, best derived from `Section`.
        values: the config's values. Types are strict: the text "3" is not a number, the number 1 is not a boolean.
        where: the section's key, such as "model"; error messages name `where.key`.

    Raises:
        ConfigError: the first problem, naming key, value and rule.
    """
    try:
        # In JSON mode strict types accept a list for a tuple and text for a path, because YAML has neither.
        return model.model_validate_json(json.dumps(values, default=str), strict=True)
    except ValidationError as error:
        raise ConfigError(_explain(model, error, where)) from None


def _read(path: Path) -> dict[str, Any]:
    try:
        text = files.read_text(path, _MOST_BYTES)
    except CapslogError as error:
        raise ConfigError(f"config file {error}") from None
    values = _parsed(text, f"{path}: not valid YAML", "mend that line")
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: holds a {type(values).__name__}; a config is a mapping of keys such as `workload:`")
    return values


def assignments(texts: Iterable[str], option: str) -> dict[str, Any]:
    """Return the values of texts `NAME=VALUE`, each parsed as YAML. Raises ConfigError, which begins with `option`, for
    a text of another form, or whose name is no Python identifier.
    """
    assigned: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.strip().isidentifier():
            raise ConfigError(f"{option} {text!r}: write name=value, for example depth=12")
        assigned[name.strip()] = _parsed(value, f"{option} {text!r}: no valid YAML value", "quote it")
    return assigned


def _parsed(text: str, where: str, advice: str, depth: int = 0) -> Any:
    """Return the value of a YAML text at this depth of a config, aliases copied. ConfigErrors begin with `where`."""
    try:
        # a copy, since YAML aliases share one object: an override of one key would change the other
        return json.loads(json.dumps(_Loader(text, depth).get_single_data()))
    except yaml.YAMLError as error:
        problem, mark = getattr(error, "problem", None), getattr(error, "problem_mark", None)
        place = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        raise ConfigError(f"{where}: {problem or ' '.join(str(error).split())}{place}; {advice}") from None
    except RecursionError:
        raise ConfigError(f"{where}: nested more than {files.MOST_LEVELS} deep; {advice}") from None


def parse_override(override: str) -> tuple[str, Any]:
    """Return key and value of a text `a.b=value`, the value parsed as YAML. Raises ConfigError for other texts."""
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts) or len(parts) > _MOST_PARTS or _NO_TEXT.search(key):
        raise ConfigError(f"override {override!r}: write key=value, for example train.max_steps=10")
    return key.strip(), _parsed(text, f"override {override!r}: no valid YAML value", "quote it", len(parts))


def assign(values: dict[str, Any], key: str, value: Any, origin: str) -> None:
    """Set `key`, such as `train.max_steps`, in a config's plain values; missing sections are made. Raises ConfigError,
    which begins with `origin`, where a part of the key is no section.
    """
    *parts, last = key.split(".")
    target = values
    if not parts and last in _SECTION_KEYS and not isinstance(value, (dict, NoneType)):
        raise ConfigError(f"{origin}: {last} is a section; write a key of it, such as {last}.{_SECTION_KEYS[last]}")
    for depth, part in enumerate(parts):
        inner = target.setdefault(part, {})
        if inner is None:
            inner = target[part] = {}
        if not isinstance(inner, dict):
            section = ".".join(parts[: depth + 1])
            raise ConfigError(f"{origin}: {section} is {inner!r}, not a section; write a key of it, such as {key}=...")
        target = inner
    target[last] = value


def _origin(message: str, path: Path, overrides: Sequence[str]) -> str:
    """Return the override that set the key at the beginning of a message, else the file."""
    key = message.split(" ", 1)[0].partition("=")[0].rstrip(":")
    for override in reversed(overrides):
        name = override.partition("=")[0].strip()
        if key == name or key.startswith((name + ".", name + "[")) or name.startswith(key + "."):
            return f"override {override!r}"
    return str(path)


def _explain(model: type[BaseModel], error: ValidationError, where: str) -> str:
    """Return a sentence on the first problem; misspelled keys come first, since they cause others (a missing key)."""
    problems = sorted(error.errors(include_url=False), key=lambda problem: problem["type"] != "extra_forbidden")
    first = problems[0]
    if first["type"] == "extra_forbidden":
        place: list[str] = []
        for part in first["loc"]:  # the place in a list belongs to the list's key
            place[-1:] = [f"{place[-1]}[{part}]"] if isinstance(part, int) else [*place[-1:], part]
        return _unknown(model, place, where)
    location, description = _locate(model, first["loc"])
    key = _join(where, location)
    if first["type"] == "value_error":
        reason = str(first["ctx"]["error"])
        return reason if key in reason else f"{key}: {reason}"  # a check of several keys names them itself
    if first["type"] == "missing":
        return f"{key} is missing; set it{description}"
    # A union reports one problem per branch: the value breaks all of them.
    rules = [_rule(problem) for problem in problems if _locate(model, problem["loc"])[0] == location]
    shown = json.dumps(first["input"], default=str)
    return f"{key} is {shown} but must {' or '.join(dict.fromkeys(rules))}{description}"


def _rule(problem: Any) -> str:
    if problem["type"] == "model_type":
        return "be a section of keys"
    if problem["type"] == "string_pattern_mismatch":
        return f"match {problem['ctx']['pattern']}"
    if problem["type"] in ("too_short", "too_long"):
        return f"have {problem['ctx'].get('min_length', problem['ctx'].get('max_length'))} entries"
    return re.sub(r"^Input should ", "", problem["msg"])


def _locate(model: type[BaseModel], location: Sequence[int | str]) -> tuple[list[str], str]:
    """Return the part of a pydantic location that is a user's key (no branch names of unions), and its description."""
    keys: list[str] = []
    description = ""
    in_dict = False
    current: type[BaseModel] | None = model
    for part in location:
        if current is not None and isinstance(part, str) and part in current.model_fields:
            field = current.model_fields[part]
            keys.append(part)
            first_sentence = " ".join((field.description or "").split()).partition(". ")[0].rstrip(".")
            description = f" ({first_sentence})" if first_sentence else ""
            current = section_of(field)
            in_dict = get_origin(field.annotation) is dict
        elif isinstance(part, int) and keys:
            keys[-1] += f"[{part}]"
        elif in_dict:
            keys.append(str(part))
            in_dict = False
    return keys, description


def _unknown(model: type[BaseModel], location: list[str], where: str) -> str:
    *parents, name = location
    parent: type[BaseModel] = model
    for part in parents:
        inner = section_of(parent.model_fields[part.partition("[")[0]])
        if inner is None:
            break
        parent = inner
    # A right name in the wrong section is as common as a misspelled name, and a key may be both: pipeline.device.
    everywhere = dict(_all_keys(model, ()))
    same_section = {key: (*parents, key) for key in parent.model_fields}
    near = _nearest(name, same_section, _ALMOST if name in everywhere else _ALIKE)
    matches = [same_section[near]] if near is not None else []
    elsewhere = name if name in everywhere else _nearest(name, everywhere) if near is None else None
    matches += [everywhere[elsewhere]] if elsewhere is not None else []
    hint = f"known keys: {', '.join(parent.model_fields)}"
    if matches:
        hint = f"did you mean {' or '.join(_join(where, match) for match in matches)}?"
    return f"{_join(where, location)} is not a known key; {hint}"


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    """Return the section that a field holds, also where it may be null; None for other fields."""
    for annotation in (field.annotation, *get_args(field.annotation)):
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            return annotation
    return None


def _all_keys(model: type[BaseModel], prefix: tuple[str, ...]) -> Iterable[tuple[str, tuple[str, ...]]]:
    for name, field in model.model_fields.items():
        yield name, (*prefix, name)
        inner = section_of(field)
        if inner is not None and get_origin(field.annotation) is not list:
            yield from _all_keys(inner, (*prefix, name))


def _nearest(name: str, candidates: Iterable[str], cutoff: float = _ALIKE) -> str | None:
    matches = difflib.get_close_matches(name, list(candidates), n=1, cutoff=cutoff)
    return matches[0] if matches else None


def _join(where: str, parts: Sequence[str]) -> str:
    return ".".join(([where] if where else []) + list(parts))
