"""Seeded damage: to a tree of JSON or YAML values, to the text of a file, to its bytes.

`fuzz.py` calls `damaged` with the bytes of a valid file. The same random generator gives the same bytes.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from typing import Any

import yaml

__all__ = ["damaged"]

HOSTILE_VALUES: tuple[Any, ...] = (
    0,
    -1,
    1,
    7,
    10**9,
    2**31,
    2**63 - 1,
    2**63,
    10**30,
    10**400,
    0.5,
    -0.0,
    1e30,
    1e308,
    float("nan"),
    float("inf"),
    True,
    False,
    None,
    "",
    "1",
    "nan",
    "x" * 10_000,
    "../../outside",
    "/etc/hostname",
    "\x1b]0;title\x07\x1b[31m",
    "a\x00b",
    "\u202egnp.exe",
    "\ud800",
    "line\nbreak",
    [],
    {},
    [[]],
    [None],
    {"": None},
    [0] * 1000,
    "__import__('os').system('true')",
    "os:system",
)
HOSTILE_TEXTS: tuple[str, ...] = (
    "\x00",
    "\ufeff",
    "{",
    "]",
    ",,",
    "NaN",
    "-Infinity",
    "1e999999",
    "9" * 5000,
    "[" * 100_000,
    '{"a":' * 3000,
    "\\ud800",
    "!!python/object/apply:os.system ['true']",
    "!!int ''",
    "!!timestamp x",
    "!!bool x",
    "!!binary '*'",
    "!!set {a, b}",
    "!!omap [a: 1]",
    "!!map abc",
    "!!float 1_e",
    "&a [*a]",
    "<<: *nothing",
    "? [a, b]\n: c\n",
    "\t",
    "%YAML 9.9\n---\n",
    "---\na: 1\n---\nb: 2\n",
    "a: &a [x, x]\nb: &b [*a, *a, *a, *a, *a, *a, *a, *a]\nc: [*b, *b, *b, *b, *b, *b, *b, *b]\n",
)

_Place = tuple[Any, Any]  # a list or dict, and the index or key of the value there


def damaged(dice: random.Random, content: bytes, form: str) -> bytes:
    """Returns the content with one to three damages.

    Args:
        dice: chooses the damages and their places.
        content: content of a valid file.
        form: "json", "jsonl", "yaml", "override" for a text behind a config, or "bytes" for a file that is no text.
    """
    if form == "override":
        return content if dice.random() < 0.7 else _override(dice)
    for _ in range(dice.choice((1, 1, 1, 2, 3))):
        if form == "bytes" or dice.random() < 0.15:
            content = dice.choice(_OF_BYTES)(dice, content)
        elif form == "jsonl":
            content = _line_damaged(dice, content)
        else:
            content = _tree_damaged(dice, content, form)
    return content


def _override(dice: random.Random) -> bytes:
    key = dice.choice(("train.lr", "pipeline.capacity", "model", "data.arguments.a", "x", "pipeline.cuts", ""))
    return f"{key}{dice.choice(('=', '=', '', '=='))}{dice.choice(HOSTILE_TEXTS)}".encode()


def _tree_damaged(dice: random.Random, content: bytes, form: str) -> bytes:
    try:
        tree = json.loads(content) if form == "json" else yaml.safe_load(content)
    except (ValueError, RecursionError, yaml.YAMLError):  # an earlier damage
        return dice.choice(_OF_BYTES)(dice, content)
    tree = {"": tree}
    try:
        dice.choice(_OF_TREES)(dice, tree)
        tree = tree.get("")
        text = json.dumps(tree) if form == "json" or dice.random() < 0.1 else yaml.safe_dump(tree, sort_keys=False)
    except (ValueError, RecursionError, yaml.YAMLError):
        return content
    return text.encode("utf-8", "surrogatepass")


def _line_damaged(dice: random.Random, content: bytes) -> bytes:
    lines = content.splitlines(keepends=True) or [b"{}\n"]
    index = dice.randrange(len(lines))
    lines[index] = _tree_damaged(dice, lines[index], "json").rstrip(b"\n") + b"\n"
    return b"".join(lines)


def _places(tree: Any) -> list[_Place]:
    """Return the places of all values in the tree except its root, each with its container."""
    places: list[_Place] = []
    waiting = [tree]
    while waiting:
        container = waiting.pop()
        keys = list(container) if isinstance(container, dict) else range(len(container))
        for key in keys:
            places.append((container, key))
            if isinstance(container[key], dict | list):
                waiting.append(container[key])
    return places


def _place(dice: random.Random, tree: Any) -> _Place:
    """Draw a place in the tree; a rare key is as likely as one that thousands of entries have."""
    places = _places(tree)
    if dice.random() < 0.5:
        names = sorted({str(key) for _, key in places if isinstance(key, str)})
        name = dice.choice(names)
        places = [(container, key) for container, key in places if str(key) == name]
    return dice.choice(places)


def _replace(dice: random.Random, tree: Any) -> None:
    container, key = _place(dice, tree)
    container[key] = copy.deepcopy(dice.choice(HOSTILE_VALUES))


def _shift(dice: random.Random, tree: Any) -> None:
    """Changes a number a little, or by a large factor."""
    numbers = [(box, key) for box, key in _places(tree) if type(box[key]) in (int, float)]
    if not numbers:
        return _replace(dice, tree)
    container, key = dice.choice(numbers)
    number = container[key]
    container[key] = dice.choice(
        (number + 1, number - 1, -number, number * 1000, number / 3, float(number), str(number))
    )
    return None


def _remove(dice: random.Random, tree: Any) -> None:
    container, key = _place(dice, tree)
    del container[key]


def _rename(dice: random.Random, tree: Any) -> None:
    container, key = _place(dice, tree)
    if isinstance(container, dict):
        container[dice.choice((f"{key}s", str(key).upper(), "", "unknown", "\x1b[2J", "x" * 3000))] = container.pop(key)


def _repeat(dice: random.Random, tree: Any) -> None:
    """Repeats an entry of a list, swaps two, or cuts the list short."""
    lists = [box[key] for box, key in _places(tree) if isinstance(box[key], list) and box[key]]
    if not lists:
        return _replace(dice, tree)
    entries = dice.choice(lists)
    index = dice.randrange(len(entries))
    dice.choice(
        (
            lambda: entries.insert(index, copy.deepcopy(entries[index])),
            entries.reverse,
            lambda: entries.__delitem__(slice(index, None)),
            lambda: entries.extend(copy.deepcopy(entries) * 50),
        )
    )()
    return None


def _transplant(dice: random.Random, tree: Any) -> None:
    """Puts a copy of one value in the place of another."""
    source, name = _place(dice, tree)
    value = copy.deepcopy(source[name])
    container, key = _place(dice, tree)
    container[key] = value


def _deepen(dice: random.Random, tree: Any) -> None:
    container, key = _place(dice, tree)
    value = container[key]
    for _ in range(dice.choice((3, 90, 700))):
        value = [value] if dice.random() < 0.5 else {"a": value}
    container[key] = value


def _flip(dice: random.Random, content: bytes) -> bytes:
    damage = bytearray(content)
    for _ in range(dice.choice((1, 1, 8))):
        if damage:
            damage[dice.randrange(len(damage))] ^= 1 << dice.randrange(8)
    return bytes(damage)


def _cut(dice: random.Random, content: bytes) -> bytes:
    return content[: dice.randrange(len(content) + 1)]


def _insert(dice: random.Random, content: bytes) -> bytes:
    position = dice.randrange(len(content) + 1)
    if dice.random() < 0.5:  # where a line begins or a value stands
        position = content.rfind(dice.choice((b"\n", b": ")), 0, position) + 1
    return content[:position] + dice.choice(HOSTILE_TEXTS).encode() + content[position:]


def _double(dice: random.Random, content: bytes) -> bytes:
    return content + content


def _blank(dice: random.Random, content: bytes) -> bytes:
    begin = dice.randrange(len(content) + 1)
    return content[:begin] + bytes(min(4096, len(content) - begin)) + content[begin + 4096 :]


_OF_TREES: tuple[Callable[[random.Random, Any], None], ...] = (
    _replace,
    _replace,
    _replace,
    _shift,
    _remove,
    _rename,
    _repeat,
    _transplant,
    _deepen,
)
_OF_BYTES: tuple[Callable[[random.Random, bytes], bytes], ...] = (_flip, _cut, _insert, _insert, _double, _blank)
