"""The learning rate by step; optimizers against torch's own over the whole model; averages; refusals."""

from __future__ import annotations

import copy
import dataclasses
import math

import pytest
import torch
from torch import Tensor, nn

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.config.settings import ParameterGroup, Train
from varuna_capslog.engine.layers import EngineLayer, take_layers
from varuna_capslog.engine.offload import HostTier, TierOptions
from varuna_capslog.engine.optimizer import StageOptimizer, step_alike
from varuna_capslog.engine.recipe import LearningRate, Recipe, in_parts
from varuna_capslog.engine.replicated import norm_of
from varuna_capslog.model.chain import Chain, Layer
from varuna_capslog.training import layer_state
from varuna_capslog.training.layer_state import digest

CPU = torch.device("cpu")
OPTIMIZERS = (
    Recipe(optimizer="adamw", arguments={"betas": [0.8, 0.95], "eps": 1e-6}),
    Recipe(optimizer="adamw", arguments={"amsgrad": True}),
    Recipe(optimizer="Adam"),
    Recipe(optimizer="sgd"),
    Recipe(optimizer="sgd", arguments={"momentum": 0.9, "nesterov": True}),
    Recipe(optimizer="adafactor"),
    Recipe(optimizer="rmsprop", arguments={"momentum": 0.5, "centered": True}),
    Recipe(optimizer="adagrad"),
    Recipe(optimizer="nadam"),
    Recipe(optimizer="muon"),
    Recipe(optimizer="tests.engine.test_optimizer:Counting"),
    Recipe(optimizer="tests.engine.test_optimizer:Coded"),
    Recipe(optimizer="tests.engine.test_optimizer:Bytes"),
)
ROUNDED = tuple(dataclasses.replace(recipe, moments="bfloat16") for recipe in OPTIMIZERS)


class Counting(torch.optim.Optimizer):
    """Optimizer of a user, which keeps a plain number beside a tensor."""

    def __init__(self, params: object, lr: float = 1e-3, pull: float = 0.5) -> None:
        super().__init__(params, {"lr": lr, "pull": pull})  # type: ignore[arg-type]

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["count"] = state.get("count", 0) + 1
                    state["sum"] = state.get("sum", torch.zeros_like(parameter)) + parameter.grad
                    parameter.sub_(state["sum"], alpha=group["lr"] * group["pull"] / state["count"])


class Codes(Tensor):
    """A momentum of 8 bits that looks like one of 32, as torchao's do; reading it as 32 bits fails."""

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor) -> Codes:
        return Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype, device=codes.device)  # type: ignore[attr-defined,no-any-return]

    def __init__(self, codes: Tensor, scale: Tensor) -> None:
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], context: None, size: object, stride: object) -> Codes:
        return cls(inner["codes"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: object, types: object, args: object = (), kwargs: object = None) -> Tensor:
        raise NotImplementedError(f"{func} of a tensor that is to be taken apart")


class Coded(torch.optim.Optimizer):
    """Keeps such a momentum, and has its learning rate in a tensor that must stay, as torchao's optimizers do."""

    wraps = True

    def __init__(self, params: object, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})  # type: ignore[arg-type]
        for group in self.param_groups:
            group["lr"] = torch.tensor(group["lr"])

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                assert isinstance(group["lr"], Tensor)
                state = self.state[parameter]
                if not state:
                    zeros = torch.zeros_like(parameter, dtype=torch.int8), torch.ones(())
                    state.update({"momentum": Codes(*zeros)} if self.wraps else dict(zip("cs", zeros, strict=True)))
                wrapped = state["momentum"] if self.wraps else None
                codes, scale = state.values() if wrapped is None else (wrapped.codes, wrapped.scale)
                momentum = 0.5 * codes * scale + parameter.grad
                scale.copy_(momentum.abs().amax() / 127)
                codes.copy_((momentum / scale).round())
                parameter.sub_(group["lr"] * momentum)


class Bytes(Coded):
    """Keeps the same as plain tensors of 8 bits, as bitsandbytes does."""

    wraps = False


