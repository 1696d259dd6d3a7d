"""Profiles and plans for inference, against the real allocator's peaks while each stage runs forward."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.engine.probe import PeakProbe
from varuna_capslog.model.inference_model import InferenceModel
from varuna_capslog.model.model_workload import ModelSection
from varuna_capslog.planning.problem import Problem
from varuna_capslog.planning.solve import solve
from varuna_capslog.profiles.conditions import CACHE_BYTES, DECODE_SECONDS
from varuna_capslog.profiles.record import Profile
from varuna_capslog.profiling.estimation.rates import speed_of
from varuna_capslog.profiling.inference import Served, decoding, estimate_inference

HERE = __name__
BLOCKS = 4


class Lopsided(nn.Module):
    """A wide first block, an attention block, a bypass around the second block, and dropout that must not run."""

    def __init__(self) -> None:
        super().__init__()
        widths = [512, 64, 64, 32]
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, w), nn.Dropout(), nn.Linear(w, 64)) for w in widths)
        self.attention = nn.MultiheadAttention(64, 4, batch_first=True)
        self.head = nn.Linear(64, 300)

    def forward(self, x: Tensor) -> Tensor:
        first = self.blocks[0](x)
        second = self.blocks[1](first)
        third = self.blocks[2](second + self.attention(second, second, second, need_weights=False)[0])
        return self.head(self.blocks[3](third + first))


def lopsided() -> nn.Module:
    return Lopsided()


class MostlyBfloat16(nn.Module):
    """One parameter of another type, as the bias of a router of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Linear(64, 64, dtype=torch.bfloat16) for _ in range(2)))
        self.bias = nn.Parameter(torch.ones(64))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x) + self.bias.to(x.dtype)


def mostly_bfloat16() -> nn.Module:
    return MostlyBfloat16()


class Otherwise(nn.Module):
    """Calls other operators in eval mode, as state spaces do."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).sin() if self.training else block(torch.cat([x, x, x], 1).mean(1, keepdim=True) + x).tanh()
        return x


def otherwise() -> nn.Module:
    return Otherwise()


class KeepsInside(nn.Module):
    """A part returns its caches, as the decoder inside a model of pictures and text does, unless its config says no."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = Lopsided()
        self.decoder.config = SimpleNamespace(use_cache=True)  # type: ignore[assignment]

    def forward(self, x: Tensor) -> dict[str, object]:
        return {"x": self.decoder(x)} | ({"caches": range(3)} if self.decoder.config.use_cache else {})


def keeps_inside() -> nn.Module:
    return KeepsInside()


class Looks(nn.Module):
    """Tokens, and three blocks of which one has attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        attends = nn.TransformerEncoderLayer(4, 1, 4, batch_first=True)
        self.blocks = nn.ModuleList([nn.Linear(4, 4), attends, nn.Linear(4, 4)])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return x


class Halving(Looks):
    """Takes an even number of tokens, as models of pictures take whole pictures."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids.view(ids.shape[0], 2, -1).flatten(1))


def halving() -> nn.Module:
    return Halving()


class SmallLlama(Looks):
    """A Hugging Face config describes it, so that its caches are known to be none."""

    config = SimpleNamespace(model_type="none", to_dict=dict, get_text_config=SimpleNamespace)


small_llama = SmallLlama


def served(factory: str, *inputs: str, size: int = 4, **more: object) -> InferenceModel:
    return InferenceModel(ModelSection(factory=factory, inputs=list(inputs)), size, **more)


def llama(sequence: int) -> InferenceModel:
    pytest.importorskip("transformers")
    section = ModelSection(
        factory="examples.llama:model", arguments={"layers": BLOCKS}, inputs=["input_ids=int64[1,16]:512"]
    )
    return InferenceModel(section, 4, dtype="float32", sequence=sequence)


@functools.cache
def profile_of_llama() -> Profile:
    return estimate_inference(llama(96), Served(4))


def measured(model: InferenceModel, cuts: tuple[int, ...]) -> list[int]:
    """Return the peak of a forward of each stage, without its caches."""
    chain = model.build_chain()
    values = {name: spec.zeros() for name, spec in model.profile_inputs(4).items()}
    peaks = []
    for first, end in zip(cuts, (*cuts[1:], len(chain)), strict=True):
        modules = [layer.module.eval() for layer in chain.layers[first:end]]
        held = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
        with torch.no_grad(), PeakProbe(torch.device("cpu"), held) as probe:
            # inside, since the profiler does not see releases of earlier tensors
            values = chain.run_stage(first, end, {name: tensor.clone() for name, tensor in values.items()})
        peaks.append(probe.peak_bytes)
    return peaks


def assert_close(profile: Profile, model: InferenceModel, devices: int) -> None:
    """Check that estimate and measurement agree within a hundredth."""
    plan = solve(Problem.of_serving(profile, devices, 4), "exact")
    caches = profile.conditions[CACHE_BYTES]
    predicted = [
        size - 4 * sum(caches[stage.first : stage.end])
        for size, stage in zip(plan.stage_bytes, plan.stages, strict=True)
    ]
    assert predicted == pytest.approx(measured(model, plan.cut_list), rel=0.01)


