"""Frozen weights in few bits: bytes by hand and as bitsandbytes has them; whole weights one layer at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import varuna_capslog as capslog
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.model.chain import Chain
from varuna_capslog.model.hollow import hollow_copy
from varuna_capslog.model.quantised import BASES, QuantisedLinear

OUT, IN = 384, 512
NUMBERS = OUT * IN
BLOCKS = NUMBERS // 64
WIDTH = 2048
BY_HAND = {
    "4bit": NUMBERS // 2 + 4 * BLOCKS + 64,
    "4bit-double": NUMBERS // 2 + BLOCKS + 4 * (BLOCKS // 256) + 4 + 64,
    "8bit": NUMBERS + 4 * OUT,
}


def held(base: str) -> int:
    layer = QuantisedLinear(nn.Linear(IN, OUT, bias=False, device="meta"), base)
    assert not any(parameter.requires_grad for parameter in layer.parameters())
    return sum(parameter.nbytes for parameter in layer.parameters())


@pytest.mark.parametrize("base", BASES)
def test_a_weight_takes_its_codes_and_their_scales(base: str) -> None:
    assert held(base) == BY_HAND[base]


@pytest.mark.parametrize("base", BASES)
def test_it_takes_the_bytes_that_bitsandbytes_takes(base: str) -> None:
    nn_of = pytest.importorskip("bitsandbytes.nn", reason="bitsandbytes is not installed")
    if base == "8bit":
        layer = nn_of.Linear8bitLt(IN, OUT, bias=False, has_fp16_weights=False).to("cpu")
        tensors = [layer.weight, layer.weight.SCB]
    else:
        layer = nn_of.Linear4bit(IN, OUT, bias=False, quant_type="nf4", compress_statistics=base != "4bit").to("cpu")
        state = layer.weight.quant_state
        tensors = [layer.weight, state.absmax, state.code]
        tensors += [state.offset, state.state2.absmax] if state.nested else []
    assert sum(tensor.nbytes for tensor in tensors) == held(base)


class Block(nn.Module):
    """A wide frozen layer with narrow trained ones beside it."""

    def __init__(self, base: str | None, width: int = WIDTH) -> None:
        super().__init__()
        options: Any = {"bias": False, "device": "meta", "dtype": torch.bfloat16}
        linear = nn.Linear(width, width, **options).requires_grad_(False)
        self.base = linear if base is None else QuantisedLinear(linear, base)
        self.adapter = nn.Sequential(nn.Linear(width, 8, **options), nn.Linear(8, width, **options))

    def forward(self, x: Tensor) -> Tensor:
        summed: Tensor = self.base(x) + self.adapter(x)
        return summed


class Adapted(nn.Module):
    def __init__(self, base: str | None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(base) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def profiled(base: str | None, tokens: int = 256) -> Any:
    x = torch.ones(1, tokens, WIDTH, dtype=torch.bfloat16)
    return capslog.estimate(Adapted(base), x, device="cuda:h100-80gb")


def test_the_backward_keeps_no_weight_and_a_whole_weight_exists_once() -> None:
    """Also not two layers' at a time: a stage of two layers needs one more than what it always holds."""
    plain, low = profiled(None), profiled("4bit")
    weight, codes = 2 * WIDTH**2, WIDTH**2 // 2 + 4 * WIDTH**2 // 64 + 64
    for before, after in zip(plain.layers, low.layers, strict=True):
        assert after.parameter_bytes == before.parameter_bytes - weight + codes
        assert after.saved_bytes == before.saved_bytes
    for before, after in zip(plain.observations, low.observations, strict=True):
        spared = (before.layers[1] - before.layers[0]) * (weight - codes)
        assert before.static_bytes - after.static_bytes == pytest.approx(spared, abs=4096)
        if before.layers[1] == 3:  # the loss has the peak
            continue
        # beside other activations than those at the peak without it
        assert before.peak_bytes - after.peak_bytes - spared == pytest.approx(-weight, abs=3 * 2 * 256 * WIDTH)


def test_products_of_a_frozen_weight_take_the_seconds_of_products() -> None:
    plain, low = profiled(None, 8192), profiled("4bit", 8192)
    for before, after in zip(plain.layers, low.layers, strict=True):
        assert after.forward_seconds == pytest.approx(before.forward_seconds, rel=0.2)
    read_again = 1.2 * (WIDTH**2 * 2 + WIDTH**2 * 0.5625) / 3.35e12
    assert low.layers[1].backward_seconds - plain.layers[1].backward_seconds > read_again
    assert low.layers[1].backward_seconds < 1.2 * plain.layers[1].backward_seconds


@pytest.mark.parametrize("bias", [True, False])
def test_a_copy_without_memory_has_our_layer_in_its_place(bias: bool) -> None:
    """Every layer without a bias, as all of a Llama, ended in a KeyError."""
    kind = type("Linear4bit", (nn.Linear,), {"__module__": "bitsandbytes.nn"})
    copied = hollow_copy(nn.Sequential(kind(64, 32, bias=bias).requires_grad_(False)))[0]
    assert isinstance(copied, QuantisedLinear)
    assert (copied.bias is not None) is bias
    assert all(parameter.is_meta for parameter in copied.parameters())


@pytest.mark.parametrize("base", BASES)
def test_a_layer_without_values_cannot_be_measured_and_says_what_to_do(base: str) -> None:
    with pytest.raises(CapslogError, match=r"can be estimated, but not measured; set profile\.source=estimated"):
        QuantisedLinear(nn.Linear(64, 32), base)(torch.zeros(2, 64))


class InFewBits(nn.Module):
    """Layers of bitsandbytes with trained adapters beside them."""

    def __init__(self, nn_of: Any, base: str, bias: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self._block(nn_of, base, bias) for _ in range(3))

    def _block(self, nn_of: Any, base: str, bias: bool) -> nn.Module:
        if base == "8bit":
            frozen = nn_of.Linear8bitLt(64, 64, bias=bias, has_fp16_weights=False)
        else:
            frozen = nn_of.Linear4bit(64, 64, bias=bias, quant_type="nf4", compress_statistics=base != "4bit")
        return nn.ModuleDict({"base": frozen.to("cpu").requires_grad_(False), "adapter": nn.Linear(64, 64)})

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block["base"](x) + block["adapter"](x)  # type: ignore[index]
        return x


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("base", BASES)
def test_layers_of_bitsandbytes_itself_are_planned_by_their_bytes_and_train_with_their_bits(
    base: str, bias: bool
) -> None:
    """The copy without memory ended in a traceback of torch's, since `Params4bit` cannot be copied there."""
    model = InFewBits(pytest.importorskip("bitsandbytes.nn", reason="bitsandbytes is not installed"), base, bias)
    frozen = [part for part in hollow_copy(model).modules() if isinstance(part, QuantisedLinear)]
    linear = QuantisedLinear(nn.Linear(64, 64, bias=bias, device="meta"), base)
    expected = sum(parameter.nbytes for parameter in linear.parameters())
    assert [sum(parameter.nbytes for parameter in part.parameters()) for part in frozen] == [expected] * 3
    assert all(parameter.is_meta for part in frozen for parameter in part.parameters())
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    assert len(capslog.plan(model, (x,), devices=2).stages) == 2
    chain = Chain.from_module(model, None, (x,))
    assert len(chain) >= 3
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    wanted = torch.autograd.grad(model(x).square().mean(), trained)
    made = torch.autograd.grad(chain.run({"x": x})["output"].square().mean(), trained)
    assert all(map(torch.equal, wanted, made))
