"""Models whose Python does what no graph can: each trains as itself or is refused by name; none differs silently."""

from __future__ import annotations

import contextlib
import copy
import functools
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.associative_scan import associative_scan
from torch._subclasses.fake_tensor import FakeTensor

from tests.model import hostile, unusual
from tests.sweeps import some
from varuna_capslog.api.planning import estimate, plan
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.seeds import mix, mixed
from varuna_capslog.engine.layout import Layout
from varuna_capslog.engine.pipeline import PipelineEngine
from varuna_capslog.engine.recipe import EngineOptions
from varuna_capslog.engine.step import train_step
from varuna_capslog.fitting import fit
from varuna_capslog.model.capture import Kept
from varuna_capslog.model.capture.export import named_leaves
from varuna_capslog.model.capture.trial import has_weights
from varuna_capslog.model.chain import Chain, TensorSpec
from varuna_capslog.model.hollow import hollow_copy
from varuna_capslog.model.python_state import PythonState, crafted_draws, seed_generators
from varuna_capslog.model.trace import ShapeTable
from varuna_capslog.model.workload import Minibatch
from varuna_capslog.profiling.estimation.hollow import SilentCommunicator

BATCHES = [torch.randn(4, hostile.WIDTH, generator=torch.Generator().manual_seed(number)) for number in range(3)]
ONE_LAYER = {
    *("LayerDrop", "RareLayerDrop", "NumpyLayerDrop", "Roll", "OwnGenerator", "TorchGenerator", "Branches"),
    *("Seeds", "ReadsNumber", "Filling"),
}
"""Models whose own outermost code must stay Python."""