def test_a_model_is_captured_as_it_is_served() -> None:
    model = served(f"{HERE}:otherwise", "x=float32[1,500,64]")
    assert_close(estimate_inference(model, Served(4)), model, 2)
    module, x = Otherwise().eval(), torch.randn(4, 500, 64)
    chain = model.build_chain()
    for layer in chain.layers:
        layer.module.eval()
    module.load_state_dict({name[len("blocks.0.") :]: value for name, value in chain.named_parameters().items()})
    assert torch.equal(next(iter(chain.run({"x": x}).values())), module(x))


def test_caches_of_a_part_are_switched_off() -> None:
    assert served(f"{HERE}:keeps_inside", "x=float32[1,5,64]").build_chain().outputs == ("x_out",)


@pytest.mark.parametrize("devices", [2, 3])
def test_peaks_of_stages_are_those_of_the_allocator(devices: int) -> None:
    model = served(f"{HERE}:lopsided", "x=float32[1,50,64]")
    assert_close(estimate_inference(model, Served(4)), model, devices)


def test_peaks_of_a_captured_decoder_are_those_of_the_allocator() -> None:
    assert_close(profile_of_llama(), llama(96), 3)


def test_the_next_token_reads_all_weights_and_the_whole_cache() -> None:
    """The layers are those of one token, whose seconds on a card are the weights' bytes and its host's."""
    decode, rows = [], []
    for tokens in (96, 192):
        profile = estimate_inference(llama(tokens), Served(4, "cuda", "a100-80gb"))
        decode.append(profile.conditions[DECODE_SECONDS])
        rows.append(profile)
    alone = [layer.forward_seconds for layer in estimate_inference(llama(1), Served(4, "cuda", "a100-80gb")).layers]
    second_of_byte = speed_of("cuda", "a100-80gb").seconds_of["bytes"]
    for seconds, profile in zip(decode, rows, strict=True):
        caches = profile.conditions[CACHE_BYTES]
        expected = [layer + 4 * size * second_of_byte for layer, size in zip(alone, caches, strict=True)]
        assert seconds == pytest.approx(expected)
    assert [layer.forward_seconds for layer in decoding(rows[0]).layers] == decode[0]
    assert sum(decode[1]) > sum(decode[0])


def test_a_model_that_cannot_take_one_token_has_no_seconds_of_decode() -> None:
    profile = estimate_inference(served(f"{HERE}:halving", "ids=int64[1,6]:8"), Served(4, cache_bytes_per_token=8))
    assert profile.conditions["decode"].startswith("not estimated: ")
    assert DECODE_SECONDS not in profile.conditions


def test_what_a_decoder_caches_belongs_to_its_blocks_and_grows_with_the_batch() -> None:
    profile = profile_of_llama()
    # two key-value heads of 32 numbers, keys and values, float32, 96 tokens
    assert profile.conditions[CACHE_BYTES] == [0, *[2 * 2 * 32 * 4 * 96] * BLOCKS, 0]
    plans = {batch: solve(Problem.of_serving(profile, 2, batch, cuts=[0, 3]), "exact") for batch in (4, 16)}
    more = [b - a for a, b in zip(plans[4].stage_bytes, plans[16].stage_bytes, strict=True)]
    assert more == [12 * 2 * 49152, 12 * 2 * 49152]
    assert (plans[16].num_microbatches, plans[16].microbatch_size, plans[16].schedule) == (4, 4, None)
    with pytest.raises(CapslogError, match="a batch of 6 is not a multiple of the microbatch size 4"):
        Problem.of_serving(profile, 2, 6)


def test_a_stated_cache_is_that_of_the_layers_that_attend() -> None:
    model = served(f"{HERE}:lopsided", "x=float32[1,50,64]")
    with pytest.raises(CapslogError, match="--cache counts tokens, but the model's inputs have none"):
        estimate_inference(model, Served(4, cache_bytes_per_token=8))
    with pytest.raises(CapslogError, match="says itself what its layers cache; leave --cache out"):
        estimate_inference(served(f"{HERE}:small_llama", "ids=int64[1,8]"), Served(4, cache_bytes_per_token=8))
    profile = estimate_inference(served(f"{HERE}:Looks", "ids=int64[1,8]"), Served(4, cache_bytes_per_token=8))
    assert profile.conditions[CACHE_BYTES] == [0, 0, 64, 0]


def test_weights_and_inputs_have_the_type_that_is_asked_for() -> None:
    model = served(f"{HERE}:lopsided", "x=float32[1,50,64]", dtype="float16")
    halved = estimate_inference(model, Served(4, "cuda"))
    full = estimate_inference(served(f"{HERE}:lopsided", "x=float32[1,50,64]"), Served(4, "cuda"))
    assert [2 * row.static_bytes for row in halved.observations] == [row.static_bytes for row in full.observations]
    assert halved.conditions["dtype"] == "float16"
    mixed = served(f"{HERE}:mostly_bfloat16", "x=float32[1,50,64]")
    mixed.build_chain()
    assert (mixed.dtype, mixed.profile_inputs(4)["x"].dtype) == (torch.bfloat16, torch.bfloat16)
    assert halved.conditions["headroom"]["fixed_bytes"] > 512 << 20
    with pytest.raises(CapslogError, match=r"--sequence is 9, but .* has no input of tokens"):
        served(f"{HERE}:lopsided", "x=float32[1,50,64]", sequence=9).build_chain()
    with pytest.raises(CapslogError, match="--dtype is 'int3'; it must be one of float32, bfloat16, float16"):
        served(f"{HERE}:lopsided", dtype="int3")
