"""The parts of a run that do not depend on cuts: chain, data, loss and engine options; and the checks of a device.

A process builds the parts once from config and plan, for all of its engines. The weights that a run begins with
(`init_from`) come from one of our checkpoints or from a file that the workload can read.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from varuna_capslog import accelerator
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.units import format_bytes
from varuna_capslog.config.settings import Config, Train
from varuna_capslog.engine.offload import TierOptions
from varuna_capslog.engine.recipe import EngineOptions, LearningRate, LossScale, Recipe
from varuna_capslog.model.chain import Chain
from varuna_capslog.model.layer import weights_of_parts
from varuna_capslog.model.workload import DataSource, Workload
from varuna_capslog.plans.plan import Plan
from varuna_capslog.training.checkpoint import latest_checkpoint, open_checkpoint, passed_over
from varuna_capslog.training.feed import DataWatch, Feed
from varuna_capslog.training.journal import check_loggers
from varuna_capslog.training.stored_layers import read_for

__all__ = [
    "RunSetup",
    "build_chain",
    "check_devices",
    "check_nccl_variables",
    "check_plan",
    "check_room",
    "choose_device",
    "initialise",
    "last_step",
    "set_up_run",
]


_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunSetup:
    """Parts of a run.

    Attributes:
        chain: with the run's initial weights, equal on every rank; layers of factories are not built yet.
        source: the training data.
        total_steps: number of the last step; None where only time limits the run.
        left_out: one line for each entry of the model or of `init_from` that was not loaded.
        facts: about the training data, stored in checkpoints; see `Workload.data_facts`.
    """

    config: Config
    workload: Workload
    chain: Chain
    source: DataSource
    options: EngineOptions
    total_steps: int | None
    left_out: Sequence[str] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def run_dir(self) -> Path:
        """Folder of the run."""
        return Path(self.config.run_dir)

    @property
    def checkpoints(self) -> Path:
        """Folder of the run's checkpoints."""
        return self.run_dir / "checkpoints"

    def feed(self, local: Sequence[int] = (), judged: Sequence[int] = (), watch: DataWatch | None = None) -> Feed:
        """Feed of a rank that loads the microbatches `local` and computes the losses of the microbatches `judged`."""
        train = self.config.train
        return Feed(self.source, train.minibatch_size, train.microbatch_size, train.seed, local, judged, watch)


def build_chain(config: Config, workload: Workload) -> tuple[Chain, list[str]]:
    """Build the whole chain with the run's initial weights, equal on every rank; also return `RunSetup.left_out`."""
    torch.manual_seed(config.train.seed)
    chain = workload.chosen_chain()
    if config.init_from is None:
        return chain, []
    # only values are loaded; optimizer, step and data order start afresh
    return chain, initialise(chain, workload, config.init_from, config.init_skip)


