"""The workload of chaos runs: features that make equal bits hard, and pauses that change no number."""

from __future__ import annotations

import time

import torch

from tests.rig.toy import toy_config, workload


def test_the_config_file_is_written_into_the_folder_and_overrides_win(tmp_path):
    config = toy_config(tmp_path / "run", ["train.max_steps=3", "model.blocks=2"])
    assert (config.run_dir, config.train.max_steps, config.model["blocks"]) == (tmp_path / "run", 3, 2)
    assert (tmp_path / "run" / "toy.yaml").exists()


def test_first_and_last_layer_share_a_parameter_and_blocks_have_statistics_and_dropout(tmp_path):
    chain = workload(toy_config(tmp_path, ["model.blocks=2"])).build_chain()
    assert [layer.name for layer in chain.layers] == ["stem", "block.0", "block.1", "head"]
    (shared,) = chain.shared
    assert shared.layers == (0, 3)
    kinds = {type(module) for module in chain.layers[1].module.modules()}
    assert {torch.nn.BatchNorm1d, torch.nn.Dropout} <= kinds


def test_towers_are_two_branches_with_inputs_of_their_own(tmp_path):
    toy = workload(toy_config(tmp_path, ["model.blocks=4", "model.towers=true"]))
    chain = toy.build_chain()
    names = [layer.name for layer in chain.layers]
    assert names == ["stem", "block.0", "block.1", "side.stem", "side.0", "side.1", "join", "head"]
    assert chain.edges == ((0, 1), (1, 2), (2, 6), (3, 4), (3, 5), (4, 5), (5, 6), (6, 7))
    assert chain.shared[0].layers == (0, 7)
    inputs = toy.train_data().load(toy.train_data().minibatch([[1, 2]], 0), 0)
    assert list(inputs) == ["x", "y"] == list(toy.profile_inputs(2))
    assert not torch.equal(inputs["x"], inputs["y"])


def test_pauses_take_time_and_change_no_number(tmp_path):
    def step(*overrides):
        began = time.monotonic()
        torch.manual_seed(0)
        toy = workload(toy_config(tmp_path, [*overrides, "model.blocks=2"]))
        data = toy.train_data()
        minibatch = data.minibatch([[1, 2], [3, 4]], 0)
        value = data.load(minibatch, 1)["x"]
        for layer in toy.build_chain().layers:
            value = layer.module(value)
        loss = toy.loss({"x": value}, minibatch.targets[1], minibatch.normalisers)["loss"]
        return float(loss.detach()), time.monotonic() - began

    step()
    fast, _ = step()
    slow, seconds = step("data.pause_seconds=0.1", "model.block_seconds=0.1")
    assert slow == fast
    assert seconds > 0.3
