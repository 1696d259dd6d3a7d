"""Layouts as other systems write them: the decoder blocks of each stage, and the cuts of our layers that they mean.

Imports no torch. `planning/export` writes the same forms; the rules are those that it names.
"""

from __future__ import annotations

import ast
import itertools
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from varuna_capslog.base import fields
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.model.names import ModelNames
from varuna_capslog.planning.export.layer_counts import block_pattern, blocks_of_layers

__all__ = ["SYSTEMS", "Layout", "count_blocks", "layout_cuts", "parted", "read_layout"]


@dataclass(frozen=True)
class Layout:
    """Layout of another system, for a number of decoder blocks and of pipeline ranks.

    system: a key of SYSTEMS. counts: decoder blocks of each stage in the order of the model; stage s is on rank
    s % ranks.
    prediction_stages: stage of each layer for multi-token prediction, which stand behind the blocks.
    faults: sentences on the rules of the system, or of the model, that the layout breaks; empty where it is legal.
    """

    system: str
    counts: tuple[int, ...]
    prediction_stages: tuple[int, ...] = ()
    faults: tuple[str, ...] = ()


def read_layout(text: str, num_blocks: int, ranks: int, system: str | None = None, num_predictions: int = 0) -> Layout:
    """Return the layout that a text says.

    Args:
        text: a Megatron layout string, numbers of blocks (`16,16,16,13`), or a line or file with the settings of a
            system, such as `VLLM_PP_LAYER_PARTITION=31,31,31`.
        num_blocks: decoder blocks of the model. ranks: of one pipeline.
        system: whose text it is; None: recognised.
        num_predictions: the model's layers for multi-token prediction; a layout may leave them out.

    Raises CapslogError for a text that is none, and for an unknown system.
    """
    if system is not None:
        fields.refuse_unknown([system], list(SYSTEMS), "system of a layout")
    system = system or _system_of(text)
    counts, predictions, faults = _READERS[system](text, num_blocks, ranks)
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
    """Return the number of a model's decoder blocks. pattern: of their names, as for `capslog export`."""
    blocks = blocks_of_layers(names, block_pattern(names.layers, pattern))
    return 1 + max(number for numbers in blocks for number in numbers)


