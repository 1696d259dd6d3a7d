"""`capslog.plan_decoding` and `capslog.decode`: greedy decoding with a key-value cache divided over several ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from varuna_capslog.base import units
from varuna_capslog.base.gpus import gpu_of, parse_device
from varuna_capslog.decoding.choice import DecoderShape, DecodingDevice, DecodingPlan, choose_shard
from varuna_capslog.planners.seconds import Link

if TYPE_CHECKING:
    from torch import nn

    from varuna_capslog.decoding.decoder import DecodedTokens
    from varuna_capslog.decoding.generation import Prompts
    from varuna_capslog.engine.communicator import Communicator

__all__ = ["decode", "plan_decoding"]


def plan_decoding(
    model: nn.Module | DecoderShape | str,
    *,
    degree: int,
    batch: int,
    length: int,
    bandwidth: str | float,
    latency: str | float = 0.0,
    device: str | None = None,
    capacity: str | int | None = None,
) -> DecodingPlan:
    """Choose whether to divide the cache by positions or by heads, for greedy decoding on `degree` ranks.

    Estimates both layouts and returns the faster of those that fit (`decoding/choice`), without bytes of activations.

    Args:
        model: a transformers model with the layers of Llama or GPT-2, on any device (the meta device, too); a folder
            with its config.json; or its sizes.
        batch: requests that are decoded together.
        length: tokens of each request, prompt and answer.
        bandwidth: of each rank's link, such as `"25GB/s"` or `"100Mbit"`.
        latency: seconds of one exchange between all ranks, or text such as `"20us"`.
        device: kind of GPU such as `"cuda:a100-80gb"`, whose data sheet gives speeds and memory; None: the estimate
            counts only messages.
        capacity: bytes of a rank's memory, or text such as `"40GiB"`; default: the memory of the kind, or no limit.

    Raises:
        CapslogError: an unknown number, size, kind or model; transformers is missing.
    """
    shape = model if isinstance(model, DecoderShape) else _shape(model)
    link = Link(float(units.parse_rate(bandwidth)), units.parse_latency(latency, "latency"))
    gpu = None if device is None else gpu_of(parse_device(device))
    room = None if gpu is None else gpu.memory_bytes
    if capacity is not None:
        room = units.parse_memory(capacity, "capacity")
    if gpu is None:
        return choose_shard(shape, batch, length, degree, link, DecodingDevice(room))
    # tensor cores multiply 16-bit numbers twice as fast as TF32
    flops = max(gpu.float32_flops, 2 * gpu.tensor_flops) if shape.itemsize < 4 else gpu.float32_flops
    return choose_shard(shape, batch, length, degree, link, DecodingDevice(room, gpu.bytes_per_second, flops))


def decode(
    model: nn.Module,
    prompts: Prompts,
    new_tokens: int,
    *,
    attention_mask: Prompts | None = None,
    shard: str = "sequence",
    ranks: Communicator | None = None,
) -> DecodedTokens:
    """Decode greedily on all ranks that torchrun has started; the tokens are those of transformers'
    `generate(do_sample=False)` for each request alone, with the model's generation config.

    Call it on every rank with the same model and prompts, which the ranks compare; every rank gets all tokens. Sums are
    added in rank order, so the same number of ranks always gives the same bits.

    Args:
        model: a transformers model with the layers of Llama or GPT-2, on the CPU or this rank's GPU; it is not changed.
        prompts: token ids of each request, as lists of any lengths or as a tensor [requests, tokens].
        attention_mask: 0 for every padding token; None: tokens equal to the generation config's `pad_token_id` are
            padding, unless that token ends answers.
        new_tokens: most new tokens of each request; the model's end-of-sequence token ends an answer sooner.
        shard: `"sequence"`: keys and values are divided by positions, and request i is decoded on rank i mod N with all
            weights. `"heads"`: heads and columns are divided.
        ranks: communicator of the ranks that decode; None: all ranks that torchrun has started, for one call in a
            process; see `engine.communicator.connected`.

    Raises:
        CapslogError: a prompt that cannot be decoded, an unknown model or key of its generation config, a number of
            ranks that does not divide heads, weights or prompts that differ between ranks, transformers is missing.
        PeerLost: another rank does not answer.
    """
    from varuna_capslog.decoding.decoder import decode_greedily

    if ranks is not None:
        return decode_greedily(model, prompts, new_tokens, ranks, shard, attention_mask)
    from varuna_capslog.engine.communicator import connected

    with connected("decoding") as joined:
        return decode_greedily(model, prompts, new_tokens, joined, shard, attention_mask)


def _shape(model: nn.Module | str) -> DecoderShape:
    from varuna_capslog.decoding.decoder import shape_of

    if isinstance(model, str):
        from varuna_capslog.model import hugging_face

        model, _ = hugging_face.model(model, trains=False, example=False)
    return shape_of(model)
