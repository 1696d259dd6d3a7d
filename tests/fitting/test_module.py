"""`fit`: a module within a budget, beside the module itself and the allocator."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.fitting import models
from varuna_capslog.base.errors import CapslogError, DoesNotFit
from varuna_capslog.base.units import format_bytes
from varuna_capslog.engine.probe import PeakProbe
from varuna_capslog.fitting.module import fit
from varuna_capslog.fitting.search import Fit
from varuna_capslog.plans.parts import MemoryInterval


def train(module: nn.Module, x: Tensor, loss: Any, optimizer: torch.optim.Optimizer) -> tuple[Tensor, int]:
    """Return the loss of a step and the peak bytes before its update."""
    moments = [tensor for state in optimizer.state.values() for tensor in state.values() if tensor.dim()]
    optimizer.zero_grad(set_to_none=True)
    with PeakProbe(torch.device("cpu"), [*module.parameters(), *module.buffers(), *moments, x]) as probe:
        outputs = module(x)
        step_loss = loss(outputs)
        step_loss.backward()
    optimizer.step()
    return step_loss.detach(), probe.peak_bytes


@pytest.mark.parametrize("name", ["skips", "images"])
def test_a_loop_within_its_budget_has_the_bits_of_the_plain_loop(name: str) -> None:
    module, x = getattr(models, name)()
    loss = getattr(models, f"{name}_loss")
    with pytest.raises(DoesNotFit) as refused:
        fit(copy.deepcopy(module), (x,), "100kB", loss=loss)
    sentence = str(refused.value)
    assert "parameters, gradients, 2 moments and buffers alone take" in sentence
    least = int(sentence.partition("smallest budget that does is ")[2].partition(" ")[0])
    plain = copy.deepcopy(module)
    fitted = fit(module, {"ids" if name == "skips" else "input": x}, least, loss=loss)
    (chosen,) = fitted.fits
    assert chosen.intervals
    assert chosen.peak_bytes <= least
    torch.manual_seed(9)
    optimizers = [torch.optim.AdamW(model.parameters(), fused=True) for model in (plain, fitted)]
    generator = torch.get_rng_state()
    peaks = []
    for number in range(3):
        for model, optimizer in zip((plain, fitted), optimizers, strict=True):
            torch.set_rng_state(generator)
            step_loss, peak = train(model, x, loss, optimizer)
            peaks.append((step_loss, peak))
        generator = torch.get_rng_state()
        assert torch.equal(peaks[-2][0], peaks[-1][0]), number
    for ours, theirs in zip(fitted.state_dict().items(), plain.state_dict().items(), strict=True):
        assert ours[0] == theirs[0]
        assert torch.equal(ours[1], theirs[1])
    assert [peak for _, peak in peaks[3::2]] == pytest.approx([chosen.peak_bytes] * 2, rel=0.005)
    assert chosen.peak_bytes < 0.95 * peaks[2][1]
    # in eval mode the module itself runs, at any batch size
    plain.eval()
    fitted.eval()
    assert not module.training
    half = x[: len(x) // 2]
    ours, theirs = fitted(half), plain(half)
    assert all(map(torch.equal, torch.utils._pytree.tree_leaves(ours)[:1], torch.utils._pytree.tree_leaves(theirs)[:1]))
    assert len(fitted.fits) == 1


def least_budget(module: nn.Module, x: Any) -> int:
    """Return the smallest sufficient budget, as the refusal names it."""
    with pytest.raises(DoesNotFit) as refused:
        fit(copy.deepcopy(module), x, 10)
    return int(str(refused.value).partition("smallest budget that does is ")[2].partition(" ")[0])


def gradients(module: nn.Module, outputs: Any, loss: Any) -> dict[str, Tensor | None]:
    module.zero_grad()
    loss(outputs).backward()
    return {name: parameter.grad for name, parameter in module.named_parameters()}


def assert_equal(ours: dict[str, Tensor | None], theirs: dict[str, Tensor | None]) -> None:
    for name, gradient in theirs.items():
        assert (ours[name] is None) == (gradient is None), name
        assert gradient is None or torch.equal(ours[name], gradient), name


def test_a_submodule_that_is_put_into_eval_mode_is_captured_again() -> None:
    """This was once refused for a submodule whose code had been cut into layers."""
    module, x = models.skips()
    plain = copy.deepcopy(module)
    fitted = fit(module, x, least_budget(module, x), loss=models.skips_loss)
    for path in ("", "blocks.1.norm", "blocks"):
        grads = []
        for model, run in ((plain, plain), (module, fitted)):
            if path:
                model.get_submodule(path).eval()
            torch.manual_seed(2)
            grads.append(gradients(model, run(x), models.skips_loss))
        assert_equal(*grads)


def test_a_fitted_module_prints_what_was_done_for_its_budget() -> None:
    """`print(fit(...))` was the module alone: nothing told what is recomputed and which peak is predicted."""
    module, x = models.images()
    least = least_budget(module, x)
    fitted = fit(module, x, least)
    (chosen,) = fitted.fits
    first, second, *modules = str(fitted).splitlines()[1:]
    recomputed = [layer for part in chosen.intervals for layer in range(part.first, part.end)]
    assert recomputed
    assert "float32[4,3,16,16]: predicted peak" in first
    assert f"{format_bytes(chosen.peak_bytes)} of a budget of {format_bytes(least)}" in first
    assert f"activation checkpointing of {len(recomputed)} of {len(chosen.names)} layers" in second
    assert chosen.names[recomputed[0]] in second
    assert f"step estimated {100 * chosen.again_seconds / chosen.step_seconds:.0f} % longer" in second
    assert modules[:-1] == str(module).splitlines()[1:-1], "the model's own lines are all there"
    kept = fit(module, x, "1GB")
    kept(x[:2])
    assert [line.strip() for line in kept.summary.splitlines()[1::2]] == ["nothing is recomputed or offloaded"] * 2
    assert "float32[2,3,16,16]" in kept.summary


def test_a_summary_names_ranges_and_says_where_tensors_go() -> None:
    kinds = [(0, 1, "recompute"), (1, 3, "recompute"), (4, 5, "offload"), (6, 7, "recompute+offload")]
    parts = tuple(MemoryInterval(*kind) for kind in kinds)
    chosen = Fit(tuple("abcdefgh"), parts, 4096, 2048, 1024, step_seconds=2.0, again_seconds=0.5)
    assert chosen.summary.splitlines() == [
        "predicted peak 2 KiB of a budget of 4 KiB",
        "activation checkpointing of 4 of 8 layers (a to c, g), CPU offload of 2 of 8 layers (e, g), step estimated "
        "25 % longer",
    ]
    many = tuple(MemoryInterval(layer, layer + 1, "recompute") for layer in range(0, 12, 2))
    assert "6 of 12 layers (a, c, e, g, ...)" in Fit(tuple("abcdefghijkl"), many, 9, 8, 1, 1.0, 0.1).summary


def test_a_batch_of_another_shape_is_fitted_when_it_comes() -> None:
    module, x = models.images()
    generator = torch.get_rng_state()
    fitted = fit(copy.deepcopy(module), x, "1GB", loss=models.images_loss)
    assert torch.equal(generator, torch.get_rng_state())
    for batch in (x, x[:2], x[:2]):
        outputs = fitted(batch)
    assert outputs.shape == (2, 4)
    assert [shape_fit.intervals for shape_fit in fitted.fits] == [(), ()]
    assert fitted.fits[1].peak_bytes < fitted.fits[0].peak_bytes
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    _, peak = train(module, x, models.images_loss, optimizer)
    moments = 2 * sum(parameter.nbytes for parameter in module.parameters())  # fit counts two by default, SGD has none
    assert peak + moments == pytest.approx(fitted.fits[0].peak_bytes, rel=0.005)


@pytest.mark.parametrize(
    ("sample", "budget", "sentence"),
    [
        ((), "1GB", "the sample holds no tensor|missing a required argument"),
        (None, "1G", "budget is '1G'"),
        (None, 0, "budget is 0"),
        ({"words": torch.zeros(2)}, "1GB", "do not go with Skips.forward"),
    ],
)
def test_mistakes_are_one_sentence(sample: Any, budget: Any, sentence: str) -> None:
    module, x = models.skips()
    with pytest.raises(CapslogError, match=sentence):
        fit(module, (x,) if sample is None else sample, budget)


def test_a_loop_in_float16_with_a_scaler_has_the_bits_of_the_plain_loop() -> None:
    module, x = models.images()
    plain, losses = copy.deepcopy(module), []
    with pytest.raises(DoesNotFit) as refused:
        fit(copy.deepcopy(module), x, "100kB", loss=models.images_loss, precision="float16")
    least = int(str(refused.value).partition("smallest budget that does is ")[2].partition(" ")[0])
    fitted = fit(module, x, least, loss=models.images_loss, precision="float16")
    assert fitted.fits[0].intervals
    for model in (plain, fitted):
        torch.manual_seed(9)
        scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=2.0**17), torch.optim.AdamW(model.parameters())
        for _ in range(6):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                outputs = model(x)
            loss = models.images_loss(outputs)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append((float(loss.detach()), scaler.get_scale()))
    assert losses[:6] == losses[6:]
    assert losses[5][1] < 2.0**17, "no step was skipped"
    assert all(map(torch.equal, fitted.state_dict().values(), plain.state_dict().values()))