def made(kind: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind()


@functools.cache
def training_chain(name: str) -> Chain:
    """Chain of a hostile model in training mode, which no test may change."""
    return Chain.from_module(made(hostile.RIGHT[name]), None, (BATCHES[0],), evaluates=False)


def seed(model: nn.Module, value: int) -> None:
    torch.default_generator.manual_seed(value)
    seed_generators(PythonState(dict(model.named_modules()), files=True).generators, value)


def loss(outputs: Mapping[str, Tensor], targets: Any = None, normalisers: Mapping[str, float] | None = None) -> Any:
    share = (normalisers or {"microbatches": 1.0})["microbatches"]
    return {"loss": torch.stack([output.square().mean() for output in outputs.values()]).sum() / share}


def tensors(result: Any) -> dict[str, Tensor]:
    return {name: leaf for name, leaf in named_leaves(result) if isinstance(leaf, Tensor)}


def step(run: Callable[[Tensor], Mapping[str, Tensor]], model: nn.Module, x: Tensor) -> tuple[Any, dict[str, Any]]:
    model.zero_grad()
    outputs = run(x)
    loss(outputs)["loss"].backward()
    return outputs, {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_same(ours: Mapping[str, Tensor | None], theirs: Mapping[str, Tensor | None], case: object) -> None:
    assert ours.keys() == theirs.keys(), case
    for name, expected in theirs.items():
        actual = ours[name]
        assert (expected is None) == (actual is None), (case, name)
        assert expected is None or torch.equal(expected, actual), (case, name)


@contextlib.contextmanager
def nothing_stays(model: nn.Module) -> Iterator[None]:
    """Check that a capture in the block, also one that is refused, leaves nothing behind. Fake tensors stayed on
    modules that keep an activation, and the random generators advanced.
    """
    modules = dict(model.named_modules())
    before = {path: dict(vars(module)) for path, module in modules.items()}
    state, forward = PythonState(modules, files=True), hostile.Reverse.forward
    saved, generator = {name: tensor.clone() for name, tensor in model.state_dict().items()}, torch.get_rng_state()
    draws = random.getstate(), np.random.get_state()[1].copy()  # noqa: NPY002
    yield
    assert state.changes() == []
    assert {path: dict(vars(module)) for path, module in modules.items()} == before
    assert hostile.Reverse.forward is forward
    held = [attribute for module in modules.values() for attribute in vars(module).values()]
    assert not any(isinstance(attribute, FakeTensor) for attribute in held)
    assert all(torch.equal(saved[key], tensor) for key, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), generator)
    assert random.getstate() == draws[0]
    assert np.array_equal(np.random.get_state()[1], draws[1])  # noqa: NPY002


@pytest.mark.parametrize("name", hostile.RIGHT)
def test_a_hostile_model_is_its_chain_to_the_last_bit(name: str, tmp_path: Any) -> None:
    """Backwards of the user's own were lost, and values that Python drew were frozen at the capture: gradient reversal
    trained in the wrong direction, and layers that the capture's draw left out were never trained. The test also
    covers another process that reads the capture.
    """
    model = made(hostile.RIGHT[name])
    plain, kept = copy.deepcopy(model), Kept(tmp_path)
    kept.writes = True
    chains = []
    for _ in range(2):
        with nothing_stays(model):
            chains.append(Chain.from_module(model, None, (BATCHES[0],), kept=kept))
    for chain in chains:
        assert (len(chain) == 1) == (name in ONE_LAYER), [layer.name for layer in chain.layers]
        for number in range(3):
            seed(plain, number)
            outputs, gradients = step(lambda x: tensors(plain(x)), plain, BATCHES[1])
            seed(model, number)
            chain_outputs, ours = step(lambda x: chain.run({chain.inputs[0]: x}), model, BATCHES[1])  # noqa: B023
            assert_same(ours, gradients, number)
            assert all(map(torch.equal, chain_outputs.values(), outputs.values()))
    if name != "DroppingSequential":
        held = {id(parameter) for chain in chains for layer in chain.layers for parameter in layer.module.parameters()}
        assert held == {id(parameter) for parameter in model.parameters()}, "parameters that no layer holds"


def engine_step(chain: Chain, recompute: bool) -> tuple[float, dict[str, Tensor]]:
    """Return loss and gradients of one step of three microbatches on one rank, by the model's own names."""
    inputs = [{chain.inputs[0]: x} for x in BATCHES]
    specs = [{name: TensorSpec.of(tensor) for name, tensor in sample.items()} for sample in inputs]
    minibatch = Minibatch(specs, [None] * 3, {"microbatches": 3.0}, [[0], [1], [2]])
    options = EngineOptions(3, seed=5, clip_norm=0.0, recompute=recompute)
    layout, communicator = Layout.pipelines((0,), len(chain)), SilentCommunicator(0, 1, False)
    engine = PipelineEngine(chain, loss, layout, options, communicator, torch.device("cpu"))
    gradients: dict[str, Tensor] = {}

    def keep() -> None:
        for layer in engine.layers:
            gradients.update(
                {
                    name: parameter.grad.clone()
                    for name, parameter in layer.parameters.items()
                    if parameter.grad is not None
                }
            )

    return train_step(engine, 1, minibatch, inputs.__getitem__, before_commit=keep).parts["loss"], gradients


DRAWING = ["LayerDrop", "RareLayerDrop", "NumpyLayerDrop", "DroppingBlocks", "DroppingSequential", "BackwardHook"]
"""Models that draw in Python, in each way, and one that does not; every run of the tests tries these."""


@pytest.mark.parametrize("name", some(sorted(hostile.RIGHT, key=lambda name: name not in DRAWING), len(DRAWING)))
def test_a_step_of_the_engine_draws_by_its_seeds(name: str) -> None:
    """The step also covers layers that run again, in any state of the process's generators, which stay unchanged."""
    random.seed(1)
    states = random.getstate(), np.random.get_state()[1].copy()  # noqa: NPY002
    losses = [engine_step(copy.deepcopy(training_chain(name)), recompute) for recompute in (True, False)]
    assert random.getstate() == states[0]
    assert np.array_equal(np.random.get_state()[1], states[1])  # noqa: NPY002
    assert losses[0][0] == losses[1][0]
    assert_same(losses[0][1], losses[1][1], name)


@pytest.mark.parametrize("name", ["LayerDrop", "NumpyLayerDrop", "OwnGenerator", "Branches"])
def test_a_step_of_a_whole_model_is_the_models_own_with_the_same_seeds(name: str) -> None:
    plain = made(hostile.RIGHT[name])
    total, gradients = engine_step(copy.deepcopy(training_chain(name)), recompute=True)
    losses = []
    for microbatch, x in enumerate(BATCHES):
        seed(plain, mix(0, after=mixed(5, 1, microbatch)))
        part = loss(tensors(plain(x)), None, {"microbatches": 3.0})["loss"]
        part.backward()
        losses.append(part.item())
    assert total == pytest.approx(sum(losses), rel=1e-12)
    assert_same(
        gradients,
        {name: parameter.grad for name, parameter in plain.named_parameters() if parameter.grad is not None},
        name,
    )


@pytest.mark.parametrize("name", hostile.REFUSED)
def test_a_state_from_one_forward_to_the_next_is_refused_by_name(name: str) -> None:
    """State was frozen at its value in the capture, and `fit` changed it twice if layers ran again."""
    kind, word = hostile.REFUSED[name]
    for model, compares in ((made(kind), True), (made(kind), False), (hollow_copy(made(kind)), True)):
        match = f"changes its (attribute|buffer) .*{word}.* in its forward"
        with nothing_stays(model) if has_weights(model) else contextlib.nullcontext():
            with pytest.raises(CapslogError, match=match) as refused:
                Chain.from_module(model, None, (BATCHES[0],), compares=compares)
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", some([name for name in hostile.RIGHT if name != "DroppingSequential"][::-1], 9))
def test_without_weights_the_same_modules_stay_python(name: str) -> None:
    """The capture then knows, as in planning, only the reads and draws that it notices."""
    hollow = hollow_copy(made(hostile.RIGHT[name]))
    chains = [training_chain(name), Chain.from_module(hollow, None, (BATCHES[0],), evaluates=False)]
    assert [layer.name for layer in chains[0].layers] == [layer.name for layer in chains[1].layers]
    specs = [ShapeTable(chain).boundaries({chain.inputs[0]: TensorSpec((4, 8))}) for chain in chains]
    assert specs[0] == specs[1]


def test_what_carries_a_gradient_does_not_depend_on_a_draw() -> None:
    """A skipped block passes on a tensor without a gradient; stages before it were then never trained."""
    for kind in (hostile.DroppingBlocks, hostile.DroppingSequential):
        chain = Chain.from_module(made(kind), None, (BATCHES[0],), evaluates=False)
        for high in (True, False):
            with crafted_draws(high):
                table = ShapeTable(chain).boundaries({chain.inputs[0]: TensorSpec((4, 8))})
            assert all(spec.requires_grad for cut in table[1:] for spec in cut.values())


def test_draws_that_decide_nothing_keep_nothing_python() -> None:
    """An example is a LayerDrop whose rate is 0."""

    class Off(hostile.Base):
        rate = 0.0

        def body(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                if self.training and random.random() < self.rate:
                    continue
                x = x + block(x)
            return x

    assert [layer.name for layer in Chain.from_module(made(Off), None, (BATCHES[0],)).layers][:2] == [
        "blocks.0",
        "blocks.1",
    ]


def test_crafted_draws_are_the_extremes() -> None:
    for high, least, most in ((False, 0.0, 0.0), (True, 1 - 1e-9, 1.0)):
        with crafted_draws(high):
            draws = [random.random(), float(np.random.uniform()), random.random()]  # noqa: NPY002
        assert all(least <= draw <= most for draw in draws)


def test_a_changed_attribute_is_named_where_the_chain_runs() -> None:
    """A coefficient that the loop annealed, and a block that was replaced, had no effect."""
    changes: dict[str, Callable[[nn.Module], None]] = {
        "alpha": lambda model: setattr(model, "alpha", 0.5),
        r"settings\['beta'\]": lambda model: model.settings.update(beta=0.1),
        r"blocks\.1": lambda model: model.blocks.__setitem__(1, nn.Linear(8, 8)),
        "extra": lambda model: setattr(model, "extra", 1),
    }
    for named, change in changes.items():
        model = made(hostile.Alpha)
        chain = Chain.from_module(model, None, (BATCHES[0],))
        chain.run({"x": BATCHES[0]})
        change(model)
        with pytest.raises(CapslogError, match=f"{named} of the model was changed after the model was captured"):
            chain.run({"x": BATCHES[0]})
        with pytest.raises(CapslogError, match="was changed after"):
            engine_step(chain, recompute=False)


def test_what_torch_compile_keeps_is_no_state_of_the_model() -> None:
    """A chain of a model with a compiled block was refused once the model itself had run."""
    model = made(hostile.Base)
    model.blocks[1] = torch.compile(model.blocks[1], backend="eager")
    chain = Chain.from_module(model, None, (BATCHES[0],))
    expected = model(BATCHES[1])
    assert torch.equal(chain.run({"x": BATCHES[1]})["output"], expected)


def test_what_layers_run_themselves_may_change() -> None:
    """Examples: a dropout's rate, requires_grad, and attributes of modules whose code runs."""

    class Dropping(hostile.Base):
        def block(self) -> nn.Module:
            return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))

    model = made(Dropping)
    chain = Chain.from_module(model, None, (BATCHES[0],))
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    model.head.requires_grad_(False)
    output = chain.run({"x": BATCHES[0]})["output"]
    assert torch.equal(output, model(BATCHES[0]))
    copied = copy.deepcopy(chain)  # the copy does not refer to the model
    model.extra = 1
    copied.run({"x": BATCHES[0]})


