"""Reads pipeline layouts of other systems: the decoder blocks of each stage, and the cuts of our layers that match.

Imports no torch. `planning/export` writes the same forms, and names the sources of their rules.
"""

from __future__ import annotations

import ast
import contextlib
import html
import itertools
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import yaml

from varuna_capslog.base import fields
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.model.names import ModelNames
from varuna_capslog.planning.export.layer_counts import block_pattern, blocks_of_layers

__all__ = ["SYSTEMS", "Layout", "count_blocks", "faults_of_cuts", "layout_cuts", "read_layout", "system_of"]


@dataclass(frozen=True)
class Layout:
    """Layout of another system, for a number of decoder blocks and of pipeline ranks.

    system: a key of SYSTEMS. counts: decoder blocks of each stage in the order of the model; stage s is on rank
    s % ranks.
    prediction_stages: stage of each layer for multi-token prediction; these layers follow the blocks.
    faults: sentences on rules of the system or the model that the layout breaks; empty where it breaks none.
    """

    system: str
    counts: tuple[int, ...]
    prediction_stages: tuple[int, ...] = ()
    faults: tuple[str, ...] = ()


def read_layout(
    text: str,
    num_blocks: int,
    ranks: int,
    system: str | None = None,
    num_predictions: int = 0,
    letters: Sequence[str] = (),
) -> Layout:
    """Return the layout that a text describes.

    Args:
        text: a Megatron layout string or hybrid pattern, numbers of blocks (`16,16,16,13`), or a line or file with the
            settings of a system, such as `VLLM_PP_LAYER_PARTITION=31,31,31`, also quoted for HTML, Markdown or a shell.
        num_blocks: decoder blocks of the model. ranks: of one pipeline.
        system: key of SYSTEMS; None: recognized from the text.
        num_predictions: the model's layers for multi-token prediction; a layout may leave them out.
        letters: of each block of a hybrid model (`export.layer_counts.block_letters`); (): every block has as many.

    Raises CapslogError for a text with no layout or several, and for an unknown system.
    """
    if system is not None:
        fields.refuse_unknown([system], list(SYSTEMS), "system of a layout")
    text = _pasted(text)
    system = system or system_of(text)
    counts, predictions, faults = _READERS[system](text, _Model(num_blocks, ranks, tuple(letters)))
    if num_predictions and len(predictions) not in (0, num_predictions):
        faults = [
            f"it has {len(predictions)} layers for multi-token prediction (m), the model {num_predictions}",
            *faults,
        ]
    if sum(counts) != num_blocks:
        faults = [f"it has {sum(counts)} decoder blocks, the model {num_blocks}", *faults]
    if len(counts) % ranks:
        faults = [*faults, f"its {len(counts)} stages are no multiple of {ranks} ranks"]
    return Layout(system, tuple(counts), predictions, tuple(faults))


def count_blocks(names: ModelNames, pattern: str | None = None) -> int:
    """Return the number of a model's decoder blocks. pattern: as for `export.layer_counts.block_pattern`."""
    blocks = blocks_of_layers(names, block_pattern(names.layers, pattern))
    return 1 + max(number for numbers in blocks for number in numbers)


def faults_of_cuts(layout: Layout, names: ModelNames, pattern: str | None = None) -> list[str]:
    """Return a sentence for each border between stages that lies inside one of our layers."""
    blocks = blocks_of_layers(names, block_pattern(names.layers, pattern))
    layer_of = {number: layer for layer, numbers in enumerate(blocks) for number in numbers}
    faults = []
    for stage in range(1, len(layout.counts)):
        first = sum(layout.counts[:stage])
        layer = 0 if first == 0 else layer_of[first - 1]
        if layer_of.get(first) == layer:
            held = "the embedding and its blocks" if layer == 0 else f"blocks {blocks[layer][0]} to {blocks[layer][-1]}"
            faults.append(
                f"stage {stage} begins with block {first}, but {held} are one layer, {names.layers[layer]!r}, which "
                "cannot be parted (capslog profile says why, --cut-points parts what a model allows)"
            )
    return faults


