"""Simulates the memory of a rank storage by storage: the oracle of the fold.

Every tensor is a storage with a size. A rank holds every storage that its graphs, kept inputs, buffers and unconfirmed
messages refer to, each once. Actions run layer by layer, receives and sends one by one, as in the executor.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from varuna_capslog.engine.executor import acknowledgements
from varuna_capslog.plans.parts import PlanStage, Units
from varuna_capslog.plans.rules import stage_graph
from varuna_capslog.profiles.record import ActionBytes, Observation, Profile, TensorRecord, layers_of_runs
from varuna_capslog.profiles.runs import stage_runs
from varuna_capslog.schedules import Action, Message, Recv, SendInstruction, lower

Storage = tuple[str, int, int]
"""("act" or "grad", microbatch, cut), ("inner", "hidden", "tail", "noted" or "statistics", microbatch, layer), ("sum",
block, layer)."""
WORK, BARE = 50, 20
"""Bytes that every layer needs while it runs: with a graph or in a backward, and without a graph."""
AGAIN, AWAY = 1000, 2000
"""Added to the microbatch of a recomputed tensor, and of a tensor that comes back from the host tier."""


@dataclass(frozen=True)
class Model:
    """Layers with parameters. Per layer: the bytes that its graph saves inside it (inner: visible to autograd's hooks;
    hidden: not), whether the graph also saves its input and output, and the statistics that a forward leaves.

    tail: bytes that the graph of a layer saves behind its last parameters. noted: gradients that the layer's input half
    keeps, besides the gradient of its input or output (`notes`).
    """

    static: list[int]
    gradients: list[int]
    inner: list[int]
    hidden: list[int]
    statistics: list[int]
    keeps_input: list[bool]
    keeps_output: list[bool]
    cuts: list[int]
    tail: list[int]
    noted: list[int]
    notes: list[set[int]]

    @classmethod
    def random(cls, draw: random.Random, size: int, even: bool, scale: int = 1) -> Model:
        """Draw a model. even: all cuts have the same size, so that pairs of layers determine any range exactly."""
        cut = draw.randrange(1, 30) * scale
        return cls(
            [draw.randrange(500) * scale for _ in range(size)],
            [draw.randrange(1, 40) * scale for _ in range(size)],
            [draw.randrange(100, 200) * scale for _ in range(size)],
            [draw.choice([0, 0, 7]) * scale for _ in range(size)],
            [draw.choice([0, 3]) * scale for _ in range(size)],
            [draw.random() < 0.7 for _ in range(size)],
            [*(draw.random() < 0.5 for _ in range(size - 1)), True],  # the loss reads the last one
            [cut if even else draw.randrange(1, 30) * scale for _ in range(size + 1)],
            [draw.choice([0, 0, 9]) * scale for _ in range(size)],
            [draw.randrange(60) * scale for _ in range(size)],
            [draw.choice([set(), {1}, {1}, {0}]) for _ in range(size)],
        )

    def bytes(self, storages: Iterable[Storage]) -> int:
        sizes = {"act": self.cuts, "grad": self.cuts, "inner": self.inner, "sum": self.gradients}
        sizes |= {"hidden": self.hidden, "statistics": self.statistics, "tail": self.tail, "noted": self.noted}
        return sum(sizes[kind][place] for kind, _, place in set(storages))

    def stays(self, storages: Iterable[Storage]) -> set[Storage]:
        """Return the storages of a graph that offloading leaves on the device: the loss's input and hidden ones."""
        last = len(self.static)
        return {
            storage for storage in storages if storage[0] == "hidden" or (storage[0] == "act" and storage[2] == last)
        }


