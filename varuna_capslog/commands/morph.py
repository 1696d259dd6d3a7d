"""`capslog morph` and `capslog notice`: what people and schedulers tell a run that is going on."""

from __future__ import annotations

from typing import Annotated

import typer

from varuna_capslog.commands.arguments import RunDirectory

__all__ = ["morph", "notice"]


def morph(
    run_dir: RunDirectory,
    devices: Annotated[int, typer.Option(min=1, help="Workers that the run is to have.", show_default=False)],
) -> None:
    """Let a running elastic training go on with another number of devices."""
    from varuna_capslog.elastic import request_morph
    from varuna_capslog.elastic.host.hooks import outlook

    prospect = outlook(devices, run_dir)
    request_morph(devices, run_dir)
    typer.echo(f"asked for {devices} device(s): {prospect}; {run_dir}/events.jsonl tells what comes of it")


def notice(
    run_dir: RunDirectory,
    host: Annotated[str | None, typer.Option(help="The host that is to leave.", show_default="the only one")] = None,
    member: Annotated[str | None, typer.Option(help="One worker instead of a whole host.", show_default=False)] = None,
    seconds: Annotated[
        float | None, typer.Option(min=0, help="Seconds that are left.", show_default="no deadline")
    ] = None,
    urgent: Annotated[bool, typer.Option("--urgent", help="Leave at the next step, whatever has been copied.")] = False,
    hint: Annotated[bool, typer.Option("--hint", help="It may have to leave soon: copy ahead, nobody leaves.")] = False,
) -> None:
    """Tell a running elastic training that a host, or one worker, is to leave."""
    from varuna_capslog.base.errors import CapslogError
    from varuna_capslog.elastic.host.hooks import give_notice

    if urgent and hint:
        raise CapslogError("--urgent and --hint exclude each other; a hint moves nobody")
    if host is not None and member is not None:
        raise CapslogError("--host and --member exclude each other; name one")
    who = give_notice(run_dir, host, member, urgent, seconds, hint)
    typer.echo(f"told that {who} {'may have' if hint else 'is'} to leave")