class Late(Counting):
    """Makes a part of its state at the second step."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        super().step()
        for state in self.state.values():
            if state["count"] == 2:
                state["late"] = torch.zeros(3)


class Listing(Counting):
    """Keeps a list."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        super().step()
        for state in self.state.values():
            state["norms"] = [1.0, 2.0]


class Foreign(Counting):
    """Its kernel takes addresses of memory."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            parameter.grad.numpy()


class Together(Counting):
    """Scales every step by the norm of all gradients that it sees."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        seen = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        scale = sum(float(gradient.abs().sum()) for gradient in seen)
        for gradient in seen:
            gradient.div_(scale)
        super().step()


def layers_of(*indices: int) -> list[EngineLayer]:
    torch.manual_seed(5)
    modules = [nn.Linear(12, 16), nn.LayerNorm(16), nn.Linear(16, 24, bias=False)]
    named = [Layer(f"l{index}", module, [f"x{index}"], [f"x{index + 1}"]) for index, module in enumerate(modules)]
    chain = Chain(named, ["x0"], ["x3"])
    return take_layers(chain, list(indices), CPU, "float32")


def parameters_of(layers: list[EngineLayer]) -> dict[str, nn.Parameter]:
    return {layer.address(name): parameter for layer in layers for name, parameter in layer.parameters.items()}


def gradient(address: str, parameter: Tensor, step: int) -> Tensor:
    return torch.sin(torch.arange(parameter.numel(), dtype=torch.float32) + len(address) * step).view_as(parameter)


def advance(optimizer: StageOptimizer, layers: list[EngineLayer], *steps: int) -> None:
    for step in steps:
        for address, parameter in parameters_of(layers).items():
            parameter.grad = gradient(address, parameter, step)
        optimizer.step(step, 0.5)


def test_the_learning_rate_is_a_function_of_the_step() -> None:
    rate = LearningRate(1.0, warmup_steps=4, drop_steps=10, drop_factor=0.1)
    assert [rate.at(step) for step in (1, 2, 4, 10)] == [0.25, 0.5, 1.0, 1.0]
    assert [rate.at(step) for step in (11, 20, 21)] == pytest.approx([0.1, 0.1, 0.01])


def test_linear_and_cosine_decays_are_torchs() -> None:
    """Torch's schedulers count from 0 and know no warm-up of their own."""
    line = LearningRate(2.0, warmup_steps=3, decay="linear", decay_steps=13, final_factor=0.2)
    wave = LearningRate(2.0, warmup_steps=3, decay="cosine", decay_steps=13, final_factor=0.2)
    assert [line.at(step) for step in (1, 2)] == pytest.approx([2 / 3, 4 / 3]) == [wave.at(step) for step in (1, 2)]
    weight = [nn.Parameter(torch.zeros(1))]
    optimizers = [torch.optim.SGD(weight, lr=2.0) for _ in range(2)]
    linear = torch.optim.lr_scheduler.LinearLR(optimizers[0], 1.0, 0.2, total_iters=10)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizers[1], T_max=10, eta_min=0.4)
    for step in range(3, 14):
        assert line.at(step) == pytest.approx(linear.get_last_lr()[0])
        assert wave.at(step) == pytest.approx(cosine.get_last_lr()[0])
        for optimizer, scheduler in zip(optimizers, (linear, cosine), strict=True):
            optimizer.step()
            scheduler.step()
    assert [line.at(99), wave.at(99)] == pytest.approx([0.4, 0.4])


