"""An elastic run of four members under load: pauses of planned leaves, kill to next step, and the same over NCCL.

On the CPU NCCL's stand-in takes its place, as in chaos.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from live import Live, losses, pauses, quantiles, step_ends
from parts.nccl import STAND_IN

from tests.rig import nccl_failures
from tests.rig.toy import CONFIG

MEMBERS, STEPS = 4, 12
LEAVES, KILLS = 2, 2
PATIENCE = 120.0
"""Seconds for the steps of one generation, on a machine that is busy with other things; the part has its own limit."""
LEAVE, KILL = "pause of a planned leave", "kill to next step"
SAME = {"cuda": "the same changes over gloo and NCCL", "cpu": "the same changes over gloo and the stand-in"}
ROWS = {device: {LEAVE: "", KILL: "", same: "same members, same losses"} for device, same in SAME.items()}


@dataclass
class Changes:
    """Members, losses and delays of an elastic run.

    Attributes:
        members: members of every generation that was waited for.
        losses: losses by step.
        pauses, kills: seconds of each.
    """

    members: list[tuple[str, ...]] = field(default_factory=list)
    losses: dict[int, float] = field(default_factory=dict)
    pauses: list[float] = field(default_factory=list)
    kills: list[float] = field(default_factory=list)


def measure(device: torch.device, tell: Any) -> None:
    """Write the times in milliseconds; all members share a GPU, except over NCCL."""
    over_gloo = changes(device, "gloo")
    for row, values in ((LEAVE, over_gloo.pauses), (KILL, over_gloo.kills)):
        numbers = quantiles(values)
        tell(row, f"median {numbers['p50']:.1f} ms, largest {numbers['max']:.1f} ms of {len(values)}", **numbers)
    if device.type == "cuda" and len(tell.facts["gpus"]) < MEMBERS:
        tell.not_run(SAME["cuda"], f"NCCL needs a GPU for each of the {MEMBERS} members (CUDA_VISIBLE_DEVICES)")
        return
    os.environ[nccl_failures.MANNERS] = "0,0,0"
    over_nccl = changes(device, "nccl" if device.type == "cuda" else STAND_IN)
    both = sorted(over_gloo.losses.keys() & over_nccl.losses.keys())
    differ = [step for step in both if over_gloo.losses[step] != over_nccl.losses[step]]
    result = f"{len(over_gloo.members)} generations; losses differ in {len(differ)} of {len(both)} steps"
    same = over_gloo.members == over_nccl.members and bool(both) and not differ
    tell(SAME[device.type], result, same, members=[over_gloo.members, over_nccl.members], steps=both)


def changes(device: torch.device, transport: str) -> Changes:
    """Run leaves and kills, with a member joining after each."""
    path = Path(tempfile.mkdtemp()) / "toy.yaml"  # in the folder of this part, which is removed at its end
    path.write_text(CONFIG)
    keys = [f"device={device.type}", f"pipeline.transport={transport}", "model.dim=128", "pipeline.timeout_seconds=10"]
    changed, planned = Changes(), set()
    with Live(path, keys, MEMBERS) as run:
        newest = run.wait_steps(MEMBERS, STEPS, PATIENCE)
        for number in range(LEAVES + KILLS):
            victim = run.members[number % MEMBERS]
            if number < LEAVES:
                run.leave(victim)
                newest = run.wait_steps(MEMBERS - 1, STEPS, PATIENCE, newest)
                planned.add(newest)
            else:
                began = run.kill(victim)
                newest = run.wait_steps(MEMBERS - 1, STEPS, PATIENCE, newest)
                ends = step_ends(run.marks())[newest]
                changed.kills.append(ends[min(ends)][1] - began)
            changed.members.append(run.members)
            run.join()
            newest = run.wait_steps(MEMBERS, STEPS, PATIENCE, newest)
            changed.members.append(run.members)
        changed.pauses = [pause.net for pause in pauses(run.marks()) if pause.generation in planned]
        changed.losses = losses(run.folder)
    return changed
