"""`capslog fits`: a verdict on a model and devices, and other sizes and GPUs that would fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from varuna_capslog.base.errors import CapslogError, DoesNotFit
from varuna_capslog.commands import shared
from varuna_capslog.commands.help import BATCH, DEVICES, MODEL
from varuna_capslog.commands.questions import ModelInputs, keys_of
from varuna_capslog.commands.shared import option, say

if TYPE_CHECKING:
    from varuna_capslog.api.fits import Fit

__all__ = ["fits"]

_CARDS = 6
"""Most kinds of GPU that are named; further kinds are only counted."""


@dataclass(frozen=True)
class FitsFlags:
    """The command line of `fits`."""

    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="Folder with a Hugging Face config.json, a name of its hub, or package.module:function.",
            show_default=False,
        ),
    ] = None
    overrides: shared.Overrides = None
    inputs: ModelInputs = None
    sequence: Annotated[
        int | None,
        option("Tokens of a sequence, of a folder or name.", "1024, or as many as it takes", min=1, panel=MODEL),
    ] = None
    precision: Annotated[
        str | None,
        option(
            "fp32, bf16, fp16, bf16-weights or bf16-master; the key train.precision.",
            "bf16-weights where config.json says bfloat16, else fp32",
            panel=MODEL,
        ),
    ] = None
    lora: Annotated[
        int | None, option("Rank of peft's adapters, trained in place of the weights.", False, min=1, panel=MODEL)
    ] = None
    base: Annotated[
        str | None,
        option(
            "Frozen weights of linear layers below adapters: 4bit, 4bit-double (its scales in 8 bits) or 8bit, as "
            "bitsandbytes has them.",
            "as they are",
            panel=MODEL,
        ),
    ] = None
    optimizer: Annotated[
        str | None,
        option(
            "Optimizer: of torch, muon, adamw8bit or package.module:Class; the key train.optimizer.",
            "adamw",
            panel=MODEL,
        ),
    ] = None
    zero: Annotated[
        int | None,
        option(
            "1: replicas (pipeline.replicas=2) share optimizer states; the key pipeline.zero.",
            "0",
            min=0,
            max=1,
            panel=MODEL,
        ),
    ] = None
    devices: Annotated[
        str | None,
        option("Kinds of GPUs, such as '2x rtx4090', or a number with --capacity.", False, panel=DEVICES),
    ] = None
    capacity: Annotated[
        str | None, option("Memory of each device, where --devices is a number: 16GiB.", False, panel=DEVICES)
    ] = None
    device: Annotated[
        str | None,
        option(
            "Device of the costs, where --devices is a number.", "the GPU of this machine, or its cpu", panel=DEVICES
        ),
    ] = None
    host_capacity: Annotated[
        str | None, option("Host memory of each device for what is offloaded.", "nothing is", panel=DEVICES)
    ] = None
    free: Annotated[
        bool, typer.Option("--free", help="Show the devices of this machine and their free memory; stands alone.")
    ] = False
    batch: Annotated[int | None, option("Samples of an optimizer step.", "4 for each device", min=1, panel=BATCH)] = (
        None
    )
    as_json: shared.AsJson = False


@shared.options_of(FitsFlags)
def fits(flags: FitsFlags) -> None:
    """Say whether a model trains on these devices, and what else would fit. Exit status 3 when it does not."""
    if flags.free:
        _show_free(flags)
        return
    if flags.model is None or flags.devices is None:
        raise CapslogError("fits needs a MODEL and --devices, such as: capslog fits llama --devices '2x rtx4090'")
    from varuna_capslog.api.fits import fits as ask

    keys = {
        "train.precision": flags.precision,
        "train.optimizer": flags.optimizer,
        "train.minibatch_size": flags.batch,
        "pipeline.host_capacity": flags.host_capacity,
        "pipeline.zero": flags.zero,
        "model.arguments.lora": flags.lora,
        "model.arguments.base": flags.base,
    }
    fit = ask(
        flags.model,
        flags.inputs,
        devices=flags.devices,
        capacity=flags.capacity,
        device=flags.device,
        sequence=flags.sequence,
        settings=keys_of(flags.overrides) | {key: named for key, named in keys.items() if named is not None},
        say=lambda tried: shared.tell(f"estimating {tried}"),
    )
    if flags.as_json:
        shared.print_json(fit.to_json())
    else:
        for line in fit.lines():
            say(line)
        _show_others(fit)
    if not fit.fits:
        raise typer.Exit(DoesNotFit.exit_status)


def _show_others(fit: Fit) -> None:
    """Print other sizes and GPUs that fit, each line as soon as its search ends."""
    say(f"largest microbatch at this sequence: {fit.largest_batch.text()}")
    if fit.largest_sequence is not None:
        say(f"longest sequence at this batch: {fit.largest_sequence.text(' tokens')}")
    cards = fit.cards
    more = f" and {len(cards) - _CARDS} more" if len(cards) > _CARDS else ""
    say(f"as many of these would do, by memory: {', '.join(cards[:_CARDS]) or 'none of the table'}{more}")


def _show_free(flags: FitsFlags) -> None:
    """Print the accelerators of this machine and their free memory."""
    if flags.model is not None or flags.devices is not None:
        raise CapslogError("--free shows the devices of this machine and stands alone; leave MODEL and --devices out")
    from varuna_capslog import accelerator
    from varuna_capslog.base.units import format_bytes

    kind = accelerator.auto_type()
    rows: list[dict[str, Any]] = []
    for device in [] if kind == "cpu" else accelerator.all_devices(kind):
        free, total = accelerator.memory_info(device)
        rows.append({"device": str(device), "name": accelerator.device_name(kind), "free": free, "total": total})
    if flags.as_json:
        shared.print_json({"devices": rows})
        return
    if not rows:
        say("torch sees no accelerator on this machine; name devices to ask about, such as --devices '2x rtx4090'")
    for row in rows:
        say(f"{row['device']} ({row['name']}): {format_bytes(row['free'])} free of {format_bytes(row['total'])}")