@pytest.mark.parametrize("away", [(), (0, 1, 2)], ids=["on the device", "in the host tier"])
@pytest.mark.parametrize("recipe", OPTIMIZERS, ids=str)
def test_any_cuts_step_as_the_optimizer_itself_does_over_the_whole_model(recipe: Recipe, away: tuple[int, ...]) -> None:
    """The state also moves to another rank half way, through the forms in which it travels and lies on disk.

    away: the layers whose moments wait in the host tier, on these other ranks as on the first ones.
    """
    recipe = Recipe(
        LearningRate(0.01, warmup_steps=2),
        recipe.optimizer,
        recipe.arguments,
        weight_decay=0.1,
        groups=(ParameterGroup(vectors=True, weight_decay=0.0), ParameterGroup(match="l2.*", lr_factor=3.0)),
        ema=0.9,
    )
    unsplit = parameters_of(layers_of(0, 1, 2))
    split: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for address, parameter in unsplit.items():
        split.setdefault((parameter.dim() < 2, address.startswith("l2.")), []).append(parameter)
    decays = "weight_decay" in recipe.kind.__init__.__code__.co_varnames
    plain = recipe.kind(
        [
            {"params": group, **({"weight_decay": 0.1 * (not flat)} if decays else {})}
            for (flat, _), group in split.items()
        ],
        lr=1.0,
        **recipe.arguments,
    )
    averages = {address: parameter.detach().clone() for address, parameter in unsplit.items()}
    for step in (1, 2, 3, 4):
        for group, (_, last) in zip(plain.param_groups, split, strict=True):
            rate = 0.01 * min(1.0, step / 2) * (3.0 if last else 1.0)
            group["lr"] = torch.tensor(rate) if isinstance(group["lr"], Tensor) else rate
        for address, parameter in unsplit.items():
            parameter.grad = gradient(address, parameter, step) * 0.5
        plain.step()
        for address, parameter in unsplit.items():
            averages[address].lerp_(parameter.detach(), 1 - 0.9)
    ranks = [layers_of(0), layers_of(1, 2)]
    states: dict[int, layer_state.LayerState] = {}
    for layers in ranks:
        optimizer = StageOptimizer(layers, recipe, away, HostTier(CPU))
        advance(optimizer, layers, 1, 2)
        states |= {layer.index: layer_state.capture(layer, optimizer, copy=True) for layer in layers}
    for layers in (layers_of(0, 1), layers_of(2)):
        tier = HostTier(CPU)
        optimizer = StageOptimizer(layers, recipe, away, tier)
        for layer in layers:
            layer_state.install(layer, optimizer, states[layer.index])
        advance(optimizer, layers, 3, 4)
        for address, parameter in parameters_of(layers).items():
            # fused kernels round differently
            torch.testing.assert_close(parameter, unsplit[address], rtol=3e-7, atol=1e-8)
            torch.testing.assert_close(optimizer.moments(address)["ema"], averages[address], rtol=3e-7, atol=1e-9)
            kept = {
                key: moment.nbytes for key, moment in optimizer.moments(address).items() if isinstance(moment, Tensor)
            }
            assert recipe.kept(parameter) == kept
        moments = [moment for address in optimizer.parameters for moment in optimizer.moments(address).values()]
        large = [moment for moment in moments if isinstance(moment, Tensor) and moment.nbytes >= 512]
        assert tier.bytes == (sum(moment.nbytes for moment in large) if away else 0)
        on_device = [moment for moment in optimizer.resident() if moment.nbytes >= 512]
        assert len(on_device) == (0 if away else len(large))
        with optimizer.averaged():
            for address, parameter in parameters_of(layers).items():
                torch.testing.assert_close(parameter.detach(), averages[address], rtol=3e-7, atol=1e-9)
        for address, parameter in parameters_of(layers).items():
            torch.testing.assert_close(parameter, unsplit[address], rtol=3e-7, atol=1e-8)