@pytest.mark.parametrize("checks", [True, False])
def test_a_model_that_draws_from_a_distribution_is_divided_unless_arguments_are_checked(checks: bool) -> None:
    """Its plan ended in an error: `normal_` was counted as a norm. The checks of torch branch on values."""

    class Drawing(hostile.Base):
        def forward(self, x: Tensor) -> Any:
            mean = self.body(x)
            spread = torch.ones_like(mean)
            return self.head(torch.distributions.Normal(mean, spread, validate_args=checks).rsample())

    model = made(Drawing)
    chain = Chain.from_module(model, None, (BATCHES[0],))
    assert (len(chain) == 1) == checks
    assert ("pass validate_args=False to divide it" in str(chain.layers[0].module.meta.get("whole", ""))) == checks
    assert all(layer.peak_bytes for layer in estimate(model, BATCHES[0]).observations)


def test_a_hook_with_a_tensor_of_the_forward_keeps_its_module_whole() -> None:
    class Masked(hostile.Base):
        def forward(self, x: Tensor) -> Any:
            x = self.body(x)
            mask = (x > 0).float()
            if x.requires_grad:
                x.register_hook(lambda gradient: gradient * mask)
            return self.head(x)

    model = made(Masked)
    plain = copy.deepcopy(model)
    chain = Chain.from_module(model, None, (BATCHES[0],))
    assert "uses another tensor of the forward" in chain.layers[-1].module.meta["whole"][""]
    _, gradients = step(lambda x: tensors(plain(x)), plain, BATCHES[1])
    assert_same(step(lambda x: chain.run({"x": x}), model, BATCHES[1])[1], gradients, "")


