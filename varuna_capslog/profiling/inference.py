"""Profiles for inference: one forward of every layer and of every two neighbours, on fake tensors and without graphs.

The bytes come from `estimation/hollow`, without a training step. The layers' caches per sequence are listed separately,
since they stay in memory between microbatches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.model.chain import Chain, TensorSpec
from varuna_capslog.model.inference_model import InferenceModel
from varuna_capslog.model.signature import Signatures
from varuna_capslog.model.trace import ShapeTable
from varuna_capslog.profiles.conditions import CACHE_BYTES, DECODE_SECONDS, PURPOSE
from varuna_capslog.profiles.record import Profile
from varuna_capslog.profiles.runs import stage_runs
from varuna_capslog.profiling.calibration import corrected_speed
from varuna_capslog.profiling.conditions import RunConditions, profile_of, shapes_of
from varuna_capslog.profiling.estimate import key_of_range
from varuna_capslog.profiling.estimation.headroom import least_bytes, state_headroom
from varuna_capslog.profiling.estimation.hollow import ForwardRun, run_forward
from varuna_capslog.profiling.estimation.lifetimes import Recipes
from varuna_capslog.profiling.estimation.quirks import QUIRKS, QUIRKS_VERSION, Quirks
from varuna_capslog.profiling.estimation.rates import Speed
from varuna_capslog.profiling.trim import skeleton

__all__ = ["Served", "decoding", "estimate_inference"]

_SIMULATED = 6
"""Number of runs that are replayed in the allocator's simulation, as in `estimate`."""


@dataclass(frozen=True)
class Served:
    """Settings with which a model is served.

    microbatch_size: sequences, or samples, of one forward.
    device, gpu: "cpu" or "cuda", and the kind of GPU (`base.gpus`) that the seconds are for; "" for none.
    cache_bytes_per_token: of each layer with attention, for models without `cache_bytes`; None: no cache.
    """

    microbatch_size: int = 1
    device: str = "cpu"
    gpu: str = ""
    cache_bytes_per_token: int | None = None


def estimate_inference(model: InferenceModel, served: Served) -> Profile:
    """Return the inference profile of a model: per run the peak of one forward, weights (static) and nothing saved.

    Its conditions name the purpose, the cache of every layer for one sequence and, where layers cache, the seconds of
    every layer for the next token.

    Raises CapslogError: the model cannot be captured, or a layer cannot run on fake tensors; `cache_bytes_per_token` is
    given for a model that has `cache_bytes`, or has no tokens or no layer with attention.
    """
    size, speed = served.microbatch_size, corrected_speed(served.device, served.gpu)
    chain, specs = _captured(model, served)
    inputs, runs = model.profile_inputs(size), stage_runs(len(chain))
    forwards = _forwards(chain, specs, runs, served, speed)
    conditions = RunConditions(served.device, size, shapes_of(inputs), recompute=False, stage_inputs="device")
    rows = [
        conditions.row(
            run, (specs[run[0]], specs[run[1]]), (forward.peak_bytes, forward.weight_bytes, 0), (forward.seconds, 0.0)
        )
        for run, forward in zip(runs, forwards, strict=True)
    ]
    described: dict[str, Any] = {
        PURPOSE: "inference",
        "source": "estimated",
        "device": served.device,
        **({"gpu": served.gpu} if served.gpu else {}),
        "dtype": str(model.dtype).removeprefix("torch."),
        "microbatch_size": size,
        "input": shapes_of(inputs),
        "recompute": False,
        "peak_source": "lifetimes of fake storages",
        "quirks": sorted(name for name, quirk in QUIRKS.items() if served.device in quirk.devices),
        "quirks_version": QUIRKS_VERSION,
        "torch": torch.__version__,
        "seconds": f"classes({speed.name}), {speed.source}",
        "headroom": _headroom(forwards, served),
        "sequence": model.tokens,
        CACHE_BYTES: (caches := _cache_bytes(model, served, forwards[: len(chain)])),
    }
    if any(caches):
        try:
            described[DECODE_SECONDS] = _decode_seconds(model, caches, served, speed)
        except CapslogError as error:  # a plan by bytes does not need these seconds
            described["decode"] = f"not estimated: {error}"
    if limits := frozenset().union(*(forward.limits for forward in forwards)):
        described["limits"] = sorted(limits)
    return profile_of(chain, rows, "estimated", described, specs=specs)


