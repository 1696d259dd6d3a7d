"""Chains from ordinary modules: the same numbers as the module itself, and no silently wrong results."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

from tests.sweeps import crossed
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.model.capture import automatic_cut_points, source_modules
from varuna_capslog.model.chain import Chain, TensorSpec
from varuna_capslog.model.signature import layer_signature
from varuna_capslog.model.trace import ShapeTable

torch.set_num_threads(1)


def tiny_llama(attention: str = "eager") -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=61, use_cache=False, attn_implementation=attention, bos_token_id=1, eos_token_id=2,
        attention_dropout=0.1,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def tiny_gpt2(attention: str = "eager") -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_embd=32, n_layer=2, n_head=4, vocab_size=61, n_positions=32, use_cache=False, attn_implementation=attention,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def tokens() -> Tensor:
    return torch.randint(0, 61, (2, 12), generator=torch.Generator().manual_seed(3))


def set_mode(chain: Chain, training: bool) -> None:
    for layer in chain.layers:
        layer.module.train(training)


def outputs_of(result: Any) -> dict[str, Tensor]:
    if isinstance(result, Tensor):
        return {"output": result}
    return {name: value for name, value in result.items() if isinstance(value, Tensor)}


def gradients(outputs: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    model.zero_grad()
    torch.stack([value.float().square().mean() for value in outputs.values()]).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(
    model: nn.Module, chain: Chain, inputs: dict[str, Tensor], training: bool, tolerance: float = 0.0
) -> None:
    """Check that a chain's outputs, gradients and running statistics equal the module's (bitwise if tolerance is 0)."""
    model.train(training)
    set_mode(chain, training)
    before = copy.deepcopy(model.state_dict())
    torch.manual_seed(7)
    expected = outputs_of(model(**inputs))
    expected_gradients = gradients(expected, model)
    expected_state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(before)
    torch.manual_seed(7)
    outputs = chain.run({name: inputs[name] for name in chain.inputs})
    chain_gradients = gradients(outputs, model)
    assert outputs.keys() == expected.keys()
    for name in expected:
        assert torch.equal(outputs[name], expected[name]), name
    assert chain_gradients.keys() == expected_gradients.keys()
    assert chain_gradients
    for name, gradient in expected_gradients.items():
        bound = tolerance * max(float(gradient.abs().max()), 1e-3)
        assert float((gradient - chain_gradients[name]).abs().max()) <= bound, name
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, expected_state[name]), name


@pytest.mark.parametrize("training", [True, False])
def test_sequential_runs_any_shape_and_keeps_its_names(training: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Dropout(0.3), nn.BatchNorm1d(8), nn.Linear(8, 2))
    chain = Chain.from_module(model, ["1", "3"])
    assert [layer.name for layer in chain.layers] == ["0", "1", "3"]
    assert next(iter(chain.layers[2].module.state_dict())) == "3.weight"
    assert chain.layers[0].module.get_parameter("0.weight") is model[0].weight
    model.train(training)
    set_mode(chain, training)
    for batch in (3, 5):
        x = torch.randn(batch, 4)
        torch.manual_seed(0)
        expected = copy.deepcopy(model)(x)
        torch.manual_seed(0)
        assert torch.equal(chain.run({"x": x})["x"], expected)


def test_in_place_module_after_a_cut_leaves_the_boundary_alone() -> None:
    sequential = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0), nn.ReLU(inplace=True))
    chain = Chain.from_module(sequential, ["1", "2"])
    for layer in chain.layers[1:]:
        layer.module.eval()  # dropout then returns its input itself
        boundary = torch.randn(3, 4, requires_grad=True)
        before = boundary.detach().clone()
        layer.module(boundary).sum().backward()
        assert torch.equal(boundary.detach(), before)

    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.relu, self.last = nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.first(x)
            skip = hidden.view(2, 2, 4)
            return self.last(self.relu(hidden)) + skip.view(4, 4)  # the skip reads the changed value

    model = InPlace()
    with pytest.raises(CapslogError, match="2 views"):
        Chain.from_module(model, ["relu"], (torch.randn(4, 4),))

    class Plain(InPlace):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self.first(x)
            return self.last(self.relu(hidden)) + hidden

    model = Plain()
    chain = Chain.from_module(model, ["relu", "last"], (torch.randn(4, 4),))
    boundary = torch.randn(4, 4, requires_grad=True)
    before = boundary.detach().clone()
    chain.layers[1].module(boundary)
    assert torch.equal(boundary.detach(), before)
    assert_same(model, chain, {"x": torch.randn(4, 4)}, training=True)


def test_resnet_equals_its_chain() -> None:
    torchvision = pytest.importorskip("torchvision")
    torch.manual_seed(0)
    model = torchvision.models.resnet18(num_classes=5)
    cuts = ["layer1.0", "layer1.1", "layer2", "layer3.0.conv2", "layer4.1.relu", "fc"]
    chain = Chain.from_module(model, cuts, (torch.randn(2, 3, 32, 32),))
    assert [layer.name for layer in chain.layers] == ["conv1", *cuts]
    assert (chain.inputs, chain.outputs) == (("x",), ("output",))
    norms = [m for layer in chain.layers for m in layer.module.modules() if isinstance(m, nn.BatchNorm2d)]
    assert {id(m) for m in norms} == {id(m) for m in model.modules() if isinstance(m, nn.BatchNorm2d)}
    operations = {str(node.target) for layer in chain.layers for node in layer.module.graph.nodes}
    assert not any("batch_norm" in target for target in operations)
    for training in (True, False):
        assert_same(model, chain, {"x": torch.randn(2, 3, 32, 32)}, training)


def test_automatic_cuts_are_the_repeated_blocks() -> None:
    torchvision = pytest.importorskip("torchvision")
    resnet = torchvision.models.resnet18()
    assert automatic_cut_points(resnet) == [f"layer{stage}.{block}" for stage in (1, 2, 3, 4) for block in (0, 1)]
    assert automatic_cut_points(tiny_llama()) == [f"model.layers.{index}" for index in range(3)]
    named = {"evaluates": False, "compares": False}
    chain = Chain.from_module(torchvision.models.convnext_tiny(), None, (torch.randn(1, 3, 32, 32),), **named)
    assert [layer.name for layer in chain.layers][:4] == ["features.0", "features.1.0", "features.1.1", "features.1.2"]
    # the layers after the last block have weights: one layer more
    last = Chain.from_module(resnet, None, (torch.randn(2, 3, 32, 32),), **named).layers[-1]
    assert last.name == "avgpool"
    assert list(dict(last.module.named_parameters())) == ["fc.weight", "fc.bias"]
    with pytest.raises(CapslogError, match="name the cut points"):
        automatic_cut_points(nn.Linear(1, 1))


def test_llama_equals_its_chain() -> None:
    model = tiny_llama()
    ids = tokens()
    cuts = ["model.layers.0", "model.layers.1", "model.layers.2", "model.norm", "lm_head"]
    chain = Chain.from_module(model, cuts, {"input_ids": ids, "labels": ids})
    assert (chain.inputs, set(chain.outputs)) == (("input_ids", "labels"), {"loss", "logits"})
    assert chain.layers[2].name == "model.layers.1"
    assert "model.layers.1.self_attn.q_proj.weight" in dict(chain.layers[2].module.named_parameters())
    assert not any("inv_freq" in name for layer in chain.layers[1:] for name in layer.module.state_dict())
    assert not chain.shared
    # the norms run as modules, so that their dtype rules hold under autocast
    assert "model.layers.1.input_layernorm" in {str(node.target) for node in chain.layers[2].module.graph.nodes}
    other_ids = torch.randint(0, 61, (2, 12))
    for training in (True, False):
        assert_same(model, chain, {"input_ids": other_ids, "labels": ids}, training)


def test_llama_with_fused_attention_equals_to_rounding() -> None:
    # torch.export passes the causal mask as a tensor where the module says is_causal: another backward kernel
    model = tiny_llama("sdpa")
    ids = tokens()
    chain = Chain.from_module(model, None, {"input_ids": ids, "labels": ids}, outputs=["loss"])
    assert chain.outputs == ("loss",)
    model.eval()
    set_mode(chain, False)
    chain_gradients = gradients(chain.run({"input_ids": ids, "labels": ids}), model)
    expected = gradients({"loss": model(input_ids=ids, labels=ids).loss}, model)
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in expected.items():
        bound = 1e-5 * max(float(gradient.abs().max()), 1e-3 * largest)
        assert float((gradient - chain_gradients[name]).abs().max()) <= bound, name


@pytest.mark.parametrize(("attention", "training"), crossed(["eager", "sdpa"], [True, False]))
def test_gpt2_equals_its_chain_and_its_tied_weight_is_found(training: bool, attention: str) -> None:
    model = tiny_gpt2(attention)
    ids = tokens()
    chain = Chain.from_module(model, ["transformer.h.0", "transformer.h.1", "lm_head"], {"input_ids": ids})
    assert len(chain.shared) == 1
    assert chain.shared[0].uses == ((0, "transformer.wte.weight"), (3, "lm_head.weight"))
    assert chain.named_parameters()[chain.shared[0].name] is model.lm_head.weight
    assert sum(p.numel() for p in chain.named_parameters().values()) == sum(p.numel() for p in model.parameters())
    # fused attention with dropout works on other layouts, so only to rounding there
    assert_same(
        model, chain, {"input_ids": torch.randint(0, 61, (2, 12))}, training, 0.0 if attention == "eager" else 1e-5
    )


def test_a_key_value_cache_is_left_out_of_the_chain() -> None:
    model = tiny_gpt2()
    model.config.use_cache = True
    assert Chain.from_module(model, ["lm_head"], {"input_ids": tokens()}).outputs == ("logits",)


def test_two_inputs_given_as_one_tensor_stay_two() -> None:
    """torch.export takes one tensor under two names for one input; labels were then read as input_ids."""
    ids = tokens()
    chain = Chain.from_module(tiny_llama(), None, {"input_ids": ids, "labels": ids}, evaluates=False)
    assert "input_ids" in chain.layers[0].reads
    assert "labels" in chain.layers[-1].reads


def test_layers_run_on_fake_tensors_and_boundaries_are_right() -> None:
    model = tiny_gpt2()
    chain = Chain.from_module(model, ["transformer.h.0", "transformer.h.1", "lm_head"], {"input_ids": tokens()})
    table = ShapeTable(chain).boundaries({"input_ids": TensorSpec((2, 12), torch.int64)})
    values = {"input_ids": tokens()}
    for cut, layer in enumerate(chain.layers, start=1):
        values.update(layer(values))
        for name, spec in table[cut].items():
            assert (spec.shape, spec.dtype, spec.requires_grad) == (
                tuple(values[name].shape), values[name].dtype, values[name].requires_grad
            ), name  # fmt: skip


def test_another_shape_is_refused_by_the_layer_that_meets_it() -> None:
    chain = Chain.from_module(tiny_gpt2(), ["lm_head"], {"input_ids": tokens()})
    with pytest.raises(CapslogError, match=r"captured for 'input_ids' of shape \[2, 12\] but got \[2, 9\]"):
        chain.run({"input_ids": tokens()[:, :9]})


def test_functional_dropout_follows_the_mode_of_the_layer() -> None:
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(nn.functional.dropout(self.first(x), 0.5, training=self.training))

    model = Functional()
    chain = Chain.from_module(model, ["last"], (torch.randn(4, 8),))
    for training in (True, False):
        assert_same(model, chain, {"x": torch.randn(4, 8)}, training)


def test_stochastic_depth_follows_the_mode_of_the_layer() -> None:
    efficientnet = pytest.importorskip("torchvision.models.efficientnet")
    widths = itertools.pairwise((32, 16, 24, 40))  # the first three stages of a b0
    stages = [efficientnet.MBConvConfig(6, 3, 2, *width, 2, 1.0, 1.0) for width in widths]
    model = efficientnet.EfficientNet(stages, 0.2, stochastic_depth_prob=0.5, num_classes=3)
    chain = Chain.from_module(model, ["features.3.1.stochastic_depth", "features.4"], (torch.randn(2, 3, 32, 32),))
    for training in (True, False):
        assert_same(model, chain, {"x": torch.randn(2, 3, 32, 32)}, training)


def test_a_model_that_does_something_else_in_eval_mode_is_refused_there() -> None:
    class TwoFaced(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.first(x)
            return self.last(hidden * 2 if self.training else hidden)

    model = TwoFaced()
    chain = Chain.from_module(model, ["last"], (torch.randn(2, 4),))
    assert_same(model, chain, {"x": torch.randn(2, 4)}, training=True)
    set_mode(chain, False)
    with pytest.raises(CapslogError, match="for training only"):
        chain.run({"x": torch.randn(2, 4)})


@pytest.mark.parametrize("same", [False, True])
def test_tables_of_other_values_in_eval_mode_are_refused_there(same: bool) -> None:
    """torch numbers tables that the code makes in each mode anew, and equal numbers counted as equal tables: BigBird's
    blocks, drawn in training and fixed in eval mode, were those of training (transformers#23055)."""

    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            first = 1.0 if self.training or same else 2.0
            return self.last(self.first(x) * torch.tensor([first, 2.0, 3.0, 4.0]))

    model = Table()
    chain = Chain.from_module(model, ["last"], (torch.randn(2, 4),))
    assert_same(model, chain, {"x": torch.randn(2, 4)}, training=True)
    set_mode(chain, False)
    if same:
        assert_same(model, chain, {"x": torch.randn(2, 4)}, training=False)
        return
    with pytest.raises(CapslogError, match="for training only: module 'Table' reads a table of other values in eval"):
        chain.run({"x": torch.randn(2, 4)})


def test_no_grad_and_autocast_blocks_keep_their_meaning() -> None:
    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.teacher = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                target = self.teacher(x)
            with torch.autocast("cpu", enabled=False):
                hidden = self.first(x)
            return self.last(hidden) - target

    model = Blocks()
    chain = Chain.from_module(model, ["last"], (torch.randn(2, 4),))
    assert_same(model, chain, {"x": torch.randn(2, 4)}, training=True)
    assert model.teacher[0].weight.grad is None
    x = torch.randn(2, 4)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(chain.run({"x": x})["output"], model(x))
    cut_inside = Chain.from_module(model, ["teacher.1"], (torch.randn(2, 4),))
    assert [layer.name for layer in cut_inside.layers] == ["teacher.0", "teacher.1"]
    assert_same(model, cut_inside, {"x": torch.randn(2, 4)}, training=True)


def test_constants_and_plain_tensors_travel_with_their_layer() -> None:
    class Constants(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)
            self.scale = torch.tensor([1.0, 2.0, 3.0])

        def forward(self, x: Tensor) -> dict[str, Any]:
            hidden = self.first(x) * self.scale + torch.tensor([0.5, 0.25, 0.125])
            position = torch.arange(3, device=x.device)
            return {"hidden": hidden, "all": [self.last(hidden) + position, hidden]}

    model = Constants()
    chain = Chain.from_module(model, ["last"], (torch.randn(2, 3),))
    assert chain.outputs == ("hidden", "all.0", "all.1")
    x = torch.randn(2, 3)
    outputs, expected = chain.run({"x": x}), model(x)
    assert torch.equal(outputs["all.0"], expected["all"][0])
    assert torch.equal(outputs["all.1"], expected["hidden"])
    assert not any("constant" in name for layer in chain.layers for name in layer.module.state_dict())
    meta = copy.deepcopy(chain.layers[0].module).to("meta")
    assert {tensor.device.type for tensor in meta(torch.empty(2, 3, device="meta"))} == {"meta"}


def test_a_layer_that_reads_nothing_and_names_a_device_first_follows_its_buffer() -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("frequencies", torch.tensor([1.0, 0.5, 0.25]))

        def forward(self, x: Tensor) -> Tensor:
            return torch.arange(3, device=x.device) * self.frequencies

    class Rotated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.positions, self.first = Positions(), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            angles = self.positions(x)
            return self.first(x) + angles

    model, x = Rotated(), torch.randn(2, 3)
    chain = Chain.from_module(model, ["positions", "first"], (x,))
    layer = next(layer for layer in chain.layers if "positions" in layer.name)
    assert not layer.reads
    assert len({layer_signature(each) for each in chain.layers}) == len(chain.layers)
    assert copy.deepcopy(layer.module).to("meta")().device.type == "meta"


def test_bad_requests_get_one_sentence() -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) if x.sum() > 0 else -x

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.count.add_(1)
            return x * 2

    class Holder(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.first, self.inner, self.unused, self.last = nn.Linear(4, 4), inner, nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.inner(self.first(x)))

    example = (torch.randn(2, 4),)
    with pytest.raises(CapslogError, match=r"cut point 'inner\.linear' lies in 'inner', which runs as a whole .*of a"):
        Chain.from_module(Holder(Branching()), ["inner.linear"], example)
    with pytest.raises(CapslogError, match=r"'inner' \(Counting\) changes its 'count'"):
        Chain.from_module(Holder(Counting()), ["last"], example)
    plain = Holder(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    with pytest.raises(CapslogError, match="did you mean 'last'"):
        Chain.from_module(plain, ["lost"], example)
    with pytest.raises(CapslogError, match="'unused' does nothing"):
        Chain.from_module(plain, ["unused"], example)
    with pytest.raises(CapslogError, match="same operation"):
        Chain.from_module(plain, ["inner", "inner.0"], example)
    with pytest.raises(CapslogError, match="listed twice"):
        Chain.from_module(plain, ["last", "last"], example)
    with pytest.raises(CapslogError, match="needs example_inputs"):
        Chain.from_module(plain, ["last"])
    with pytest.raises(CapslogError, match="one string"):
        Chain.from_module(plain, "last", example)
    with pytest.raises(CapslogError, match="names 'logits'"):
        Chain.from_module(plain, ["last"], example, outputs=["logits"])


def test_the_captured_model_is_left_as_it_was() -> None:
    model = tiny_gpt2()
    model.transformer.h[0].eval()
    modes = [module.training for module in model.modules()]
    state = copy.deepcopy(model.state_dict())
    chain = Chain.from_module(model, ["lm_head"], {"input_ids": tokens()})
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in state.items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert source_modules(chain.layers[1]) == ("lm_head",)


class OwnBackward(torch.autograd.Function):
    """Runs a module again in the backward, and its gradients arrive there, as in a reversible block."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module) -> Tensor:
        ctx.save_for_backward(x)
        ctx.module = module
        return module(x).detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            ctx.module(x).backward(gradients[0])
        return x.grad, None


class Reversible(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return OwnBackward.apply(self.blocks[0](x), self.blocks[1])


def test_a_comparison_leaves_no_gradient_on_the_model() -> None:
    """A leftover gradient would be added to those of the first step."""
    torch.manual_seed(0)
    model = Reversible()
    chain = Chain.from_module(model, None, {"x": torch.randn(2, 4)})
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(parameter.grad is None for parameter in chain.named_parameters().values())


class IndexedUnderVmap(nn.Module):
    """Indexes with a result of vmap, as transformers does for its masks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        allowed = x[:, 0] > 0
        with TransformGetItemToIndex():
            mask = torch.vmap(lambda row: allowed[row].to(x.dtype))(torch.arange(len(x)))
        return self.blocks[1](self.blocks[0](x) * mask[:, None])


def test_a_module_that_indexes_under_vmap_is_kept_whole() -> None:
    torch.manual_seed(0)
    model, x = IndexedUnderVmap(), torch.randn(3, 4)
    chain = Chain.from_module(model, None, {"x": x})
    assert "torch.vmap" in chain.kept_whole[0]
    assert torch.equal(chain.run({"x": x})["output"], model(x))