def test_a_module_that_fails_on_its_example_says_so() -> None:
    model = made(hostile.Base)
    why = r"the model itself fails on this example, too .*shapes cannot be multiplied"
    with pytest.raises(CapslogError, match=why):
        Chain.from_module(model, None, (torch.randn(4, 5),))


# -- models that were refused wrongly, or with torch's traceback  ------------------------------------------------------


@pytest.mark.parametrize("name", unusual.CASES)
def test_an_unusual_model_trains_as_itself(name: str, tmp_path: Any) -> None:
    """Equal to the last bit, also if layers run again, and if another process reads the capture; but a sparse gradient
    is added in another order than a dense one, and the engine updates running statistics by itself.
    """
    case = unusual.CASES[name]
    kept = Kept(tmp_path)
    kept.writes = True
    batches, plain = unusual.examples(case), unusual.made(case)
    wanted_loss, wanted = unusual.plain_step(plain, batches)
    rtol = 1e-6 if name == "sparse embeddings" else 0.0
    for recompute in (False, True):
        chain = Chain.from_module(unusual.made(case), None, batches[0], evaluates=False, kept=kept)
        assert len(chain) >= case.layers, [layer.name for layer in chain.layers]
        chain_loss, gradients, buffers = unusual.engine_step(chain, batches, recompute)
        assert chain_loss == pytest.approx(wanted_loss, rel=1e-7)
        unusual.assert_close(gradients, wanted, rtol)
        unusual.assert_close(buffers, {name: buffer for name, buffer in plain.named_buffers() if name in buffers}, 1e-6)