@pytest.mark.parametrize("recipe", ROUNDED, ids=str)
def test_rounded_moments_are_those_of_the_optimizer_itself_rounded_after_every_step(recipe: Recipe) -> None:
    """Moments of the parameter's shape are rounded; counts, and rows and columns of factored moments, are not."""
    recipe = dataclasses.replace(recipe, rate=LearningRate(0.01), ema=0.9)
    layers, parameters = layers_of(0, 1, 2), parameters_of(layers_of(0, 1, 2))
    optimizer, plain = StageOptimizer(layers, recipe), recipe.build(parameters, on_cpu=True)
    for step in (1, 2, 3, 4):
        advance(optimizer, layers, step)
        for address, parameter in parameters.items():
            parameter.grad = gradient(address, parameter, step) * 0.5
        plain.step()
        for address, parameter in parameters.items():
            state, kept = plain.state[parameter], optimizer.moments(address)
            parts = {key: moment for key, moment in in_parts(state).items() if isinstance(moment, Tensor)}
            shaped = {
                key for key, moment in parts.items() if moment.is_floating_point() and moment.shape == parameter.shape
            }
            for key in shaped:
                state[key] = state[key].bfloat16().float()
                assert kept[key].dtype == torch.bfloat16
                assert torch.equal(kept[key].float(), state[key]), (address, key)
            unrounded = {key: moment for key, moment in in_parts(state).items() if key not in shaped}
            assert all(
                torch.equal(torch.as_tensor(kept[key]), torch.as_tensor(moment)) for key, moment in unrounded.items()
            )
            assert kept["ema"].dtype == torch.float32
            assert torch.equal(parameters_of(layers)[address], parameter)
            sizes = {key: moment.nbytes for key, moment in kept.items() if isinstance(moment, Tensor)}
            assert recipe.kept(parameter) == sizes


@pytest.mark.parametrize("ema", [None, 0.9])
@pytest.mark.parametrize("recipe", [*OPTIMIZERS, *ROUNDED], ids=str)
def test_optimizers_that_step_together_change_what_they_would_change_alone(recipe: Recipe, ema: float | None) -> None:
    groups = (ParameterGroup(vectors=True, weight_decay=0.0), ParameterGroup(match="l2.*", lr_factor=3.0))
    rate = LearningRate(0.01, warmup_steps=2)
    recipe = dataclasses.replace(recipe, rate=rate, weight_decay=0.1, groups=groups, ema=ema)
    layer_sets = [[layers_of(index) for index in range(3)] for _ in range(2)]
    alone, together = [[StageOptimizer(layers, recipe) for layers in row] for row in layer_sets]
    for step in (1, 2, 3, 4):
        for layers in (layers for row in layer_sets for layers in row):
            for address, parameter in parameters_of(layers).items():
                if (address, step) != ("l1.weight", 3):  # in one step it has no gradient
                    parameter.grad = gradient(address, parameter, step)
        for optimizer in alone:
            optimizer.step(step, 0.5)
        step_alike(together, step, 0.5)
        for layers, single, joint in zip(layer_sets[0], alone, together, strict=True):
            assert all(parameter.grad is None for parameter in joint.parameters.values())
            mine, theirs = (
                digest(layer_state.capture(captured[0], optimizer, copy=False))
                for captured, optimizer in ((layers, single), (layer_sets[1][layers[0].index], joint))
            )
            assert mine == theirs


def test_the_average_begins_slowly_where_it_is_asked_to() -> None:
    recipe = Recipe(ema=0.99, ema_warmup_steps=10)
    assert recipe.average_decay(1) == pytest.approx(0.99 * (1 - math.exp(-0.1)))
    assert [Recipe(ema=0.99).average_decay(1), Recipe().average_decay(1)] == [0.99, 0.0]


@pytest.mark.parametrize("recipe", [*OPTIMIZERS, *ROUNDED], ids=str)
def test_moments_that_wait_in_the_host_tier_change_no_bit(recipe: Recipe) -> None:
    recipe = dataclasses.replace(recipe, rate=LearningRate(0.01), ema=0.9)
    digests = []
    for away in ((), (0, 2), (0, 1, 2)):
        layers = layers_of(0, 1, 2)
        optimizer = StageOptimizer(layers, recipe, away, HostTier(CPU))
        advance(optimizer, layers, 1, 2, 3)
        states = [layer_state.capture(layer, optimizer, copy=False) for layer in layers]
        digests.append([digest(state) for state in states])
        assert all(key in states[0] for key in ("optimizer/weight/ema", "optimizer/bias/ema"))
    assert digests[0] == digests[1] == digests[2]


