"""Training state that one member has in memory: its own layers, earlier boundaries, copies that follow.

The protocol says by layer and stamp what must be held. Own layers are live in the `Work`, and their boundary before is
kept aside. A copy makes each step late: its state and the waiting update give two boundaries, also between generations,
so that a copy that stays costs nothing at a change of members.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from varuna_capslog.base import fields, files
from varuna_capslog.base.clock import wall_seconds
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.elastic.member.work import Followed, LayerState, Work
from varuna_capslog.engine.layers import EngineLayer
from varuna_capslog.engine.recipe import EngineOptions
from varuna_capslog.membership.generation import Generation, Held, Stamp
from varuna_capslog.model.chain import Chain
from varuna_capslog.training import layer_state
from varuna_capslog.training.checkpoint import entry_of, latest_checkpoint, publish, write_whole
from varuna_capslog.training.layer_state import digest
from varuna_capslog.training.manifest import FORMAT, check_manifest
from varuna_capslog.training.stored_layers import manifest_of_layers, to_checkpoint

__all__ = ["Copy", "Holdings", "LayerCopies", "recover", "take_newest", "write_boundaries", "write_held"]


class Due(NamedTuple):
    """A step that a copy has not made yet. before: boundary of the copy until then."""

    before: Stamp
    update: Mapping[str, Tensor]
    step: int
    scale: float


@dataclass
class Copy:
    """Copy of another member's layer. stamp: newest boundary that it can give. due: the step to make before that."""

    followed: Followed
    stamp: Stamp
    due: Due | None = None

    @property
    def stands_at(self) -> Stamp:
        """Boundary of the state in memory."""
        return self.stamp if self.due is None else self.due.before

    @property
    def stamps(self) -> set[Stamp]:
        """All boundaries that it can give."""
        return {self.stands_at, self.stamp}