PLANNED = ["complex parameters", "nested batch", "old weight_norm", "autocast around all", "sparse embeddings"]


@pytest.mark.parametrize("name", PLANNED)
def test_an_unusual_model_is_planned(name: str) -> None:
    case = unusual.CASES[name]
    assert len(plan(unusual.made(case), case.example(), devices=2).stages) == 2


def refusal(door: Any, case: unusual.Case) -> str:
    with pytest.raises(CapslogError) as error:
        door(unusual.made(case), case.example())
    assert "\n" not in str(error.value)
    return str(error.value)


def test_what_cannot_be_planned_says_why() -> None:
    case = unusual.CASES["batch norm called twice"]
    twice = refusal(lambda model, example: plan(model, example, devices=9, planner="capslog"), case)
    assert "blocks" not in twice
    assert "are one layer, which makes all calls of encoder.0.norm, since its running statistics" in twice
    packed = refusal(estimate, unusual.CASES["packed sequences in a module"])
    assert "module 'reader.rnn' cannot run on tensors without values" in packed
    fitted = refusal(lambda model, example: fit(model, example, budget="1GB"), unusual.CASES["packed sequences"])
    assert fitted.startswith("Packed cannot be fitted to a budget: ")
    spectral = refusal(estimate, unusual.Case(unusual.OldSpectralNorm, lambda: (unusual.x(),), 5))
    assert "changes its buffer 'blocks.0.weight_u' in the forward" in spectral


class KeyValueCache:
    pass


class WithCache(unusual.Blocks):
    def forward(self, x: Tensor) -> Any:
        return {"logits": super().forward(x), "past": KeyValueCache()}


def test_a_result_of_a_class_that_torch_does_not_know_is_refused() -> None:
    """The refusal said that the model returns no tensor."""
    message = refusal(
        lambda model, args: Chain.from_module(model, None, args), unusual.Case(unusual.Plain, lambda: (unusual.x(),), 1)
    )
    assert message.startswith(
        "the Plain returns a tests.model.unusual.Result, in which torch finds no tensors; return a"
    )
    cache_message = refusal(estimate, unusual.Case(WithCache, lambda: (unusual.x(),), 1))
    assert cache_message.endswith("set use_cache=False in its config, or return tensors only")


class Adapted(nn.Module):
    """Wrapper like peft's: passes all its arguments on, and shows the configuration of the inner model."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Cached()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


class Config:
    use_cache = True


class Cached(unusual.Blocks):
    config = Config()

    def forward(self, x: Tensor, use_cache: bool | None = None) -> Any:
        logits = super().forward(x)
        keeps = self.config.use_cache if use_cache is None else use_cache
        return {"logits": logits, "past": KeyValueCache()} if keeps else {"logits": logits}


class WithTower(Adapted):
    """Like transformers' Llava: the configuration of the whole says nothing of a cache, that of the inner one does."""

    config = object()


def test_the_cache_of_a_model_inside_another_is_switched_off() -> None:
    sample = {"x": unusual.x()}
    assert len(plan(Adapted(), sample, devices=2).stages) == 2
    assert len(plan(WithTower(), sample, devices=2).stages) == 2
    fitted = fit(Adapted(), sample, budget="1GB")
    assert fitted.fits[0].intervals == ()
    with pytest.raises(CapslogError, match="takes arguments without names; give all in order or all by name"):
        fitted(unusual.x(), use_cache=False)


class Keeping(unusual.Blocks):
    """Blocks that keep an activation on themselves."""

    def body(self, x: Tensor) -> Tensor:
        self.last = super().body(x)
        return self.last


def test_a_model_that_kept_an_activation_is_planned_and_stays_as_it_is() -> None:
    """Torch cannot copy a tensor with a gradient, nor any tensor under fake ones."""
    model = Keeping()
    model(unusual.x()).sum().backward()
    before = model.last
    assert len(plan(model, (unusual.x(),), devices=2).stages) == 2
    assert model.last is before