def test_no_more_than_two_layers_are_away_from_the_tier_at_a_time() -> None:
    """Copied regions are counted: a layer's moments are fetched once those of the layer before the last have left."""
    torch.manual_seed(5)
    named = [Layer(f"l{index}", nn.Linear(16, 16), [f"x{index}"], [f"x{index + 1}"]) for index in range(5)]
    layers = take_layers(Chain(named, ["x0"], ["x5"]), range(5), CPU, "float32")
    on_device: set[int] = set()
    most = 0

    class Counted(HostTier):
        def load_back(self, region, overlap):  # type: ignore[no-untyped-def]
            nonlocal most
            on_device.add(id(region))
            most = max(most, len(on_device))
            return super().load_back(region, overlap)

        def copy_out(self, tensor, region, overlap):  # type: ignore[no-untyped-def]
            wait = super().copy_out(tensor, region, overlap)

            def settled() -> None:
                wait()
                on_device.discard(id(region))

            return settled

    tier = Counted(CPU)
    optimizer = StageOptimizer(layers, Recipe(), range(5), tier)
    advance(optimizer, layers, 1)
    assert most == 0, "before the first step nothing is kept"
    advance(optimizer, layers, 2, 3)
    assert most == 2 * 2
    assert not on_device
    assert tier.bytes == 5 * 2 * 16 * 16 * 4


def test_a_tier_that_is_too_small_says_so_before_the_first_step() -> None:
    with pytest.raises(CapslogError, match="the host tier is full: it may hold 1600 bytes"):
        StageOptimizer(layers_of(0, 1, 2), Recipe(), (0, 2), HostTier(CPU, TierOptions(capacity=1600)))


def test_what_another_optimizer_kept_is_one_sentence() -> None:
    layers = layers_of(0)
    optimizer = StageOptimizer(layers, Recipe())
    advance(optimizer, layers, 1)
    state = layer_state.capture(layers[0], optimizer, copy=True)
    sgd = StageOptimizer(layers_of(0), Recipe(optimizer="sgd", arguments={"momentum": 0.9}))
    with pytest.raises(
        CapslogError, match=r"kept \['exp_avg', 'exp_avg_sq', 'step'\], but train.optimizer=sgd keeps \["
    ):
        layer_state.install(layers_of(0)[0], sgd, state)


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (Recipe(optimizer="adamz"), "unknown train.optimizer 'adamz'; did you mean 'adam"),
        (Recipe(optimizer="lbfgs"), "train.optimizer=lbfgs must compute the loss several times a step"),
        (Recipe(optimizer="torch.nn:Linear"), "is not a class with the interface of torch.optim.Optimizer"),
        (Recipe(optimizer="torch.optim:Nothing"), "has no function 'Nothing'"),
        (Recipe(optimizer="tests.engine.test_optimizer:Together"), "treats each parameter by itself"),
        (
            Recipe(optimizer="tests.engine.test_optimizer:Late"),
            r"keeps \['count', 'sum'\] of a parameter after its first step and \['count', 'late', 'sum'\] after",
        ),
        (Recipe(optimizer="tests.engine.test_optimizer:Listing"), "keeps 'norms' of a parameter as a list, but"),
        (Recipe(optimizer="tests.engine.test_optimizer:Foreign"), "cannot step tensors without memory .*; name an"),
        (Recipe(optimizer="sgd", arguments={"betas": [0, 1]}), r"refuses betas=\[0, 1\] or one of the"),
        (
            Recipe(groups=[ParameterGroup(match="decodre.*")]),
            "pattern 'decodre.\\*', which matches no parameter;",
        ),
        (Recipe(groups=[ParameterGroup(match="l0.weight", vectors=True)]), "no parameter with at most one dimension"),
        (
            Recipe(optimizer="rprop", groups=[ParameterGroup(weight_decay=0.1)]),
            "train.optimizer=rprop knows no weight decay",
        ),
    ],
)
def test_a_recipe_that_no_run_can_follow_is_one_sentence(recipe: Recipe, message: str) -> None:
    with pytest.raises(CapslogError, match=message):
        recipe.check({"l0.weight": 2, "l0.bias": 1})


