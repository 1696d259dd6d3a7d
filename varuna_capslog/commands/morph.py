"""`capslog morph` and `capslog notice`: what people and schedulers tell a run that is going on."""

from __future__ import annotations

from typing import Annotated

import typer

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.commands.arguments import RunDirectory, option

__all__ = ["morph", "notice"]


def morph(
    run_dir: RunDirectory,
    devices: Annotated[int, option("Workers that the run is to have.", False, min=1)],
) -> None:
    """Let a running elastic training go on with another number of devices."""
    from varuna_capslog.elastic import request_morph
    from varuna_capslog.elastic.host.hooks import outlook

    prospect = outlook(devices, run_dir)
    request_morph(devices, run_dir)
    typer.echo(f"asked for {devices} device(s): {prospect}; {run_dir}/events.jsonl tells what comes of it")


def notice(
    run_dir: RunDirectory,
    host: Annotated[str | None, option("The host that is to leave.", "the only one")] = None,
    member: Annotated[str | None, option("One worker instead of a whole host.", False)] = None,
    seconds: Annotated[float | None, option("Seconds that are left.", "no deadline", min=0)] = None,
    urgent: Annotated[bool, typer.Option("--urgent", help="Leave at the next step, whatever has been copied.")] = False,
    hint: Annotated[bool, typer.Option("--hint", help="It may have to leave soon: copy ahead, nobody leaves.")] = False,
) -> None:
    """Tell a running elastic training that a host, or one worker, is to leave."""
    from varuna_capslog.elastic.host.hooks import give_notice

    if urgent and hint:
        raise CapslogError("--urgent and --hint exclude each other; a hint moves nobody")
    if host is not None and member is not None:
        raise CapslogError("--host and --member exclude each other; name one")
    who = give_notice(run_dir, host, member, urgent, seconds, hint)
    typer.echo(f"told that {who} {'may have' if hint else 'is'} to leave")