class Holdings:
    """States of one member. Called by one thread.

    Attributes:
        live: the boundary of the own layers while a generation trains; None between two generations.
        copies: by layer. updates: final gradients for the copies, by layer and step, until a copy uses them.
        scales: by step, the factor of its gradients in the update, from its vote; 0: the step is skipped.
    """

    def __init__(self, work: Work) -> None:
        self._work = work
        self.live: Stamp | None = None
        self.copies: dict[int, Copy] = {}
        self._own: frozenset[int] = frozenset()
        self._held: Held = frozenset()
        self._kept: dict[tuple[int, Stamp], LayerState] = {}
        self._spare: dict[int, LayerState] = {}
        self._arriving: set[tuple[int, Stamp]] = set()
        self._shelf: dict[int, Copy] = {}
        self._stepping: Callable[[], None] | None = None
        self._digests: dict[tuple[int, Stamp], Future[bytes]] = {}
        self._beside = _thread_beside("digests")
        self.updates: dict[tuple[int, int], Mapping[str, Tensor]] = {}
        self.scales: dict[int, float] = {}

    # -- looking -------------------------------------------------------------------------------------------------------

    def at(self, layer: int, stamp: Stamp) -> LayerState:
        """Return a held state without copying it. Raises KeyError where it is missing, which is a defect."""
        return self.all_at([layer], stamp)[layer]

    def all_at(self, layers: Iterable[int], stamp: Stamp) -> dict[int, LayerState]:
        """Return the held states of these layers. Copies that are one step behind make it together. Raises as `at`."""
        states: dict[int, LayerState] = {}
        copies: dict[int, Copy] = {}
        for layer in layers:
            kept = self._kept.get((layer, stamp))
            if kept is not None:
                states[layer] = kept
            elif self.live == stamp and layer in self._own:
                states[layer] = self._work.state(layer, copy=False)
            else:
                copies[layer] = self._copy_with(layer, stamp)
        self._make_due(*(entry for entry in copies.items() if entry[1].stands_at != stamp))
        return states | {layer: self._state_of(copy) for layer, copy in copies.items()}

    def _copy_with(self, layer: int, stamp: Stamp) -> Copy:
        for copy in (self.copies.get(layer), self._shelf.get(layer)):
            if copy is not None and stamp in copy.stamps:
                return copy
        raise KeyError((layer, stamp))

    def stands_at(self, layer: int, held: Held) -> Stamp | None:
        """Return the boundary at which a copy is in memory; it makes its due step only if that boundary is not held.
        None: there is no copy, or it is at no boundary that is held.
        """
        copy = self._copy_of(layer)
        if copy is None:
            return None
        if (layer, copy.stands_at) not in held:
            self._make_due((layer, copy))
        return copy.stands_at if (layer, copy.stands_at) in held else None

    def _copy_of(self, layer: int) -> Copy | None:
        return self.copies.get(layer, self._shelf.get(layer))

    # -- digests of states that are compared with another member's at a planned change ---------------------------------

    def begin_digests(self, layers: Iterable[int], stamp: Stamp) -> None:
        """Begin to compute digests at a boundary in a thread, for own layers at `live` and for copies that are there.

        The states keep that boundary until their next step, which waits for the digests.
        """
        for layer in layers:
            copy = self._copy_of(layer)
            if (layer, stamp) in self._digests:
                continue
            if self.live == stamp and layer in self._own:
                self._digests[layer, stamp] = self._beside.submit(digest, self._work.state(layer, copy=False))
            elif copy is not None and copy.stands_at == stamp:
                self._digests[layer, stamp] = self._beside.submit(_digest_of, copy, self._stepping)

    def has_digest(self, layer: int, stamp: Stamp) -> bool:
        """True where `begin_digests` has begun this digest."""
        return (layer, stamp) in self._digests

    def digest_at(self, layer: int, stamp: Stamp) -> bytes:
        """Return the digest of a held state, begun ahead or computed now. Raises as `at`."""
        begun = self._digests.get((layer, stamp))
        return digest(self.at(layer, stamp)) if begun is None else begun.result()

    def _wait_for_digests(self, layers: Collection[int]) -> None:
        """Wait for the digests of layers whose states a step is about to change."""
        wait([begun for (layer, _), begun in self._digests.items() if layer in layers])

    def close(self) -> None:
        """End the thread."""
        self._beside.shutdown()

    def everything(self, held: Held) -> dict[tuple[int, Stamp], LayerState]:
        """Return all states that the protocol holds."""
        states = {}
        self._held = held
        # the newest first: a copy that makes its due step keeps the state before the step, if that is held, too
        for layer, stamp in sorted(held, key=lambda entry: entry[1], reverse=True):
            with contextlib.suppress(KeyError):  # a state that is missing must not keep the others from being written
                states[(layer, stamp)] = self.at(layer, stamp)
        return states

    # -- coming and going ----------------------------------------------------------------------------------------------

    def take(self, layer: int, stamp: Stamp, state: LayerState) -> None:
        """Keep a state that was received or loaded, also before the protocol lists it as held."""
        self._kept[(layer, stamp)] = state
        self._arriving.add((layer, stamp))

    def forget(self, held: Held) -> None:
        """Free the states that the protocol no longer holds; new states that it does not list yet stay."""
        self._held = held
        self._arriving -= held
        self._digests = {entry: begun for entry, begun in self._digests.items() if entry in held}
        for entry in [entry for entry in self._kept if entry not in held and entry not in self._arriving]:
            state = self._kept.pop(entry)
            if entry[0] in self._own:  # `keep_before` reuses its memory
                self._spare[entry[0]] = state
        for layer in [layer for layer, copy in self._shelf.items() if not self._wanted(layer, copy)]:
            del self._shelf[layer]

    def adopt(self) -> None:
        """Adopt a newer generation: drop the older one's updates and scales; new states need no listing any more."""
        self.updates.clear()
        self.scales.clear()
        self._arriving.clear()

    # -- from one generation to the next -------------------------------------------------------------------------------

    def shelve(self, held: Held) -> None:
        """Put live layers and copies aside at the end of a generation; copies make no step for that."""
        if self.live is None:
            return
        for layer, state in self._work.shelve().items():
            # an interrupted step may have changed the layer: the state kept before that step counts
            self._kept.setdefault((layer, self.live), state)
        self._held = held
        for layer, copy in self.copies.items():
            if layer in self._shelf:
                self._unshelve(layer)
            self._shelf[layer] = copy
        self.copies = {}
        self._own, self.live = frozenset(), None
        self._spare = {}

    def open(self, layers: Collection[int], copies: Iterable[int], base: Stamp) -> None:
        """Begin a generation: take shelved copies of `copies` into use; the others stay while a boundary is held."""
        self.live, self._own = base, frozenset(layers)
        for layer in layers:
            self._kept.pop((layer, base), None)
            if layer in self._shelf and base in self._shelf[layer].stamps:
                del self._shelf[layer]
        for layer in copies:
            shelved, state = self._shelf.get(layer), self._kept.pop((layer, base), None)
            if shelved is not None and base in shelved.stamps:
                if base != shelved.stamp:  # the step after it was taken back
                    shelved.stamp, shelved.due = base, None
                self.copies[layer] = self._shelf.pop(layer)
            elif state is not None:
                self.follow(layer, base, state)

    def _unshelve(self, layer: int) -> None:
        """Remove a shelved copy that a newer one replaces, and keep its held states."""
        copy = self._shelf.pop(layer)
        for stamp in sorted(copy.stamps, reverse=True):
            if (layer, stamp) in self._held and (layer, stamp) not in self._kept:
                if stamp != copy.stands_at:
                    self._make_due((layer, copy))
                self._kept.setdefault((layer, stamp), self._state_of(copy))

    def _wanted(self, layer: int, copy: Copy) -> bool:
        return any((layer, stamp) in self._held for stamp in copy.stamps)

    # -- steps ---------------------------------------------------------------------------------------------------------

    def follow(self, layer: int, stamp: Stamp, state: LayerState) -> None:
        """Begin a copy of a layer, from its state at this boundary."""
        self.copies[layer] = Copy(self._work.follow(layer, state), stamp)

    def keep_before(self) -> None:
        """Copy the own layers aside before a step changes them: all of them, or none where that fails."""
        assert self.live is not None
        self._wait_for_digests(self._own)
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        kept: dict[tuple[int, Stamp], LayerState] = {}
        for layer in self._own:
            live, spare = self._work.state(layer, copy=False), self._spare.pop(layer, {})
            # a script's state may change its shape from step to step
            if live.keys() != spare.keys() or any(spare[name].shape != tensor.shape for name, tensor in live.items()):
                spare = {name: torch.empty_like(tensor) for name, tensor in live.items()}
            targets += [spare[name] for name in live]
            sources += live.values()
            kept[(layer, self.live)] = spare
        if sources:
            torch._foreach_copy_(targets, sources)
        self._kept |= kept

    def advance(self, held: Held, generation: int, accepted: int) -> None:
        """Advance the copies by the steps whose updates are here. accepted: the newest step that a vote accepted."""
        self._held = held
        while following := [
            (layer, copy) for layer, copy in self.copies.items() if self._can_follow(layer, copy, accepted)
        ]:
            self._make_due(*following)
            for layer, copy in following:
                step = copy.stamp.step + 1
                copy.due = Due(copy.stamp, self.updates.pop((layer, step)), step, self.scales[step])
                copy.stamp = Stamp(step, generation)

    def take_back(self, step: int) -> None:
        """Undo `advance` for an accepted step that this member could not apply: the updates wait again."""
        for layer, copy in self.copies.items():
            if copy.due is not None and copy.due.step == step:
                self.updates[(layer, step)] = copy.due.update
                copy.stamp, copy.due = copy.due.before, None

    def _can_follow(self, layer: int, copy: Copy, accepted: int) -> bool:
        """True where the copy's next step was accepted and the update is here."""
        step = copy.stamp.step + 1
        return step <= accepted and step in self.scales and (layer, step) in self.updates

    def catch_up(self, layers: Iterable[int]) -> None:
        """Begin the due steps of the copies of these layers, if there are any."""
        copies = {layer: self._copy_of(layer) for layer in layers}
        self._make_due(*((layer, copy) for layer, copy in copies.items() if copy is not None and copy.due is not None))

    def _make_due(self, *copies: tuple[int, Copy]) -> None:
        """Begin the due steps of these copies; they may run beside training."""
        if not copies:
            return
        self._wait_for_digests([layer for layer, _ in copies])
        self._settle()
        steps: list[tuple[Followed, Mapping[str, Tensor], int, float]] = []
        for layer, copy in copies:
            due, copy.due = copy.due, None
            if due is None:
                continue
            if (layer, due.before) in self._held:
                self._kept[(layer, due.before)] = copy.followed.state(copy=True)
            steps.append((copy.followed, due.update, due.step, due.scale))
        if steps:
            self._stepping = self._work.apply_to_copies(steps)

    def _state_of(self, copy: Copy) -> LayerState:
        self._settle()
        return copy.followed.state(copy=False)

    def _settle(self) -> None:
        """Wait for the steps of copies that are being made."""
        stepping, self._stepping = self._stepping, None
        if stepping is not None:
            stepping()

    def prune(self, step: int, behind: bool) -> None:
        """Drop updates and scales that no copy needs after a step. behind: copies still to come may lag further."""
        reached = {layer: copy.stamp.step for layer, copy in self.copies.items()}
        self.updates = {
            (layer, number): update
            for (layer, number), update in self.updates.items()
            if number > reached.get(layer, step - 1)
        }
        if not behind:
            oldest = min([step - 1, *(number + 1 for number in reached.values())])
            self.scales = {number: scale for number, scale in self.scales.items() if number >= oldest}


