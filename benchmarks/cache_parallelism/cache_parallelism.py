"""Compares bytes and seconds of decoding with a cache sharded by positions and with one sharded by heads.

`count`: bytes that every rank sends for one token of every request, counted at the communicator and by the kernel
(TCP_INFO of all sockets), and by the formulas. `plans`: sharding that the planner chooses. `link`: seconds on slow
links, measured and planned. `seconds`: both shardings interleaved, in processes on this machine. `answers`: tokens
under random generation configs beside transformers' `generate`. `types`: the same by dtype, without a config.
"""

from __future__ import annotations

import argparse
import os
import random
import socket
import stat
import statistics
import struct
import time
from functools import partial
from typing import Any

import torch

from benchmarks.common import interleave, machine, median_ratio, run_ranks
from tests.decoding.test_decoder import generated
from tests.decoding.worlds import VOCABULARY as FEW_TOKENS
from tests.decoding.worlds import on_ranks, small_model
from varuna_capslog import plan_decoding
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.decoding.choice import (
    HEADS,
    SEQUENCE,
    SHARDS,
    DecoderShape,
    described_sequence_bytes,
    heads_bytes,
    printed_heads_bytes,
    printed_sequence_bytes,
    sequence_bytes,
)
from varuna_capslog.decoding.decoder import ShardedDecoder, decode_greedily, shape_of
from varuna_capslog.engine.communicator import Communicator
from varuna_capslog.planners.seconds import Link

VOCABULARY = 256


def llama(width: int, heads: int, kv_heads: int, layers: int = 1, inner: int = 1024, dtype=torch.bfloat16) -> Any:
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=inner,
        vocab_size=VOCABULARY,
        eos_token_id=None,
    )
    return transformers.LlamaForCausalLM(config).to(dtype)


def gpt2(width: int, heads: int) -> Any:
    import transformers

    sizes = {"n_embd": width, "n_head": heads, "n_layer": 1, "n_inner": 1024, "vocab_size": VOCABULARY}
    config = transformers.GPT2Config(**sizes, bos_token_id=None, eos_token_id=None)
    return transformers.GPT2LMHeadModel(config).to(torch.bfloat16)


# Each model has one layer and a narrow feed-forward: neither changes the bytes of a layer.
MODELS = {
    "Llama-7B (E 4096, 32 heads)": partial(llama, 4096, 32, 32),
    "Llama-3-8B (E 4096, 32 heads, 8 of keys)": partial(llama, 4096, 32, 8),
    "GPT-2 (E 768, 12 heads)": partial(gpt2, 768, 12),
    "GPT-2 XL (E 1600, 25 heads)": partial(gpt2, 1600, 25),
}


