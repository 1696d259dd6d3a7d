"""A training run that faults are let loose on, and the verdict whether it came through.

Machines, store and members are what they are in any run; the schedule says what happens to them, the judge what they
made of it. Nothing is done for the run but what a cloud does: a machine or a worker that was lost comes back as a new
one.
"""

from __future__ import annotations

import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import varuna_capslog
from varuna_capslog.base import files
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.supervisor import reserve
from varuna_capslog.config.reading import load_config
from varuna_capslog.config.settings import Config
from varuna_capslog.membership.entries import NoticeEntry
from varuna_capslog.membership.generation import Member
from varuna_capslog.rig import faults
from varuna_capslog.rig.judge import Partition, Stepped, Truth, judge
from varuna_capslog.rig.schedule import Fault, schedule
from varuna_capslog.rig.sites import STORE_HOST, Field, machine_of
from varuna_capslog.rig.tally import Hit, by_class
from varuna_capslog.rig.watch import arm
from varuna_capslog.start.prepare import prepare_run

__all__ = ["Chaos", "Hung", "Options", "Outcome", "toy_config", "truth_of", "weights_of_run"]

FORMAT = "varuna-capslog/chaos/1"

_READY_SECONDS = 90.0
_FIRE_SECONDS = 10.0


@dataclass(frozen=True)
class Options:
    """What is done to a run.

    Attributes:
        faults: how many; None: as many as `seconds` allow.
        seconds: after which no further fault is begun; None: no limit.
        mean_seconds: between a recovery and the next fault.
        weights: of the fault classes, see `schedule.weights_of`.
        hosts, workers: machines, and workers of each.
        network: "loopback", "relay" or "namespaces"; see `Field`.
        store: "tcp", or "etcd": three servers, of which the class `store` kills one.
        hang_seconds: a run that has not finished a step for so long after a fault hangs, and has failed.
    """

    seed: int = 0
    faults: int | None = 20
    seconds: float | None = None
    mean_seconds: float = 0.5
    weights: Mapping[str, float] = field(default_factory=dict)
    hosts: int = 2
    workers: int = 2
    network: str = "loopback"
    store: str = "tcp"
    hang_seconds: float = 60.0


@dataclass
class Outcome:
    """How it ended.

    Attributes:
        breaches: what is wrong, in sentences; nothing where the run came through.
        store_losses: of `hits`, how many ended in a new start.
        regresses: generations that went back to a checkpoint, as more was lost than the redundancy covers.
    """

    options: Options
    breaches: list[str]
    hits: list[Hit]
    joins: int
    generations: int
    steps: int
    repeated: int
    store_losses: int
    regresses: int
    seconds: float
    sizes: list[int]
    redundancy: int
    protection: str

    @property
    def passed(self) -> bool:
        return not self.breaches

    def to_json(self) -> dict[str, Any]:
        """A line of a results file."""
        import torch

        options = self.options
        return {
            "format": FORMAT,
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "seed": options.seed,
            "versions": {
                "varuna_capslog": varuna_capslog.__version__,
                "commit": _commit(),
                "torch": torch.__version__,
                "python": platform.python_version(),
                "system": f"{platform.system()} {platform.release()}, {os.cpu_count()} cores",
            },
            "outcome": "passed" if self.passed else "failed",
            "breaches": self.breaches,
            "hosts": options.hosts,
            "workers": options.workers,
            "network": options.network,
            "store": options.store,
            "mean_seconds": options.mean_seconds,
            "faults": len(self.hits),
            "joins": self.joins,
            "generations": self.generations,
            "layouts": self.sizes,
            "steps": self.steps,
            "steps_made_again": self.repeated,
            "store_losses": self.store_losses,
            "regresses": self.regresses,
            "redundancy": self.redundancy,
            "protection": self.protection,
            "seconds": round(self.seconds, 1),
            "classes": by_class(self.hits),
        }


class Hung(Exception):
    """The run does not go on."""