@pytest.mark.parametrize("kind", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_torchaos_optimizers_step_two_ranks_as_a_plain_loop_does(kind: str) -> None:
    """They ended at the first step in a traceback: their learning rate is a tensor, their moments wrap others."""
    pytest.importorskip("torchao.optim", reason="torchao is not installed")
    recipe = Recipe(LearningRate(0.01), f"torchao.optim:{kind}", weight_decay=0.1)
    recipe.check({"l0.weight": 2, "l0.bias": 1})
    torch.manual_seed(5)
    modules = [nn.Linear(64, 128), nn.Linear(128, 64)]
    unsplit = {
        f"l{at}.{name}": parameter for at, module in enumerate(modules) for name, parameter in module.named_parameters()
    }
    named = [Layer(f"l{at}", copy.deepcopy(module), [f"x{at}"], [f"x{at + 1}"]) for at, module in enumerate(modules)]
    chain = Chain(named, ["x0"], ["x2"])
    plain = recipe.kind(unsplit.values(), lr=0.01, weight_decay=0.1)
    for step in (1, 2):
        for address, parameter in unsplit.items():
            parameter.grad = gradient(address, parameter, step) * 0.5
        plain.step()
    for rank in (0, 1):
        layers = take_layers(chain, [rank], CPU, "float32")
        optimizer = StageOptimizer(layers, recipe)
        advance(optimizer, layers, 1)
        state = layer_state.capture(layers[0], optimizer, copy=True)
        optimizer = StageOptimizer(layers, recipe)
        layer_state.install(layers[0], optimizer, state)  # as on another rank
        advance(optimizer, layers, 2)
        for address, parameter in parameters_of(layers).items():
            assert torch.equal(parameter, unsplit[address])
            kept = {
                key: moment.nbytes for key, moment in optimizer.moments(address).items() if isinstance(moment, Tensor)
            }
            assert recipe.kept(parameter) == kept


def test_a_recipe_is_what_the_config_says() -> None:
    train = Train(
        optimizer="sgd",
        optimizer_args={"momentum": 0.9},
        parameter_groups=[{"match": "*.bias", "weight_decay": 0}, {"match": "back*", "weight_decay": 0.5}],
        lr_multipliers={"back[": 0.1},
        weight_decay=0.2,
        ema=0.5,
    )
    recipe = Recipe.of_config(train)
    assert str(recipe) == "sgd(momentum=0.9)+ema"
    assert recipe.settings("back[0].bias", 1) == (0.1, 0)
    assert recipe.settings("back[0].weight", 2) == (0.1, 0.5)
    assert recipe.settings("head.weight", 2) == (1.0, 0.2)


class Spectrum(nn.Module):
    """A complex parameter beside a real one."""

    def __init__(self) -> None:
        super().__init__()
        self.spectrum, self.scale = nn.Parameter(torch.randn(5, dtype=torch.complex64)), nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(x) * self.spectrum, n=8) * self.scale


@pytest.mark.parametrize("kind", ["adamw", "sgd", "adam"])
def test_complex_parameters_are_stepped_as_torch_does(kind: str) -> None:
    """torch's fused kernels, which step the real ones, refuse them: a run of such a model ended in a traceback."""
    torch.manual_seed(0)
    plain = Spectrum()
    chain = Chain([Layer("spectrum", copy.deepcopy(plain), ["x"], ["y"])], ["x"], ["y"])
    layers = take_layers(chain, [0], CPU, "float32")
    recipe = Recipe(optimizer=kind, rate=LearningRate(base=0.1), weight_decay=0.01)
    ours, theirs = StageOptimizer(layers, recipe), recipe.kind(plain.parameters(), lr=0.1, weight_decay=0.01)
    for step in range(1, 4):
        for module in (layers[0].layer.module, plain):
            module(torch.full((2, 8), 0.5 * step)).square().sum().backward()
        ours.step(step, 1.0)
        theirs.step()
        theirs.zero_grad()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(layers[0].parameters[name], parameter, rtol=1e-6, atol=1e-7)


def test_the_norm_of_a_complex_gradient_is_of_both_parts() -> None:
    assert norm_of(torch.tensor([3 + 4j, 12j])).item() == 13.0
