"""Compares plans by the old estimate of seconds, without classes of operators, with plans by today's estimate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

import varuna_capslog as capslog
from varuna_capslog.base.gpus import GPUS, Gpu
from varuna_capslog.planning.simulation import simulate_plan
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiles.record import Profile
from varuna_capslog.profiling.estimate import Memo, estimate_config
from varuna_capslog.profiling.estimation.operators import Work, work_of
from varuna_capslog.profiling.estimation.rates import Speed
from varuna_capslog.schedules import RunShape
from varuna_capslog.start.ordinary import OrdinaryModel, ordinary_config

__all__ = ["Change", "changes"]

CARD, DEVICES, MICROBATCHES = "a100-80gb", 4, 16
ONE_PIPELINE = {"train.accumulation_blocks": 1}
"""Settings that keep the default planner from giving stages replicas, whose plans have no cuts."""
_CONVOLUTIONS = frozenset({torch.ops.aten.convolution, torch.ops.aten.convolution_backward})


@dataclass(frozen=True)
class Roofline(Speed):
    """Roofline estimate, as used until version 2a778569: an operator takes the longest of its FLOPs, bytes and launch.

    FLOPs by torch's registry, for every type at 70 % of the float32 rate, those of convolutions at half of TF32's;
    bytes at 80 % of the bandwidth.
    """

    gpu: Gpu = GPUS[CARD]

    __hash__ = Speed.__hash__

    def count(self, total: Work, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        if not work_of(func, args, kwargs, result):  # a view
            return
        flops_of = flop_registry.get(func.overloadpacket)
        flops = 0.0 if flops_of is None else flops_of(*args, **kwargs, out_val=result)
        rate = 0.7 * self.gpu.float32_flops
        if func.overloadpacket in _CONVOLUTIONS:
            rate = max(rate, 0.5 * self.gpu.tensor_flops)
        moved = sum(tensor.numel() * tensor.itemsize for tensor in _tensors((args, tuple(kwargs.values()), result)))
        seconds = max(flops / rate, moved / (0.8 * self.gpu.bytes_per_second), 5e-6)
        total["seconds"] = total.get("seconds", 0.0) + seconds

    def seconds(self, work: Work) -> float:
        return work.get("seconds", 0.0)


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (tuple, list)):
        for value in values:
            yield from _tensors(value)


def _convnext() -> nn.Module:
    import torchvision

    return torchvision.models.convnext_base()


def _regnet() -> nn.Module:
    import torchvision

    return torchvision.models.regnet_y_16gf()


def _opt() -> nn.Module:
    from transformers import OPTConfig, OPTForCausalLM

    config = OPTConfig(
        hidden_size=1024, ffn_dim=4096, num_hidden_layers=24, num_attention_heads=16, vocab_size=50272,
        word_embed_proj_dim=512, do_layer_norm_before=False, layerdrop=0.0, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        return OPTForCausalLM(config)


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=8192, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        return LlamaForCausalLM(config)


MODELS: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "ConvNeXt-B": (_convnext, ["x=float32[32,3,224,224]"]),
    "RegNetY-16GF": (_regnet, ["x=float32[32,3,224,224]"]),
    "OPT-350M": (_opt, ["input_ids=int64[4,1024]:50272", "labels=int64[4,1024]:50272"]),
    "Llama-3-8B": (_llama, ["input_ids=int64[1,4096]:128256", "labels=int64[1,4096]:128256"]),
}


@dataclass(frozen=True)
class Change:
    """Plans and step times by old and by new seconds.

    Attributes:
        old, new: first layers of all stages of one pipeline, by old and by new seconds.
        free_old, free_new: layers of all stages where the planner may also give them replicas, by the same seconds.
        old_step, new_step, free_step: seconds of a step with `old`, `new` and `free_new`, all played by new seconds.
    """

    model: str
    precision: str
    layers: int
    old: Sequence[int]
    new: Sequence[int]
    free_old: str
    free_new: str
    old_step: float
    new_step: float
    free_step: float


def changes() -> Iterator[Change]:
    """Yield the changes for well-known models on four A100, in float32 and in autocast of bfloat16."""
    for name, (make, inputs) in MODELS.items():
        try:
            model = make()
        except ImportError as error:
            print(f"left out: {name} needs pip install {error.name}")
            continue
        for precision in ("float32", "bfloat16"):
            before, after = (_profile(model, inputs, precision, speed) for speed in (Roofline("old", {}), None))
            batch = MICROBATCHES * int(inputs[0].split("[")[1].split(",")[0])
            old, new = (_plan(profile, batch, ONE_PIPELINE) for profile in (before, after))
            free_old, free_new = (_plan(profile, batch, {}) for profile in (before, after))
            run = RunShape.of_conditions(after.conditions)
            steps = [simulate_plan(after, plan, run=run).step_seconds for plan in (old, new, free_new)]
            cuts, stages = (old.cut_list, new.cut_list), (_stages(free_old), _stages(free_new))
            yield Change(name, precision, after.num_layers, *cuts, *stages, *steps)


def _plan(profile: Profile, batch: int, settings: Mapping[str, Any]) -> Plan:
    return capslog.plan(profile, devices=DEVICES, minibatch_size=batch, settings=settings)


def _stages(plan: Plan) -> str:
    """Return the layers of all stages, stages with the same layers once and with their number."""
    counts = Counter(stage.spans for stage in plan.stages)
    return ", ".join(spans if count == 1 else f"{count} x {spans}" for spans, count in counts.items())


def _profile(model: nn.Module, inputs: list[str], precision: str, speed: Speed | None) -> Profile:
    config = ordinary_config(
        OrdinaryModel(model, inputs),
        {"devices": DEVICES},
        device=f"cuda:{CARD}",
        settings={"train.precision": precision},
    )
    memo = Memo()
    if speed is not None:
        memo.speeds["cuda", CARD, config.train.threads] = speed
    return estimate_config(config, memo=memo)
