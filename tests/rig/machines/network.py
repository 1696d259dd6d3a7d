"""Ways by which the machines of a chaos run reach the store and each other; cuts, slows and heals these ways."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tests.rig.machines.links import LinkShape
from tests.rig.namespaces import Namespaces
from tests.rig.relay import Line, Relay, Way
from tests.rig.relayed import VARIABLE
from varuna_capslog.base.secret import Secret

__all__ = ["STORE_HOST", "Access", "MachineNetwork"]

STORE_HOST = "store"
"""The name by which ways mean the store."""


@dataclass(frozen=True)
class Access:
    """Settings with which a machine reaches the others.

    Attributes:
        store: the store's address for this machine.
        namespace: path of the network namespace to enter; None: none.
        environment: variables for the machine's workers.
    """

    store: str
    namespace: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)


class MachineNetwork:
    """The network of a run.

    Args:
        kind: "loopback": nothing can be disturbed; "relay": all that hosts say to each other goes through one process;
            "namespaces": every machine has a network namespace of its own, see `namespaces.enter`.
        machines: their names.
        secret: of the run.
        shape: of the links between namespaces; None: no limits.
        seed: of the packets that these lose.
    """

    def __init__(
        self, kind: str, machines: Sequence[str], secret: Secret, shape: LinkShape | None = None, seed: int = 0
    ) -> None:
        self._stack = contextlib.ExitStack()
        self._relay: Relay | None = None
        self._line: Line | None = None
        self._spaces: Namespaces | None = None
        if kind == "relay":
            self._relay = Relay(secret)
            self._stack.callback(self._relay.close)
            self._line = Line(self._relay.address, secret)
            self._stack.callback(self._line.close)
        elif kind == "namespaces":
            self._spaces = Namespaces(machines, STORE_HOST, shape, seed)
            self._stack.callback(self._spaces.close)

    def register_store(self, address: str) -> None:
        """The store is at this address from now on."""
        if self._line is not None:
            self._line.register(STORE_HOST, address)

    def access(self, machine: str, store: str) -> Access:
        """Return the settings with which this machine reaches the others, and the store at the address `store`."""
        if self._line is not None and self._relay is not None:
            return Access(
                self._line.through(machine, store), environment={VARIABLE: f"{machine}@{self._relay.address}"}
            )
        if self._spaces is not None:
            return Access(store.replace("127.0.0.1", self._spaces.gateway(machine)), self._spaces.path(machine))
        return Access(store)

    @property
    def _disturbed(self) -> Line | Namespaces:
        disturbed = self._spaces or self._line
        assert disturbed is not None
        return disturbed

    def disturb(self, ways: set[Way], delay: float | None = None) -> None:
        """See `Line.disturb`."""
        self._disturbed.disturb(ways, delay)

    def heal(self, ways: set[Way]) -> None:
        """See `Line.heal`."""
        self._disturbed.heal(ways)

    def counts(self) -> dict[str, int]:
        """Packets carried, lost and dropped between namespaces so far; empty for other networks."""
        return {} if self._spaces is None else self._spaces.counts()

    def close(self) -> None:
        """Ends the relay, or the namespaces."""
        self._stack.close()