def last_step(train: Train, samples: int) -> int | None:
    """Number of a run's last step. samples: size of the training data. None where only time limits the run."""
    limits = [] if train.epochs is None else [train.epochs * (samples // train.minibatch_size)]
    if train.max_steps is not None:
        limits.append(train.max_steps)
    return min(limits, default=None)


def set_up_run(config: Config, workload: Workload, plan: Plan | None = None) -> RunSetup:
    """Build the parts of a run; the engine uses the actions of `plan`, if it has any."""
    chain, left_out = build_chain(config, workload)
    source, train, pipeline = workload.train_data(), config.train, config.pipeline
    steps_per_epoch = len(source) // train.minibatch_size
    drop = train.lr_drop_steps if train.lr_drop_epochs is None else train.lr_drop_epochs * steps_per_epoch
    last = last_step(train, len(source))
    rate = LearningRate(
        train.lr,
        train.warmup_steps,
        drop,
        train.lr_drop_factor,
        train.lr_schedule,
        train.lr_decay_steps or last or 0,
        train.lr_final_factor,
    )
    options = replace(
        EngineOptions.of_config(config).settled(),
        transport=pipeline.transport,
        precision=train.precision,
        weights=train.weights,
        compile=train.compile,
        seed=train.seed,
        clip_norm=train.clip_norm,
        recipe=Recipe.of_config(train, rate),
        actions=plan.actions if plan is not None else None,
        loss_scale=_loss_scale(train),
        tier=TierOptions(
            pipeline.host_tier, pipeline.host_capacity, pipeline.host_bandwidth, max(60.0, pipeline.timeout_seconds)
        ),
    )
    facts = {"number of samples": len(source), **workload.data_facts()}
    return RunSetup(config, workload, chain, source, options, last, left_out, facts)


def _loss_scale(train: Train) -> LossScale | None:
    """Loss scale of the first step; None where the loss is not scaled."""
    if train.precision != "float16":
        return None
    return LossScale() if train.loss_scale == "dynamic" else LossScale(float(train.loss_scale), dynamic=False)


def check_plan(setup: RunSetup, plan: Plan) -> None:
    """Raise CapslogError if the plan, or a key of the config, does not fit the model that was built."""
    chain = setup.chain
    if plan.num_layers != len(chain):
        raise CapslogError(
            f"the plan is for {plan.num_layers} layers, the model has {len(chain)}: plan again with this config"
        )
    if plan.model is not None and plan.model != chain.name:
        raise CapslogError(f"the plan is for the model {plan.model!r}, the config builds {chain.name!r}: plan again")
    check_keys(setup.config.train, chain, setup.options.recipe)


def check_keys(train: Train, chain: Chain, recipe: Recipe) -> None:
    """Raise CapslogError for keys of `train` that name a missing logger or parameter; only shapes are needed."""
    check_loggers(train.loggers)
    # a misspelt key would silently have no effect
    parameters = chain.named_parameters()
    addresses = list(parameters)
    for text in train.lr_multipliers:
        if not any(text in address for address in addresses):
            raise CapslogError(
                f"train.lr_multipliers has the key {text!r}, which is part of no parameter's address; they look like "
                f"{', '.join(repr(address) for address in addresses[:: max(1, len(addresses) // 3)][:3])}"
            )
    recipe.check({address: parameter.dim() for address, parameter in parameters.items()})


def read_weights(path: Path, workload: Workload, chain: Chain) -> tuple[dict[str, Tensor], list[str]]:
    """Read tensors by address in the chain; also return lines on entries of the file that cannot be used.

    path: a checkpoint, a run folder (its newest complete checkpoint) or a file that the workload imports. Raises
    CapslogError where it does not exist or cannot be read.
    """
    if not path.exists():
        raise CapslogError(f"init_from={str(path)!r} does not exist; give a checkpoint folder or a weights file")
    if path.is_file():
        imported, skipped = workload.import_weights(path)
        return weights_of_parts(imported, chain.layers), skipped
    if (path / "checkpoints").is_dir():
        newest, damaged = latest_checkpoint(path / "checkpoints")
        if newest is None:
            raise CapslogError(
                f"init_from={str(path)!r} is a run without a whole checkpoint ({'; '.join(damaged) or 'it has none'}); "
                "give another"
            )
        for line in passed_over(newest, damaged):
            _log.warning("init_from: %s", line)
    else:
        newest = open_checkpoint(path)
    checkpoint = read_for(newest, chain)
    weights: dict[str, Tensor] = {}
    for layer in checkpoint.manifest["layers"]:
        weights |= {f"{layer}.{name}": tensor for name, tensor in checkpoint.weights(layer, mapped=True).items()}
    return weights, []


def initialise(chain: Chain, workload: Workload, path: Path, skip: Sequence[str]) -> list[str]:
    """Copy weights into a newly built chain; return one line for each entry that was left out.

    skip: entries whose address contains one of these texts keep their initial values. Raises CapslogError for a shape
    that does not match and is not skipped, or a file that shares no name with the model.
    """
    weights, skipped = read_weights(path, workload, chain)
    taken: dict[str, Tensor] = {}
    for address, target in chain.named_tensors().items():
        value = weights.pop(address, None)
        if any(text in address for text in skip):
            skipped.append(f"{address}: skipped by init_skip")
            continue
        if value is None:
            skipped.append(f"{address}: not in {path}")
            continue
        if value.shape != target.shape:
            raise CapslogError(
                f"init_from={str(path)!r}: {address!r} has shape {list(value.shape)}, the model wants "
                f"{list(target.shape)}; add a part of its name to init_skip to begin it afresh"
            )
        taken[address] = value
    if not taken:
        raise CapslogError(f"init_from={str(path)!r} shares no parameter name with the model; is it the right file?")
    chain.begin_with(taken)
    return [*skipped, *(f"{address}: unknown to the model" for address in weights)]


# -- Chooses the device of a worker, and checks that it meets the demands of the config.
#
# Workers call this before they build anything, so that a machine that does not fit the config causes one sentence with
# the key or variable to change, instead of a later error of the device or of NCCL.


def choose_device(wish: str, local_rank: int) -> torch.device:
    """Return the device for `device: wish`. Raises CapslogError with torch's reason where the type is unusable here."""
    kind = accelerator.auto_type() if wish == "auto" else wish
    reason = accelerator.why_unusable(kind)
    if reason is not None:
        raise CapslogError(f"device={wish}, but torch can use no such device here ({reason}); set device=cpu or auto")
    devices = accelerator.all_devices(kind)
    device = devices[local_rank % len(devices)]
    accelerator.select(device)
    return device


def check_devices(transport: str, device: torch.device, local_rank: int) -> None:
    """Check that `pipeline.transport` can connect this worker; gloo always can.

    local_rank: number of this worker on its machine. Raises CapslogError: nccl without a GPU for each worker, or with
    environment variables that forbid all of its transports.
    """
    if transport != "nccl":
        return
    count = len(accelerator.all_devices("cuda"))
    if device.type != "cuda" or local_rank >= count:
        raise CapslogError(
            f"pipeline.transport=nccl needs one GPU per rank, but worker {local_rank} of this machine runs on "
            f"{device.type}, and there are {count} GPUs; set pipeline.transport=gloo, or start fewer workers here"
        )
    check_nccl_variables(os.environ, [name for _, name in socket.if_nameindex()])


def check_nccl_variables(environment: Mapping[str, str], interfaces: Iterable[str]) -> None:
    """Check that NCCL's variables allow a connection to other ranks; see "Environment Variables" in NCCL's manual.

    Two GPUs of one machine communicate directly (P2P), through shared memory (SHM), or, as between machines, through
    InfiniBand or sockets. The first connection always uses sockets, over this machine's network `interfaces`. Raises
    CapslogError, with the variable to change, where no interface is allowed, or no transport.
    """
    wanted = environment.get("NCCL_SOCKET_IFNAME", "")
    names = sorted(interfaces)
    if wanted and not any(_matches(name, wanted) for name in names):
        raise CapslogError(
            f"NCCL_SOCKET_IFNAME={wanted} leaves none of this machine's network interfaces ({', '.join(names)}), so "
            "that NCCL cannot meet the other ranks; change or unset it, or set pipeline.transport=gloo"
        )
    network = environment.get("NCCL_NET", "")
    if network == "IB" and _is_on(environment, "NCCL_IB_DISABLE"):
        others = [name for name in ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE") if _is_on(environment, name)]
        forbidden = f" ({' and '.join(f'{name}=1' for name in others)} forbid the rest)" if others else ""
        raise CapslogError(
            f"NCCL_NET=IB and NCCL_IB_DISABLE=1 leave NCCL no network{forbidden}; unset one of the two, or set "
            "pipeline.transport=gloo"
        )


def _is_on(environment: Mapping[str, str], name: str) -> bool:
    return environment.get(name, "0") not in ("", "0")


def _matches(name: str, wanted: str) -> bool:
    """True where NCCL may use an interface. wanted: prefixes of names; exact names after `=`; exclusions after `^`."""
    excluding, listed = wanted.startswith("^"), wanted.removeprefix("^")
    exact, listed = listed.startswith("="), listed.removeprefix("=")
    matches = any(name == pattern if exact else name.startswith(pattern) for pattern in listed.split(",") if pattern)
    return matches is not excluding


def check_room(device: torch.device, predicted: int | None, worker_name: str) -> None:
    """Check that an accelerator has the free memory that the plan predicts for this worker; called before any is used.

    predicted: bytes of the rank's peak; None: no check. worker_name: for the error, such as "rank 2". Raises
    CapslogError where other processes leave too little memory.
    """
    if device.type == "cpu" or predicted is None:
        return
    free, total = accelerator.memory_info(device)
    if predicted > free:
        raise CapslogError(
            f"{worker_name} needs {format_bytes(predicted)} of {device}, but only {format_bytes(free)} of its "
            f"{format_bytes(total)} are free: other processes fill it; end them, choose another device "
            "(of CUDA's with CUDA_VISIBLE_DEVICES), or plan for what is free with pipeline.capacity"
        )
