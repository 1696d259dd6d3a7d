"""A rank's memory carried out storage by storage: the oracle of the fold.

Every tensor is a storage with a size; a rank holds what any of its graphs, kept inputs, buffers and unconfirmed
messages refer to, each storage once. Actions run layer by layer, receives and sends one by one as the executor does.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from varuna_capslog.engine.executor import acknowledgements
from varuna_capslog.plans.parts import PlanStage, Units
from varuna_capslog.plans.rules import stage_graph
from varuna_capslog.profiles.action_bytes import ActionBytes
from varuna_capslog.profiles.record import Observation, Profile, TensorRecord, layers_of_runs
from varuna_capslog.profiles.runs import stage_runs
from varuna_capslog.schedules import Action, Message, Recv, SendInstruction, lower

Storage = tuple[str, int, int]
"""("act" or "grad", microbatch, cut), ("inner", "hidden", "tail", "noted" or "statistics", microbatch, layer), ("sum",
block, layer)."""
WORK, BARE = 50, 20
"""Bytes that every layer needs while it works, with a graph or a backward, and without."""
AGAIN, AWAY = 1000, 2000
"""Added to the microbatch of a tensor that is made again, and of one that comes back from the host tier."""


@dataclass(frozen=True)
class Model:
    """Layers with parameters, and the bytes that a graph keeps inside them: those that autograd's hooks see, and hidden
    ones; whether it saves their inputs and outputs as well; and the statistics that a forward leaves.

    tail: what the graph of a layer keeps behind its last parameters. noted: gradients that its input half notes,
    besides that of its input or output (`notes`).
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
        """`even`: all cuts are alike, so that what pairs of layers tell is exact for any range."""
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
        """Those of a graph that offloading leaves on the device: what the loss reads, and what is hidden."""
        last = len(self.static)
        return {one for one in storages if one[0] == "hidden" or (one[0] == "act" and one[2] == last)}