def test_an_example_may_be_a_bare_tensor() -> None:
    """`plan` and `fit` accept one, too; its rows were taken for arguments."""
    chain = Chain.from_module(unusual.Blocks(), None, unusual.x(), evaluates=False)
    assert chain.inputs == ("x",)
    assert len(chain) == 5


class Doubled(nn.Sequential):
    """An nn.Sequential with code of its own."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = super().forward(x)
        return 2 * result


class SequenceFirst(nn.Module):
    """Attends in its own code on [tokens, batch, width], as `nn.MultiheadAttention` does inside."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.ModuleList(nn.Linear(32, 96) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        tokens, batch, width = x.shape
        for qkv, out in zip(self.qkv, self.out, strict=True):
            parts = (part.reshape(tokens, batch * 2, 16).transpose(0, 1) for part in qkv(x).chunk(3, -1))
            query, key, value = (part.view(batch, 2, tokens, 16) for part in parts)
            y = nn.functional.scaled_dot_product_attention(query, key, value)
            x = x + out(y.permute(2, 0, 1, 3).contiguous().view(tokens * batch, width)).view(tokens, batch, width)
        return x


def test_a_copy_that_only_another_devices_attention_needs_is_made_there() -> None:
    """A CPU's kernel returns attention in the layout of the queries: an export finds nothing to copy, and a GPU did."""
    model, x = SequenceFirst(), torch.randn(6, 4, 32)
    assert plan(model, {"x": x}, devices="a100-80gb").peak_bytes > 0
    chain = Chain.from_module(model, None, {"x": x}, evaluates=False)
    assert len(chain) > 1
    assert torch.equal(chain.run({"x": x})["output"], model(x))


@pytest.mark.parametrize("how", ["class", "forward", "hook", "pre-hook", "backward pre-hook"])
def test_what_a_sequential_does_beside_its_children_is_not_lost(how: str) -> None:
    """The model was cut between its children, and only the children ran."""
    children = nn.Linear(8, 8), nn.Linear(8, 8)
    model = Doubled(*children) if how == "class" else nn.Sequential(*children)
    if how == "forward":
        plain = model.forward
        model.forward = lambda x: 2 * plain(x)  # type: ignore[method-assign, assignment]
    elif how == "hook":
        model.register_forward_hook(lambda module, args, output: 3 * output)
    elif how == "pre-hook":
        model.register_forward_pre_hook(lambda module, args: (3 * args[0],))
    elif how == "backward pre-hook":
        model.register_full_backward_pre_hook(lambda module, gradients: (3 * gradients[0],))
    x = torch.randn(4, 8)
    with pytest.raises(CapslogError, match=r"is more than an nn\.Sequential that is cut between its children"):
        Chain.from_module(model, None)
    chain = Chain.from_module(model, None, x)
    model(x).sum().backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    next(iter(chain.run({chain.inputs[0]: x}).values())).sum().backward()
    assert all(
        torch.equal(parameter.grad, gradient) for parameter, gradient in zip(model.parameters(), expected, strict=True)
    )


def test_hooks_of_parameters_are_refused() -> None:
    """Copies of parameters, which other ranks train, have no hooks."""
    for register in ("register_hook", "register_post_accumulate_grad_hook"):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        getattr(model[1].weight, register)(lambda gradient: None)
        with pytest.raises(CapslogError, match=r"parameter '1\.weight' has a hook on its gradient, which copies of it"):
            Chain.from_module(model, None)


def test_a_model_with_hooks_of_parameters_is_planned(caplog: pytest.LogCaptureFixture) -> None:
    """peft's OSF projects gradients by hooks; nothing of that hinders a plan, which takes no weights."""
    with torch.device("meta"):
        model = made(hostile.Base)
    model.blocks[1].weight.register_hook(lambda gradient: gradient @ gradient.t() @ gradient)
    assert len(plan(model, (BATCHES[0],), devices=2).stages) == 2
    assert "'blocks.1.weight' has a hook on its gradient: it can be planned, but training refuses it" in caplog.text


