"""Compares losses and weights after many random morphs with those of an uninterrupted run, bit by bit.

Members leave with notice, are killed and join at random; every set of members gets a layout of its own (cuts and
replicas drawn from the members' names), so that layouts differ far more than a placer's would. With `--plans` every
generation runs a plan drawn at random (`tests/rig/drawn_plans`): memory intervals, several stages on a member,
pipelines and replicas of unequal length and shares; pauses are reported, too. The model has dropout, running statistics
and a shared parameter; `accumulation_blocks` is 4. Every step's microbatches are counted over all members, too:
each exactly once.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from live import HERE, Clock, Live, Mark, append_result, pauses, quantiles
from live import main as marked

BLOCKS = 4


def cuts_for(members: Sequence[str], num_layers: int) -> tuple[tuple[int, ...], int]:
    """Return cuts and number of replicas for these members, always the same for the same members."""
    dice = random.Random(hashlib.blake2b(" ".join(members).encode()).digest())
    replicas = dice.choice([count for count in (1, 2, 4) if count <= len(members)])
    stages = min(num_layers, len(members) // replicas)
    return (0, *sorted(dice.sample(range(1, num_layers), stages - 1))), replicas


def main(arguments: Sequence[str]) -> int:
    """Entry point of a member: random layouts; writes its samples of every step to `<run_dir>/shares/<member>`."""
    from tests.rig.drawing import PLANS, DrawingWork
    from varuna_capslog.plans.parts import Units
    from varuna_capslog.plans.plan import plan_of_pipelines

    folder = Path(arguments[0]) / "shares"
    folder.mkdir(exist_ok=True)
    file = os.open(folder / os.environ["CAPSLOG_MEMBER"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    class Counted(DrawingWork):
        def place(self, seats, plan=None):  # type: ignore[no-untyped-def]
            if seats and plan is None and PLANS not in os.environ:
                cuts, replicas = cuts_for([seat.member for seat in seats], len(self.chain))
                run = self.placer.candidates.run
                units = Units(run.num_microbatches, run.microbatch_size, run.num_blocks)
                plan = plan_of_pipelines(len(self.chain), cuts, replicas, units, run.schedule)
            return self.placer(seats, plan)

        def compute(self, step):  # type: ignore[no-untyped-def]
            done = super().compute(step)
            engine, ids = self.engine, self.loop.minibatch.sample_ids
            last, count = len(self.chain) - 1, engine.options.num_microbatches
            if judged := engine.layout.microbatches_of(engine.rank, last, count):
                samples = [sample for index in judged for sample in ids[index]]
                os.write(file, (json.dumps([self._begun[0], step, samples]) + "\n").encode())
            return done

    return marked(arguments, Counted)


def losses(folder: Path) -> dict[int, tuple[float, ...]]:
    """Return by step the loss, its parts and the gradient norm, from the last generation that computed the step."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: (row["loss"], *row["parts"].values(), row["grad_norm"]) for row in rows}


def weights(folder: Path) -> dict[str, object]:
    """All tensors of the last checkpoint, optimizer included, by address."""
    from varuna_capslog.training.checkpoint import latest_checkpoint

    checkpoint, _ = latest_checkpoint(folder / "checkpoints")
    assert checkpoint is not None
    tensors: dict[str, object] = {"step": checkpoint.step}
    for layer in checkpoint.manifest["layers"]:
        for kind, content in checkpoint.layer(layer).items():
            for name, value in content.items():
                entries = value.items() if isinstance(value, dict) else [("", value)]
                tensors |= {f"{layer}/{kind}/{name}/{moment}": tensor for moment, tensor in entries}
    return tensors


def compare(folder: Path, truth: Path) -> dict[str, object]:
    """Count the losses and tensors that differ between two finished runs."""
    import torch

    mine, theirs = losses(folder), losses(truth)
    ours, others = weights(folder), weights(truth)
    same = ours.keys() == others.keys()
    differing = [
        name
        for name, value in others.items()
        if not (torch.equal(ours[name], value) if isinstance(value, torch.Tensor) else ours.get(name) == value)
    ] if same else ["(other tensors)"]  # fmt: skip
    return {
        "steps": len(theirs),
        "losses_that_differ": sum(mine.get(step) != theirs.get(step) for step in mine.keys() | theirs.keys()),
        "tensors": len(others),
        "tensors_that_differ": len(differing),
    }


def count_shares(folder: Path, applied: Sequence[Mark]) -> dict[str, int]:
    """Count the steps whose samples were not used exactly once by the last generation that applied the step."""
    from varuna_capslog.config.reading import load_config
    from varuna_capslog.model.workload import load_workload
    from varuna_capslog.training.feed import Feed

    files = sorted((folder / "shares").glob("*"))
    rows = [(path, json.loads(line)) for path in files for line in path.read_text().splitlines()]
    newest: dict[int, int] = {}
    for mark in applied:
        newest[mark.step] = max(mark.generation, newest.get(mark.step, 0))
    used: dict[int, list[int]] = {step: [] for step in newest}
    for _, (generation, step, samples) in rows:
        if generation == newest.get(step):
            used[step] += samples
    config = load_config(folder / "config.yaml")
    train = config.train
    feed = Feed(
        load_workload(config).train_data(), train.minibatch_size, train.microbatch_size, train.seed, ()
    )  # fmt: skip
    wrong = []
    for step in range(1, max(newest) + 1):
        wanted = Counter(sample for group in feed.minibatch(step).sample_ids for sample in group)
        if Counter(used.get(step, [])) != wanted:
            wrong.append(step)
            told = [(path.name, row) for path, row in rows if row[1] == step]
            sys.stderr.write(f"step {step}: wanted {wanted}, used {told}; {[m for m in applied if m.step == step]}\n")
    return {"steps_counted": max(newest), "steps_with_a_sample_not_used_once": len(wrong)}


