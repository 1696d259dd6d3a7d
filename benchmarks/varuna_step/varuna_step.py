"""Compares a training step on Varuna with the plugin and on Varuna with a minimal shim that lets it run here.

    PYTHONPATH=/path/to/varuna OMP_NUM_THREADS=1 python benchmarks/varuna_step/varuna_step.py

Two ranks on this machine, `Linear(width, width)` eight times with a CutPoint between every two, 16 microbatches of 4
rows. The shim repairs only the parts that stop Varuna on a CPU (random state, device, task list) and replaces apex's
three kernels by torch's functions; the rest is Varuna's code. Both are interleaved in the same two processes; CPU time
of a whole process.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import io
import multiprocessing
import os
import pstats
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

LAYERS, ROWS, MICROBATCHES, STEPS = 8, 4, 16, 12


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--widths", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--profile", choices=["shim", "plugin"], help="print rank 0's profile of one variant instead")
    parser.add_argument("--rank", type=int, default=0)
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ends = [context.Pipe() for _ in range(2)]
        workers = [
            context.Process(target=_serve, args=(rank, ends[rank][1], folder, vars(args)), daemon=True)
            for rank in range(2)
        ]
        for worker in workers:
            worker.start()
        results = [ours.recv() for ours, _ in ends]
        for worker in workers:
            worker.join()
    if args.profile:
        sys.stdout.write(results[args.rank])
        return
    for width in args.widths:
        for rank, seconds_by_width in enumerate(results):
            shim, plugin = seconds_by_width[width]["shim"], seconds_by_width[width]["plugin"]
            ratios = [b / a for a, b in zip(shim, plugin, strict=True)]
            sys.stdout.write(
                f"width {width:5d} rank {rank}: shim {1e3 * min(shim):7.2f} ms, plugin {1e3 * min(plugin):7.2f} ms CPU "
                f"per step; ratio of rounds: median {statistics.median(ratios):.2f} "
                f"({min(ratios):.2f} to {max(ratios):.2f}), of the best {min(plugin) / min(shim):.2f}\n"
            )


def _serve(rank: int, pipe: Any, folder: str, args: dict[str, Any]) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.chdir(folder)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    with contextlib.redirect_stdout(io.StringIO()):
        if args["profile"]:
            pipe.send(_profile(args["profile"], args["widths"][0]))
            return
        seconds_by_width: dict[int, dict[str, list[float]]] = {}
        for width in args["widths"]:
            rows = seconds_by_width[width] = {"shim": [], "plugin": []}
            for _ in range(args["rounds"]):
                for variant in rows:
                    rows[variant].append(min(_steps(variant, width, STEPS)))
        pipe.send(seconds_by_width)


def _profile(variant: str, width: int) -> str:
    profiler, out = cProfile.Profile(), io.StringIO()
    _steps(variant, width, 60, profiler)
    pstats.Stats(profiler, stream=out).sort_stats("tottime").print_stats(32)
    return out.getvalue()


def _steps(variant: str, width: int, count: int, profiler: cProfile.Profile | None = None) -> list[float]:
    """Return the CPU seconds of each step except the first."""
    import torch

    with _patched(variant) as varuna:
        torch.manual_seed(0)
        model = _model(varuna.CutPoint, width)
        size = ROWS * MICROBATCHES
        batch = {"x": torch.randn(size, width)}
        trainer = varuna.Varuna(
            model,
            "0;1;",
            lambda n, device=None: {"x": torch.randn(n, width)},
            size,
            ROWS,
            device="cpu",
            from_cache=False,
        )
        if variant == "shim":
            trainer.shared_weights = []  # its norm iterates over them; its constructor does not take an empty list
        held = sum(parameter.numel() for parameter in model.parameters())
        assert held == LAYERS // 2 * width * (width + 1), held
        trainer.config["device"] = "cpu"
        optimizer = torch.optim.SGD(trainer.parameters(), lr=1e-3)
        trainer.set_optimizer(optimizer)
        seconds = []
        for step in range(count + 1):
            if profiler is not None and step == 1:
                profiler.enable()
            began = time.process_time()
            trainer.step(batch)
            optimizer.step()
            trainer.zero_grad()
            seconds.append(time.process_time() - began)
        if profiler is not None:
            profiler.disable()
        return seconds[1:]


def _model(cut: Callable[[], Any], width: int) -> Any:
    from torch import Tensor, nn

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            # unpatched Varuna calls all modules: those that a stage skips return None
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(LAYERS))
            self.cuts = nn.ModuleList(cut() for _ in range(LAYERS - 1))

        def forward(self, x: Tensor) -> Tensor:
            for layer, cut in zip(self.layers, self.cuts, strict=False):
                x = cut(layer(x))
            return self.layers[-1](x).square().mean()

    return Model()


@contextlib.contextmanager
def _patched(variant: str) -> Iterator[Any]:
    """Patch Varuna with the plugin, or with the shim."""
    import torch
    import varuna
    import varuna.partitioned_model
    import varuna.utils
    import varuna.varuna

    import varuna_capslog.varuna_plugin as plugin
    from varuna_capslog.varuna_plugin.executor import varuna_tasks
    from varuna_capslog.varuna_plugin.install import Patches

    if variant == "plugin":
        plugin.install()
        plugin.configure(timeout_seconds=60.0)
        try:
            yield varuna
        finally:
            plugin.uninstall()
        return
    patches = Patches()
    patches.replace(varuna.partitioned_model, "save_rng_states", lambda device: torch.get_rng_state())
    patches.replace(varuna.partitioned_model, "restore_rng_states", lambda state, device: torch.set_rng_state(state))
    patches.replace(varuna.utils, "generate_schedule", varuna_tasks)
    patches.replace(varuna.varuna, "torch", _CpuTorch())
    for name, value in _kernels().items():
        vars(varuna.varuna).setdefault(name, None)  # where apex is not installed
        patches.replace(varuna.varuna, name, value)
    try:
        yield varuna
    finally:
        patches.undo()


class _CpuTorch:
    """Stand-in for torch, with `torch.cuda.IntTensor` in host memory."""

    def __init__(self) -> None:
        import torch

        self._torch, self.cuda = torch, SimpleNamespace(IntTensor=torch.IntTensor)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torch, name)


def _kernels() -> dict[str, Any]:
    """Return apex's functions that Varuna calls in a step: (a * scale) of a list, its norm, views of a flat tensor."""
    import torch

    def scale(chunk: int, overflow: Any, lists: list[list[Any]], factor: float) -> None:
        torch._foreach_copy_(lists[1], lists[0])
        if factor != 1.0:
            torch._foreach_mul_(lists[1], factor)

    def norm(chunk: int, overflow: Any, lists: list[list[Any]], per_tensor: bool) -> tuple[Any, None]:
        return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(lists[0]))).reshape(1), None

    return {
        "amp_C": SimpleNamespace(multi_tensor_scale=scale, multi_tensor_l2norm=norm),
        "apex_C": SimpleNamespace(unflatten=torch._utils._unflatten_dense_tensors),
        "multi_tensor_applier": lambda kernel, overflow, lists, *rest: kernel(65536, overflow, lists, *rest),
    }


if __name__ == "__main__":
    main()
