"""Options of a host: its run, its workers, its store."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.fork_server import PRELOADED, ForkServer
from varuna_capslog.config.settings import Elastic
from varuna_capslog.elastic.notices.interface import Listener
from varuna_capslog.membership.generation import INITIAL, Stamp

__all__ = ["HostOptions"]


@dataclass(frozen=True)
class HostOptions:
    """Options of a `Host`. Raises CapslogError for fewer than one worker.

    Attributes:
        run_dir: the run's folder; on every host, and the same where checkpoints are to be found again.
        entry: "module:function" that a worker runs; the start-up fills it in.
        arguments: its argument (any JSON value); default: [run_dir].
        num_workers: devices of this host.
        name: of this host in the run; default: the system's. A second host of that name gets a number behind it.
        store: address of the run's store; None: this host begins the run, and locks its folder.
        serve_at: name or address under which other hosts reach this one's store, and its port (0: any free one); or the
            address of a store in etcd (see `store_etcd`), which needs no host to serve it.
        keys: put into the store before the first worker starts, where this host serves it.
        first: the boundary that the run begins with.
        hosts: number that begin together. The server of the store founds the first generation once all have named their
            workers; a later host joins.
        environment: variables for workers on top of this process's own.
        say: prints one line for the user.
        look: called again and again; True: end the run after the step under way, as asked by the caller.
        sources: of notices; None: those of `auto_sources`, and the file `run_dir/notices/<host>`.
        modules: imported ahead for the workers, besides the entry's.
        fork_server: a running one with this entry, which the host closes; None: the host starts one.
    """

    run_dir: Path
    entry: str = ""
    arguments: Any = None
    num_workers: int = 1
    name: str | None = None
    store: str | None = None
    serve_at: str = "127.0.0.1:0"
    keys: Mapping[str, str] = field(default_factory=dict)
    first: Stamp = INITIAL
    hosts: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)
    settings: Elastic = field(default_factory=Elastic)
    say: Callable[[str], None] = lambda line: None
    look: Callable[[], bool] = lambda: False
    sources: Sequence[Listener] | None = None
    modules: Sequence[str] = PRELOADED
    fork_server: ForkServer | None = None

    def __post_init__(self) -> None:
        if self.num_workers < 1:
            raise CapslogError(f"num_workers={self.num_workers}; a host needs at least one worker")

    @property
    def serves(self) -> bool:
        """True where this host begins the run."""
        return self.store is None

    @property
    def folder(self) -> Path:
        """Folder of the workers' logs."""
        return self.run_dir / "workers"
