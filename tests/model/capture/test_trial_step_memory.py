"""Steps that exceed memory: compared with their large tensors in files, or a message says that they were not.

Such a comparison ended when the system killed the process, or by an error of the allocator that was taken for one of
the model's own, so that nothing was compared.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import logging
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.machine_memory import available_bytes
from varuna_capslog.model.capture import capture_layers, opaque, trial
from varuna_capslog.model.capture.comparison import compare_steps
from varuna_capslog.model.capture.text import CapturedLayers
from varuna_capslog.model.capture.trial import MemoryGuard, NoRoom, StepMemory, try_model
from varuna_capslog.model.chain import Chain

ROOT = Path(__file__).parents[3]
MIB = 1 << 20
M_MMAP_THRESHOLD = -3
"""Of malloc.h."""
FREE = 40 * MIB
"""What the system calls available in the tests with a limit."""


class Detached(nn.Module):
    """Layer whose backward was lost."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *tensors: Tensor) -> Any:
        return self.layer(*(tensor.detach() for tensor in tensors))


class Blocks(nn.Module):
    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width)) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).sigmoid().tanh()
        return x


def losing(captured: CapturedLayers) -> CapturedLayers:
    """Return the captured layers with the backward of one layer lost."""
    layers = list(captured[0])
    layers[1] = dataclasses.replace(layers[1], module=Detached(layers[1].module))
    return layers, captured[1], captured[2]


def status(name: str) -> int:
    """Return bytes of this process by the system's name for them."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) * 1024


def measure(*kinds: str) -> None:
    """Write for each kind the results of comparisons, and the peak bytes of each. Freed memory leaves the process, as
    for large tensors.
    """
    assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 16)
    sys.stdout.write(json.dumps([results(kind) for kind in kinds]))


def results(kind: str) -> list[tuple[str | None, int]]:
    torch.manual_seed(0)
    model, x = {
        "activations": lambda: (Blocks(64, 16), torch.randn(8192, 64)),  # about 130 MiB are saved
        "weights": lambda: (Blocks(1024, 8), torch.randn(2, 1024)),  # 32 MiB, and as much of gradients
    }[kind]()
    captured = capture_layers(model, None, (x,), evaluates=False)
    rows = []
    for limit in ("none", "free", "addresses"):
        for layers in (captured, losing(captured)):
            trial._give_back_freed()
            start = status("VmRSS")
            Path("/proc/self/clear_refs").write_text("5")  # reset the peak
            if limit == "free":
                trial.available_bytes = lambda start=start: FREE - (status("VmRSS") - start)  # type: ignore[assignment]
            elif limit == "addresses":
                resource.setrlimit(resource.RLIMIT_AS, (status("VmSize") + 2 * FREE, resource.RLIM_INFINITY))
            verdict = compare_steps(model, layers, ((x,), {}))
            rows.append((verdict, status("VmHWM") - start))
            trial.available_bytes = available_bytes
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return rows


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_step_that_does_not_fit_is_compared_in_bounded_memory(programs: Path) -> None:
    """The verdicts equal those of the comparison in memory, in less memory than that needs; also if the limit cannot
    be read from the system, so that only the allocator's error shows it.
    """
    code = f"from {__name__} import measure; measure('weights', 'activations')"
    run = subprocess.run([programs / "python", "-"], input=code, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert run.returncode == 0, run.stderr
    assert "not compared" not in run.stderr
    for rows in json.loads(run.stdout):
        verdicts, peaks = [row[0] for row in rows], [row[1] for row in rows]
        assert verdicts[0] is None
        assert "the gradient of 'blocks.0.0.weight'" in verdicts[1]
        assert verdicts[2:4] == verdicts[4:] == verdicts[:2]
        assert min(peaks[:2]) > 2 * FREE
        assert max(peaks[2:4]) < 1.25 * FREE


@pytest.fixture
def case() -> tuple[nn.Module, CapturedLayers, Any]:
    torch.manual_seed(0)
    model, x = Blocks(64, 4), torch.randn(128, 64)
    return model, capture_layers(model, None, (x,), evaluates=False), ((x,), {})


@pytest.fixture
def in_files(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Return the paths of tensors that were written to files."""
    made: list[Path] = []
    write = trial._InFile.__init__

    def counted(self: Any, path: Path, tensor: Tensor) -> None:
        write(self, path, tensor)
        made.append(path)

    monkeypatch.setattr(trial._InFile, "__init__", counted)
    monkeypatch.setattr(StepMemory, "holds_weights", lambda self: self.folder is not None)
    return made


def test_what_fits_stays_in_memory(case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "_InFile", None)
    assert compare_steps(*case) is None
    assert "the gradient" in str(compare_steps(case[0], losing(case[1]), case[2]))


def test_files_leave_nothing_behind(case: Any, in_files: list[Path]) -> None:
    """No files or gradients remain, and weights and buffers are unchanged; hooks that wait for gradients are
    registered again.
    """
    model, _, example = case
    called: list[Tensor] = []
    weight = model.blocks[0][0].weight
    weight.register_post_accumulate_grad_hook(called.append)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert compare_steps(*case) is None
    assert in_files
    assert not called
    assert not any(path.parent.exists() for path in in_files)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    model(*example[0]).sum().backward()
    assert len(called) == 1


