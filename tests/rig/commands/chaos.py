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
def chaos(flags: ChaosFlags) -> None:
    """Disturb a training and judge it: all losses, gradient norms and weights must be as if nothing had been.

    `launch/chaos.sh script FILE` does the same to a script; see `launch/chaos.sh script --help`.
    """
    import shutil
    import tempfile

    from tests.rig.chaos import Chaos
    from tests.rig.namespaces import enter
    from varuna_capslog.base import files

    options = _options(flags)
    if options.network == "namespaces":
        enter()
    folder = flags.output or Path(tempfile.mkdtemp(prefix="capslog-chaos-"))
    settings = _settings(flags, folder, options.hosts * options.workers)
    say = lambda line: shared.say(line, err=True)  # noqa: E731
    run = Chaos(settings, options, say) if flags.trace is None else _preemptions(flags, settings, options, say)
    outcome = run.run()
    results = outcome.to_json() | run.summary()
    if flags.trace is not None:
        results |= {"trace": flags.trace.name}
    if flags.results is not None:
        files.append_jsonl(flags.results, results)
    if flags.output is None and outcome.passed:
        shutil.rmtree(folder, ignore_errors=True)
    if flags.as_json:
        print_json(results)
    else:
        _print(outcome, results)
    if not outcome.passed:
        raise CapslogError(f"the run failed: {outcome.breaches[0]}; everything it wrote is in {folder}")


def _options(flags: ChaosFlags) -> ChaosOptions:
    from tests.rig.machines.links import LinkShape
    from tests.rig.outcome import ChaosOptions
    from tests.rig.schedule import weights_of
    from varuna_capslog.base import fields, units

    fields.choice(flags.network, "network", ("loopback", "relay", "namespaces"))
    fields.choice(flags.store, "store", ("tcp", "etcd"))
    hosts, network = (flags.hosts, flags.network) if flags.trace is None else (1, "loopback")
    if flags.store == "etcd" and network == "relay":
        raise CapslogError(
            "the relay does not reach etcd's servers; give --network loopback or --network namespaces with --store etcd"
        )
    links = LinkShape.parse(flags.delay, flags.loss, flags.bandwidth)
    if links != LinkShape() and network != "namespaces":
        raise CapslogError(f"--delay, --loss and --bandwidth need --network namespaces, but the network is {network}")
    weights = weights_of(flags.kinds, network != "loopback")
    return ChaosOptions(
        seed=flags.seed,
        faults=flags.faults,
        seconds=None if flags.duration is None else units.parse_seconds(flags.duration, "duration"),
        mean_seconds=units.parse_seconds(flags.mean, "mean"),
        weights=weights,
        hosts=hosts,
        workers=flags.workers,
        network=network,
        links=links,
        store=flags.store,
        plans=flags.plans,
    )


def _preemptions(flags: ChaosFlags, settings: Config, options: ChaosOptions, say: Callable[[str], None]) -> Preemptions:
    from tests.rig.preemptions import Preemptions, rents
    from varuna_capslog.base import units
    from varuna_capslog.planning.trace_replay import read_trace

    assert flags.trace is not None
    rented = rents(read_trace(flags.trace), options.workers, flags.scale, options.seconds)
    return Preemptions(settings, options, rented, flags.scale, units.parse_seconds(flags.notice, "notice"), say)


def _settings(flags: ChaosFlags, folder: Path, devices: int) -> Config:
    from tests.rig.toy import toy_config

    config, changes = flags.config, list(flags.overrides or ())
    if config is not None and "=" in config:  # no file was given: this is the first override
        changes.insert(0, config)
        config = None
    forced = [f"run_dir={folder}", f"pipeline.devices={devices}", "elastic.enabled=true"]
    changes = [*forced, *changes]
    settings = toy_config(folder, changes) if config is None else shared.load(Path(config), changes, trust=flags.trust)
    if settings.pipeline.plan is not None and settings.world_size != devices:
        raise CapslogError(
            f"the hosts have {devices} workers in all, but pipeline.plan={settings.pipeline.plan} runs on "
            f"{settings.world_size} ranks; choose --hosts and --workers for these"
        )
    return settings


def _print(outcome: ChaosOutcome, results: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("fault", "count", "next step: p50", "p90", "max", "gap: p50", "p90", "max"):
        table.add_column(name, justify="left" if name == "fault" else "right", no_wrap=True)
    for row in results["classes"]:
        cells = [row["kind"], str(row["count"])]
        for name in ("recovered_seconds", "gap_seconds"):
            times = row.get(name)
            cells += ["-"] * 3 if times is None else [f"{times[key]:.2f} s" for key in ("p50", "p90", "max")]
        table.add_row(*cells)
    console = Console()
    console.print(table)
    console.print(
        f"seed {results['seed']}: {results['outcome']}; {results['faults']} faults, {results['joins']} joins, "
        f"{results['generations']} generations of {'/'.join(map(str, results['layouts']))} members, "
        f"{results['steps']} steps ({results['steps_made_again']} made again) in {results['seconds']:.0f} s",
        highlight=False,
        soft_wrap=True,
    )
    right, wrong = outcome.causes
    if right or wrong:
        console.print(f"causes: {right} of {right + len(wrong)} losses named as injected", highlight=False)
    for sentence in wrong:
        console.print(f"  {sentence}", highlight=False, soft_wrap=True, markup=False)
    if outcome.packets:
        sent = sum(outcome.packets[name] for name in ("carried", "lost", "dropped", "cut"))
        console.print(
            f"packets between the machines: {sent}, of which {outcome.packets['lost']} were lost at random, "
            f"{outcome.packets['dropped']} did not fit into a queue, {outcome.packets['cut']} were cut off",
            highlight=False,
            soft_wrap=True,
        )
    if "share_of_ideal" in results:
        console.print(
            f"{results['trace']} at {results['scale']:g} times its pace: {results['changes']} changes, "
            f"{results['lost_nodes']} nodes lost, "
            f"{100 * results['share_of_ideal']:.1f} % of the steps of a run that changes in no time "
            f"({results['lost_seconds']:.1f} s of {results['seconds']:.0f} s lost)",
            highlight=False,
            soft_wrap=True,
        )
    for breach in outcome.breaches:
        console.print(f"  {breach}", highlight=False, soft_wrap=True, markup=False)