def layout_cuts(layout: Layout, names: ModelNames, pattern: str | None = None) -> list[int]:
    """Return the first layer of each stage of a layout without faults; a stage without layers has that of the next.

    The embedding is in the first stage. The last stage has the head, and layers for multi-token prediction if the
    layout does not name them. With such layers the norm before them is with the last block, as in Megatron. Raises
    CapslogError for a layer that holds parts of two blocks in different stages.
    """
    blocks = blocks_of_layers(names, block_pattern(names.layers, pattern))
    first_layers: dict[int, int] = {}
    for layer, numbers in enumerate(blocks):
        for number in numbers:
            first_layers.setdefault(number, layer)
    behind = max(layer for layer, numbers in enumerate(blocks) if numbers) + 1
    tail = [*names.predictions, names.predictions[-1] + 1] if names.predictions else [behind]
    cuts = [0]
    for stage in range(1, len(layout.counts)):
        before = sum(layout.counts[:stage])
        predicted = sum(place < stage for place in layout.prediction_stages) if names.predictions else 0
        cuts.append(first_layers.get(before, tail[min(predicted, len(tail) - 1)]))
    for number, (start, end) in enumerate(pairwise(cuts)):
        if start > end:
            raise CapslogError(f"stages {number} and {number + 1} of the layout hold parts of one layer; cut it finer")
    return cuts


# -- Pasted texts: from a shell, a config file, a web page or a discussion.


_MARKS_OF_WRITING = str.maketrans("\u201c\u201d\u2018\u2019`\u00d7", '""\'\'"*')


def _pasted(text: str) -> str:
    """Return a text without comments and without the escapes of Markdown, HTML, JSON and shells, in which shell
    variables that the text sets are replaced by their values.
    """
    text = html.unescape(text).translate(_MARKS_OF_WRITING)
    text = re.sub(r"\\+(?=[^\w\\]|$)", "", text)  # \| and \* of tables, \" of JSON, the end of a shell's line
    text = re.sub(r"(?m)(?:^|(?<=\s))#.*$", "", text).strip() or text.replace("#", "")
    text = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)
    for name, value in re.findall(r"(?m)^\s*(?:export\s+)?(\w+)=[\"']?([^\s\"']+)[\"']?\s*$", text):
        text = re.sub(rf"\$(?:{name}\b|\{{{name}\}})", value.replace("\\", "\\\\"), text)
    return text


def _setting(text: str, name: str, form: str, example: str, alone: str | None = None) -> str | None:
    """Return the value of a setting in a text: an option, or an assignment in a shell, YAML, TOML, JSON or Python; None
    where it is absent or null.

    name, form: regular expressions of the setting's name and value. alone: that of a value in quotes which needs no
    name. Raises CapslogError, with the example, for a value of another form, and for several different values.
    """
    layouts = {}
    setting = rf"""["'\]]*(?:\s*(?:==?|:)\s*(?P<set>{form}|\S+)|[\s,]+(?P<next>{form}))"""
    for hit in re.finditer(rf"(?P<name>(?i:{name})){setting}", text):
        layout = (hit["set"] or hit["next"]).strip("\"',; \n")
        if layout.lower() in ("null", "none", "~", ""):
            continue
        if re.fullmatch(form, hit["set"] or hit["next"]) is None:
            raise CapslogError(f"{hit['name']} is {layout!r} there; write it out, such as {example}")
        layouts["".join(layout.split()).strip("[]")] = layout
    if not layouts and alone is not None:
        layouts = {layout: layout for layout in re.findall(rf"[\"']({alone})[\"']", text)}
    if len(layouts) > 1:
        raise CapslogError(f"the text has {len(layouts)} layouts, {' and '.join(map(repr, layouts))}; give one of them")
    return next(iter(layouts.values()), None)


def _setting_or_text(text: str, name: str, form: str, example: str, alone: str | None = None) -> str:
    """Return the value of a setting, as `_setting`; the text itself where it does not contain the setting's name."""
    layout = _setting(text, name, form, example, alone)
    if layout is None and (named := re.search(name, text, re.IGNORECASE)):
        raise CapslogError(f"the text names {named[0]}, but gives no value such as {example} behind it; add that")
    return layout or text


def _joined(text: str) -> str:
    """Return a text without quotes round it and without spaces."""
    return "".join(text.split()).strip("\"'")


def _lists(text: str, name: str) -> list[list[str]] | None:
    """Return the lists of words in a text's outer list: in brackets, or in YAML after a name; None where absent."""
    if start := re.search(r"\[\s*\[", text):
        depths = itertools.accumulate((letter == "[") - (letter == "]") for letter in text[start.start() :])
        length = next((place + 1 for place, depth in enumerate(depths) if depth == 0), len(text))
        block = text[start.start() :][:length]
    elif dashes := re.search(rf"""(?:{name})["']?[ \t]*:[ \t]*\n(?P<lines>(?:[ \t]*-.*\n?)+)""", text):
        block = textwrap.dedent(dashes["lines"])
    else:
        return None
    stages, reason = None, "no lists in a list"
    try:
        stages = _value(ast.parse(block.strip(), mode="eval").body)
    except (SyntaxError, TypeError) as error:
        reason = str(error)
        with contextlib.suppress(yaml.YAMLError):
            stages = yaml.safe_load(block)
    if not isinstance(stages, list) or any(not isinstance(row, list) for row in stages):
        raise CapslogError(
            f"the lists {block[:60]!r} cannot be read ({reason}); give one list of words for each stage, written out"
        )
    return [list(map(str, row)) for row in stages]


