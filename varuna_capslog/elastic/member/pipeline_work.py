"""Our engine as the `Work` of an elastic run: pipelines that are cut anew for every generation.

Chain, data and constants of the run are loaded once per process; a generation is a new `PipelineEngine` over the layers
that the protocol gave to this member. A layer that stays keeps its tensors.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from varuna_capslog.base import files
from varuna_capslog.base.errors import CapslogError, DiskFailed
from varuna_capslog.config.settings import Config
from varuna_capslog.elastic.member.held_state import write_held
from varuna_capslog.elastic.member.work import Followed, LayerState, Opening, Outcome
from varuna_capslog.engine.communicator import Communicator
from varuna_capslog.engine.layers import EngineLayer
from varuna_capslog.engine.observer import Observer
from varuna_capslog.engine.pipeline import Layout as EngineLayout
from varuna_capslog.engine.pipeline import PipelineEngine, Ready
from varuna_capslog.engine.stage_meter import held_inputs
from varuna_capslog.engine.vote import Verdict
from varuna_capslog.membership.generation import Generation, Layout, Member, Stamp
from varuna_capslog.membership.placing import Placer
from varuna_capslog.membership.recovery import Seat
from varuna_capslog.model.trace import ShapeTable
from varuna_capslog.model.workload import Minibatch, Workload
from varuna_capslog.planning.search import plan as planned
from varuna_capslog.plans.folder import latest_plan
from varuna_capslog.plans.plan import Plan, write_plan
from varuna_capslog.profiles.record import Profile
from varuna_capslog.schedules import RunShape
from varuna_capslog.training import layer_state
from varuna_capslog.training.checkpoint import from_checkpoint, open_checkpoint, prune, save_checkpoint
from varuna_capslog.training.constants import run_constants
from varuna_capslog.training.feed import Feed
from varuna_capslog.training.follower import Follower
from varuna_capslog.training.journal import Journal, peak_record, step_record
from varuna_capslog.training.judging import Judging
from varuna_capslog.training.peak_meter import PeakMeter
from varuna_capslog.training.run import build_chain, check_multipliers, engine_options, total_steps

__all__ = ["PipelineWork"]

_WARM_UP_BYTES = 1 << 30


class PipelineWork:
    """One member's part of a pipeline run.

    Args:
        plan: the run's first plan; its cuts are taken whenever as many devices take part as it was made for.
        profile: what the planner goes by afterwards; None: parameters' bytes.
        offset: generation n of the store is `plan-<n + offset>.json`, and so are the generations of metrics and events.
        resumed: where a boundary's checkpoint lies, if not in this run's own folder.
        stop_wished: asked once per step; True on any member stops all after it.
        placed: told the number and stages of this member in every generation that it trains in, in a thread beside the
            training.
        observer: sees the work of the engine of every generation.
    """

    def __init__(
        self,
        me: Member,
        config: Config,
        workload: Workload,
        plan: Plan,
        profile: Profile | None,
        device: torch.device,
        offset: int = 0,
        resumed: Mapping[Stamp, Path] | None = None,
        stop_wished: Callable[[], bool] = lambda: False,
        placed: Callable[[int, list[int]], None] = lambda number, stages: None,
        observer: Observer | None = None,
    ) -> None:
        self._placed, self._observer = placed, observer
        self.me, self.config, self.device = me, config, device
        self._plan, self._offset, self._stop_wished = plan, offset, stop_wished
        self._workload = workload
        self._resumed = dict(resumed or {})
        self.run_dir = Path(config.run_dir)
        self.checkpoints = self.run_dir / "checkpoints"
        self.chain, _ = build_chain(config, workload)
        check_multipliers(self.chain, config.train.lr_multipliers)
        if plan.num_layers != len(self.chain):
            raise CapslogError(f"the plan is for {plan.num_layers} layers, the model has {len(self.chain)}: plan again")
        self._source = workload.train_data()
        train = config.train
        # a plan of its own for every generation: the schedule's actions are made anew
        self.options = dataclasses.replace(
            engine_options(config, len(self._source) // train.minibatch_size), actions=None
        )
        self._feed_of = functools.partial(Feed, self._source, train.minibatch_size, train.microbatch_size, train.seed)
        self.feed = self._feed_of(())
        self.total_steps = total_steps(config, self.feed.steps_per_epoch)
        self.layer_bytes = tuple(layer_state.size_of(self.chain, index) for index in range(len(self.chain)))
        self._table = ShapeTable(self.chain, device.type, config.train.precision)
        self.placer = Placer.of_config(config, profile, self.layer_bytes, plan=plan)
        self._profile = profile
        self._judging = Judging(config, workload)
        self._meter = PeakMeter(device)
        self._peaks: list[int] | None = None
        self.engine: PipelineEngine | None = None
        self._by_index: dict[int, EngineLayer] = {}
        self._shelved: dict[int, tuple[EngineLayer, LayerState]] = {}
        self._minibatch: Minibatch | None = None
        self._verdict: Verdict | None = None
        self._journal: Journal | None = None
        # generation, members, and the line of a step
        self._last_records: deque[tuple[int, int, dict[str, Any]]] = deque(maxlen=2)
        self._first = False
        self._number = 0
        self._saved = self._judged = self._base = 0
        self._part_names: list[str] | None = None
        self._best: tuple[float, int] | None = self._read_best()
        self._began = time.monotonic()
        self._step_began = 0.0
        self.asked = False

    def _read_best(self) -> tuple[float, int] | None:
        best = self.checkpoints / "best.json"
        if not best.exists():
            return None
        record = files.read_json(best)
        return record["value"], record["step"]

    def began(self, seconds_ago: float) -> None:
        """The run has been at work for so long when this member comes: `max_seconds` counts for all of it."""
        self._began = time.monotonic() - seconds_ago

    def warm_up(self) -> None:
        """One microbatch through a whole chain of this process's own, so that a newcomer meets nothing for the first
        time while others wait for it. Left out for chains of which a device might not hold a second one.
        """
        if sum(self.layer_bytes) > _WARM_UP_BYTES:
            return
        whole = self.feed.minibatch(1)
        one = dataclasses.replace(
            whole,
            inputs=whole.inputs[:1],
            targets=whole.targets[:1],
            sample_ids=whole.sample_ids[:1],
            recipes=whole.recipes[:1],
        )
        options = dataclasses.replace(self.options, num_microbatches=1, num_blocks=1)
        alone = Communicator(0, 1, "warm-up", datetime.timedelta(seconds=1))
        layout = EngineLayout((0,), (0,), 1)
        loss = self._workload.loss
        ready = Ready(self._table, layers={})
        engine = PipelineEngine(self.chain, loss, layout, options, alone, self.device, ready, self._observer)
        inputs = {name: tensor.to(self.device) for name, tensor in self._source.load(whole, 0).items()}
        engine.compute(1, one, lambda microbatch: inputs)
        verdict = engine.vote(1, one)
        if verdict.refusal is None:
            engine.apply(verdict)

    def knows(self) -> list[str] | None:
        return self._part_names

    def place(self, seats: Sequence[Seat]) -> Layout | str:
        return self.placer(seats)

    # -- generations --------------------------------------------------------------------------------------------------

    def open(self, opening: Opening, communicator: Communicator, states: Mapping[int, LayerState]) -> None:
        cuts, devices, replicas = self.placer.pipeline(opening.layout, opening.members)
        layout = EngineLayout(tuple(cuts), tuple(range(devices)), replicas)
        kept = {
            index: layer
            for index, (layer, shelved) in self._shelved.items()
            if index in states and states[index] is shelved and not layer.shared
        }
        engine = PipelineEngine(
            self.chain,
            self._workload.loss,
            layout,
            self.options,
            communicator,
            self.device,
            Ready(self._table, kept, next((names for names in opening.told if names is not None), None)),
            self._observer,
        )
        self._by_index = {layer.index: layer for layer in engine.layers}
        for index, state in states.items():
            layer_state.install(self._by_index[index], engine.optimizer, state)
        self._shelved = {}
        self.engine = engine
        self.feed = self._feed_of(engine.local_microbatches if engine.owns_first_stage else ())
        step = opening.base.step
        self._base = step
        self._saved = self._saved if self._saved <= step else 0
        self._judged = self._judged if self._judged <= step else 0
        self._first = opening.members[0] == self.me
        self._number = opening.number + self._offset
        if (path := self._resumed.get(opening.base)) is not None and path.parent == self.checkpoints.absolute():
            self._saved = step  # where the run goes on from its own checkpoint
        self._meter.begin(opening.number)
        arguments = (self._number, tuple(cuts), devices, replicas, layout.stages_of(communicator.rank))
        threading.Thread(target=self._write_papers, args=arguments, name="write-papers", daemon=True).start()
        self._open_journal(opening, communicator.world_size)

    def _write_papers(self, number: int, cuts: tuple[int, ...], devices: int, replicas: int, stages: list[int]) -> None:
        """The generation's plan file, and what this member is in it; beside the training: nobody waits for them."""
        try:
            if self._first:
                self._write_plan(number, cuts, devices, replicas)
            self._placed(number, stages)
        except DiskFailed as error:  # so will the next line of metrics, which tells everybody
            sys.stderr.write(f"{error}\n")

    def _write_plan(self, number: int, cuts: tuple[int, ...], devices: int, replicas: int) -> None:
        path = self.run_dir / f"plan-{number}.json"
        if path.exists():
            return
        pipeline, count = self.config.pipeline, self.options.num_microbatches // replicas
        if self._profile is None:
            plan = dataclasses.replace(self._plan, cuts=cuts, num_microbatches=count, placed=None, actions=None)
        else:
            plan = planned(
                self._profile,
                devices,
                planner=pipeline.planner,
                memory=pipeline.memory,
                run=dataclasses.replace(RunShape.of_config(self.config), num_microbatches=count, num_blocks=1),
                cuts=cuts,
            )
        write_plan(path, plan)

    def _open_journal(self, opening: Opening, world_size: int) -> None:
        number = opening.number + self._offset
        if not self._first:
            self._close_journal()
        elif self._journal is None:
            step, every = opening.base.step, self.config.train.log_every
            self._journal = Journal(self.run_dir, self.total_steps, step + 1, number, world_size, every)
            self._write_missing(step)
            self._journal.change(number, world_size)
        else:
            self._journal.change(number, world_size)

    def _write_missing(self, step: int) -> None:
        """Whoever wrote before may have been lost between applying a step and writing its line."""
        assert self._journal is not None
        path = self.run_dir / "metrics.jsonl"
        written = {line.get("step") for line in files.last_lines(path)} if path.exists() else set()
        for number, world_size, record in self._last_records:
            if record["step"] <= step and record["step"] not in written:
                self._journal.change(number, world_size)
                self._journal.step(record)

    def _close_journal(self) -> None:
        if self._journal is not None:
            self._journal.close()
            self._journal = None

    def shelve(self) -> Mapping[int, LayerState]:
        engine, self.engine = self.engine, None
        if engine is None:
            return {}
        engine.forget()
        self.feed.close()
        states = {layer.index: layer_state.capture(layer, engine.optimizer, copy=False) for layer in engine.layers}
        self._shelved = {layer.index: (layer, states[layer.index]) for layer in engine.layers}
        self._by_index = {}
        self._verdict = self._minibatch = None
        return states

    # -- a step -------------------------------------------------------------------------------------------------------

    @property
    def _running(self) -> PipelineEngine:
        assert self.engine is not None
        return self.engine

    def is_done(self, step: int) -> bool:
        return self.total_steps is not None and step >= self.total_steps

    def compute(self, step: int) -> bool:
        self._step_began = time.perf_counter()
        self._minibatch = self.feed.minibatch(step)
        engine = self._running
        load = self.feed.loader(step) if engine.owns_first_stage else (lambda microbatch: {})
        with self._meter.computing(engine) as measured:
            if measured and engine.owns_first_stage:
                load = held_inputs(load, engine.local_microbatches)
            engine.compute(step, self._minibatch, load)
        return True  # the vote adds everything up, and finds what is not finite

    def vote(self, step: int, ballot: bytes) -> Outcome:
        assert self._minibatch is not None
        train, engine = self.config.train, self._running
        late = train.max_seconds is not None and time.monotonic() - self._began > train.max_seconds
        stop, ballot = late or self._stop_wished(), self._meter.sealed(ballot)
        verdict = self._verdict = engine.vote(step, self._minibatch, stop, ballot)
        self._part_names = engine.part_names
        ballots, peaks = self._meter.opened(verdict.ballots or (b"",) * engine.communicator.world_size)
        self._peaks = None if peaks is None else [peaks[device] for device in engine.layout.placement]
        return Outcome(verdict.refusal is None, ballots, verdict.stop, verdict.scale)

    def apply(self, step: int) -> None:
        assert self._verdict is not None
        assert self._minibatch is not None
        with self._meter.applying(self._running):
            result = self._running.apply(self._verdict)
        inputs = self._minibatch.inputs
        self._verdict = self._minibatch = None
        seconds = time.perf_counter() - self._step_began
        record = step_record(result, seconds, self.feed.epoch(step), self.config.train.minibatch_size)
        if self._peaks is not None:
            count = self._running.options.num_microbatches // self._running.layout.replicas
            record |= peak_record(self._peaks, self._meter.source, inputs[:count])
        self._last_records.append((self._number, self._running.communicator.world_size, record))
        if self._journal is not None:
            self._journal.step(record)

    def discard(self, step: int) -> str:
        assert self._verdict is not None
        self._running.forget()
        return self._verdict.refusal or f"step {step} was voted down"

    # -- states -------------------------------------------------------------------------------------------------------

    def state(self, layer: int, copy: bool) -> LayerState:
        return layer_state.capture(self._by_index[layer], self._running.optimizer, copy)

    def update(self, layer: int) -> Mapping[str, Tensor]:
        return self._running.update_of(layer)

    def follow(self, layer: int, state: LayerState) -> Followed:
        return Follower(self.chain, layer, self.options, self.device, state)

    def initial(self, layer: int) -> LayerState:
        return layer_state.initial(self.chain, layer)

    def load(self, layer: int, stamp: Stamp) -> LayerState:
        checkpoint = open_checkpoint(self._resumed.get(stamp, self.checkpoints / f"step-{stamp.step:08d}"))
        return from_checkpoint(checkpoint, self.chain, layer)

    def persist(self, held: Mapping[tuple[int, Stamp], LayerState], record: Generation, why: str) -> None:
        if record.number + self._offset > self._number:  # nobody trains in it, and it has no plan of its own
            self._keep_plan(record.number + self._offset)
        extra = {"constants": run_constants(self.config)}
        write_held(self.run_dir, self.chain, held, record, record.number + self._offset, extra)
        self.note("persisted", why=why, states=len(held), member=self.me, generation=record.number)

    def _keep_plan(self, number: int) -> None:
        """The plan before stands for a generation that waits or is parked: whoever goes on counts from its number."""
        last = latest_plan(self.run_dir)
        if last is not None and last[0] < number:
            write_plan(self.run_dir / f"plan-{number}.json", last[1])

    # -- boundaries ---------------------------------------------------------------------------------------------------

    def between(self, stamp: Stamp, save: bool = False) -> Stamp | None:
        train, step = self.config.train, stamp.step
        judges = bool(train.evaluate_every) and step > 0 and step % (train.evaluate_every or 1) == 0
        saves = train.checkpoint_every is not None and step > 0 and step % train.checkpoint_every == 0
        saves = saves or (save and step > 0)
        written = None
        if judges or saves:
            self._learn_done(step)
        if (judges or saves) and self._saved < step:
            self._save(step)
            written = stamp
        if judges and self._judged < step:
            self._judge(step)
        every = self.config.pipeline.verify_every
        if every and step and step % every == 0:
            self._running.verify_copies()
        return written

    def _learn_done(self, step: int) -> None:
        """A newcomer does not know what was written and judged at the boundary with which its generation begins."""
        if step == self._base:
            known = self._running.communicator.gather((self._saved, self._judged))
            self._saved = max(saved for saved, _ in known)
            self._judged = max(judged for _, judged in known)

    def _save(self, step: int) -> None:
        began, engine = time.monotonic(), self._running
        save_checkpoint(
            self.checkpoints,
            step,
            self._number,
            self.chain,
            engine.layers,
            engine.optimizer,
            engine.communicator,
            engine.replica == 0,
            {"constants": run_constants(self.config), "cuts": list(engine.layout.cuts)},
        )
        self._saved = step
        if self._journal is not None:
            spare = () if self._best is None else (self._best[1],)
            prune(self.checkpoints, self.config.train.checkpoint_keep, spare)
            self._journal.event("checkpoint", step=step, seconds=round(time.monotonic() - began, 3))

    def _judge(self, step: int) -> None:
        scores = self._judging.scores(self._running)
        self._judged = step
        if scores is None:
            return
        if self._journal is not None:
            self._journal.scores(step, scores)
        if self._journal is not None:  # who came later has not seen every evaluation
            self._best = self._read_best()
        value = next((value for value in scores.values() if isinstance(value, (int, float))), None)
        if value is not None and not math.isnan(value) and (self._best is None or value > self._best[0]):
            self._best = (float(value), step)
            if self._journal is not None:
                self.checkpoints.mkdir(parents=True, exist_ok=True)
                files.write_json(self.checkpoints / "best.json", {"step": step, "value": self._best[0]})

    def finish(self, stamp: Stamp, stopped: bool) -> None:
        engine = self._running
        self.asked = stopped and any(engine.communicator.gather(self._stop_wished()))
        self._learn_done(stamp.step)
        if self._saved < stamp.step:
            self._save(stamp.step)
        if self.config.train.evaluate_every is not None and self._judged != stamp.step and not self.asked:
            self._judge(stamp.step)
        if self._journal is not None:
            self._journal.event("stop", step=stamp.step, asked=self.asked)
            self._close_journal()

    # -- words --------------------------------------------------------------------------------------------------------

    def note(self, kind: str, **details: Any) -> None:
        if self.engine is not None and kind in ("begin", "morph"):
            layout = self.engine.layout
            idle = self.engine.communicator.world_size - layout.world_size
            details |= {"cuts": list(layout.cuts), "replicas": layout.replicas, "idle": idle}
        generation = int(details.pop("generation", 0)) + self._offset
        if kind == "begin":
            details["step"] -= 1  # told after the first step, of the boundary before it
            kind = "resume" if details["step"] else "start"
        self._say_event(kind, **details, generation=generation)

    def _say_event(self, kind: str, **details: Any) -> None:
        files.append_jsonl(self.run_dir / "events.jsonl", {"kind": kind, "time": time.time(), **details})

    def close(self) -> None:
        """Stops the loading threads and the terminal's progress bar."""
        self.feed.close()
        self._close_journal()
