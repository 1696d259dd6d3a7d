"""Our engine as the `Work` of an elastic run: pipelines that are cut anew for every generation.

Chain, data and constants of the run are loaded once per process; a generation is a new `PipelineEngine` over this
member's layers. A layer that stays keeps its tensors. Steps, checkpoints and evaluations are the `TrainingLoop`'s, as
in a run that is not elastic.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch

from varuna_capslog.base import files
from varuna_capslog.base.clock import wall_seconds
from varuna_capslog.base.errors import CapslogError, StepRefused
from varuna_capslog.base.processes import OwnedThread
from varuna_capslog.config.settings import Config
from varuna_capslog.elastic.member.balance import Balance, Pace
from varuna_capslog.elastic.member.holdings import LayerCopies, write_held
from varuna_capslog.elastic.member.start_up import MemberStart, fail
from varuna_capslog.elastic.member.work import Followed, LayerState, Opening, Outcome, Work
from varuna_capslog.engine.communicator import Communicator
from varuna_capslog.engine.executor import Observer
from varuna_capslog.engine.layers import EngineLayer
from varuna_capslog.engine.layout import Layout, layout_of
from varuna_capslog.engine.pair_groups import opener_of
from varuna_capslog.engine.pipeline import PipelineEngine, Ready
from varuna_capslog.engine.recipe import EngineOptions
from varuna_capslog.engine.step import train_step
from varuna_capslog.membership.generation import INITIAL, Generation, Member, MemberLayout, Stamp
from varuna_capslog.membership.placing import Placer
from varuna_capslog.membership.recovery import Seat
from varuna_capslog.membership.small_motion import Loss, SmallMotion, Weighed
from varuna_capslog.model.chain import Chain
from varuna_capslog.model.trace import ShapeTable
from varuna_capslog.model.workload import Workload
from varuna_capslog.planning.problem import Problem
from varuna_capslog.planning.solve import solve
from varuna_capslog.plans.plan import Plan, latest_plan, pipelines_of, plan_path, write_plan
from varuna_capslog.profiles.record import Profile
from varuna_capslog.schedules import RunShape
from varuna_capslog.training import layer_state
from varuna_capslog.training.checkpoint import open_checkpoint
from varuna_capslog.training.loop import TrainingLoop
from varuna_capslog.training.manifest import run_constants
from varuna_capslog.training.run_setup import build_chain, check_plan, set_up_run
from varuna_capslog.training.stored_layers import from_checkpoint

__all__ = ["PipelineRun", "PipelineWork"]

_WARM_UP_BYTES = 1 << 30
_WRITE_SECONDS = 10.0
"""Seconds that `close` waits for the last plan file, since a disk may hang."""


@dataclass(frozen=True)
class PipelineRun:
    """Run that a `PipelineWork` is part of. plan: the first plan, also used later for as many devices as it was made
    for. profile: costs for later plans; None: they are made from the bytes of the parameters.
    """

    config: Config
    workload: Workload
    plan: Plan
    profile: Profile | None

    def layout_of(self, plan: Plan) -> Layout:
        """Return the engine's layout of a generation's plan. Raises CapslogError as `engine/layout.layout_of`."""
        alike = pipelines_of(plan)
        if alike is None:
            return layout_of(plan, self.config)
        return Layout.pipelines(alike[0], plan.num_layers, None, alike[1], self.config.num_blocks)

    def write_plan(self, number: int, plan: Plan) -> None:
        """Write `plan-<number>.json` of a generation that trains, if it is missing; for equal pipelines, one's plan."""
        path = plan_path(self.config.run_dir, number)
        if not path.exists():
            alike = pipelines_of(plan)
            write_plan(path, plan if alike is None else self._one_of(*alike))

    def _one_of(self, cuts: tuple[int, ...], replicas: int) -> Plan:
        """Plan of one of `replicas` equal pipelines."""
        pipeline, count = self.config.pipeline, self.config.num_microbatches // replicas
        if self.profile is None:
            return Plan.of_cuts(
                self.plan.num_layers,
                cuts,
                num_microbatches=count,
                microbatch_size=self.config.train.microbatch_size,
                model=self.plan.model,
                schedule=pipeline.schedule,
            )
        run = dataclasses.replace(RunShape.of_config(self.config), num_microbatches=count, num_blocks=1)
        return solve(Problem.of(self.profile, len(cuts), run=run, memory=pipeline.memory, cuts=cuts), pipeline.planner)

    def keep_plan(self, number: int) -> None:
        """Write the last plan again, under the number of a generation that does not train: a resumed run counts its
        generations from the newest plan file.
        """
        last = latest_plan(self.config.run_dir)
        if last is not None and last[0] < number:
            write_plan(plan_path(self.config.run_dir, number), last[1])