def _value(node: ast.expr) -> Any:
    """Return the value of an expression of lists, strings and whole numbers, with + and repetition by *."""
    match node:
        case ast.Constant(value=str() | int() as constant):
            return constant
        case ast.List(elts=parts):
            return [_value(part) for part in parts]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _value(left) + _value(right)
        case ast.BinOp(left=ast.List() as left, op=ast.Mult(), right=ast.Constant(value=int() as n)) if n < 1000:
            return _value(left) * n
    raise TypeError(f"{ast.unparse(node)!r} is no list, no name, no sum, and no product of a list with less than 1000")


# -- The readers, one for each form of text


_Parts = tuple[list[int], tuple[int, ...], list[str]]
"""Blocks of each stage, stages of the layers for multi-token prediction, faults."""


@dataclass(frozen=True)
class _Model:
    """num_blocks: decoder blocks. letters: of each block in hybrid patterns; () where they are not known."""

    num_blocks: int
    ranks: int
    letters: tuple[str, ...] = ()


_LAYOUT = r"""(?=[^\s"']*t)[EtmL|()*\d,]+(?=[\s"';\])]|$)"""
_HYBRID = r"""(?=[^\s"']*[MG*D+])[MG*D+\-E|/]+"""
_LAYOUT_NAME = r"pipeline[-_]model[-_]parallel[-_]layout"
_HYBRID_NAME = r"hybrid[-_](?:layer|override)[-_]pattern"
_LETTERS = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
_NUMBERS = r"""["'\[(\s]*(?:-\s+)?\d+(?:(?:[ \t]*,\s*|[ \t]+|\s*\n\s*-\s*)\d+)*[,\s]*["'\])]*(?!\w)"""
_MODULES_NAME = r"module_(?:fqns|names)_per_model_(?:part|chunk)"


def _megatron(text: str, model: _Model) -> _Parts:
    """Read a layout string (stages split by |; E, t, m and L, `x*n` and `(...)*n`; commas are ignored), lists of words,
    or the pattern of a hybrid model.
    """
    if re.search(rf"(?i:{_HYBRID_NAME})", text) or re.fullmatch(_HYBRID, _joined(text)):
        form = r"""["']+[^"']*["']+|[MG*D+\-E|/]+"""
        return _hybrid(_joined(_setting_or_text(text, _HYBRID_NAME, form, "M-M-|M-M*-")), model)
    lists = _lists(text, _LAYOUT_NAME)
    if lists is None:
        form = rf"""["']+[^"'$]*["']+|{_LAYOUT}"""
        layout = _setting_or_text(text, _LAYOUT_NAME, form, "Et*4|t*4L", f"(?=E){_LAYOUT}")
        stages = _expanded(_joined(layout)).split("|")
    else:
        words = [[word.strip().lower() for word in row] for row in lists]
        if unknown := [word for row in words for word in row if word not in _LETTERS]:
            raise CapslogError(f"{unknown[0]!r} is no layer of Megatron's lists; these are {', '.join(_LETTERS)}")
        stages = ["".join(_LETTERS[word] for word in row) for row in words]
    flat, faults = "".join(stages), []
    if stages[0][:1] != "E" or flat.count("E") != 1:
        faults.append("it does not begin with one E, the embedding")
    if stages[-1][-1:] != "L" or flat.count("L") != 1:
        faults.append("it does not end with one L, the loss")
    if "m" in flat and "t" in flat[flat.index("m") :]:
        faults.append("a layer for multi-token prediction (m) stands before a block (t)")
    predictions = tuple(number for number, stage in enumerate(stages) for _ in range(stage.count("m")))
    if len(set(predictions)) > 1:
        faults.append(f"the layers for multi-token prediction (m) are in stages {sorted(set(predictions))}, not in one")
    if predictions and predictions[0] < len(stages) - model.ranks:
        faults.append("a layer for multi-token prediction (m) is not in the last chunk of its rank")
    return [stage.count("t") for stage in stages], predictions, faults