class Averaged(hostile.Base):
    """A teacher whose weights the forward updates."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            self.teacher.weight.lerp_(self.blocks[0].weight, 0.1)
        return self.head(self.body(x) - self.teacher(x))


class Clamped(hostile.Base):
    """Weights that the forward clamps: twice has the same effect as once."""

    def forward(self, x: Tensor) -> Any:
        self.head.weight.data.clamp_(-0.1, 0.1)
        return self.head(self.body(x))


def test_what_a_forward_writes_into_parameters_and_closures_is_noticed() -> None:
    model = made(Averaged)
    before = model.teacher.weight.clone()
    with pytest.raises(CapslogError, match=r"module 'teacher' .*changes its parameter 'weight' in its forward"):
        Chain.from_module(model, None, (BATCHES[0],), compares=True)
    assert torch.equal(model.teacher.weight, before)
    model = made(Clamped)
    before = model.head.weight.clone()
    chain = Chain.from_module(model, None, (BATCHES[0],), compares=True)
    assert torch.equal(model.head.weight, before)
    assert torch.equal(chain.run({chain.inputs[0]: BATCHES[0]})["output"], model(BATCHES[0]))


def test_what_a_forward_makes_of_its_first_batch_is_noticed() -> None:
    """The chain scaled every batch by itself, the module all by the first: on the first batch they agree."""
    model = made(hostile.FirstScale)
    with pytest.raises(CapslogError, match=r"changes its attribute 'scale' in its forward, and what it computes"):
        Chain.from_module(model, None, (BATCHES[0],))
    assert model.scale is None


def test_a_module_of_torch_script_is_refused_in_a_sentence() -> None:
    """It ended in a TypeError of OrderedModuleDict."""
    model = made(hostile.Base)
    model.blocks[1] = torch.jit.trace(nn.Linear(8, 8), BATCHES[0])
    with pytest.raises(
        CapslogError, match=r"module 'blocks.1' was compiled by torch.jit, whose code cannot be captured"
    ):
        Chain.from_module(model, None, (BATCHES[0],))


def test_a_count_in_a_closure_is_noticed() -> None:
    count = [0]

    class Alternating(hostile.Base):
        def forward(self, x: Tensor) -> Any:
            count[0] += 1
            return self.head(self.body(x)) * (1 + count[0] % 2)

    with pytest.raises(CapslogError, match=r"changes its attribute 'count\[0\]' in its forward"):
        Chain.from_module(made(Alternating), None, (BATCHES[0],))
    assert count == [0]


scale = 1.0
loss_so_far = 0.0


class Scaled(hostile.Base):
    """A value in its file scales it; an attribute has the name of another value of the file."""

    def forward(self, x: Tensor) -> Any:
        return _scaled(self.head(self.body(x)), self.loss_so_far)

    loss_so_far = 0.0


def _scaled(x: Tensor, more: float) -> Tensor:
    return x * scale + more


def test_a_value_of_its_file_that_the_code_reads_may_not_change(monkeypatch: pytest.MonkeyPatch) -> None:
    chain = Chain.from_module(made(Scaled), None, (BATCHES[0],))
    monkeypatch.setitem(globals(), "loss_so_far", 0.5)
    chain.run({chain.inputs[0]: BATCHES[0]})
    monkeypatch.setitem(globals(), "scale", 2.0)
    with pytest.raises(CapslogError, match=r"test_exporting\.scale of the model was changed after"):
        chain.run({chain.inputs[0]: BATCHES[0]})
    monkeypatch.undo()
    monkeypatch.setattr(Scaled, "loss_so_far", 0.5)
    with pytest.raises(CapslogError, match=r"Scaled\.loss_so_far of the model was changed"):
        chain.run({chain.inputs[0]: BATCHES[0]})


class Scans(nn.Module):
    """As state spaces of transformers do, it scans where it is compiled, by a function that no operator stands for."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            compiled = torch.compiler.is_compiling()
            x = associative_scan(torch.add, x, 0, combine_mode="generic") if compiled else x.cumsum(0)
        return x


def test_code_for_compilers_that_no_graph_holds_is_captured_as_it_runs() -> None:
    model, x = Scans(), torch.randn(5, 4)
    chain = Chain.from_module(model, ["blocks.0", "blocks.1"], x)
    assert len(chain) == 2
    assert torch.equal(*chain.run({"x": x}).values(), model(x))
    assert not torch.compiler.is_compiling()