def acknowledged() -> int:
    """Return the bytes that this process has sent: those that peers of all its TCP sockets have acknowledged."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            is_socket = stat.S_ISSOCK(os.fstat(int(name)).st_mode)
            connection = socket.socket(fileno=os.dup(int(name))) if is_socket else None
        except OSError:
            continue  # closed meanwhile
        if connection is None:
            continue
        with connection:
            if connection.type == socket.SOCK_STREAM and connection.family in (socket.AF_INET, socket.AF_INET6):
                # linux/tcp.h: tcpi_bytes_acked stands after 8 bytes, 24 32-bit and 2 64-bit numbers
                total += struct.unpack_from("Q", connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256), 120)[
                    0
                ]
    return total


def counted(model: Any, shard: str, degree: int, batch: int, length: int) -> tuple[float, float]:
    """Return bytes (passed to the communicator, sent by the kernel) per rank, layer and token of every request."""
    prompts = [[(request + place) % VOCABULARY for place in range(length)] for request in range(batch)]
    seen: list[int] = []

    def steps_of(ranks: Communicator) -> int:
        decoder = ShardedDecoder(model, ranks, shard)
        logits = decoder.read(prompts, degree + 1)
        _look(ranks, seen)
        for _ in range(degree):
            logits = decoder.step(logits.argmax(-1))
        _look(ranks, seen)
        return decoder.wire.sent_bytes["step"]

    sent = sum(on_ranks(degree, steps_of, timeout_seconds=600))
    layers = model.config.num_hidden_layers
    return sent / degree / degree / layers, (seen[1] - seen[0]) / degree / degree / layers


def _look(ranks: Communicator, seen: list[int]) -> None:
    ranks.barrier()
    if ranks.rank == 0:
        time.sleep(0.2)  # until everything is acknowledged
        seen.append(acknowledged())
    ranks.barrier()


def count(arguments: argparse.Namespace) -> None:
    headings = ["layer of", "B", "length", "N", "thesis", "described", "formula", "counted", "kernel"]
    print(f"| {' | '.join([*headings, 'thesis', 'formula', 'counted', 'kernel', 'less'])} |")
    print("|---" * 14 + "|")
    for name, make in MODELS.items():
        torch.manual_seed(0)
        model = make()
        shape = shape_of(model)
        for batch, length, degree in [
            *((batch, 2, degree) for batch in (1, 8, 32) for degree in (2, 4, 8)),
            (8, 200, 4),
        ]:
            kib = [
                formula(shape, batch, degree)
                for formula in (printed_sequence_bytes, described_sequence_bytes, sequence_bytes)
            ]
            by_sequence = counted(model, SEQUENCE, degree, batch, length)
            row = [*kib, *by_sequence, printed_heads_bytes(shape, batch, degree), heads_bytes(shape, batch, degree)]
            cells = [f"{value / 1024:.2f}" for value in row]
            try:
                by_heads = counted(model, HEADS, degree, batch, length)
                cells += [f"{value / 1024:.2f}" for value in by_heads] + [f"{by_heads[0] / by_sequence[0]:.2f}"]
            except CapslogError as error:
                cells += [str(error).partition(";")[0], "", ""]
            print(f"| {name} | {batch} | {length} | {degree} | " + " | ".join(cells) + " |", flush=True)


def plans(arguments: argparse.Namespace) -> None:
    """Print the planner's choices for Llamas in bfloat16 on A100s."""
    models = {
        "Llama-7B": DecoderShape(32, 4096, 32, 32, 128, 11008, 2, 6476005376, 131072000, 131338240),
        "Llama-3-8B": DecoderShape(32, 4096, 32, 8, 128, 14336, 2, 6979321856, 525336576, 525602816),
        "Llama-3-70B": DecoderShape(80, 8192, 64, 8, 128, 28672, 2, 68451041280, 1050673152, 1051992064),
    }
    cases = [
        ("Llama-7B", 4, 1, 131072, "25GB/s", "20us"),
        ("Llama-7B", 4, 32, 8192, "25GB/s", "20us"),
        ("Llama-7B", 4, 512, 512, "25GB/s", "20us"),
        ("Llama-7B", 4, 512, 512, "2.5GB/s", "50us"),
        ("Llama-7B", 4, 32, 8192, "100MB/s", "100us"),
        ("Llama-7B", 4, 128, 4096, "25GB/s", "20us"),
        ("Llama-3-70B", 8, 64, 32768, "25GB/s", "20us"),
        ("Llama-3-70B", 8, 32, 32768, "25GB/s", "20us"),
        ("Llama-3-8B", 8, 16, 131072, "25GB/s", "20us"),
        ("Llama-3-8B", 16, 16, 131072, "25GB/s", "20us"),
    ]
    print("| model | N | B | length | link | sequence ms | heads ms | chosen | why |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name, degree, batch, length, bandwidth, latency in cases:
        plan = plan_decoding(
            models[name],
            degree=degree,
            batch=batch,
            length=length,
            bandwidth=bandwidth,
            latency=latency,
            device="cuda:a100-80gb",
        )
        times = [f"{1e3 * cost.seconds:.1f}" for cost in plan.costs]
        where = f"{bandwidth}, {latency}"
        print(f"| {name} | {degree} | {batch} | {length} | {where} | {' | '.join(times)} | {plan.shard} | {plan.why} |")


def _eight(decoder: ShardedDecoder, tokens: torch.Tensor) -> None:
    for _ in range(8):
        tokens = decoder.step(tokens).argmax(-1)


def timed(ranks: Communicator, batch: int, length: int, rounds: int) -> Any:
    """Return the seconds of interleaved rounds of 8 tokens with either sharding, on one rank."""
    torch.manual_seed(0)
    model = llama(1024, 16, 16, layers=4, inner=2816, dtype=torch.float32)
    prompts = [[(request + place) % VOCABULARY for place in range(length)] for request in range(batch)]
    runs = {}
    for shard in SHARDS:
        decoder = ShardedDecoder(model, ranks, shard)
        logits = decoder.read(prompts, 8 * (rounds + 4))

        runs[shard] = partial(_eight, decoder, logits.argmax(-1))
    return interleave(runs, rounds, ranks.barrier)


def seconds(arguments: argparse.Namespace) -> None:
    print(machine())
    for batch, length in ((2, 512), (16, 512), (16, 64)):
        times = run_ranks(timed, 2, batch, length, arguments.rounds)[0]
        cells = []
        for kind in (0, 1):
            runs = {name: [round_seconds[kind] / 8 for round_seconds in rows] for name, rows in times.items()}
            cells += [f"{1e3 * statistics.median(runs[shard]):.1f}" for shard in SHARDS]
            middle, low, high = median_ratio(runs[SEQUENCE], runs[HEADS])
            cells.append(f"{middle:.2f} ({low:.2f}..{high:.2f})")
        print(f"| {batch} | {length} | {' | '.join(cells)} |", flush=True)


class SlowLink:
    """Communicator whose exchanges take a slow link's latency plus the transfer time of this rank's messages."""

    def __init__(self, ranks: Communicator, link: Link) -> None:
        self._ranks, self._link = ranks, link
        self.rank, self.world_size = ranks.rank, ranks.world_size

    def exchange(self, outgoing: Any, wanted: Any, tag: int, device: torch.device) -> Any:
        sent = sum(message.nbytes for message in outgoing.values())
        time.sleep(self._link.latency_seconds + sent / self._link.bandwidth)
        return self._ranks.exchange(outgoing, wanted, tag, device)


def link(arguments: argparse.Namespace) -> None:
    """Print measured and planned seconds of a token on slow links; plans count only messages. Ranks are threads."""
    print("| N | B | link | sequence s | by the plan | heads s | by the plan | ratio | by the plan |")
    print("|---" * 9 + "|")
    for degree, batch, bandwidth, latency in (
        (2, 16, 2e4, 0.05),
        (4, 16, 2e4, 0.05),
        (4, 16, 4e5, 0.5),
        (8, 16, 2e4, 0.05),
    ):
        torch.manual_seed(0)
        model = llama(256, 8, 8, layers=2, inner=64, dtype=torch.float32)
        line = Link(bandwidth, latency)
        measured = {shard: _slow_seconds(model, shard, degree, batch, line) for shard in SHARDS}
        plan = plan_decoding(
            shape_of(model), degree=degree, batch=batch, length=20, bandwidth=bandwidth, latency=latency
        )
        planned = {cost.shard: cost.seconds for cost in plan.costs}
        cells = [f"{seconds_by_shard[shard]:.3f}" for shard in SHARDS for seconds_by_shard in (measured, planned)]
        cells += [
            f"{seconds_by_shard[SEQUENCE] / seconds_by_shard[HEADS]:.2f}" for seconds_by_shard in (measured, planned)
        ]
        print(
            f"| {degree} | {batch} | {bandwidth / 1e6:g} MB/s, {1e3 * latency:g} ms | {' | '.join(cells)} |", flush=True
        )


def _slow_seconds(model: Any, shard: str, degree: int, batch: int, line: Link) -> float:
    def rank_of(ranks: Communicator) -> float:
        decoder = ShardedDecoder(model, SlowLink(ranks, line), shard)  # type: ignore[arg-type]
        logits = decoder.read([[1 + request] for request in range(batch)], degree + 1)
        times = []
        for _ in range(degree):
            ranks.barrier()
            began, tokens = time.perf_counter(), logits.argmax(-1)
            decoder.tokens_of_all(tokens)
            logits = decoder.step(tokens)
            times.append(time.perf_counter() - began)
        return statistics.median(times)

    return max(on_ranks(degree, rank_of, timeout_seconds=600))


# -- Answers beside those of transformers


def _generated(model: Any, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    """Return the answers of `generate` to each prompt alone, up to the end token."""
    ends, answers = model.generation_config.eos_token_id or [], []
    for prompt in prompts:
        with torch.no_grad():
            whole = model.generate(torch.tensor([prompt]), max_new_tokens=new_tokens, do_sample=False)
        row = whole[0, len(prompt) :].tolist()
        last = next((place for place, token in enumerate(row) if token in ends), len(row) - 1)
        answers.append(row[: last + 1])
    return answers


def _random_keys(draw: random.Random) -> dict[str, Any]:
    """Return one to four keys of a generation config that change logits, and end tokens."""
    some = lambda count: draw.sample(range(FEW_TOKENS), count)  # noqa: E731
    keys = {
        "repetition_penalty": draw.choice([0.5, 1.2, 3.0]),
        "encoder_repetition_penalty": draw.choice([0.5, 1.5, 9.0]),
        "no_repeat_ngram_size": draw.randint(1, 3),
        "encoder_no_repeat_ngram_size": draw.randint(1, 2),
        "bad_words_ids": [some(draw.randint(1, 2)) for _ in range(9)],
        "sequence_bias": [[some(draw.randint(1, 2)), draw.uniform(-5, 5)] for _ in range(9)],
        "suppress_tokens": some(20),
        "begin_suppress_tokens": some(40),
        "min_length": draw.randint(1, 15),
        "min_new_tokens": draw.randint(1, 9),
        "exponential_decay_length_penalty": (draw.randint(0, 4), draw.uniform(1, 2)),
        "forced_bos_token_id": draw.randrange(FEW_TOKENS),
        "forced_eos_token_id": draw.randrange(FEW_TOKENS),
    }
    chosen = draw.sample(sorted(keys), draw.randint(1, 4))
    if any(key.startswith("forced") for key in chosen):  # transformers refuses a token that is suppressed, too
        chosen = [key for key in chosen if key != "suppress_tokens"]
    return {**{key: keys[key] for key in chosen}, "eos_token_id": some(draw.randint(1, 12))}


def answers(arguments: argparse.Namespace) -> None:
    """Print how many questions are answered as `generate` answers them, and how many without the generation config."""
    equal, plain, total = 0, 0, 10 * arguments.rounds
    for seed in range(total):
        draw = random.Random(seed)
        family = draw.choice(["Llama", "GPT2", "Qwen2"])
        shard, degree = draw.choice([(SEQUENCE, 1), (SEQUENCE, 2), (SEQUENCE, 3), (HEADS, 2)])
        model = small_model(family, num_hidden_layers=1)
        prompts = [[draw.randrange(1, FEW_TOKENS) for _ in range(draw.choice([1, 2, 5, 9]))] for _ in range(3)]
        model.generation_config.eos_token_id = (keys := _random_keys(draw))["eos_token_id"]
        without = _generated(model, prompts, 10)
        model.generation_config.update(**keys)
        expected = _generated(model, prompts, 10)
        longest = max(map(len, prompts))
        padded = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        given, mask = (padded, None) if draw.random() < 0.5 else (prompts, None)
        if given is padded and 0 in keys["eos_token_id"]:  # the padding token is then no sign of padding
            mask = padded != 0
        work = partial(decode_greedily, model, given, 10, shard=shard, attention_mask=mask)
        same = all(decoded.tokens == expected for decoded in on_ranks(degree, lambda ranks, work=work: work(ranks)))
        if not same:
            print(f"seed {seed}: {family}, {shard} on {degree}, {keys}")
        equal, plain = equal + same, plain + (without == expected)
    print(f"{equal} of {total} questions answered as by generate; {plain} would be without the keys")


def types(arguments: argparse.Namespace) -> None:
    """Print how many answers of 32 tokens, and tokens before the first that differs, equal those of `generate`."""
    print("| dtype | sharding | ranks | equal answers | equal tokens |\n|---|---|---|---|---|")
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        for shard, degree in (("generate, one batch", 1), (SEQUENCE, 1), (SEQUENCE, 2), (SEQUENCE, 3), (HEADS, 2)):
            equal = first = total = 0
            for seed in range(arguments.rounds):
                draw = random.Random(seed)
                model = small_model(draw.choice(["Llama", "GPT2"])).to(dtype)
                prompts = [[draw.randrange(1, FEW_TOKENS) for _ in range(draw.choice([1, 5, 9, 40]))] for _ in range(4)]
                expected = _generated(model, prompts, 32)
                if shard in SHARDS:
                    work = partial(decode_greedily, model, prompts, 32, shard=shard)
                    decoded = on_ranks(degree, lambda ranks, work=work: work(ranks))[0].tokens
                else:
                    decoded = generated(model, prompts, 32)
                for mine, theirs in zip(decoded, expected, strict=True):
                    pairs = list(zip(mine, theirs, strict=True))
                    first += next((place for place, (a, b) in enumerate(pairs) if a != b), len(pairs))
                    equal, total = equal + (mine == theirs), total + 1
            name = str(dtype).removeprefix("torch.")
            print(f"| {name} | {shard} | {degree} | {equal} of {total} | {first / total / 32:.1%} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(required=True)
    for command in (count, plans, link, seconds, answers, types):
        part = commands.add_parser(command.__name__)
        part.set_defaults(run=command)
        part.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.run(arguments)


if __name__ == "__main__":
    main()