def _hybrid(pattern: str, model: _Model) -> _Parts:
    """Read the layers' letters of a hybrid model, with | between stages, and / before the layers of each prediction."""
    if unknown := re.search(r"[^MG*D+\-E|/]", pattern):
        raise CapslogError(
            f"the hybrid pattern {pattern!r} cannot be read behind {pattern[: unknown.start()]!r}; Megatron's letters "
            "are M, G, *, D, +, -, E, | and /"
        )
    main, *predictions = pattern.split("/")
    predictions = predictions if any(predictions) else []
    stages, flat, faults = main.split("|"), main.replace("|", ""), []
    if len(set(predictions)) > 1 or "|" in "".join(predictions):
        faults.append("the layers for multi-token prediction, behind each /, are not alike and without |")
    if any("*" in part and set("D+") & set(part) for part in (main, *predictions)):
        faults.append("it has attention (*) and latent attention (D or +)")
    if len(stages) == 1 < model.ranks:  # Megatron splits it at run time, which it plans to drop
        if len(flat) % model.ranks:
            faults.append(f"it has no |, and its {len(flat)} layers do not share evenly among {model.ranks} ranks")
        size = max(1, len(flat) // model.ranks)
        stages = [flat[rank * size : (rank + 1) * size] for rank in range(model.ranks)]
    known = "".join(model.letters)
    if known and known != flat:
        place = next((n for n, pair in enumerate(zip(flat, known, strict=False)) if len(set(pair)) > 1), len(known))
        faults.append(f"it has the layers {flat}, the model {known}: they differ at layer {min(place, len(flat))}")
    elif not known and len(flat) % model.num_blocks:
        faults.append(f"its {len(flat)} layers are no whole number for each of the model's {model.num_blocks} blocks")
    if faults:
        return [model.num_blocks, *[0] * (len(stages) - 1)], (), faults
    sizes = list(map(len, model.letters)) or [len(flat) // model.num_blocks] * model.num_blocks
    ends = [0, *itertools.accumulate(sizes)]
    borders = [0, *itertools.accumulate(map(len, stages))]
    if inside := [number for number, border in enumerate(borders) if border not in ends]:
        raise CapslogError(
            f"stage {inside[0]} of the pattern begins inside a block, behind layer {borders[inside[0]] - 1}; our plans "
            "keep blocks whole, so move the | before or behind the block"
        )
    counts = [ends.index(end) - ends.index(start) for start, end in pairwise(borders)]
    return counts, (len(stages) - 1,) * len(predictions), []


def _expanded(layout: str) -> str:
    """Write out the repetitions of a layout string, first those of groups, as Megatron does."""
    letters = layout.replace(",", "")
    for repeated in (r"\(([^()]+)\)\*(\d{1,4})", r"(.)\*(\d{1,4})"):
        letters = re.sub(repeated, lambda hit: hit[1] * int(hit[2]), letters)
    if unknown := re.search(r"[^EtmL|]", letters):
        raise CapslogError(
            f"the layout {layout!r} cannot be read behind {letters[: unknown.start()]!r}; Megatron's letters are E, t, "
            "m, L and |, repeated as t*3 or (tt|)*2"
        )
    return letters


def _numbers(text: str, model: _Model) -> _Parts:
    """Read the number of blocks of each rank."""
    numbers = _setting_or_text(text, "PP_LAYER_PARTITION", _NUMBERS, "16,16,16,13")
    if not re.fullmatch(_NUMBERS, numbers.strip()):
        raise CapslogError(
            f"{text.strip()[:60]!r} has no numbers of blocks such as 16,16,16,13; give one for each rank"
        )
    return _whole_numbers(numbers), (), []


def _whole_numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def _primus(text: str, model: _Model) -> _Parts:
    """Read a list of numbers of blocks, ordered by rank and then by the rank's virtual stages."""
    split, ranks = _listed(text, "decoder[-_]pipeline[-_]manual[-_]split[-_]list"), model.ranks
    chunks, faults = len(split) // ranks, []
    if min(split, default=0) < 1:
        faults.append("Primus wants at least one block in every stage")
    if len(split) % ranks:
        return split, (), faults
    return [split[rank * chunks + chunk] for chunk in range(chunks) for rank in range(ranks)], (), faults


def _diffusion_pipe(text: str, model: _Model) -> _Parts:
    """Read bounds of stages, which count an initial layer, the blocks and a final layer."""
    bounds = [0, *_listed(text, "partition_split"), model.num_blocks + 2]
    faults = [] if bounds == sorted(set(bounds)) else ["the bounds of partition_split do not rise"]
    ends = [min(max(bound - 1, 0), model.num_blocks) for bound in bounds]
    return [end - start for start, end in pairwise(ends)], (), faults


def _ends(text: str, model: _Model) -> _Parts:
    """Read the numbers of blocks of the first and the last stage; the other stages share the rest evenly."""
    names = (rf"{place}[-_]pipeline[-_](?:num[-_]layers|stage)" for place in ("first", "last"))
    sizes = (_setting(text, name, r"""["']*\d+["']*""", "7") for name in names)
    begin, end = ([] if size is None else [int(size)] for size in sizes)
    if not begin and not end:
        raise CapslogError("the text has no number of layers of the first or the last pipeline stage; give one of them")
    stages, blocks, faults = model.ranks - len(begin + end), max(0, model.num_blocks - sum(begin + end)), []
    if stages <= 0:
        return [*begin, *end], (), []
    if blocks % stages:
        faults.append(f"the {blocks} blocks of the other stages do not share evenly among {stages}")
    between = [blocks // stages + (stage < blocks % stages) for stage in range(stages)]
    return [*begin, *between, *end], (), faults


def _module_lists(text: str, model: _Model) -> _Parts:
    """Read the modules of each stage; names that end with a number are blocks."""
    stages = _lists(text, _MODULES_NAME)
    if stages is None:
        raise CapslogError("the text has no lists of modules; give one list for each stage, [[...], [...]]")
    numbers = [[int(hit[1]) for name in stage if (hit := re.search(r"\.(\d+)$", name))] for stage in stages]
    flat = [number for row in numbers for number in row]
    faults = [] if flat == list(range(len(flat))) else ["the blocks are not listed once each, in their order"]
    return [len(row) for row in numbers], (), faults


def _listed(text: str, name: str) -> list[int]:
    numbers = _setting(text, name, _NUMBERS, "[7, 8, 9]")
    if numbers is None:
        key = name.replace("[-_]", "_")
        raise CapslogError(f"the text has no list {key}: [N, ...]; give it as in the config of its system")
    return _whole_numbers(numbers)


_READERS: dict[str, Callable[[str, _Model], _Parts]] = {
    "megatron": _megatron,
    "primus": _primus,
    "verl": _ends,
    "slime": _ends,
    "torchtitan": _module_lists,
    "automodel": _module_lists,
    "diffusion-pipe": _diffusion_pipe,
    "vllm-ascend": _numbers,
    "sglang": _numbers,
    "vllm": _numbers,
}

SYSTEMS: Sequence[str] = tuple(_READERS)
"""Names of the systems whose layouts are read; `capslog export --to` writes for all of them."""

_MARKS = (
    (r"decoder[-_]pipeline[-_]manual[-_]split[-_]list", "primus"),
    (r"num_layers_in_(?:first|last)_pipeline_stage", "verl"),
    (r"(?i)decoder[-_](?:first|last)[-_]pipeline[-_]num[-_]layers", "slime"),
    (r"partition_split", "diffusion-pipe"),
    (r"pp_layer_partition", "vllm-ascend"),
    (r"SGLANG_PP_LAYER_PARTITION", "sglang"),
    (r"VLLM_PP_LAYER_PARTITION", "vllm"),
    (rf"(?i:{_LAYOUT_NAME}|{_HYBRID_NAME})|[\"'](?=E){_LAYOUT}[\"']", "megatron"),
    (r"""(?i)\[\s*\[\s*["']?(?:embedding|decoder|mtp|loss)\b""", "megatron"),
    (rf"""{_MODULES_NAME}|\[\s*\[\s*["']?\w""", "torchtitan"),
)
"""(Regular expression, system) by which a layout is recognized; the first match in the text counts."""


def system_of(text: str) -> str:
    """Return the name of the system that writes such a text. Raises CapslogError where none is known."""
    system = next((system for mark, system in _MARKS if re.search(mark, text)), None)
    if system is None and re.fullmatch(_NUMBERS, text.strip()):
        system = "vllm"
    if system is None and re.fullmatch(f"{_LAYOUT}|{_HYBRID}", _joined(text)):
        system = "megatron"
    if system is None:
        raise CapslogError(
            f"no system is known that writes a layout such as {text.strip()[:60]!r}; give Megatron's layout string or "
            "hybrid pattern, numbers of blocks such as 16,16,16,13, a file with the settings of a system, or name it "
            "with --from"
        )
    return system