@dataclass
class Rank:
    """Storages that one rank refers to. peak: most bytes since it was last set to 0. host: those in the host tier."""

    model: Model
    layers: Sequence[int]
    holding: dict[object, set[Storage]] = field(default_factory=dict)
    peak: int = 0
    host: dict[tuple[int, int, int], set[Storage]] = field(default_factory=dict)
    versions: dict[object, tuple[int, int]] = field(default_factory=dict)

    def note(self, more: Iterable[Storage] = (), work: int = 0) -> None:
        static = sum(self.model.static[layer] for layer in self.layers)
        held = set().union(*self.holding.values(), more)
        self.peak = max(self.peak, static + self.model.bytes(held) + work)

    # -- one call of a stage

    def forward(self, key: object, mb: int, first: int, end: int, graph: bool, enters: bool = True) -> None:
        """Run layers first .. end-1. The caller holds the input; the output is left in holding["out"].

        enters: the graph holds its input even if no layer saves it.
        """
        saved = self.holding.setdefault(key, set())
        for layer in range(first, end):
            ends = [self.act(key, mb, cut, first) for cut in (layer, layer + 1)]
            if graph:
                saved |= self._kept(key, mb, layer, first, enters)
                if self.model.keeps_output[layer]:
                    saved.add(ends[1])
            self.note(ends, WORK if graph else BARE)
        self.holding["out"] = {ends[1]}

    def _kept(self, key: object, mb: int, layer: int, first: int, enters: bool) -> set[Storage]:
        """Return the storages of one layer that a graph starting at `first` keeps, without the layer's output."""
        saved: set[Storage] = {("inner", mb, layer), ("hidden", mb, layer), ("tail", mb, layer)}
        if self.model.keeps_input[layer] or (enters and layer == first):
            saved.add(self.act(key, mb, layer, first))
        return saved

    def act(self, key: object, mb: int, cut: int, first: int) -> Storage:
        """Return the tensor at a cut. Recomputed, or back from the host tier, it is another storage."""
        input_version, version = self.versions.get(key, (0, 0))
        return "act", mb + (input_version if cut == first else version), cut

    def backward(self, key: object, mb: int, first: int, end: int, block: int, enters: bool = True) -> None:
        """Run the backward of the layers. The caller holds the gradient of the output until the end."""
        for layer in range(end - 1, first - 1, -1):
            self.holding.setdefault("sums", set()).add(("sum", block, layer))
            self.note({("grad", mb, layer)} if layer else (), WORK)
            before = range(first, layer)
            kept = {self.act(key, mb, earlier + 1, first) for earlier in before if self.model.keeps_output[earlier]}
            self.holding[key] = kept.union(*(self._kept(key, mb, earlier, first, enters) for earlier in before))
        del self.holding[key]
        self.holding["out"] = {("grad", mb, first)} if first else set()

    def input_half(self, key: object, mb: int, first: int, end: int) -> None:
        """Compute the gradients of the inputs, as `backward`. The graph stays but for its end; gradients are noted."""
        noted, last = set[Storage](), len(self.model.static)
        self.note()
        # the last activation is freed with the loss
        kept = {storage for storage in self.holding[key] if (storage[0], storage[2]) != ("act", last)}
        self.holding[key] = kept
        if not first:  # the first stage needs no input gradient: all work is left for the weight half
            self.holding[key] = kept | {("grad", mb, end)}
            self.holding["out"] = set()
            return
        for layer in range(end - 1, first - 1, -1):
            noted |= {("noted", mb, layer), *(("grad", mb, layer + side) for side in self.model.notes[layer])}
            self.note({("grad", mb, layer), *noted} if layer else noted, WORK)
        gone = ("tail", end - 1), ("act", end)
        self.holding[key] = noted.union(storage for storage in kept if (storage[0], storage[2]) not in gone)
        self.holding["out"] = {("grad", mb, first)} if first else set()

    def weight_half(self, key: object, mb: int, first: int, end: int, block: int) -> None:
        """Compute the gradients of the parameters; the graph is freed at the end."""
        if not first:
            self.holding["seed"] = {("grad", mb, end)}
            self.backward(key, mb, first, end, block)
            del self.holding["seed"], self.holding["out"]
            return
        for layer in range(end - 1, first - 1, -1):
            self.holding.setdefault("sums", set()).add(("sum", block, layer))
            self.note((), WORK)
        del self.holding[key]