class PipelineWork(Work):
    """Training of one member in a pipeline run. loop: the training loop; its engine is this member's part.

    placed: called in a thread beside training with each generation's number and this member's stages in it.
    observer: see `PipelineEngine`; the same for every generation.
    """

    def __init__(
        self,
        start: MemberStart,
        run: PipelineRun,
        device: torch.device,
        placed: Callable[[int, list[int]], None] = lambda number, stages: None,
        observer: Observer | None = None,
    ) -> None:
        self.start, self.device, self._placed, self._observer = start, device, placed, observer
        self._run = run
        # without a plan: `open` takes the actions from each generation's own plan
        self.setup = set_up_run(run.config, run.workload)
        check_plan(self.setup, run.plan)
        # chain with the run's initial weights; None after `open`: `initial` builds it again where it is needed
        self._fresh: Chain | None = self.chain
        options, indices = self.setup.options, range(len(self.chain))
        kept = options.recipe, options.weights
        self.layer_bytes = tuple(layer_state.size_of(self.chain, index, *kept) for index in indices)
        gradients = [layer_state.gradient_size(self.chain, index) for index in indices]
        edges = self.chain.edges
        self.placer = Placer.of_config(run.config, run.profile, self.layer_bytes, gradients, run.plan, edges)
        self._balance = Balance(self.placer) if run.config.elastic.rebalance else None
        self.proposes = self.placer.proposes or self._balance is not None
        self.loop = TrainingLoop(self.setup, device, start.offset, start.stop_wished)
        self.loop.watch.late = partial(fail, start)
        self.engine: PipelineEngine | None = None
        self._begun = 0, INITIAL  # number of the generation in the store, and the boundary where it began
        self._plan: Plan | None = None
        self._pace = Pace(RunShape.of_config(run.config).settled(), device.type)
        self._table = ShapeTable(self.chain, device.type, options.precision, options.weights)
        self._by_index: dict[int, EngineLayer] = {}
        self._copies = LayerCopies(self.chain, self.setup.options, device)
        self._part_names: list[str] | None = None
        self._writer: OwnedThread | None = None  # of the newest plan file
        self._failure: CapslogError | None = None  # of a writer

    @property
    def chain(self) -> Chain:
        """Chain of the run."""
        return self.setup.chain

    def warm_up(self) -> None:
        """Find the shapes at all cuts and train one microbatch on the whole chain in this process, so that a joining
        member has them and all kernels before others wait for it. Chains of which a device may not have room for a
        second one are not trained.
        """
        setup, minibatch = self.setup, self.setup.feed().minibatch(1)
        one_microbatch = dataclasses.replace(minibatch, inputs=minibatch.inputs[:1])
        self._table.boundaries(one_microbatch.inputs[0])  # one stage alone would not ask for them
        if sum(self.layer_bytes) > _WARM_UP_BYTES:
            return
        options = dataclasses.replace(setup.options, num_microbatches=1, num_blocks=1)
        lone_communicator = Communicator(0, 1, "warm-up", datetime.timedelta(seconds=1))
        layout = Layout.pipelines((0,), len(self.chain))
        engine = self._engine(layout, options, lone_communicator, Ready(self._table, layers={}))
        inputs = {name: tensor.to(self.device) for name, tensor in setup.source.load(minibatch, 0).items()}
        with contextlib.suppress(StepRefused):
            train_step(engine, 1, one_microbatch, lambda microbatch: inputs)

    def _engine(
        self, layout: Layout, options: EngineOptions, communicator: Communicator, ready: Ready
    ) -> PipelineEngine:
        loss = self.setup.workload.loss
        return PipelineEngine(self.chain, loss, layout, options, communicator, self.device, ready, self._observer)

    def knows(self) -> list[str] | None:
        return self._part_names

    def place(self, seats: Sequence[Seat], plan: Plan | None = None) -> MemberLayout | str:
        return self.placer(seats, plan)

    def propose(self, seats: Sequence[Seat]) -> Plan | None:
        return self.placer.propose(self._seated(seats))

    def _seated(self, seats: Sequence[Seat]) -> Sequence[Seat]:
        return seats if self._balance is None else self._balance.seated(seats)

    def weigh(self, loss: Loss) -> Weighed | None:
        elastic = self._run.config.elastic
        motions = SmallMotion(self.placer, elastic.small_motion if elastic.shadows else "never")
        return motions.weigh(dataclasses.replace(loss, seats=self._seated(loss.seats)))

    def rebalance(self, seats: Sequence[Seat]) -> tuple[Member, str] | None:
        finding = None if self._balance is None else self._balance.wanted(seats)
        if finding is None:
            return None
        about = {"member": finding.member, "slower": finding.slower, "speeds": finding.speeds}
        self.note("rebalance", why=finding.why, planned_gain=finding.gain, **about, generation=self._begun[0])
        return finding.member, finding.why

    def look_ahead(self, seats: Sequence[Seat]) -> Iterator[Any]:
        return self.placer.look_ahead(self._seated(seats))

    def learn(self, findings: Any) -> None:
        self.placer.learn(findings)

    # -- generations --------------------------------------------------------------------------------------------------

    def pairs(self, layout: MemberLayout) -> Iterable[tuple[int, int]]:
        if layout.plan is None or opener_of(self.setup.options.transport) is None:
            return ()
        ranks = self._run.layout_of(layout.plan)
        graph = ranks.graph(self.setup.options.num_microbatches, self.chain.edges)
        return ranks.pairs(graph.edges, [shared.layers for shared in self.chain.shared])

    def begin_pairs(self, communicator: Communicator, pairs: Iterable[tuple[int, int]]) -> None:
        opener = opener_of(self.setup.options.transport)
        if opener is not None:
            communicator.begin_pair_groups(pairs, opener, self.device)

    def open(self, opening: Opening, communicator: Communicator, states: Mapping[int, LayerState]) -> None:
        plan = opening.layout.plan
        assert plan is not None
        layout = self._run.layout_of(plan)
        assert layout.layers_of(communicator.rank) == sorted(states), "a plan of other members"
        kept = self._copies.ready(states, opening.layout.copied.get(self.start.me, ()))
        ready = Ready(self._table, kept, next((names for names in opening.knowledge if names is not None), None))
        schedule = plan.schedule or self.setup.options.schedule
        options = dataclasses.replace(self.setup.options, actions=plan.actions, schedule=schedule)
        engine = self._engine(layout, options, communicator, ready)
        self._by_index = {layer.index: layer for layer in engine.layers}
        for index, state in states.items():
            layer_state.install(self._by_index[index], engine.optimizer, state)
        if self._fresh is not None:
            self.chain.release(())  # layers that this member owns or copies have tensors of their own
            self._fresh = None
        self.engine, self._begun = engine, (opening.number, opening.base)
        self._plan = plan
        self._pace.begin(plan)
        if self._balance is not None:
            self._balance.begin(opening.members, plan)
        writes = opening.members[0] == self.start.me
        arguments = (opening.number + self.start.offset, plan, layout.stages_of(communicator.rank), writes)
        self._writer = OwnedThread("write-papers", self._write_plan_file, self._papers_failed, *arguments)
        self._writer.start()
        path = self.start.resumed.get(opening.base)
        # True where the run goes on from its own checkpoint
        saved = path is not None and path.parent == self.setup.checkpoints.absolute()
        self.loop.begin(engine, opening.number, opening.base.step, writes, saved)

    def _write_plan_file(self, number: int, plan: Plan, stages: list[int], writes: bool) -> None:
        """Write the generation's plan file and this member's place in it, in a thread beside training."""
        if writes:
            self._run.write_plan(number, plan)
        self._placed(number, stages)

    def _papers_failed(self, error: CapslogError) -> None:
        self._failure = error

    def shelve(self) -> Mapping[int, LayerState]:
        engine, self.engine = self.engine, None
        if engine is None:
            return {}
        self.loop.end()
        states = {layer.index: layer_state.capture(layer, engine.optimizer, copy=False) for layer in engine.layers}
        self._copies.keep(engine.layers)
        self._by_index = {}
        return states

    @property
    def _running(self) -> PipelineEngine:
        assert self.engine is not None
        return self.engine

    def needs(self) -> int:
        sizes = None if self._plan is None else self.placer.needed(self._plan)
        rank = self._running.communicator.rank
        return 0 if sizes is None or rank >= len(sizes) else sizes[rank]

    # -- a step -------------------------------------------------------------------------------------------------------

    def is_done(self, step: int) -> bool:
        return self.loop.is_done(step)

    def compute(self, step: int) -> bool:
        if self._failure is not None:
            raise self._failure
        self._copies.let_go()
        self.loop.compute(step)
        return True  # the vote sums over all members, and finds sums that are not finite

    def vote(self, step: int, ballot: bytes) -> Outcome:
        verdict = self.loop.vote(step, ballot)
        self._part_names = self._running.part_names
        return Outcome(verdict.refusal is None, verdict.ballots, verdict.stop, verdict.scale)

    def apply(self, step: int) -> None:
        busy = () if self.loop.verdict is None else self.loop.verdict.busy_seconds
        self.loop.apply()
        if self._balance is not None:
            self._balance.measured(busy, self.loop.step_seconds)

    def discard(self, step: int) -> str:
        return self.loop.discard(step)

    # -- states -------------------------------------------------------------------------------------------------------

    def state(self, layer: int, copy: bool) -> LayerState:
        return layer_state.capture(self._by_index[layer], self._running.optimizer, copy)

    def update(self, layer: int) -> Mapping[str, torch.Tensor]:
        return self._running.update_of(layer)

    def follow(self, layer: int, state: LayerState) -> Followed:
        return self._copies.follow(layer, state)

    def apply_to_copies(
        self, due: Sequence[tuple[Followed, Mapping[str, torch.Tensor], int, float]]
    ) -> Callable[[], None] | None:
        steps = [(cast("layer_state.Follower", followed), update, step, scale) for followed, update, step, scale in due]
        return self._copies.apply(steps)

    def initial(self, layer: int) -> LayerState:
        if self._fresh is None:  # the run's seed gives the same weights again
            with torch.random.fork_rng(devices=[]):
                self._fresh, _ = build_chain(self._run.config, self._run.workload)
        return layer_state.initial(self._fresh, layer)

    def load(self, layer: int, stamp: Stamp) -> LayerState:
        path = self.start.resumed.get(stamp, self.setup.checkpoints / f"step-{stamp.step:08d}")
        return from_checkpoint(open_checkpoint(path), self.chain, layer)

    def persist(self, held: Mapping[tuple[int, Stamp], LayerState], record: Generation) -> None:
        number = record.number + self.start.offset
        if record.number > self._begun[0]:  # no member trains in it, and it has no plan of its own
            self._run.keep_plan(number)
        extra = {"constants": run_constants(self.setup.config), "data": dict(self.setup.facts)}
        write_held(self.setup.run_dir, self.chain, held, record, number, extra)

    # -- boundaries ---------------------------------------------------------------------------------------------------

    def between(self, stamp: Stamp, save: bool = False) -> Stamp | None:
        written = self.loop.boundaries.between(stamp.step, save)
        number, base = self._begun
        return None if written is None else base if written == base.step else Stamp(written, number)

    def finish(self, stamp: Stamp, stopped: bool) -> None:
        self.asked = self.loop.finish(stamp.step, stopped)

    # -- words --------------------------------------------------------------------------------------------------------

    def note(self, kind: str, **details: Any) -> None:
        if self.engine is not None and kind in ("begin", "morph"):
            layout = self.engine.layout
            idle = self.engine.communicator.world_size - len(set(layout.ranks))
            ways = layout.layers_of_ways
            details |= {"cuts": ways[0], "replicas": layout.replicas, "idle": idle}
            if len(ways) > layout.replicas:
                details["ways"] = ways
            details |= self._pace.event_fields
            if self.setup.total_steps is not None:
                details["last_step"] = self.setup.total_steps
        generation = int(details.pop("generation", 0)) + self.start.offset
        if kind == "begin":
            details["step"] -= 1  # noted after the first step, but meant for the boundary before it
            kind = "resume" if details["step"] else "start"
        line = {"kind": kind, "time": wall_seconds(), **details, "generation": generation}
        files.append_jsonl(self.setup.run_dir / "events.jsonl", line)

    def close(self) -> None:
        """Stop the threads and the terminal's progress bar; the last plan file is written before."""
        if self._writer is not None:
            self._writer.join(_WRITE_SECONDS)
        self._copies.close()
        self.loop.close()
