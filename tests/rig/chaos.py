"""A training run with faults at random moments, and the verdict on whether it passed.

Machines, store and members are those of any run; `schedule` chooses the faults, `fault_injection` injects them, and
`judge` checks the results. The rig helps the run only as a cloud does: a lost machine or worker comes back as new.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.rig.fault_injection import READY_SECONDS, Strikes
from tests.rig.machines.machines import Machines
from tests.rig.outcome import ChaosOptions, ChaosOutcome
from tests.rig.recovery import Hung, Recovery
from tests.rig.schedule import schedule
from tests.rig.tally import Hit, causes_found
from tests.rig.verdict import breaches_of
from varuna_capslog.base import files
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.supervisor import reserve
from varuna_capslog.config.settings import Config
from varuna_capslog.start.prepare import prepare_run

__all__ = ["Chaos"]

_STOP_SECONDS = 60.0


class Chaos:
    """A chaos run.

    Args:
        config: a resolved config with `elastic.enabled`; its folder must not hold a run.
        say: called with a line for every fault.

    Attributes:
        hits: the faults that happened so far.
    """

    def __init__(self, config: Config, options: ChaosOptions, say: Callable[[str], None] = lambda line: None) -> None:
        self.config, self.options, self.say = config, options, say
        self.run_dir = Path(config.run_dir)
        self.hits: list[Hit] = []

    def run(self) -> ChaosOutcome:
        """Train, inject faults, stop, and judge.

        Raises:
            CapslogError: the run cannot be started.
        """
        began = time.monotonic()
        if (self.run_dir / "checkpoints").exists() or (self.run_dir / "chaos").exists():
            raise CapslogError(f"{self.run_dir} holds a run already; chaos needs a folder of its own")
        breaches: list[str] = []
        with reserve(self.run_dir):
            prepare_run(self.config, show=False)
            self.machines = Machines(self.config, self.options)
            self.recovery = Recovery(self.machines, self.options.hang_seconds)
            self.strikes = Strikes(self.machines, self.recovery, self.say)
            try:
                self._disturb(began)
            except Hung as error:
                if error.hit is not None:
                    self._note(error.hit)
                breaches.append(str(error))
                self.machines.show_threads()
                time.sleep(0.5)
            finally:
                packets = self.machines.network.counts()
                self.machines.close()
            records, finished = self.machines.records, self.machines.members.roster.finished
            last = records.step if finished is None else finished.step
            self.say(f"comparing {last} steps with an uninterrupted run of one process")
            try:
                breaches += breaches_of(self.config, records.segments, last, records.step)
            except CapslogError as error:
                breaches.append(str(error))
        founded = [record for segment in records.segments for record, _ in segment.founded]
        made = {(event.step, event.generation, k) for k, part in enumerate(records.segments) for event in part.stepped}
        return ChaosOutcome(
            self.options, breaches, self.hits, self.machines.members.joins, len(founded), last, len(made) - last,
            self.strikes.store_losses, sum(record.regress for record in founded), time.monotonic() - began,
            sorted(self.recovery.sizes), self.config.elastic.redundancy, self.config.elastic.protection,
            causes_found(
                self.hits, files.read_jsonl(self.run_dir / "events.jsonl"), self.machines.members.lost_at
            ), packets,
        )  # fmt: skip

    def summary(self) -> dict[str, Any]:
        """Return fields that a subclass adds to a line of results."""
        return {}

    def _disturb(self, began: float) -> None:
        """Begins the run, disturbs it and stops it.

        Args:
            began: `time.monotonic` of the beginning.

        Raises:
            Hung: the run does not go on.
        """
        options, recovery = self.options, self.recovery
        self.machines.begin()
        recovery.until(lambda: bool(self.machines.records.step_times), "its first step", READY_SECONDS)
        for fault in schedule(options.seed, options.weights, options.mean_seconds):
            if options.faults is not None and len(self.hits) >= options.faults:
                break
            if options.seconds is not None and time.monotonic() - began > options.seconds:
                break
            recovery.wait(fault.after)
            self.strikes.wait_until_ready(fault)
            hit = self.strikes.strike(fault)
            if hit is not None:
                self._note(hit)
        recovery.wait(1.0)
        self.say("stopping")
        self._stop()

    def _stop(self) -> None:
        if not self.machines.stop(_STOP_SECONDS):
            raise Hung(f"the run was asked to stop and did not within {_STOP_SECONDS:g} s")

    def _note(self, hit: Hit) -> None:
        self.hits.append(hit)
        victims = ", ".join(hit.victims) or hit.note
        times = "" if hit.recovered is None else f"next step after {hit.recovered:.2f} s"
        step = self.machines.records.step
        self.say(f"{len(self.hits):4d}  step {step:6d}  {hit.kind:13s} {victims:24s} {times}")