def profile_of(model: Model, device: str) -> Profile:
    """Return the profile that estimating the model gives: runs of single layers and of pairs, with bytes per action."""
    rows, size = [], len(model.static)
    for first, end in stage_runs(size):
        layers, last = range(first, end), end == size
        rank = Rank(model, layers)
        static = sum(model.static[layer] for layer in layers)

        def most(rank: Rank = rank, before: int = 0) -> int:
            rise, rank.peak = rank.peak - before, 0
            return rise

        def level(rank: Rank = rank) -> int:
            rank.peak = 0
            rank.note()
            return most(rank)

        rank.holding["in"] = {("act", 0, first)}
        began = level()
        rank.forward("bare", 0, first, end, False)
        bare = most(rank, began)
        del rank.holding["bare"], rank.holding["out"]
        rank.forward("graph", 0, first, end, True)
        forward = most(rank, began)
        del rank.holding["in"]
        graph = set(rank.holding["graph"])
        graph_bytes, stays = model.bytes(graph), model.stays(graph)
        moved = graph - stays - (set() if model.keeps_input[first] else {("act", 0, first)})
        shared = 0 if last else model.bytes(rank.holding["graph"] & rank.holding["out"])
        rank.holding["out"] = set() if last else {("grad", 0, end)}
        began = level()
        rank.holding["seed"] = rank.holding["out"]
        rank.backward("graph", 0, first, end, 0)
        first_backward = most(rank, began)
        rank.holding |= {"graph": graph, "out": set()}
        began = level()
        rank.backward("graph", 0, first, end, 0)
        backward = most(rank, began)
        halves = [0, 0]
        for number in range(2):
            rank.holding |= {"graph": graph, "out": set() if last else {("grad", 0, end)}, "seed": set()}
            rank.holding["sums"] = set() if number == 0 else rank.holding["sums"]
            began = level()
            rank.holding["seed"] = rank.holding["out"]
            rank.input_half("graph", 0, first, end)
            inputs = most(rank, began)
            noted = model.bytes(storage for storage in rank.holding["graph"] if storage[0] in ("noted", "grad"))
            rank.holding |= {"seed": set(), "out": set()}
            began, held = level(), model.bytes(rank.holding["graph"])
            rank.weight_half("graph", 0, first, end, 0)
            halves[number] = most(rank, began)
        made = sum(model.gradients[layer] for layer in layers)
        statistics, saved = sum(model.statistics[layer] for layer in layers), graph_bytes - sum(model.hidden[first:end])
        parts = statistics, graph_bytes, model.bytes(moved), model.bytes(stays)
        split = inputs, halves[1], halves[0], noted, model.cuts[end] * (not first or 1 in model.notes[end - 1])
        actions = ActionBytes(forward, bare, backward, first_backward, 0, made, shared, *parts, *split)
        peak = static + made + statistics + max(forward + model.cuts[first], backward + graph_bytes)
        rows.append(
            Observation(
                (first, end), device, 1, [1], peak, static_bytes=static + made, saved_bytes=saved,
                boundary_in_bytes=model.cuts[first], boundary_out_bytes=model.cuts[end], action_bytes=actions,
                weight_bytes=held,
            )
        )  # fmt: skip
    tensors = tuple(
        TensorRecord("x", cut, place > 0, place - 1 if place else None, (place,))
        for place, cut in enumerate(model.cuts)
    )
    names = [f"layer{number}" for number in range(size)]
    return Profile(layers_of_runs(names, rows), observations=tuple(rows), tensors=tensors)


