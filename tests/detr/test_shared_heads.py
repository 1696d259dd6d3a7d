"""The second chain: heads inside every decoder layer, one set of parameters for all of them."""

from __future__ import annotations

import torch

from detr_pipeline.loss import set_loss
from detr_pipeline.weights import from_reference, load_into, reference_names, to_reference
from tests.detr.tiny import normalisers_of, targets_of, tiny_chain, tiny_config, two_sizes

LAYERS = 4


def test_losses_and_gradients_are_those_of_the_first_chain() -> None:
    config = tiny_config()
    last = tiny_chain(decoder_layers=LAYERS)
    every = tiny_chain(seed=1, decoder_layers=LAYERS, heads="every_decoder")
    load_into(every, from_reference(every, to_reference(last))[0])
    targets = targets_of([3, 2])
    results = []
    for chain in (last, every):
        parts = set_loss(chain.run(two_sizes()), targets, normalisers_of(targets, 7), config)
        parts["loss"].backward()
        names = reference_names(chain)
        gradients = {names[address]: p.grad for address, p in chain.named_parameters().items()}
        results.append((parts, gradients))
    (parts, gradients), (other_parts, other_gradients) = results
    torch.testing.assert_close(other_parts, parts, atol=1e-6, rtol=1e-5)
    assert set(gradients) == set(other_gradients)
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    for name, gradient in gradients.items():
        bound = 1e-5 * max(float(gradient.abs().max()), 1e-3 * largest)
        assert (gradient - other_gradients[name]).abs().max() <= bound * 10, name


def test_every_decoder_layer_holds_the_same_parameters() -> None:
    chain = tiny_chain(decoder_layers=LAYERS, heads="every_decoder")
    first = [layer.name for layer in chain.layers].index("decoder.0")
    users = tuple(range(first, first + LAYERS))
    assert len(chain) == first + LAYERS
    assert {shared.name for shared in chain.shared} == {
        f"decoder.0.heads.{name}.{kind}"
        for name in ("norm", "class_embed", *(f"bbox_embed.layers.{index}" for index in range(3)))
        for kind in ("weight", "bias")
    }
    assert all(shared.layers == users for shared in chain.shared)
    assert tiny_chain(decoder_layers=LAYERS).shared == ()


def test_it_has_as_many_parameters_as_the_first_chain() -> None:
    last, every = (tiny_chain(decoder_layers=LAYERS, heads=heads) for heads in ("last", "every_decoder"))
    assert every.num_parameters() == last.num_parameters()
    assert set(reference_names(every).values()) == set(reference_names(last).values())
    assert len(every.named_tensors()) > len(reference_names(every)) - 1


def test_predictions_gather_along_the_way() -> None:
    chain = tiny_chain(decoder_layers=LAYERS, heads="every_decoder")
    values, seen = two_sizes(), []
    for layer in chain.layers:
        values.update(layer(values))
        if layer.name.startswith("decoder."):
            seen.append((len(values["logits"]), len(values["boxes"]), len(values["hidden"])))
    assert seen == [(1, 1, 1), (2, 2, 1), (3, 3, 1), (4, 4, 1)]
    assert chain.crossing(len(chain) - 1) == ("boxes", "hidden", "logits", "memory", "query", "valid")