@dataclass
class Rank:
    """What one rank refers to. `peak` is the most since it was last set to 0; `host` what is in the host tier."""

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
        """Layers first .. end-1; the input is held by whoever calls. The output is left in holding["out"].

        enters: the graph holds its input also where no layer saves it.
        """
        own = self.holding.setdefault(key, set())
        for layer in range(first, end):
            ends = [self.act(key, mb, cut, first) for cut in (layer, layer + 1)]
            if graph:
                own |= self._kept(key, mb, layer, first, enters)
                if self.model.keeps_output[layer]:
                    own.add(ends[1])
            self.note(ends, WORK if graph else BARE)
        self.holding["out"] = {ends[1]}

    def _kept(self, key: object, mb: int, layer: int, first: int, enters: bool) -> set[Storage]:
        """What the graph of layers from `first` on keeps of one of them, its output apart."""
        found: set[Storage] = {("inner", mb, layer), ("hidden", mb, layer), ("tail", mb, layer)}
        if self.model.keeps_input[layer] or (enters and layer == first):
            found.add(self.act(key, mb, layer, first))
        return found

    def act(self, key: object, mb: int, cut: int, first: int) -> Storage:
        """The tensor at a cut: made again, or back from the host tier, it is another storage."""
        input_version, version = self.versions.get(key, (0, 0))
        return "act", mb + (input_version if cut == first else version), cut

    def backward(self, key: object, mb: int, first: int, end: int, block: int, enters: bool = True) -> None:
        """The same layers back; the gradient of the output is held by whoever calls and stays until the end."""
        for layer in range(end - 1, first - 1, -1):
            self.holding.setdefault("sums", set()).add(("sum", block, layer))
            self.note({("grad", mb, layer)} if layer else (), WORK)
            before = range(first, layer)
            kept = {self.act(key, mb, one + 1, first) for one in before if self.model.keeps_output[one]}
            self.holding[key] = kept.union(*(self._kept(key, mb, one, first, enters) for one in before))
        del self.holding[key]
        self.holding["out"] = {("grad", mb, first)} if first else set()

    def input_half(self, key: object, mb: int, first: int, end: int) -> None:
        """The gradients of the inputs; the graph stays but for its end, and gradients are noted. As `backward`."""
        noted, last = set[Storage](), len(self.model.static)
        self.note()
        kept = {one for one in self.holding[key] if (one[0], one[2]) != ("act", last)}  # with the loss
        self.holding[key] = kept
        if not first:  # no gradient enters: all is left for the other half
            self.holding[key] = kept | {("grad", mb, end)}
            self.holding["out"] = set()
            return
        for layer in range(end - 1, first - 1, -1):
            noted |= {("noted", mb, layer), *(("grad", mb, layer + side) for side in self.model.notes[layer])}
            self.note({("grad", mb, layer), *noted} if layer else noted, WORK)
        gone = ("tail", end - 1), ("act", end)
        self.holding[key] = noted.union(one for one in kept if (one[0], one[2]) not in gone)
        self.holding["out"] = {("grad", mb, first)} if first else set()

    def weight_half(self, key: object, mb: int, first: int, end: int, block: int) -> None:
        """The gradients of the parameters; what was held goes at the end."""
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
    """What estimating the model says: runs of single layers and of pairs, and what each action takes."""
    rows, size = [], len(model.static)
    for first, end in stage_runs(size):
        layers, last = range(first, end), end == size
        rank = Rank(model, layers)
        static = sum(model.static[layer] for layer in layers)

        def most(rank: Rank = rank, before: int = 0) -> int:
            found, rank.peak = rank.peak - before, 0
            return found

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
        whole, stays = model.bytes(graph), model.stays(graph)
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
            noted = model.bytes(one for one in rank.holding["graph"] if one[0] in ("noted", "grad"))
            rank.holding |= {"seed": set(), "out": set()}
            began, held = level(), model.bytes(rank.holding["graph"])
            rank.weight_half("graph", 0, first, end, 0)
            halves[number] = most(rank, began)
        made = sum(model.gradients[layer] for layer in layers)
        statistics, saved = sum(model.statistics[layer] for layer in layers), whole - sum(model.hidden[first:end])
        parts = statistics, whole, model.bytes(moved), model.bytes(stays)
        split = inputs, halves[1], halves[0], noted, model.cuts[end] * (not first or 1 in model.notes[end - 1])
        actions = ActionBytes(forward, bare, backward, first_backward, 0, made, shared, *parts, *split)
        peak = static + made + statistics + max(forward + model.cuts[first], backward + whole)
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
    """One rank at work; `bytes` gets the most of every action, and what was there while a message was let go."""

    def __init__(
        self, model: Model, stages: Sequence[PlanStage], units: Units, rows: Sequence[Sequence[Action]], rank: int
    ) -> None:
        self.model, self.stages, self.units = model, stages, units
        own = [stage.layers[0] for stage in stages if stage.ranks == (rank,)]
        self.rank = Rank(model, [layer for piece in own for layer in range(*piece)])
        self.graph = stage_graph(stages, units)
        lowered = lower(rows, graph=self.graph)
        self.program, self.known = lowered.programs[rank], acknowledgements(lowered, rank)
        self.again = {(one.stage, one.microbatch) for row in rows for one in row if one.kind == "R"}
        self.ready: set[tuple[int, int]] = set()
        self.copies: list[object] = []
        self.bytes: list[int] = []
        self.host_bytes = 0

    def run(self, ahead: int, ahead_bytes: int, one_memory: bool) -> None:
        """The whole program; receives are posted so far ahead."""
        pending = deque(item for item in self.program if isinstance(item, Recv))
        posted: dict[Message, int] = {}
        under_way: dict[int, deque[object]] = {}
        confirmed: dict[int, int] = {}
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
        for item in self.program:
            if isinstance(item, Recv):
                holding["buffer", item.message] = {self.storage(item.message)}
                posted.pop(item.message, None)
                post()
                before = self.level()
                while confirmed.get(item.peer, 0) < self.known[item.message] and under_way.get(item.peer):
                    holding.pop(under_way[item.peer].popleft(), None)
                    confirmed[item.peer] = confirmed.get(item.peer, 0) + 1
                let_go += before - self.level()
            elif isinstance(item, SendInstruction):
                key = "send", item.message
                kept = holding.pop(("buffer", item.message))
                if one_memory:
                    holding[key] = kept
                under_way.setdefault(item.peer, deque()).append(key)
            else:
                began, self.rank.peak = self.level() + let_go, 0
                self.act(item, self.copy_waited(item))
                self.bytes.append(max(self.rank.peak, began))
                let_go = 0

    def level(self) -> int:
        kept, self.rank.peak = self.rank.peak, 0
        self.rank.note()
        found, self.rank.peak = self.rank.peak, kept
        return found

    def storage(self, message: Message) -> Storage:
        stage, call = message.downstream
        kind = "act" if message.kind == "activation" else "grad"
        return kind, self.graph.microbatches[stage][call], self.stages[stage].layers[0][0]

    def copy_waited(self, action: Action) -> list[object]:
        """The copies that are waited for at the end of this action: those of the O before it."""
        if action.kind in "OL":
            return []
        done, self.copies = self.copies, []
        return done

    def segments(self, number: int, call: int) -> list[tuple[int, int, str]]:
        """(first, end, kind) of the parts of a stage that are treated alike in this call."""
        first, end = self.stages[number].layers[0]
        own = [one for one in self.program if isinstance(one, Action) and one.stage == number and one.kind in "FRBIW"]
        place = next(place for place, one in enumerate(own) if (one.kind, one.microbatch) == ("F", call))
        away = Action(number, "O", call) in self.program
        whole = own[place + 1] in (Action(number, "B", call), Action(number, "I", call)) and not away
        found, reached = [], first
        for one in self.stages[number].memory or ():
            found += [(reached, one.first, "")] if reached < one.first else []
            kind = one.kind
            if whole:  # nothing leaves, and the last part of the stage keeps its graph
                kind = "recompute" if "recompute" in kind and one.end < end else ""
            found.append((one.first, one.end, kind))
            reached = one.end
        return [*found, (reached, end, "")] if reached < end else found

    def act(self, action: Action, waited: list[object]) -> None:
        number, call, rank = action.stage, action.microbatch, self.rank
        assert call is not None
        holding, mb = rank.holding, self.graph.microbatches[number][call]
        parts = self.segments(number, call)
        keys = {part: (number, call, part[0]) for part in parts}
        here, before = (number, call), next(iter(self.graph.upstream[number][call]), None)
        after = next(iter(self.graph.downstream[number][call]), None)
        offload = any(one == Action(number, "O", call) for one in self.program)
        if action.kind == "F":
            self._arrive(before, here, "activation")
            layers = range(parts[0][0], parts[-1][1])
            holding.setdefault("statistics", set()).update(("statistics", mb, layer) for layer in layers)
            for part in parts:
                first, end, kind = part
                holding["in"] = {("act", mb, first)}
                if first == parts[0][0]:
                    holding.pop(("buffer", before and Message("activation", before, here)), None)
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
            if after is not None:
                holding["buffer", Message("activation", here, after)] = out
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
            self._backward(parts, keys, mb, (here, before, after), action.kind == "I")
        elif action.kind == "W":
            for part in reversed(parts):
                rank.weight_half(keys[part], mb, *part[:2], mb // self.units.of_block)
            self._end(parts, keys, here)
        for leaving in waited:
            holding.pop(leaving, None)

    def _arrive(self, source: tuple[int, int] | None, target: tuple[int, int], kind: str) -> None:
        if source is None:
            mb = self.graph.microbatches[target[0]][target[1]]
            self.rank.holding["buffer", None] = {("act", mb, self.stages[target[0]].layers[0][0])}

    def _take_away(self, key: tuple[int, int, int], kind: str) -> None:
        """All that moves. What segments of one call share goes once where it goes together."""
        holding = self.rank.holding
        kept = holding.pop(key)
        holding["stays", key] = set() if "recompute" in kind else self.model.stays(kept)
        self.rank.host[key] = kept - holding["stays", key]
        calls: dict[object, list[set[Storage]]] = {}
        for (number, call, first), moved in self.rank.host.items():
            together = Action(number, "O", call) in self.program
            calls.setdefault((number, call, None if together else first), []).append(moved)
        self.host_bytes = max(self.host_bytes, sum(self.model.bytes(set().union(*some)) for some in calls.values()))

    def _bring_back(self, parts: list, keys: dict, together: bool) -> None:  # type: ignore[type-arg]
        """Whatever of the call is away, as other tensors; a copy that has not been waited for is waited for first."""
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
        here, before, after = ends
        rank, holding = self.rank, self.rank.holding
        block = mb // self.units.of_block
        buffer = ("buffer", after and Message("gradient", here, after))
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
        if before is not None:
            holding["buffer", Message("gradient", before, here)] = gradient
        if not half:
            self._end(parts, keys, here)

    def _end(self, parts: list, keys: dict, here: tuple[int, int]) -> None:  # type: ignore[type-arg]
        """After the last backward of a call."""
        for part in parts:
            self.rank.host.pop(keys[part], None)
            self.rank.versions.pop(keys[part], None)
        calls = self.graph.microbatches[here[0]]
        block = calls[here[1]] // self.units.of_block
        served = [one // self.units.of_block for one in calls]
        if here[1] + 1 == len(calls) or served[here[1] + 1] != served[here[1]]:
            self._close(here[0], block, served[0])

    def _close(self, number: int, block: int, oldest: int) -> None:
        """A block's sums are added to the oldest block's where no other rank holds the layer."""
        for layer in range(*self.stages[number].layers[0]):
            ranks = {stage.ranks for stage in self.stages if layer in range(*stage.layers[0])}
            if block != oldest and len(ranks) == 1:
                self.rank.holding["sums"].discard(("sum", block, layer))