def _thread_beside(name: str) -> ThreadPoolExecutor:
    """Return a thread for work beside the member's own, with as many threads inside torch as that has: a kernel's bits
    may depend on their number, and the setting may count for the whole process.
    """
    return ThreadPoolExecutor(1, name, initializer=torch.set_num_threads, initargs=(torch.get_num_threads(),))


def _digest_of(copy: Copy, stepping: Callable[[], None] | None) -> bytes:
    """Return the digest of a copy once the step that it makes has ended."""
    if stepping is not None:
        stepping()
    return digest(copy.followed.state(copy=False))


# -- Copies of layers that a member of our engine keeps for others, and the layers that its last generation trained.
#
# At a change of members a layer may change its role: a copy becomes a layer that this member trains, and a layer that
# it trained becomes a copy. Neither is copied in memory for that. Copies make their steps in a thread of their own,
# beside the next forward.


class LayerCopies:
    """Layer copies of one member, and its last trained layers. Called by its one thread."""

    def __init__(self, chain: Chain, options: EngineOptions, device: torch.device) -> None:
        self._chain, self._options, self._device = chain, options, device
        self._trained: dict[int, EngineLayer] = {}
        self._followers: WeakValueDictionary[int, layer_state.Follower] = WeakValueDictionary()
        self._beside = _thread_beside("copies")

    def keep(self, layers: Iterable[EngineLayer]) -> None:
        """Keep the layers that a generation's engine trained here, once it has ended."""
        self._trained = {layer.index: layer for layer in layers}

    def ready(self, states: Mapping[int, LayerState], copied: Collection[int]) -> dict[int, EngineLayer]:
        """Return the layers whose tensors are those of `states`, the states of all layers of the next engine: it takes
        them as they are. copied: layers that this member will have copies of; other trained layers are freed.
        """
        layers = [*self._trained.values(), *(follower.layer for follower in self._followers.values())]
        self._trained = {index: layer for index, layer in self._trained.items() if index in copied}
        return {
            layer.index: layer
            for layer in layers
            if layer.index in states and layer_state.lies_in(states[layer.index], layer)
        }

    def let_go(self) -> None:
        """Free the last generation's layers that have not become copies: once training continues, none will."""
        self._trained = {}

    def follow(self, index: int, state: LayerState) -> layer_state.Follower:
        """Return a copy of a layer, which begins with this state."""
        before = self._trained.pop(index, None)
        follower = layer_state.Follower(self._chain, index, self._options, self._device, state, before)
        self._followers[index] = follower
        return follower

    def apply(
        self, due: Sequence[tuple[layer_state.Follower, Mapping[str, Tensor], int, float]]
    ) -> Callable[[], None] | None:
        """See `Work.apply_to_copies`."""
        # a user's optimizer may not be thread-safe, and a GPU runs asynchronously anyway
        if self._device.type != "cpu" or ":" in self._options.recipe.optimizer:
            layer_state.apply_together(due)
            return None
        return self._beside.submit(layer_state.apply_together, due).result

    def close(self) -> None:
        """End the thread."""
        self._beside.shutdown()


