"""The tiny workload with one fault built in: `tests.faulty:workload`, for runs that must end in one clear sentence.

`model.fault` says what happens and where: {"what": "raise" | "kill" | "stop" | "sleep", "in": "forward" | "backward" |
"load" | "optimizer" | "checkpoint", "rank": 1, "call": 3}. The call counts real calls in that process, from 1. The
chain is the same with and without a fault, so that a run whose fault is gone can resume.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from tests.engine.workload import TinyData, TinyWorkload
from varuna_capslog.config.settings import Config
from varuna_capslog.model.chain import Chain, Layer
from varuna_capslog.model.workload import Minibatch


class Fault:
    """Strikes at the `call`-th time that the process of `rank` comes by `place`."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = {"what": "raise", "in": "forward", "rank": 1, "call": 3} | settings
        self.enabled = bool(settings) and os.environ.get("RANK") == str(self.settings["rank"])
        self.calls = 0

    def come_by(self, place: str) -> None:
        if not self.enabled or place != self.settings["in"]:
            return
        self.calls += 1
        if self.calls != self.settings["call"]:
            return
        action = self.settings["what"]
        if action == "raise":
            raise RuntimeError(f"deliberate fault in {place}")
        if action == "sleep":
            time.sleep(600)
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[action])


class _Pass(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, fault: Fault) -> Tensor:
        ctx.fault = fault
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.fault.come_by("backward")
        return gradients[0], None


class Trap(nn.Module):
    """Changes nothing, unless its fault strikes."""

    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self._fault = fault

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(x, FakeTensor) or x.device.type == "meta":
            return x.clone()
        self._fault.come_by("forward")
        out: Tensor = _Pass.apply(x, self._fault)
        return out


class FaultyData(TinyData):
    def __init__(self, count: int, poison: int | None, fault: Fault) -> None:
        super().__init__(count, poison)
        self._fault = fault

    def load(self, minibatch: Minibatch, microbatch: int) -> dict[str, Tensor]:
        self._fault.come_by("load")
        return super().load(minibatch, microbatch)


class FaultyWorkload(TinyWorkload):
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._fault = Fault(config.model.get("fault") or {})
        if self._fault.enabled:
            self._trap_calls()

    def _trap_calls(self) -> None:
        from varuna_capslog.training import checkpoint

        step, write = torch.optim.AdamW.step, checkpoint.write_synced

        def faulty_step(*arguments: Any) -> Any:
            self._fault.come_by("optimizer")
            return step(*arguments)

        def faulty_write(*arguments: Any) -> Any:
            self._fault.come_by("checkpoint")
            return write(*arguments)

        torch.optim.AdamW.step = faulty_step  # type: ignore[method-assign]
        checkpoint.write_synced = faulty_write

    def build_chain(self) -> Chain:
        plain = super().build_chain()
        layers = list(plain.layers)
        layers.insert(9, Layer("trap.late", Trap(self._fault), ("state",), ("state",)))
        layers.insert(2, Layer("trap.early", Trap(self._fault), ("x",), ("x",)))
        return Chain(layers, ("x", "sizes"), ("outputs",), self._config.model.get("name", "faulty"))

    def train_data(self) -> FaultyData:
        return FaultyData(self._config.data.get("samples", 24), self._config.data.get("poison"), self._fault)


def workload(config: Config) -> FaultyWorkload:
    """Entry for a config's `workload: tests.faulty:workload`."""
    return FaultyWorkload(config)