class Machine:
    """Runs one rank. `bytes` gets the peak of every action, with messages that are freed just before it."""

    def __init__(
        self, model: Model, stages: Sequence[PlanStage], units: Units, rows: Sequence[Sequence[Action]], rank: int
    ) -> None:
        self.model, self.stages, self.units = model, stages, units
        layer_ranges = [stage.layers[0] for stage in stages if stage.ranks == (rank,)]
        self.rank = Rank(model, [layer for layer_range in layer_ranges for layer in range(*layer_range)])
        self.graph = stage_graph(stages, units)
        lowered = lower(rows, graph=self.graph)
        self.program, self.known = lowered.programs[rank], acknowledgements(lowered, rank)
        self.again = {(action.stage, action.microbatch) for row in rows for action in row if action.kind == "R"}
        self.ready: set[tuple[int, int]] = set()
        self.copies: list[object] = []
        self.bytes: list[int] = []
        self.host_bytes = 0

    def run(self, ahead: int, ahead_bytes: int, one_memory: bool) -> None:
        """Run the program. ahead, ahead_bytes: limits of the receives that are posted in advance."""
        pending = deque(instruction for instruction in self.program if isinstance(instruction, Recv))
        posted: dict[Message, int] = {}
        sends: dict[int, deque[object]] = {}
        acked: dict[int, int] = {}
        holding, let_go = self.rank.holding, 0

        def post() -> None:
            while pending and one_memory:
                message = pending[0].message
                size = self.model.bytes([self.storage(message)])
                if len(posted) >= ahead and sum(posted.values()) + size > ahead_bytes:
                    return
                pending.popleft()
                posted[message] = size
                holding["buffer", message] = {self.storage(message)}

        post()
        for instruction in self.program:
            if isinstance(instruction, Recv):
                holding["buffer", instruction.message] = {self.storage(instruction.message)}
                posted.pop(instruction.message, None)
                post()
                before = self.level()
                while acked.get(instruction.peer, 0) < self.known[instruction.message] and sends.get(instruction.peer):
                    holding.pop(sends[instruction.peer].popleft(), None)
                    acked[instruction.peer] = acked.get(instruction.peer, 0) + 1
                let_go += before - self.level()
            elif isinstance(instruction, SendInstruction):
                key = "send", instruction.message
                kept = holding.pop(("buffer", instruction.message))
                if one_memory:
                    holding[key] = kept
                sends.setdefault(instruction.peer, deque()).append(key)
            else:
                began, self.rank.peak = self.level() + let_go, 0
                self.act(instruction, self.copy_waited(instruction))
                self.bytes.append(max(self.rank.peak, began))
                let_go = 0

    def level(self) -> int:
        peak, self.rank.peak = self.rank.peak, 0
        self.rank.note()
        held_bytes, self.rank.peak = self.rank.peak, peak
        return held_bytes

    def storage(self, message: Message) -> Storage:
        stage, call = message.downstream
        kind = "act" if message.kind == "activation" else "grad"
        return kind, self.graph.microbatches[stage][call], self.stages[stage].layers[0][0]

    def copy_waited(self, action: Action) -> list[object]:
        """Return the copies that this action waits for at its end: those of the O before it."""
        if action.kind in "OL":
            return []
        copies, self.copies = self.copies, []
        return copies

    def segments(self, number: int, call: int) -> list[tuple[int, int, str]]:
        """Return (first, end, kind) of each part of a stage that has one memory action in this call."""
        first, end = self.stages[number].layers[0]
        actions = [
            action
            for action in self.program
            if isinstance(action, Action) and action.stage == number and action.kind in "FRBIW"
        ]
        place = next(place for place, action in enumerate(actions) if (action.kind, action.microbatch) == ("F", call))
        away = Action(number, "O", call) in self.program
        backward_follows = actions[place + 1] in (Action(number, "B", call), Action(number, "I", call)) and not away
        parts, reached = [], first
        for interval in self.stages[number].memory or ():
            parts += [(reached, interval.first, "")] if reached < interval.first else []
            kind = interval.kind
            if backward_follows:  # nothing is offloaded, and the last part of the stage keeps its graph
                kind = "recompute" if "recompute" in kind and interval.end < end else ""
            parts.append((interval.first, interval.end, kind))
            reached = interval.end
        return [*parts, (reached, end, "")] if reached < end else parts

    def act(self, action: Action, waited: list[object]) -> None:
        number, call, rank = action.stage, action.microbatch, self.rank
        assert call is not None
        holding, mb = rank.holding, self.graph.microbatches[number][call]
        parts = self.segments(number, call)
        keys = {part: (number, call, part[0]) for part in parts}
        stage_call, upstream = (number, call), next(iter(self.graph.upstream[number][call]), None)
        downstream = next(iter(self.graph.downstream[number][call]), None)
        offload = any(instruction == Action(number, "O", call) for instruction in self.program)
        if action.kind == "F":
            self._arrive(upstream, stage_call, "activation")
            layers = range(parts[0][0], parts[-1][1])
            holding.setdefault("statistics", set()).update(("statistics", mb, layer) for layer in layers)
            for part in parts:
                first, end, kind = part
                holding["in"] = {("act", mb, first)}
                if first == parts[0][0]:
                    holding.pop(("buffer", upstream and Message("activation", upstream, stage_call)), None)
                if "recompute" in kind:
                    holding[keys[part]] = {("act", mb, first)}
                    if "offload" in kind and not offload:
                        self._take_away(keys[part], kind)
                    if end == len(self.model.static) and not any(self.model.statistics[first:end]):
                        holding["out"] = set()
                        continue
                    rank.forward("none", mb, first, end, False)
                    del holding["none"]
                else:
                    rank.forward(keys[part], mb, first, end, True, "offload" not in kind)
                    if "offload" in kind and not offload:
                        self._take_away(keys[part], kind)
            del holding["in"]
            out = holding.pop("out")
            if downstream is not None:
                holding["buffer", Message("activation", stage_call, downstream)] = out
            rank.note()
        elif action.kind == "O":
            for part in parts:
                if "offload" in part[2]:
                    leaving = "leaving", keys[part]
                    kept = set(holding[keys[part]])
                    self._take_away(keys[part], part[2])
                    holding[leaving] = kept
                    self.copies.append(leaving)
            rank.note()
        elif action.kind == "L":
            self._bring_back(parts, keys, offload)
            rank.note()
        elif action.kind == "R":
            self._bring_back(parts, keys, offload)
            rank.note()
            again = [part for part in parts if "recompute" in part[2]]
            if again:
                self._rebuild(again[-1], keys, mb)
                self.ready.add(keys[again[-1]])  # type: ignore[arg-type]
            rank.note()
        elif action.kind in "BI":
            self._bring_back(parts, keys, offload)
            rank.note()
            self._backward(parts, keys, mb, (stage_call, upstream, downstream), action.kind == "I")
        elif action.kind == "W":
            for part in reversed(parts):
                rank.weight_half(keys[part], mb, *part[:2], mb // self.units.of_block)
            self._end(parts, keys, stage_call)
        for leaving in waited:
            holding.pop(leaving, None)

    def _arrive(self, source: tuple[int, int] | None, target: tuple[int, int], kind: str) -> None:
        if source is None:
            mb = self.graph.microbatches[target[0]][target[1]]
            self.rank.holding["buffer", None] = {("act", mb, self.stages[target[0]].layers[0][0])}

    def _take_away(self, key: tuple[int, int, int], kind: str) -> None:
        """Offload the storages that move. Segments of one call that are copied together copy a shared storage once."""
        holding = self.rank.holding
        kept = holding.pop(key)
        holding["stays", key] = set() if "recompute" in kind else self.model.stays(kept)
        self.rank.host[key] = kept - holding["stays", key]
        calls: dict[object, list[set[Storage]]] = {}
        for (number, call, first), moved in self.rank.host.items():
            together = Action(number, "O", call) in self.program
            calls.setdefault((number, call, None if together else first), []).append(moved)
        self.host_bytes = max(
            self.host_bytes, sum(self.model.bytes(set().union(*storages)) for storages in calls.values())
        )

    def _bring_back(self, parts: list, keys: dict, together: bool) -> None:  # type: ignore[type-arg]
        """Load the call's offloaded storages, as new tensors; wait first for copies that are under way."""
        holding = self.rank.holding
        for place, part in enumerate(parts):
            key = keys[part]
            if key in self.rank.host and key not in holding:
                holding.pop(("leaving", key), None)
                version = AWAY * (1 + 20 * key[0] + (0 if together else 1 + place))
                self.rank.versions[key] = version, version
                holding[key] = holding.pop(("stays", key)) | {
                    (kind, number + version * (kind == "act"), place) for kind, number, place in self.rank.host[key]
                }

    def _rebuild(self, part: tuple[int, int, str], keys: dict[tuple[int, int, str], object], mb: int) -> None:
        first, end, _ = part
        holding, key = self.rank.holding, keys[part]
        self.rank.versions[key] = self.rank.versions.get(key, (0, 0))[0], AGAIN
        holding["in"] = {self.rank.act(key, mb, first, first)}
        self.rank.forward(key, mb, first, end, True)
        del holding["in"], holding["out"]

    def _backward(self, parts: list, keys: dict, mb: int, ends: tuple, half: bool) -> None:  # type: ignore[type-arg]
        stage_call, upstream, downstream = ends
        rank, holding = self.rank, self.rank.holding
        block = mb // self.units.of_block
        buffer = ("buffer", downstream and Message("gradient", stage_call, downstream))
        for part in reversed(parts):
            first, end, kind = part
            if "recompute" in kind and keys[part] not in self.ready:
                self._rebuild(part, keys, mb)
            if half:
                rank.input_half(keys[part], mb, first, end)
            else:
                rank.backward(keys[part], mb, first, end, block, kind != "offload")
            holding.pop(buffer, None)
            holding["seed"] = holding.pop("out")
        gradient = holding.pop("seed")
        if upstream is not None:
            holding["buffer", Message("gradient", upstream, stage_call)] = gradient
        if not half:
            self._end(parts, keys, stage_call)

    def _end(self, parts: list, keys: dict, stage_call: tuple[int, int]) -> None:  # type: ignore[type-arg]
        """Clean up after the last backward of a call."""
        for part in parts:
            self.rank.host.pop(keys[part], None)
            self.rank.versions.pop(keys[part], None)
        microbatches = self.graph.microbatches[stage_call[0]]
        block = microbatches[stage_call[1]] // self.units.of_block
        blocks = [mb // self.units.of_block for mb in microbatches]
        if stage_call[1] + 1 == len(microbatches) or blocks[stage_call[1] + 1] != blocks[stage_call[1]]:
            self._close(stage_call[0], block, blocks[0])

    def _close(self, number: int, block: int, oldest: int) -> None:
        """Add a block's gradient sums to the oldest block's where no other rank holds the layer."""
        for layer in range(*self.stages[number].layers[0]):
            ranks = {stage.ranks for stage in self.stages if layer in range(*stage.layers[0])}
            if block != oldest and len(ranks) == 1:
                self.rank.holding["sums"].discard(("sum", block, layer))