# -- States that members leave on disk when a run stops between two checkpoints, and their use by the next run.
#
# Every member writes the layers that it holds into the run's `held/`: one folder per boundary, one file per layer, and
# the newest record of the membership. The next run looks there first: it takes the newest boundary of the run's past
# that has every layer, and removes the rest. For our engine that boundary becomes a checkpoint (`write_held`,
# `recover`); the Varuna plugin keeps its own files (`write_boundaries`, `take_newest`).


_log = logging.getLogger(__name__)
_REMEDY = "remove the folder held/, and the run goes on from its last checkpoint"

HeldStates = Mapping[tuple[int, Stamp], LayerState]
"""The states that a member holds, by layer and boundary."""


def write_boundaries(
    run_dir: Path,
    held: HeldStates,
    record: Generation,
    about: Mapping[str, Any],
    write: Callable[[Path, int, LayerState], None],
) -> None:
    """Write the states that a member holds. Several members may write one state: equal stamps mean equal states.

    Args:
        record: the member's newest generation; it says which boundaries lie on the run's past.
        about: further data for the next run, as JSON.
        write: puts one layer into the folder of its boundary, unless it is there. Raises OSError.

    Raises:
        CapslogError: the disk is full or cannot be written.
    """
    folder = run_dir / "held"
    try:
        for (index, stamp), state in sorted(held.items()):
            place = folder / f"{stamp.step:08d}-{stamp.generation:06d}"
            place.mkdir(parents=True, exist_ok=True)
            write(place, index, state)
    except OSError as error:
        raise files.write_failure(f"{folder}: what this member holds cannot be written", error) from error
    files.write_json(folder / f"record-{record.number:06d}.json", {"record": record.to_json(), **about})