class Chaos:
    """One run.

    Args:
        config: a resolved config with `elastic.enabled`; its folder must not hold a run.
        say: told of every fault, in a line.
    """

    def __init__(self, config: Config, options: Options, say: Callable[[str], None] = lambda line: None) -> None:
        self.config, self.options, self.say = config, options, say
        self.run_dir = Path(config.run_dir)
        self.hits: list[Hit] = []
        self._store_losses = 0
        self._sizes: set[int] = set()

    def run(self) -> Outcome:
        """Trains, disturbs, stops, and judges.

        Raises:
            CapslogError: the run cannot be begun.
        """
        began = time.monotonic()
        if (self.run_dir / "checkpoints").exists() or (self.run_dir / "chaos").exists():
            raise CapslogError(f"{self.run_dir} holds a run already; chaos needs a folder of its own")
        breaches: list[str] = []
        with reserve(self.run_dir):
            prepare_run(self.config, show=False)
            options = self.options
            self.field = Field(self.config, options.hosts, options.workers, options.network, options.store, self.say)
            try:
                self._go(began)
            except Hung as error:
                breaches.append(str(error))
                self.field.show_threads()
                time.sleep(0.5)
            finally:
                self.field.close()
            last = self._last()
            try:
                breaches += self._judge(last)
            except CapslogError as error:
                breaches.append(str(error))
        founded = [record for segment in self.field.segments for record, _ in segment.founded]
        made = {(one.step, one.generation, k) for k, part in enumerate(self.field.segments) for one in part.stepped}
        return Outcome(
            self.options, breaches, self.hits, self.field.joins, len(founded), last, len(made) - last,
            self._store_losses, sum(record.regress for record in founded), time.monotonic() - began,
            sorted(self._sizes), self.config.elastic.redundancy, self.config.elastic.protection,
        )  # fmt: skip

    def summary(self) -> dict[str, Any]:
        """What a kind of run adds to a line of results."""
        return {}

    def _go(self, began: float) -> None:
        options = self.options
        self.field.begin()
        self._until(lambda: bool(self.field.step_times), "its first step", _READY_SECONDS)
        for fault in schedule(options.seed, options.weights, options.mean_seconds):
            if options.faults is not None and len(self.hits) >= options.faults:
                break
            if options.seconds is not None and time.monotonic() - began > options.seconds:
                break
            self._wait(fault.after)
            self._ready(fault)
            hit = self._strike(fault)
            if hit is not None:
                self.hits.append(hit)
                self.say(self._line(hit))
        self._wait(1.0)
        self.say("stopping")
        if not self.field.stop(60.0):
            raise Hung("the run was asked to stop and did not within 60 s")

    def _line(self, hit: Hit) -> str:
        who = ", ".join(hit.victims) or hit.note
        times = "" if hit.recovered is None else f"next step after {hit.recovered:.2f} s"
        return f"{len(self.hits):4d}  step {self.field.step:6d}  {hit.kind:13s} {who:24s} {times}"

    # -- waiting -------------------------------------------------------------------------------------------------------

    def _turn(self) -> list[Stepped]:
        stepped = self.field.turn()
        for one in stepped:
            self._sizes.add(len(self.field.members_of(one.generation)))
        return stepped

    def _wait(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._turn()

    def _until(self, done: Callable[[], bool], what: str, seconds: float) -> None:
        until = time.monotonic() + seconds
        while not done():
            if time.monotonic() > until:
                raise Hung(f"the run did not come to {what} within {seconds:g} s")
            self._turn()

    def _ready(self, fault: Fault) -> None:
        """Waits until the run trains with as many as this fault needs, and one more; all but one at the longest."""
        most = self.field.target
        wanted = min(most, {"bulk": fault.count + 1, "kill": 2}.get(fault.kind, 3))
        until = time.monotonic() + 20.0

        def ready() -> bool:
            field = self.field
            voters = field.voters()
            trains = bool(field.step_times) and time.time() - field.step_times[-1] < 2.0
            enough = len(voters) >= (wanted if time.monotonic() < until else 2)
            spread = len({machine_of(member) for member in voters}) > 1 or fault.kind not in ("host", "freeze")
            return trains and enough and (spread or time.monotonic() > until)

        self._until(ready, f"where {fault.kind} can strike", 20.0 + self.options.hang_seconds)

    # -- faults --------------------------------------------------------------------------------------------------------

    def _strike(self, fault: Fault) -> Hit | None:
        """Lets a fault happen and waits until the run has recovered. None where it found no victim."""
        field = self.field
        field.replenish_at = time.monotonic() + fault.rejoin
        voters = field.voters()
        wanted = {"bulk": fault.count, "kill": 1, "stop": 1, "pause": 1, "notice": 1, "urgent": 1}.get(fault.kind, 2)
        names = [voters[index] for index in fault.pick(len(voters), min(wanted, max(1, len(voters) - 1)))]
        if not names:
            return None
        hit = Hit(fault.number, fault.kind, time.time(), generation=field.roster.generation.number)
        match fault.kind:
            case "kill" | "bulk":
                return self._lose(hit, names)
            case "stop":
                return self._lose(hit, names, signal.SIGSTOP)
            case "double":
                return self._twice(hit, names, fault.delay)
            case "pause":
                return self._pause(hit, names[0], fault.lasts)
            case "notice" | "urgent":
                self._notice(names[0], fault.kind == "urgent")
                return self._recover(hit, names)
            case "notice-kill":
                self._notice(names[0], False)
                field.later(fault.delay, lambda: field.signal(names[-1], signal.SIGKILL))
                return self._recover(hit, names)
            case "join-kill":
                return self._join_kill(hit, fault, names)
            case "before-apply" | "in-apply" | "in-step" | "in-change" | "in-leave":
                return self._at_point(hit, fault, names)
            case "host" if len({machine_of(member) for member in voters}) == 1:
                return None  # nobody would be left to go on
            case "host":
                return self._host(hit, machine_of(names[0]))
            case "freeze":
                return self._freeze(hit, machine_of(names[0]), fault.lasts)
            case "store" if field.etcd is not None:
                return self._store_server(hit, names[0], fault)
            case "store":
                return self._store(hit, names[0])
            case _:
                return self._network(hit, fault, names)

    def _notice(self, member: Member, urgent: bool) -> None:
        self.field.tell(NoticeEntry(member, urgent, source="chaos").to_json())

    def _lose(self, hit: Hit, names: list[Member], number: int = signal.SIGKILL) -> Hit:
        for name in names:
            self.field.signal(name, number)
        return self._recover(hit, names)

    def _twice(self, hit: Hit, names: list[Member], delay: float) -> Hit:
        self.field.signal(names[0], signal.SIGKILL)
        self.field.later(delay, lambda: self.field.signal(names[-1], signal.SIGKILL))
        hit.note = f"{1000 * delay:.0f} ms apart"
        return self._recover(hit, names)

    def _pause(self, hit: Hit, name: Member, seconds: float) -> Hit:
        self.field.signal(name, signal.SIGSTOP)
        self.field.later(seconds, lambda: self.field.signal(name, signal.SIGCONT))
        hit.victims, hit.note = (name,), f"for {seconds:.1f} s"
        return self._recover(hit, [], until=hit.time + seconds)

    def _join_kill(self, hit: Hit, fault: Fault, names: list[Member]) -> Hit:
        field = self.field
        before = set(field.asked)
        field.signal(names[0], signal.SIGKILL)
        field.replenish_at = 0.0
        until = time.monotonic() + _FIRE_SECONDS
        while set(field.asked) <= before and time.monotonic() < until:
            self._turn()
        self._wait(fault.delay)
        hit.time = time.time()
        for name in names[1:]:
            field.signal(name, signal.SIGKILL)
        return self._recover(hit, names)

    def _at_point(self, hit: Hit, fault: Fault, names: list[Member]) -> Hit | None:
        segment = str(self.field.number)
        do = "stop" if fault.stops else "kill"
        arm(self.run_dir, segment, faults.Fault(names[0], fault.point, do))
        changes = fault.kind in ("in-change", "in-leave")
        for name in names[1:] if changes else ():
            if fault.kind == "in-change":
                self.field.signal(name, signal.SIGKILL)
            else:
                self._notice(name, False)
        path = self.run_dir / "chaos" / "armed" / f"{segment}-{names[0]}.json"
        until = time.monotonic() + _FIRE_SECONDS

        def passed() -> bool:
            """Whether the change is over without it: not every member comes to every point of it."""
            return changes and self.field.roster.generation.number > hit.generation and self._is_past(hit, names[1:])

        while path.exists() and not passed() and time.monotonic() < until:
            self._turn()
        hit.note = f"{do} at {fault.point!r}"
        if path.exists():
            path.unlink(missing_ok=True)
            if not changes:
                return None
            names, hit.note = names[1:], f"{names[0]} did not come to {fault.point!r}"
        elif not changes:
            hit.time = path.with_suffix(".fired").stat().st_ctime
            names = names[:1]
        return self._recover(hit, names)

    def _is_past(self, hit: Hit, gone: list[Member]) -> bool:
        """Whether a step has been made without those that are gone."""
        last = self.field.segment.stepped[-1]
        return last.time > hit.time and not set(gone) & set(self.field.members_of(last.generation))

    def _members_on(self, machine: str) -> list[Member]:
        return [member for member in self.field.roster.members if machine_of(member) == machine]

    def _host(self, hit: Hit, machine: str) -> Hit:
        victims = self._members_on(machine)
        self.field.signal_site(machine, signal.SIGKILL)
        return self._recover(hit, victims)

    def _freeze(self, hit: Hit, machine: str, seconds: float) -> Hit:
        field = self.field
        field.signal_site(machine, signal.SIGSTOP, everything=True)
        field.later(seconds, lambda: field.signal_site(machine, signal.SIGCONT, everything=True))
        hit.victims, hit.note = tuple(self._members_on(machine)), f"for {seconds:.1f} s"
        return self._recover(hit, [], until=hit.time + seconds, excused=frozenset(hit.victims))

    def _store(self, hit: Hit, name: Member) -> Hit:
        """No generation can follow: what is held goes to disk, all end, and the same command would go on."""
        field = self.field
        before = field.step
        self.say("      the store is lost")
        field.replaces = False
        field.lose_store()
        self._wait(0.2)
        field.signal(name, signal.SIGKILL)
        if not field.until_ended(self.options.hang_seconds):
            raise Hung("the run did not stop after the loss of the store and a member")
        field.replaces = True
        steps = len(field.step_times)
        field.begin()
        self._until(lambda: len(field.step_times) > steps, "a step after its new start", _READY_SECONDS)
        self._store_losses += 1
        hit.victims = (name,)
        hit.recovered = field.step_times[-1] - hit.time
        hit.note = f"began again at step {field.segment.first}, {before - field.segment.first} step(s) back"
        return hit

    def _store_server(self, hit: Hit, name: Member, fault: Fault) -> Hit:
        """One of three: the others elect a leader, and a member that is lost meanwhile is replaced as ever."""
        field = self.field
        self._until(lambda: field.store_is_whole, "a whole store", _READY_SECONDS)
        number = int(fault.whom[2] * 3) % 3
        hit.time = time.time()
        field.lose_store_server(number, fault.lasts)
        field.signal(name, signal.SIGKILL)
        hit.note = f"server {number} for {fault.lasts:.1f} s"
        return self._recover(hit, [name])

    def _network(self, hit: Hit, fault: Fault, names: list[Member]) -> Hit | None:
        field = self.field
        away = machine_of(names[0])
        others = [name for name in field.sites if name != away]
        if not others:
            return None
        other = machine_of(names[-1])
        other = other if other != away else others[int(fault.whom[2] * len(others)) % len(others)]
        delay = None
        if fault.kind == "cut":
            ways = {way for name in (*others, STORE_HOST) for way in ((away, name), (name, away))}
        elif fault.kind == "store-cut":
            ways = {(away, STORE_HOST), (STORE_HOST, away)}
        elif fault.kind == "half-open":
            ways = {(away, other)}
        else:
            ways, delay = {(away, other), (other, away)}, fault.size
        victims = frozenset(self._members_on(away))
        field.disturb(ways, delay)
        hit.time = time.time()
        healed: list[float] = []

        def heal() -> None:
            healed.append(time.time())
            field.heal(ways)

        field.later(fault.lasts, heal)
        sign, whom = ("|" if delay is None else "~"), (other if len(ways) <= 2 else "all")
        hit.note = f"{away} {sign} {whom} for {fault.lasts:.1f} s"
        if fault.kind in ("cut", "half-open"):
            found = self._recover(hit, [], until=hit.time + fault.lasts, excused=victims)
        else:
            found = self._recover(hit, [], until=hit.time)
        self._until(lambda: bool(healed), "the end of a disturbance", 30.0)
        if fault.kind == "cut":
            field.segment.partitions.append(Partition(hit.time, healed[0], victims))
        return found

    # -- recovery ------------------------------------------------------------------------------------------------------

    def _recover(
        self, hit: Hit, gone: list[Member], until: float = 0.0, excused: frozenset[Member] = frozenset()
    ) -> Hit:
        """Waits for the next step of a generation without those that are gone.

        Args:
            until: a fault that changes no membership is over by then (seconds since the epoch).
            excused: where a generation without all of these trains, nobody waits for the end of the fault.
        """
        field = self.field
        hit.victims = hit.victims or tuple(gone)
        lost = set(gone)
        begun = len(field.step_times)
        deadline = time.monotonic() + self.options.hang_seconds + max(0.0, until - time.time())
        while hit.recovered is None:
            if time.monotonic() > deadline:
                self.hits.append(hit)
                self.say(self._line(hit))
                raise Hung(f"no step within {self.options.hang_seconds:g} s of {hit.kind} ({', '.join(hit.victims)})")
            for one in sorted(self._turn(), key=lambda one: one.time):
                members = set(field.members_of(one.generation))
                if one.time <= hit.time or not members or members & (lost | field.roster.dead):
                    continue
                if lost and one.generation < hit.generation:  # the last of an older one, without those lost later
                    continue
                without = bool(excused) and not members & excused
                if one.time > until or without:
                    hit.recovered = one.time - hit.time
                    break
        times = [at for at in field.step_times[max(0, begun - 50) :] if at <= hit.time + hit.recovered]
        first = max((index for index, at in enumerate(times) if at <= hit.time), default=0)
        hit.gap = max((b - a for a, b in zip(times[first:], times[first + 1 :], strict=False)), default=None)
        return hit

    # -- the verdict ---------------------------------------------------------------------------------------------------

    def _last(self) -> int:
        finished = self.field.roster.finished
        return self.field.step if finished is None else finished.step

    def _judge(self, last: int) -> list[str]:
        self.say(f"comparing {last} steps with an uninterrupted run of one process")
        truth = truth_of(self.config, last, self.field.step)
        weights = weights_of_run(self.config, self.run_dir, last)
        within = 1 if self.config.elastic.protection == "sync" else 2
        limited = self.config.pipeline.capacity is not None  # copies may find no room
        redundancy = None if limited else self.config.elastic.redundancy
        return judge(self.field.segments, truth, weights, last, within, redundancy)


def truth_of(config: Config, last: int, reached: int) -> Truth:
    """What the plain engine makes of the same config in one process that nobody disturbs.

    Args:
        last: the step whose weights are compared.
        reached: the newest step that anybody made; more than `last` where a run ended while it made up for a loss.
    """
    folder = Path(config.run_dir) / "chaos" / "truth"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    data = {key: value for key, value in config.data.items() if key != "pause_seconds"}
    model = {key: value for key, value in config.model.items() if key != "block_seconds"}
    plain = config.model_copy(
        update={
            "run_dir": folder,
            "data": data,
            "model": model,
            "elastic": config.elastic.model_copy(update={"enabled": False}),
            "pipeline": config.pipeline.model_copy(
                update={"devices": 1, "replicas": 1, "cuts": None, "capacity": None, "verify_every": 0}
            ),
            "train": config.train.model_copy(
                update={
                    "max_steps": max(1, last, reached),
                    "checkpoint_every": last if reached > last > 0 else None,
                    "max_seconds": None,
                }
            ),
        }
    )
    prepare_run(plain, show=False)
    command = [sys.executable, "-m", "varuna_capslog.start.worker", str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise CapslogError(f"the uninterrupted run failed with {done.returncode}: {done.stderr.strip()[-500:]}")
    rows = files.read_jsonl(folder / "metrics.jsonl")
    numbers = {row["step"]: (row["loss"], row["grad_norm"]) for row in rows}
    return Truth(numbers, weights_of_run(plain, folder, last))


def weights_of_run(config: Config, run_dir: Path, step: int) -> dict[str, str]:
    """A name for the state of every layer in the checkpoint of a step. Raises CapslogError where there is none."""
    from varuna_capslog.config.reading import load_workload
    from varuna_capslog.training.checkpoint import open_checkpoint
    from varuna_capslog.training.layer_state import digest, from_checkpoint
    from varuna_capslog.training.run import build_chain

    chain, _ = build_chain(config, load_workload(config))
    checkpoint = open_checkpoint(run_dir / "checkpoints" / f"step-{step:08d}")
    return {
        layer.name: digest(from_checkpoint(checkpoint, chain, index)).hex() for index, layer in enumerate(chain.layers)
    }


def toy_config(run_dir: Path, overrides: list[str]) -> Config:
    """The config of the built-in training."""
    from varuna_capslog.rig.toy import CONFIG

    run_dir.mkdir(parents=True, exist_ok=True)
    path = run_dir / "toy.yaml"
    path.write_text(CONFIG, encoding="utf-8")
    return load_config(path, [f"run_dir={run_dir}", *overrides])


def _commit() -> str | None:
    """Of the source, where it is a repository."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