def plans_of(folder: Path) -> dict[str, int]:
    """Count the plans of the generations that trained, by their features."""
    from varuna_capslog.plans.plan import read_plan

    counts: Counter[str] = Counter()
    for path in folder.glob("plan-*.json"):
        plan = read_plan(path)
        ranks, blocks = plan.placement(), [len(stage.blocks or range(BLOCKS)) for stage in plan.stages]
        counts["plans"] += 1
        counts["with_direct_routes"] += plan.routes == "direct"
        counts["with_stages_of_several_pieces"] += any(len(stage.layers) > 1 for stage in plan.stages)
        counts["with_an_order_of_their_own"] += plan.actions is not None
        counts["with_memory_intervals"] += any(stage.memory for stage in plan.stages)
        counts["with_several_stages_on_a_member"] += len(set(ranks)) < len(ranks)
        counts["with_unequal_replicas"] += len(plan.paths()) > 1 and len({stage.layers for stage in plan.stages}) > 1
        counts["with_unequal_shares"] += len(set(blocks)) > 1
    return dict(counts)


def run() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="12 morphs")
    size.add_argument("--full", action="store_true", help="400 morphs")
    parser.add_argument("--morphs", type=int, default=0, help="how many instead of 110")
    parser.add_argument("--minutes", type=float, default=0.0, help="and no more than fit into so many")
    parser.add_argument("--most", type=int, default=6, help="devices")
    parser.add_argument("--kills", type=float, default=0.2, help="share of the losses that come without notice")
    parser.add_argument("--plans", action="store_true", help="every generation runs a plan drawn at random")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--config", type=Path, default=HERE / "small.yaml")
    parser.add_argument("overrides", nargs="*", help="of the config's keys")
    args = parser.parse_args()
    wanted = args.morphs or (12 if args.quick else 400 if args.full else 110)
    dice, clock, done = random.Random(args.seed), Clock(args.minutes), 0
    stuck: str | None = None
    overrides = [f"train.accumulation_blocks={BLOCKS}", *args.overrides]
    least = 6 if args.plans else 1  # steps of a generation; the reported pauses have a median step subtracted
    causes: dict[int, str] = {}
    kinds: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="capslog-equality-") as holder:
        folder, truth = Path(holder) / "morphed", Path(holder) / "truth"
        if args.plans:
            os.environ["CAPSLOG_CHAOS_PLANS"] = str(args.seed)
        os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        layouts: set[tuple[tuple[int, ...], int]] = set()
        with Live(args.config, overrides, 3, "equality:main", folder) as live:
            newest = live.wait_steps(3, 5, 120)
            for number in range(wanted):
                if clock.over:
                    break
                count = len(live.members)
                if count == 1 or (count < args.most and dice.random() < 0.5):
                    kind, count = "join", count + 1
                    live.join()
                else:
                    kind, count = ("kill" if count > 2 and dice.random() < args.kills else "leave"), count - 1
                    victim = dice.choice(live.members)
                    (live.kill if kind == "kill" else live.leave)(victim)
                kinds[kind] += 1
                done += 1
                try:
                    newest = live.wait_steps(count, least + dice.randint(0, 3), 90, after=newest)
                except TimeoutError as error:  # the steps up to here are compared without this change
                    stuck = f"{kind} after generation {newest}: {error}"[:300]
                    break
                causes[newest] = kind
                layouts.add(cuts_for(live.members, 10))
                if number % 10 == 9:
                    sys.stderr.write(f"{number + 1} morphs, generation {newest}, {clock.seconds:.0f} s\n")
            live.host.stop()
            live._thread.join(60)
            applied, messages = live.marks(), list(live.said)
            morphs = [event for event in live.events() if event["kind"] == "morph"]
        os.environ.pop("CAPSLOG_CHAOS_PLANS", None)
        shares = count_shares(folder, applied)
        with Live(args.config, [*overrides, f"train.max_steps={shares['steps_counted']}"], 2, folder=truth) as live:
            live.finish(600)
        net = [(causes.get(pause.generation), pause.net) for pause in pauses(applied)]
        drawn = {
            "plans": plans_of(folder),
            **{f"{kind}_net_ms": quantiles([value for cause, value in net if cause == kind]) for kind in sorted(kinds)},
            "planned_net_ms": quantiles([value for cause, value in net if cause in ("join", "leave")]),
            "search_ms": quantiles([event["search_seconds"] for event in morphs], digits=2),
            "transfer_ms": quantiles([event["transfer_seconds"] for event in morphs], digits=2),
        }
        result = {
            "config": args.config.name,
            "overrides": overrides,
            "seed": args.seed,
            "seconds": clock.seconds,
            "ended_early": stuck,
            "morphs": done,
            "kinds": dict(kinds),
            "generations": newest,
            "layouts": len(layouts),
            "layouts_with_replicas": sum(replicas > 1 for _, replicas in layouts),
            "most_devices": args.most,
            "said": [line for line in messages if "SIGKILL" not in line][:5],
            **(drawn if args.plans else {}),
            **shares,
            **compare(folder, truth),
        }
    append_result("equality", result)
    if stuck is not None:
        raise SystemExit(stuck)
    if result["losses_that_differ"] or result["tensors_that_differ"] or result["steps_with_a_sample_not_used_once"]:
        raise SystemExit("not equal")


if __name__ == "__main__":
    run()