def parted(layout: Layout, names: ModelNames, pattern: str | None = None) -> list[str]:
    """Return a sentence for each border of stages that lies within a layer of the model here."""
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
    """Return the first layer of each stage of a layout without faults; that of the next stage for one without layers.

    The embedding is in the first stage, the head in the last one, where layers for multi-token prediction are too that
    the layout does not name. With such layers the norm before them is with the last block, as in Megatron. Raises
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
        cuts.append(first_layers.get(before, tail[predicted]))
    for number, (start, end) in enumerate(pairwise(cuts)):
        if start > end:
            raise CapslogError(f"stages {number} and {number + 1} of the layout hold parts of one layer; cut it finer")
    return cuts


# -- The texts of each system


_Parts = tuple[list[int], tuple[int, ...], list[str]]
"""Blocks of each stage, stages of the layers for multi-token prediction, faults."""

_PIECE = re.compile(r"\((?P<group>[^()]*)\)(?:\*(?P<times>\d+))?|(?P<letter>[EtmL|])(?:\*(?P<count>\d+))?|[,\s]")
_LAYOUT = r"""[EtmL|()*\d,\s]*t[EtmL|()*\d,\s]*"""
_LISTS = r"""\[\s*\[\s*["'](?:embedding|decoder|mtp|loss)["']"""
_LETTERS = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
_NUMBERS = r"\s*\d+\s*(?:,\s*\d+\s*)*"


def _megatron(text: str, num_blocks: int, ranks: int) -> _Parts:
    """Layout string: stages split by |; E, t, m and L, `x*n` and `(...)*n`; commas mean nothing. Or Python's lists."""
    if lists := re.search(_LISTS, text):
        stages = _lists_as_letters(text[lists.start() :])
    else:
        named = re.search(rf"""pipeline[-_]model[-_]parallel[-_]layout["']?[\s=:]+["']?({_LAYOUT})""", text)
        stages = _expanded(named[1] if named else text.strip().strip("\"'")).split("|")
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
    if predictions and predictions[0] < len(stages) - ranks:
        faults.append("a layer for multi-token prediction (m) is not in the last chunk of its rank")
    return [stage.count("t") for stage in stages], predictions, faults


def _expanded(layout: str) -> str:
    """Write out the repetitions of a layout string."""
    letters, end = "", 0
    for piece in _PIECE.finditer(layout):
        if piece.start() != end:
            break
        end = piece.end()
        times = int(piece["times"] or piece["count"] or 1)
        letters += (piece["letter"] or _expanded(piece["group"] or "")) * times
    if end != len(layout):
        raise CapslogError(
            f"the layout {layout!r} cannot be read behind {layout[:end]!r}; Megatron's letters are E, t, m, L and |, "
            "repeated as t*3 or (tt|)*2"
        )
    return letters


def _lists_as_letters(text: str) -> list[str]:
    """Return the letters of each stage of a list of lists at the text's begin, such as [["embedding"], ["decoder"] * 2
    + ["loss"]].
    """
    depths = itertools.accumulate((letter == "[") - (letter == "]") for letter in text)
    end = next((place + 1 for place, depth in enumerate(depths) if depth == 0), len(text))
    try:
        stages = _value(ast.parse(text[:end], mode="eval").body)
        return ["".join(_LETTERS[word] for word in stage) for stage in stages]
    except (SyntaxError, KeyError, TypeError) as error:
        raise CapslogError(
            f"the layout {text[:end][:60]!r} cannot be read ({error}); Megatron's lists hold, for each stage, "
            f"{', '.join(_LETTERS)}"
        ) from None


def _value(node: ast.expr) -> Any:
    """Return the value of lists, strings and numbers, added or repeated."""
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


def _numbers(text: str, num_blocks: int, ranks: int) -> _Parts:
    """Blocks of each rank, behind the last `=` or `:` if there is one."""
    hit = re.search(rf"""(?:PP_LAYER_PARTITION|pp_layer_partition)["']?\s*[=:]\s*["']?({_NUMBERS})""", text)
    numbers = hit[1] if hit else text.strip().strip("[]")
    if not re.fullmatch(_NUMBERS, numbers):
        raise CapslogError(
            f"{text.strip()[:60]!r} has no numbers of blocks such as 16,16,16,13; give one for each rank"
        )
    return [int(number) for number in numbers.split(",")], (), []


def _primus(text: str, num_blocks: int, ranks: int) -> _Parts:
    """List of blocks, in which a rank's virtual stages follow one another."""
    split = _listed(text, "decoder_pipeline_manual_split_list")
    chunks, faults = len(split) // ranks, []
    if min(split, default=0) < 1:
        faults.append("Primus wants at least one block in every stage")
    if len(split) % ranks:
        return split, (), faults
    return [split[rank * chunks + chunk] for chunk in range(chunks) for rank in range(ranks)], (), faults


def _diffusion_pipe(text: str, num_blocks: int, ranks: int) -> _Parts:
    """Bounds in a list of an initial layer, the blocks and a final layer."""
    bounds = [0, *_listed(text, "partition_split"), num_blocks + 2]
    faults = [] if bounds == sorted(set(bounds)) else ["the bounds of partition_split do not rise"]
    ends = [min(max(bound - 1, 0), num_blocks) for bound in bounds]
    return [end - start for start, end in pairwise(ends)], (), faults


def _ends(text: str, num_blocks: int, ranks: int) -> _Parts:
    """Numbers of blocks of the first and the last stage; the other stages share the rest evenly."""
    first, last = (
        re.search(rf"{place}_pipeline_(?:num_layers|stage)['\"]?[\s=:]+(\d+)", text.replace("-", "_"))
        for place in ("first", "last")
    )
    begin, end = ([] if hit is None else [int(hit[1])] for hit in (first, last))
    if not begin and not end:
        raise CapslogError("the text has no number of layers of the first or the last pipeline stage; give one of them")
    others, rest, faults = ranks - len(begin + end), max(0, num_blocks - sum(begin + end)), []
    if others <= 0:
        return [*begin, *end], (), []
    if rest % others:
        faults.append(f"the {rest} blocks of the other stages do not share evenly among {others}")
    between = [rest // others + (stage < rest % others) for stage in range(others)]
    return [*begin, *between, *end], (), faults


def _module_lists(text: str, num_blocks: int, ranks: int) -> _Parts:
    """JSON: the modules of each stage; blocks are the items of a list of modules."""
    start = text.find("[[")
    try:
        stages = json.JSONDecoder().raw_decode(text[max(start, 0) :])[0]
    except ValueError as error:
        raise CapslogError(
            f"the lists of modules cannot be read: {error}; give JSON, one list for each stage"
        ) from None
    numbers = [[int(hit[1]) for name in stage if (hit := re.search(r"\.(\d+)$", name))] for stage in stages]
    flat = [number for row in numbers for number in row]
    faults = [] if flat == list(range(len(flat))) else ["the blocks are not listed once each, in their order"]
    return [len(row) for row in numbers], (), faults


def _listed(text: str, key: str) -> list[int]:
    hit = re.search(rf"{key}['\"]?\s*[=:]\s*['\"]?\[([\d,\s]*)\]", text)
    if hit is None:
        raise CapslogError(f"the text has no list {key}: [N, ...]; give it as in the config of its system")
    return [int(number) for number in re.findall(r"\d+", hit[1])]


_READERS: dict[str, Callable[[str, int, int], _Parts]] = {
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
    (r"decoder_pipeline_manual_split_list", "primus"),
    (r"num_layers_in_(?:first|last)_pipeline_stage", "verl"),
    (r"decoder[-_](?:first|last)[-_]pipeline[-_]num[-_]layers", "slime"),
    (r"partition_split", "diffusion-pipe"),
    (r"pp_layer_partition", "vllm-ascend"),
    (r"SGLANG_PP_LAYER_PARTITION", "sglang"),
    (r"VLLM_PP_LAYER_PARTITION", "vllm"),
    (_LISTS, "megatron"),
    (r"\[\s*\[\s*[\"']", "torchtitan"),
    (r"pipeline[-_]model[-_]parallel[-_]layout", "megatron"),
    (rf"^\[?{_NUMBERS}\]?\s*$", "vllm"),
    (rf"^\s*[\"']?{_LAYOUT}[\"']?\s*$", "megatron"),
)
"""Text by which a layout is recognised -> its system; the first that stands in the layout counts."""


def _system_of(text: str) -> str:
    """Name of the system that writes such a text."""
    system = next((system for mark, system in _MARKS if re.search(mark, text)), None)
    if system is None:
        raise CapslogError(
            f"no system is known that writes a layout such as {text.strip()[:60]!r}; give a Megatron layout string, "
            "numbers of blocks such as 16,16,16,13, a file with the settings of a system, or name it with --from"
        )
    return system