def decoding(profile: Profile) -> Profile:
    """Return the profile of inference with `DECODE_SECONDS`, of the next token, as its forward seconds."""
    pairs = zip(profile.layers, profile.conditions[DECODE_SECONDS], strict=True)
    return replace(profile, layers=tuple(replace(layer, forward_seconds=seconds) for layer, seconds in pairs))


def _captured(model: InferenceModel, served: Served) -> tuple[Chain, list[dict[str, TensorSpec]]]:
    """Return the chain and the specs of the tensors across each cut, 0 .. L."""
    with torch.random.fork_rng(devices=[]):
        chain = skeleton(model, evaluates=True)
    with Quirks(served.device, served.gpu).dispatch():
        return chain, ShapeTable(chain, "cpu").boundaries(model.profile_inputs(served.microbatch_size))


def _forwards(
    chain: Chain,
    specs: Sequence[Mapping[str, TensorSpec]],
    runs: Sequence[tuple[int, int]],
    served: Served,
    speed: Speed,
) -> list[ForwardRun]:
    """Return the forward of each run of layers; equal runs are made once."""
    # new recipes: without graphs no tensor requires a gradient
    recipes, mode, signatures = Recipes(), FakeTensorMode(allow_non_fake_inputs=True), Signatures(chain.layers)
    run_of_key: dict[object, ForwardRun] = {}
    forwards = []
    for first, end in runs:
        key = key_of_range(chain, first, end, specs[first : end + 1], signatures)
        if key not in run_of_key:
            fresh = Quirks(served.device, served.gpu)
            run_of_key[key] = run_forward(mode, chain, (first, end), specs[first], fresh, speed, recipes)
        forwards.append(run_of_key[key])
    return forwards


def _decode_seconds(model: InferenceModel, caches: Sequence[int], served: Served, speed: Speed) -> list[float]:
    """Return the seconds of each layer for the next token of every sequence of a forward, with a full cache.

    The layers run for one token, and read their caches once. Raises CapslogError where the model cannot be captured for
    one token, or then has another number of layers.
    """
    chain, specs = _captured(model.of_next_token(), served)
    if len(chain) != len(caches):
        raise CapslogError(f"{model.name} has {len(caches)} layers for a prompt, but {len(chain)} for the next token")
    single = [(layer, layer + 1) for layer in range(len(chain))]
    reading = [speed.seconds({"bytes": float(served.microbatch_size * size)}) for size in caches]
    forwards = _forwards(chain, specs, single, served, speed)
    return [forward.seconds + seconds for forward, seconds in zip(forwards, reading, strict=True)]


def _cache_bytes(model: InferenceModel, served: Served, single: list[ForwardRun]) -> list[int]:
    """Return the cache of each layer for one sequence."""
    stated = served.cache_bytes_per_token
    if model.cache_bytes is not None:
        if stated is not None:
            raise CapslogError(
                f"--cache is given, but {model.name} says itself what its layers cache; leave --cache out"
            )
        return list(model.cache_bytes)
    if stated is None:
        return [0] * len(single)
    if model.tokens is None:
        raise CapslogError("--cache counts tokens, but the model's inputs have none; leave --cache out")
    if not any(forward.attends for forward in single):
        raise CapslogError("--cache is given, but no layer of the model attends to other tokens; leave --cache out")
    return [stated * model.tokens if forward.attends else 0 for forward in single]


def _headroom(forwards: list[ForwardRun], served: Served) -> dict[str, Any]:
    """Return the bytes that a device needs beyond a peak. GPUs communicate over NCCL when they serve.

    Weights and caches stay allocated, so only the tensors of a forward leave gaps: the headroom adds the bytes that the
    allocator needs beyond the peak of the largest runs, and has no factor for fragmentation.
    """
    if served.device == "cpu":
        return state_headroom(served.device, "gloo", [])
    stated = state_headroom(served.device, "nccl", [], served.gpu, communicators=2)
    largest = {
        forward.events: forward for forward in sorted(forwards, key=lambda forward: forward.peak_bytes)[-_SIMULATED:]
    }
    gaps = max(least_bytes([forward]) - forward.peak_bytes for forward in largest.values())
    origin = f"replayed by the allocator's rules: {len(largest)} runs"
    parts = stated["parts"] | {"gaps between tensors": {"bytes": gaps, "known": origin}}
    return stated | {"fixed_bytes": stated["fixed_bytes"] + gaps, "parts": parts}
