"""`launch/chaos.sh`: a training whose workers, hosts, network and store are disturbed at random, and the verdict."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.commands import shared
from varuna_capslog.commands.shared import AsJson, Overrides, option, options_of, output_option, print_json

if TYPE_CHECKING:
    from tests.rig.outcome import ChaosOptions, ChaosOutcome
    from tests.rig.preemptions import Preemptions
    from varuna_capslog.config.settings import Config

__all__ = ["app"]

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@dataclass(frozen=True)
class ChaosFlags:
    """The command line."""

    config: Annotated[
        str | None,
        typer.Argument(metavar="CONFIG", help="The run's YAML file.", show_default="a built-in training"),
    ] = None
    overrides: Overrides = None
    seed: Annotated[int, option("Of the schedule of faults.")] = 0
    faults: Annotated[int, option("How many.", min=1)] = 20
    duration: Annotated[
        str | None, option("No fault is begun after so long, such as 10min; of --trace's own time.", "all")
    ] = None
    mean: Annotated[str, option("Mean time between a recovery and the next fault.")] = "500ms"
    kinds: Annotated[str | None, option("Fault classes and shares, such as kill=3,notice.", "all but store")] = None
    hosts: Annotated[int, option("Supervisors, each as a machine of its own.", min=1, max=26)] = 2
    workers: Annotated[int, option("Of each host.", min=1)] = 2
    network: Annotated[
        str,
        option("loopback, or relay: cuts, half-open links and delays too, or namespaces: these with the kernel's TCP."),
    ] = "relay"
    delay: Annotated[str | None, option("--network namespaces: of every packet, each way, such as 20ms.", "none")] = (
        None
    )
    loss: Annotated[str | None, option("--network namespaces: of so many packets, such as 0.5%.", "none")] = None
    bandwidth: Annotated[
        str | None, option("--network namespaces: that each host can send, such as 100Mbit.", "no limit")
    ] = None
    store: Annotated[
        str, option("tcp, or etcd: three servers, of which the class store kills one; not with relay.")
    ] = "tcp"
    plans: Annotated[
        bool, typer.Option("--plans", help="Every generation runs a plan drawn at random, not the planner's.")
    ] = False
    output: Annotated[Path | None, output_option("Folder of the run.", "a temporary one")] = None
    results: Annotated[Path | None, option("File that gets one line of JSON more.", False)] = None
    trace: Annotated[
        Path | None, option("Replay these preemptions instead; lines of milliseconds,add|remove,node.", False)
    ] = None
    scale: Annotated[float, option("--trace: by how much faster.")] = 60.0
    notice: Annotated[str, option("--trace: how long before a leave it is announced; AWS's 2 min.")] = "120s"
    as_json: AsJson = False
    trust: shared.Trust = False


@app.command(context_settings={"help_option_names": ["-h", "--help"]})
@options_of(ChaosFlags)
def chaos(given: ChaosFlags) -> None:
    """Disturb a training and judge it: all losses, gradient norms and weights must be as if nothing had been.

    `launch/chaos.sh script FILE` does the same to a script; see `launch/chaos.sh script --help`.
    """
    import shutil
    import tempfile

    from tests.rig.chaos import Chaos
    from tests.rig.namespaces import enter
    from varuna_capslog.base import files

    options = _options(given)
    if options.network == "namespaces":
        enter()
    folder = given.output or Path(tempfile.mkdtemp(prefix="capslog-chaos-"))
    settings = _settings(given, folder, options.hosts * options.workers)
    say = lambda line: shared.say(line, err=True)  # noqa: E731
    run = Chaos(settings, options, say) if given.trace is None else _preemptions(given, settings, options, say)
    outcome = run.run()
    found = outcome.to_json() | run.summary()
    if given.trace is not None:
        found |= {"trace": given.trace.name}
    if given.results is not None:
        files.append_jsonl(given.results, found)
    if given.output is None and outcome.passed:
        shutil.rmtree(folder, ignore_errors=True)
    if given.as_json:
        print_json(found)
    else:
        _print(outcome, found)
    if not outcome.passed:
        raise CapslogError(f"the run failed: {outcome.breaches[0]}; everything it wrote is in {folder}")


def _options(given: ChaosFlags) -> ChaosOptions:
    from tests.rig.machines.links import LinkShape
    from tests.rig.outcome import ChaosOptions
    from tests.rig.schedule import weights_of
    from varuna_capslog.base import fields, units

    fields.choice(given.network, "network", ("loopback", "relay", "namespaces"))
    fields.choice(given.store, "store", ("tcp", "etcd"))
    hosts, network = (given.hosts, given.network) if given.trace is None else (1, "loopback")
    if given.store == "etcd" and network == "relay":
        raise CapslogError(
            "the relay does not reach etcd's servers; give --network loopback or --network namespaces with --store etcd"
        )
    links = LinkShape.parse(given.delay, given.loss, given.bandwidth)
    if links != LinkShape() and network != "namespaces":
        raise CapslogError(f"--delay, --loss and --bandwidth need --network namespaces, but the network is {network}")
    weights = weights_of(given.kinds, network != "loopback")
    return ChaosOptions(
        seed=given.seed,
        faults=given.faults,
        seconds=None if given.duration is None else units.parse_seconds(given.duration, "duration"),
        mean_seconds=units.parse_seconds(given.mean, "mean"),
        weights=weights,
        hosts=hosts,
        workers=given.workers,
        network=network,
        links=links,
        store=given.store,
        plans=given.plans,
    )


def _preemptions(given: ChaosFlags, settings: Config, options: ChaosOptions, say: Callable[[str], None]) -> Preemptions:
    from tests.rig.preemptions import Preemptions, rents
    from varuna_capslog.base import units
    from varuna_capslog.planning.traces.trace_replay import read_trace

    assert given.trace is not None
    rented = rents(read_trace(given.trace), options.workers, given.scale, options.seconds)
    return Preemptions(settings, options, rented, given.scale, units.parse_seconds(given.notice, "notice"), say)


def _settings(given: ChaosFlags, folder: Path, devices: int) -> Config:
    from tests.rig.toy import toy_config

    config, changes = given.config, list(given.overrides or ())
    if config is not None and "=" in config:  # the first override, as no file was given
        changes.insert(0, config)
        config = None
    forced = [f"run_dir={folder}", f"pipeline.devices={devices}", "elastic.enabled=true"]
    changes = [*forced, *changes]
    settings = toy_config(folder, changes) if config is None else shared.load(Path(config), changes, trust=given.trust)
    if settings.pipeline.plan is not None and settings.world_size != devices:
        raise CapslogError(
            f"the hosts have {devices} workers in all, but pipeline.plan={settings.pipeline.plan} runs on "
            f"{settings.world_size} ranks; choose --hosts and --workers for these"
        )
    return settings


def _print(outcome: ChaosOutcome, found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("fault", "count", "next step: p50", "p90", "max", "gap: p50", "p90", "max"):
        table.add_column(name, justify="left" if name == "fault" else "right", no_wrap=True)
    for row in found["classes"]:
        cells = [row["kind"], str(row["count"])]
        for name in ("recovered_seconds", "gap_seconds"):
            times = row.get(name)
            cells += ["-"] * 3 if times is None else [f"{times[key]:.2f} s" for key in ("p50", "p90", "max")]
        table.add_row(*cells)
    console = Console()
    console.print(table)
    console.print(
        f"seed {found['seed']}: {found['outcome']}; {found['faults']} faults, {found['joins']} joins, "
        f"{found['generations']} generations of {'/'.join(map(str, found['layouts']))} members, {found['steps']} steps "
        f"({found['steps_made_again']} made again) in {found['seconds']:.0f} s",
        highlight=False,
        soft_wrap=True,
    )
    right, wrong = outcome.causes
    if right or wrong:
        console.print(f"causes: {right} of {right + len(wrong)} losses named as injected", highlight=False)
    for one in wrong:
        console.print(f"  {one}", highlight=False, soft_wrap=True, markup=False)
    if outcome.packets:
        sent = sum(outcome.packets[name] for name in ("carried", "lost", "dropped", "cut"))
        console.print(
            f"packets between the machines: {sent}, of which {outcome.packets['lost']} were lost at random, "
            f"{outcome.packets['dropped']} did not fit into a queue, {outcome.packets['cut']} were cut off",
            highlight=False,
            soft_wrap=True,
        )
    if "share_of_ideal" in found:
        console.print(
            f"{found['trace']} at {found['scale']:g} times its pace: {found['changes']} changes, {found['lost_nodes']} "
            f"nodes lost, {100 * found['share_of_ideal']:.1f} % of the steps of a run that changes in no time "
            f"({found['lost_seconds']:.1f} s of {found['seconds']:.0f} s lost)",
            highlight=False,
            soft_wrap=True,
        )
    for breach in outcome.breaches:
        console.print(f"  {breach}", highlight=False, soft_wrap=True, markup=False)