class Reversible(torch.autograd.Function):
    """Computes gradients in a backward inside its own, as blocks do that recompute their inputs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, block: nn.Module) -> Tensor:
        ctx.block = block
        ctx.save_for_backward(x)
        return block(x)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            ctx.block(x).backward(gradients[0])
        return x.grad, None


class TwiceUsed(Blocks):
    """Blocks one of which gets its gradients in two parts."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(Reversible.apply(x.sigmoid() + 0 * self.blocks[1][0].bias, self.blocks[0]))  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("lost", [False, True])
def test_gradients_in_parts_are_added(lost: bool, in_files: list[Path]) -> None:
    torch.manual_seed(0)
    model, x = TwiceUsed(64, 2), torch.randn(128, 64)
    layers = capture_layers(model, None, (x,), evaluates=False)
    verdict = compare_steps(model, losing(layers) if lost else layers, ((x,), {}))
    assert in_files
    assert ("the gradient" in str(verdict)) if lost else verdict is None


@pytest.mark.parametrize("missing", ["memory", "disk", "folder"])
def test_what_fits_nowhere_is_said(
    missing: str, case: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The log says that nothing was compared, and what was missing."""
    if missing == "memory":
        monkeypatch.setattr(trial, "available_bytes", lambda: 1000)
        reason = "its weights and its largest operator do not fit into the memory that is free (1000 B now)"
    elif missing == "disk":
        usage = shutil.disk_usage(ROOT)
        monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=10 * MIB))
        reason = "the 10 MiB free in"
    else:
        monkeypatch.setattr(trial, "_file_system", lambda folder: "tmpfs")
        reason = "lie in memory; set TMPDIR"
    monkeypatch.setattr(StepMemory, "holds_weights", lambda self: False)
    with caplog.at_level(logging.WARNING):
        assert compare_steps(*case) is None
    assert "the captured Blocks was not compared with a step of the module itself: " in caplog.text
    assert reason in caplog.text


class Transformed(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.func.grad(lambda y: (y**3).sum())(x))


def test_a_model_that_fails_only_with_files_is_named(in_files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Code that transforms functions refuses saved-tensor hooks: that is no error of the model, which is captured
    where memory suffices.
    """
    model, x = Transformed(64, 2), torch.randn(128, 64)
    with pytest.raises(CapslogError, match="it does not fit into memory, and torch puts no tensors on disk for torch"):
        Chain.from_module(model, None, (x,), evaluates=False)
    monkeypatch.undo()
    assert len(Chain.from_module(model, None, (x,), evaluates=False))


def test_one_call_that_fits_nowhere_is_refused(case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "available_bytes", lambda: 1000)
    with pytest.raises(CapslogError, match="Blocks cannot be run on its example: its weights and its largest operator"):
        try_model(case[0], *case[2], opaque.OpaqueCalls({}))


TENSORS: dict[str, Callable[[], Tensor]] = {
    "transposed": lambda: torch.randn(64, 96).t(),
    "columns": lambda: torch.randn(64, 960)[:, :96],
    "expanded": lambda: torch.randn(96).expand(64, 96),
    "placed": lambda: torch.randn(6400)[100:],
    "bfloat16": lambda: torch.randn(64, 192).bfloat16(),
    "conjugate": lambda: torch.randn(64, 96, dtype=torch.complex64).conj(),
    "mask": lambda: torch.randn(128, 192) > 0,
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_comes_back_from_its_file(name: str, tmp_path: Path) -> None:
    tensor = TENSORS[name]()
    kept = StepMemory(nn.Linear(1, 1), tmp_path).keep(tensor)
    (file,) = tmp_path.iterdir()
    assert file.stat().st_size <= tensor.numel() * tensor.itemsize
    assert torch.equal(kept(), tensor)
    assert kept().dtype == tensor.dtype
    if name not in ("columns", "conjugate"):
        assert kept().stride() == tensor.stride()
    kept().zero_()
    assert torch.equal(kept(), tensor)  # each caller gets a copy
    del kept
    assert not list(tmp_path.iterdir())


def test_a_saved_tensor_that_changes_is_noticed(tmp_path: Path) -> None:
    """Torch notices it, too: a model that writes into a tensor of its backward fails in both steps, or in none."""
    x = torch.randn(64, 96, requires_grad=True)
    with StepMemory(nn.Linear(1, 1), tmp_path).saving():
        y = x.exp()
        z = y.sum()
        assert list(tmp_path.iterdir())
        with torch.no_grad():
            y.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            z.backward()


def test_an_operator_is_stopped_before_it_takes_what_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operators with a large result of small inputs, such as a table of all pairs, are stopped, too."""
    monkeypatch.setattr(trial, "available_bytes", lambda: 100 * MIB)
    row = torch.randn(1 << 16)
    with MemoryGuard(StepMemory(nn.Linear(1, 1))):
        assert (row[:, None] * row[None, :16]).shape == (1 << 16, 16)
        with pytest.raises(NoRoom):
            row[:, None] * row[None, :]
        with pytest.raises(NoRoom):
            torch.zeros(1 << 40)
