"""Cross entropy in chunks of rows, of logits and of a linear layer: equal to torch's in float64, with less memory."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from varuna_capslog.engine.probe import PeakProbe
from varuna_capslog.model.chain import Chain, TensorSpec
from varuna_capslog.own_data.handed import DataSection
from varuna_capslog.own_data.workload import LOSSES
from varuna_capslog.profiling.variant_check import check_variants
from varuna_capslog.variants.chunked_loss import _LinearLoss, chunked_cross_entropy, chunked_loss, drop_unread_logits
from varuna_capslog.variants.registry import difference

CLASSES, WIDTH = 12, 4


def found(loss: Callable[..., Tensor], logits: Tensor, classes: Tensor, **more: Any) -> tuple[Tensor, Tensor]:
    """Return the loss, and the gradient of 1.7 times the loss."""
    leaf = logits.detach().clone().requires_grad_()
    loss_value = loss(leaf, classes, **more)
    return loss_value.detach(), torch.autograd.grad(1.7 * loss_value, leaf)[0]


@pytest.mark.parametrize("hidden", [[], [0, 3, 6], list(range(7))])
@pytest.mark.parametrize("rows", [1, 3, 7, 100])
def test_it_is_torchs_own(hidden: list[int], rows: int) -> None:
    """Ignored rows, up to all of them, and rows with a class whose logit is -inf."""
    generator = torch.Generator().manual_seed(0)
    logits = 30 * torch.randn(7, CLASSES, dtype=torch.float64, generator=generator)
    classes = torch.randint(1, CLASSES, (7,), generator=generator)
    logits[:3, 0], classes[hidden] = -torch.inf, 0
    ours = found(chunked_cross_entropy, logits, classes, ignored=0, rows=rows)
    theirs = found(F.cross_entropy, logits, classes, ignore_index=0)
    for actual, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-12, rtol=1e-12, equal_nan=True)
    assert len(hidden) < 7 or (ours[0].isnan() and not ours[1].any())


def test_logits_of_16_bits_are_added_up_in_32() -> None:
    logits, classes = torch.randn(300, CLASSES).bfloat16(), torch.arange(300) % CLASSES
    loss, gradient = found(chunked_cross_entropy, logits, classes)
    exact_loss, exact_gradient = found(F.cross_entropy, logits.double(), classes)
    assert (loss.dtype, gradient.dtype) == (torch.float32, torch.bfloat16)
    torch.testing.assert_close(loss.double(), exact_loss, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gradient.double(), exact_gradient, atol=1e-5, rtol=1e-2)


class Model(nn.Module):
    """Body and head with a cross-entropy loss. kind: how the loss gets its logits."""

    def __init__(self, kind: str, bias: bool = False) -> None:
        super().__init__()
        self.body, self.head, self.kind = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES, bias=bias), kind

    def forward(self, x: Tensor, classes: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.body(x))
        more = {"label_smoothing": 0.1} if self.kind == "smoothed" else {}
        inside = logits.to(torch.float32) if self.kind == "cast" else logits
        rows = inside.flatten(0, 1) if self.kind == "cast" else inside.view(-1, CLASSES)
        if self.kind == "halved":
            rows = inside.view(-1, CLASSES // 2)
            classes = torch.stack([classes, classes], -1)
        loss = F.cross_entropy(rows, classes.view(-1), ignore_index=2, **more)
        return {"logits": logits.sigmoid() if self.kind == "read" else logits, "loss": loss}


def captured(kind: str, bias: bool = False, batch: int = 2) -> Chain:
    torch.manual_seed(0)
    example = {"x": torch.randn(batch, 5, WIDTH), "classes": torch.ones(batch, 5, dtype=torch.int64)}
    return Chain.from_module(Model(kind, bias), ["head"], example)


@pytest.mark.parametrize(("kind", "exact"), [("plain", 1e-12), ("cast", 1e-5), ("read", 1e-12), ("halved", 1e-12)])
@pytest.mark.parametrize("whole", [True, False])
def test_the_loss_of_a_captured_model_goes_in_chunks(kind: str, exact: float, whole: bool) -> None:
    """The graph of `cast` converts to float32, whatever the layer's type. The graph of `read` also uses the logits, and
    the graph of `halved` splits each row of the logits into two rows.
    """
    layer = captured(kind, bias=kind == "plain").layers[-1]
    plain, chunked = copy.deepcopy(layer.module).double(), copy.deepcopy(layer.module).double()
    assert (chunked_loss(chunked), chunked_loss(chunked)) == (1, 0)
    assert list(chunked.state_dict()) == list(plain.state_dict())
    readers = {("loss", 0): (1,), ("logits", 0): (1,)}
    drop_unread_logits([chunked], [layer.writes], readers if whole else {("loss", 0): (1,)})
    inputs = {"classes": torch.tensor([[1, 2, 3, 4, 5]] * 2)}
    x = torch.randn(2, 5, WIDTH, dtype=torch.float64, requires_grad=True)
    arguments, place = [inputs.get(name, x) for name in layer.reads], layer.writes.index("logits")
    assert difference(plain, chunked, arguments, unread=() if whole else [place]).part <= exact
    outputs = dict(zip(layer.writes, chunked(*arguments), strict=True))
    assert outputs["logits"].numel() == (120 if whole or kind in ("read", "halved") else 0)


@pytest.mark.parametrize("outputs", [("loss",), ("loss", "logits")])
def test_what_a_run_will_do_is_checked(outputs: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """The logits are computed in chunks only if the chain does not return them; then their readers are not compared."""
    chain, ways = captured("plain"), list[bool]()
    chain = Chain(chain.layers, chain.inputs, outputs, chain.name)
    inputs = {"x": TensorSpec((2, 5, WIDTH), torch.float32), "classes": TensorSpec((2, 5), torch.int64)}
    of = _LinearLoss.of

    def noting(self: _LinearLoss, x: Tensor, weight: Tensor | None, *more: Any) -> Tensor:
        ways.append(weight is not None)
        return of(self, x, weight, *more)

    monkeypatch.setattr(_LinearLoss, "of", noting)
    (check,) = check_variants(chain, {1: "chunked-loss"}, inputs)
    assert not check.fault
    assert set(ways) == {outputs == ("loss",)}


def test_configs_name_the_loss() -> None:
    logits, classes = torch.randn(2, 5, CLASSES, dtype=torch.float64), torch.randint(0, CLASSES, (2, 5))
    assert DataSection(dataset="a:b", loss="chunked_cross_entropy").loss in LOSSES
    ours, theirs = (LOSSES[name](logits, (None, classes)) for name in ("chunked_cross_entropy", "cross_entropy"))
    torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-12)


def test_what_it_is_not_for_stays() -> None:
    assert chunked_loss(captured("smoothed").layers[-1].module) is None
    assert chunked_loss(nn.Linear(2, 2)) is None


def test_probabilities_in_place_of_classes_have_the_plain_loss() -> None:
    class Soft(nn.Module):
        def forward(self, x: Tensor, wanted: Tensor) -> Tensor:
            return F.cross_entropy(x, wanted)

    x, wanted = torch.randn(3, 4), torch.rand(3, 4)
    (layer,) = Chain.from_module(Soft(), [], {"x": x, "wanted": wanted}).layers
    assert chunked_loss(layer.module) == 1
    assert torch.equal(layer.module(x, wanted), F.cross_entropy(x, wanted))


def test_it_holds_the_gradient_alone_or_less() -> None:
    """Takes 4 MiB of logits in four chunks. torch's loss holds their log-softmax and two gradients at once; a model
    that computes its logits in chunks holds two chunks.
    """
    logits, classes = torch.randn(1024, 1024, requires_grad=True), torch.arange(1024)
    hidden, graph = torch.randn(1024, 16, requires_grad=True), torch.fx.Graph()
    placeholders = [graph.placeholder(name) for name in ("x", "classes")]
    logit = graph.call_module("head", (placeholders[0],))
    graph.output(graph.call_function(torch.ops.aten.cross_entropy_loss.default, (logit, placeholders[1])))
    head = nn.Linear(16, 1024, bias=False)
    module = torch.fx.GraphModule({"head": head}, graph)
    assert chunked_loss(module) == 1
    peaks = list[float]()
    for loss, held in ((F.cross_entropy, logits), (chunked_cross_entropy, logits), (module, hidden)):
        held.grad = head.weight.grad = None
        with PeakProbe(torch.device("cpu"), [held, *module.parameters()]) as probe:
            loss(held, classes).backward()
        peaks.append(probe.peak_bytes / 2**20)
    assert peaks[0] > 16
    assert peaks[1] < 8.2
    assert peaks[2] < 1.5