def take_newest(run_dir: Path, after: int, take: Callable[[Path, int, Mapping[str, Any]], Path | None]) -> Path | None:
    """Take the newest whole boundary in `held/` that lies on the run's past and after step `after`; remove the rest.

    take: called with a boundary's folder, its step and `write_boundaries`' `about`, the newest boundary first; moves
    the folder away and returns its new path, or None where a layer is missing.
    """
    folder, taken = run_dir / "held", None
    files.refuse_link(folder)
    records = sorted(folder.glob("record-*.json"))
    if records:
        record, about = _read_record(records[-1])
        for place in sorted(folder.iterdir(), reverse=True):
            stamp = Stamp.of_name(place.name)
            if stamp is None or place.is_symlink() or not place.is_dir():
                continue  # nothing that a member wrote
            if stamp.step > after and record.continues(stamp):
                taken = take(place, stamp.step, about)
                if taken is not None:
                    break
    shutil.rmtree(folder, ignore_errors=True)
    return taken


def _read_record(path: Path) -> tuple[Generation, dict[str, Any]]:
    """Read the record of the membership and the other data of its file."""
    about = files.read_json(path)
    try:
        return Generation.from_json(fields.mapping(about, "what it holds").get("record"), "record"), about
    except CapslogError as error:
        raise CapslogError(f"{path}: {error}; {_REMEDY}") from error


def write_held(
    run_dir: Path, chain: Chain, held: HeldStates, record: Generation, generation: int, extra: Mapping[str, Any]
) -> None:
    """Write the states of our engine that a member holds, as checkpoint files. extra: further keys of the manifest."""

    def write(place: Path, index: int, state: LayerState) -> None:
        file = f"layer-{index:04d}.pt"
        if not (place / f"{file}.json").exists():
            write_whole(place / file, to_checkpoint(state, chain, index))
            files.write_json(place / f"{file}.json", {"file": file, **entry_of(place / file)})

    names = [layer.name for layer in chain.layers]
    manifest = {"model": chain.name, **manifest_of_layers(chain), "generation": generation, **extra, "layers": names}
    write_boundaries(run_dir, held, record, {"manifest": manifest}, write)


def recover(run_dir: Path) -> Path | None:
    """Make a checkpoint of the states in `held/` if they are newer than the last checkpoint, and remove the rest.
    Called by one process before any run starts, elastic or not. Returns its folder; None where none was made.
    """
    checkpoints = run_dir / "checkpoints"

    def take(place: Path, step: int, about: Mapping[str, Any]) -> Path | None:
        manifest, names = _layers_of(about)
        if {path.name.removesuffix(".json") for path in place.glob("*.pt.json")} != set(names):
            return None
        try:
            entries = {name: _entry(place, file) for file, name in names.items()}
            content = {**manifest, "format": FORMAT, "step": step, "time": wall_seconds(), "layers": entries}
            check_manifest(place, content)
        except CapslogError as error:
            _log.warning("passed over what was held after step %d: %s", step, error)
            return None
        files.write_json(place / "manifest.json", content)
        for path in place.glob("*.pt.json"):
            path.unlink()
        checkpoints.mkdir(parents=True, exist_ok=True)
        final = checkpoints / f"step-{step:08d}"
        publish(place, final, checkpoints / f".partial-replaced-{step:08d}")
        return final

    latest, _ = latest_checkpoint(checkpoints)
    return take_newest(run_dir, -1 if latest is None else latest.step, take)


def _entry(place: Path, file: str) -> dict[str, Any]:
    """Read a layer's entry for the manifest, which `write_held` wrote."""
    return {**fields.mapping(files.read_json(place / f"{file}.json"), file), "file": file}


def _layers_of(about: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the manifest in a record's file, and {file of a layer: its name}."""
    try:
        manifest = fields.mapping(about.get("manifest"), "manifest")
        layers = [fields.text(name, "layers") for name in fields.listed(manifest.get("layers"), "layers")]
    except CapslogError as error:
        raise CapslogError(f"the newest record in held/: {error}; {_REMEDY}") from error
    return manifest, {f"layer-{index:04d}.pt": name for index, name in enumerate(layers)}
