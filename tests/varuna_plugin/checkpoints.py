"""Jobs of the workers in the checkpoint tests: save, resume under another cut list, write as Varuna does."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.varuna_plugin import models
from tests.varuna_plugin.cases import Case, Outcome, joined, patched, stage_map
from varuna_capslog.engine.communicator import Communicator


def train_and_save(communicator: Communicator, case: Case, folder: Path, at: int) -> dict[str, Any]:
    """Train `at` steps and save; return the listing of the checkpoint's folder and this rank's random state."""
    with patched(case.cuts) as varuna:
        trainer, _, optimizer = build(varuna, case)
        for step in range(at):
            one_step(trainer, optimizer, case, step)
        optimizer.param_groups[0]["lr"] = 0.05
        trainer.checkpoint(str(folder))
        return {"files": sorted(os.listdir(folder / f"varuna_ckpt_{at}")), "random": torch.get_rng_state()}


def load_and_train(communicator: Communicator, case: Case, folder: Path, at: int) -> Outcome | str:
    """Load step `at` into a freshly initialised model under the case's cuts and train one more step."""
    with patched(case.cuts) as varuna:
        trainer, model, optimizer = build(varuna, case, seed=7)
        try:
            trainer.load_checkpoint(str(folder), at)
        except ValueError as error:
            return str(error)
        assert trainer.iteration == at
        outcome = Outcome()
        loss, _, norm = one_step(trainer, optimizer, case, at)
        outcome.losses, outcome.norms = [loss], [norm]
        outcome.parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
        outcome.buffers = {name: b.clone() for name, b in model.named_buffers()}
        trainer.eval()
        outcome.evaluation = trainer.evaluate(joined(case.feed(at)[trainer.rank_within_stage]))
        return outcome


def random_state_after_load(communicator: Communicator, case: Case, folder: Path, at: int) -> Tensor:
    with patched(case.cuts) as varuna:
        trainer, _, _ = build(varuna, case, seed=7)
        trainer.load_checkpoint(str(folder), at)
        return torch.get_rng_state()


def break_while_writing(communicator: Communicator, case: Case, folder: Path) -> str:
    """Save while the last stage cannot write one of its files; return the error."""
    from varuna_capslog.varuna_plugin import checkpoint

    with patched(case.cuts) as varuna:
        trainer, _, optimizer = build(varuna, case)
        one_step(trainer, optimizer, case, 0)
        real = checkpoint.write_synced

        def full(path: Path, state: Any) -> Any:
            if path.name == f"opt-state-{case.cuts[-1] if case.cuts else 0}":
                raise OSError(28, "No space left on device")
            return real(path, state)

        checkpoint.write_synced = full
        try:
            trainer.checkpoint(str(folder))
        except ValueError as error:
            return str(error)
        finally:
            checkpoint.write_synced = real
        return "written"


def build(varuna: Any, case: Case, seed: int = 0) -> tuple[Any, Any, Any]:
    torch.manual_seed(seed)
    model = models.Model(varuna.CutPoint, **case.model)
    mapping = stage_map(case.stages, case.replicas)
    trainer = varuna.Varuna(model, mapping, models.get_batch, case.batch_size, case.chunk, device="cpu")
    optimizer = case.make_optimizer(trainer.parameters())
    trainer.set_optimizer(optimizer)
    return trainer, model, optimizer


def one_step(trainer: Any, optimizer: Any, case: Case, step: int) -> Any:
    result = trainer.step(joined(case.feed(step)[trainer.rank_within_stage]), case.clip)
    optimizer.step()
    trainer.zero_grad()
    return result


def write_as_varuna(communicator: Communicator, folder: Path, shard: bool) -> dict[str, Any]:
    """Let unpatched Varuna build its stages, take made-up gradients and write a checkpoint. It cannot train here."""
    rank_folder = folder / f"rank-{communicator.rank}"
    rank_folder.mkdir()
    # its pickles go into the current folder, and rank 0's are for all
    os.chdir(folder)
    with contextlib.redirect_stdout(io.StringIO()):
        import varuna
        from varuna import checkpoint, partitioned_model, utils

        for module in (checkpoint, partitioned_model, utils):
            module.VARUNA_TEMP_FOLDER = str(rank_folder)
        torch.manual_seed(0)
        model = models.OneTensor(varuna.CutPoint)
        mapping = stage_map(2, 1)
        trainer = varuna.Varuna(
            model, mapping, models.one_tensor_batch, 8, 2, device="cpu", from_cache=False, local_rank=communicator.rank
        )
        optimizer = torch.optim.AdamW(trainer.parameters(), lr=0.02)
        trainer.set_optimizer(optimizer)
        for name, parameter in model.named_parameters():
            parameter.grad = torch.full_like(parameter, 0.1 * len(name))
        optimizer.step()
        trainer.iteration = 1
        trainer.checkpoint(str(folder / "store"), shard=shard)
    dist.barrier()
    shutil.rmtree(rank_folder)
    return state_of(model, optimizer)


def load_as_plugin(communicator: Communicator, folder: Path, cuts: list[int]) -> dict[str, Any]:
    with patched(cuts) as varuna:
        torch.manual_seed(5)
        model = models.OneTensor(varuna.CutPoint)
        trainer = varuna.Varuna(model, stage_map(len(cuts), 1), models.one_tensor_batch, 8, 2, device="cpu")
        optimizer = torch.optim.AdamW(trainer.parameters(), lr=0.5)
        trainer.set_optimizer(optimizer)
        trainer.load_checkpoint(str(folder / "store"), 1)
        return state_of(model, optimizer)


def load_as_varuna(communicator: Communicator, folder: Path, at: int) -> dict[str, Any]:
    """Read a checkpoint of ours with unpatched Varuna's own functions, for a stage of two pieces."""
    with contextlib.redirect_stdout(io.StringIO()):
        from varuna import checkpoint

        state = checkpoint.load_varuna_checkpoint(communicator.rank, 2, 4, str(folder / f"varuna_ckpt_{at}"))
        written = checkpoint.num_params_written(str(folder), at)
    return {"state": state, "written": written}


def save_one_tensor(communicator: Communicator, folder: Path) -> dict[str, Any]:
    with patched([0, 2]) as varuna:
        torch.manual_seed(0)
        model = models.OneTensor(varuna.CutPoint)
        trainer = varuna.Varuna(model, stage_map(2, 1), models.one_tensor_batch, 8, 2, device="cpu")
        optimizer = torch.optim.AdamW(trainer.parameters(), lr=0.5)
        trainer.set_optimizer(optimizer)
        trainer.checkpoint(str(folder), step=1)
        return {name: p.detach().clone() for name, p in model.named_parameters()}


def state_of(model: Any, optimizer: Any) -> dict[str, Any]:
    return {
        "parameters": {name: p.detach().clone() for name, p in model.named_parameters()},
        "moments": {name: dict(optimizer.state[p]) for name, p in model.named_parameters() if p in optimizer.state},
        "lr": optimizer.param_groups[0]["lr"],
    }
