"""`fit`: a module within a budget, beside the module itself and the allocator."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.fitting import models
from varuna_capslog.base.errors import CapslogError, DoesNotFit
from varuna_capslog.engine.probe import PeakProbe
from varuna_capslog.fitting.module import fit


def train(module: nn.Module, x: Tensor, loss: Any, optimizer: torch.optim.Optimizer) -> tuple[Tensor, int]:
    """The loss of a step, and the most bytes until its update."""
    moments = [one for state in optimizer.state.values() for one in state.values() if one.dim()]
    optimizer.zero_grad(set_to_none=True)
    with PeakProbe(torch.device("cpu"), [*module.parameters(), *module.buffers(), *moments, x]) as probe:
        outputs = module(x)
        found = loss(outputs)
        found.backward()
    optimizer.step()
    return found.detach(), probe.peak_bytes


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
    optimizers = [torch.optim.AdamW(one.parameters(), fused=True) for one in (plain, fitted)]
    generator = torch.get_rng_state()
    peaks = []
    for number in range(3):
        for one, optimizer in zip((plain, fitted), optimizers, strict=True):
            torch.set_rng_state(generator)
            found, peak = train(one, x, loss, optimizer)
            peaks.append((found, peak))
        generator = torch.get_rng_state()
        assert torch.equal(peaks[-2][0], peaks[-1][0]), number
    for ours, theirs in zip(fitted.state_dict().items(), plain.state_dict().items(), strict=True):
        assert ours[0] == theirs[0]
        assert torch.equal(ours[1], theirs[1])
    assert [peak for _, peak in peaks[3::2]] == pytest.approx([chosen.peak_bytes] * 2, rel=0.005)
    assert chosen.peak_bytes < 0.95 * peaks[2][1]
    # what does not train runs the module itself, at any size
    plain.eval()
    fitted.eval()
    assert not module.training
    half = x[: len(x) // 2]
    ours, theirs = fitted(half), plain(half)
    assert all(map(torch.equal, torch.utils._pytree.tree_leaves(ours)[:1], torch.utils._pytree.tree_leaves(theirs)[:1]))
    assert len(fitted.fits) == 1


def least_budget(module: nn.Module, x: Any) -> int:
    """The smallest budget that does."""
    with pytest.raises(DoesNotFit) as refused:
        fit(copy.deepcopy(module), x, 10)
    return int(str(refused.value).partition("smallest budget that does is ")[2].partition(" ")[0])


def gradients(module: nn.Module, outputs: Any, loss: Any) -> dict[str, Tensor | None]:
    module.zero_grad()
    loss(outputs).backward()
    return {name: one.grad for name, one in module.named_parameters()}


def assert_equal(ours: dict[str, Tensor | None], theirs: dict[str, Tensor | None]) -> None:
    for name, one in theirs.items():
        assert (ours[name] is None) == (one is None), name
        assert one is None or torch.equal(ours[name], one), name


def test_a_submodule_that_is_put_into_eval_mode_is_captured_again() -> None:
    """It was refused where its code had been cut open."""
    module, x = models.skips()
    plain = copy.deepcopy(module)
    fitted = fit(module, x, least_budget(module, x), loss=models.skips_loss)
    for path in ("", "blocks.1.norm", "blocks"):
        found = []
        for one, run in ((plain, plain), (module, fitted)):
            if path:
                one.get_submodule(path).eval()
            torch.manual_seed(2)
            found.append(gradients(one, run(x), models.skips_loss))
        assert_equal(*found)


def test_a_batch_of_another_shape_is_fitted_when_it_comes() -> None:
    module, x = models.images()
    generator = torch.get_rng_state()
    fitted = fit(copy.deepcopy(module), x, "1GB", loss=models.images_loss)
    assert torch.equal(generator, torch.get_rng_state())
    for batch in (x, x[:2], x[:2]):
        outputs = fitted(batch)
    assert outputs.shape == (2, 4)
    assert [one.intervals for one in fitted.fits] == [(), ()]
    assert fitted.fits[1].peak_bytes < fitted.fits[0].peak_bytes
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    _, peak = train(module, x, models.images_loss, optimizer)
    moments = 2 * sum(one.nbytes for one in module.parameters())  # which SGD has not, and fit counts by default
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
    for one in (plain, fitted):
        torch.manual_seed(9)
        scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=2.0**17), torch.optim.AdamW(one.parameters())
        for _ in range(6):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                outputs = one(x)
            found = models.images_loss(outputs)
            scaler.scale(found).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append((float(found.detach()), scaler.get_scale()))
    assert losses[:6] == losses[6:]
    assert losses[5][1] < 2.0**17, "no step was skipped"
    assert all(map(torch.equal, fitted.state_dict().values(), plain.state_dict().values()))
