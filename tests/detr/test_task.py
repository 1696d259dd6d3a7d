from __future__ import annotations

import base64
import importlib.util
import io
import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import detr_pipeline
from detr_pipeline import workload
from detr_pipeline.chain import to_reference
from detr_pipeline.data import sampled_padded_sizes
from detr_pipeline.task import DetrWorkload
from tests.detr.tiny import tiny_config
from varuna_capslog.base.errors import CapslogError, ConfigError, settle
from varuna_capslog.config.settings import Config
from varuna_capslog.model.workload import load_workload
from varuna_capslog.reports.run import read_sample
from varuna_capslog.variants.attention import ChunkedAttention, EagerAttention

TINY = tiny_config().model_dump(mode="json", exclude_defaults=True)


def tiny_workload(tmp_path: Path, model: dict[str, Any] | None = None, **sections: Any) -> DetrWorkload:
    data = {"root": str(tmp_path / "data"), "digits": {"train_images": 6, "val_images": 3}}
    return workload(
        Config(
            workload="detr_pipeline:workload",
            model=TINY | (model or {}),
            data=data | sections.pop("data", {}),
            run_dir=tmp_path / "run",
            **sections,
        )
    )


def test_importing_the_package_is_cheap() -> None:
    code = "import sys, detr_pipeline; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_function_stays_a_function() -> None:
    """A submodule of the same name replaced it on its first call, and the second config could not be loaded."""
    importlib.import_module("detr_pipeline.task")
    assert importlib.util.find_spec("detr_pipeline.workload") is None
    assert callable(detr_pipeline.workload)


def test_sections_are_checked_when_the_workload_is_built(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.quries is not a known key; did you mean model\.queries"):
        tiny_workload(tmp_path, {"quries": 3})
    with pytest.raises(ConfigError, match=r"data\.rot is not a known key"):
        tiny_workload(tmp_path, data={"rot": "x"})


def test_planning_writes_and_reads_no_data(tmp_path: Path) -> None:
    task = tiny_workload(tmp_path, profile={"image_size": [90, 120]})
    chain = task.build_chain()
    assert chain.named_parameters()["heads.class_embed.weight"].shape[0] == 11
    assert {name: spec.shape for name, spec in task.profile_inputs(2).items()} == {
        "images": (2, 3, 90, 120),
        "sizes": (2, 2),
    }
    assert tiny_workload(tmp_path).profile_inputs(1)["images"].shape == (1, 3, 112, 112)
    assert not (tmp_path / "data").exists()


def test_the_profilers_targets_go_through_the_loss(tmp_path: Path) -> None:
    task = tiny_workload(tmp_path)
    inputs = {name: spec.zeros() for name, spec in task.profile_inputs(2).items()}
    targets, normalisers = task.profile_targets(2)
    parts = task.loss(task.build_chain().run(inputs), targets, normalisers)
    assert parts["loss"].isfinite()
    assert normalisers["queries"] == 14


def test_steps_on_the_digits_lower_the_loss(tmp_path: Path) -> None:
    task = tiny_workload(tmp_path)
    torch.manual_seed(0)
    chain = task.build_chain()
    optimizer = torch.optim.AdamW(chain.named_parameters().values(), lr=1e-3)
    source = task.train_data()
    minibatch = source.minibatch([[0, 1, 2, 3]], 0)
    inputs = source.load(minibatch, 0)
    losses = []
    for _ in range(8):
        loss = task.loss(chain.run(inputs), minibatch.targets[0], minibatch.normalisers)["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.95 * losses[0]


def test_evaluation_takes_the_chains_outputs(tmp_path: Path) -> None:
    task = tiny_workload(tmp_path)
    source, judge, chain = task.val_data(), task.evaluator(), task.build_chain()
    assert source is not None
    assert judge is not None
    minibatch = source.minibatch([[0, 1], [2]], 0)
    results = []
    for microbatch in range(2):
        with torch.no_grad():
            outputs = chain.run(source.load(minibatch, microbatch))
        results += judge.collect(outputs, minibatch, microbatch)
    assert len(results) == 3
    assert 0 <= judge.summarize(results)["AP"] < 0.2
    assert (tmp_path / "run" / "detections.json").exists()


def test_predictions_are_drawn_into_the_folder(tmp_path: Path) -> None:
    task = tiny_workload(tmp_path)
    Image.new("RGB", (60, 90), "white").save(tmp_path / "seen.jpg")
    written = task.predict(task.build_chain(), [tmp_path / "seen.jpg"], tmp_path / "out")
    assert written == [tmp_path / "out" / "seen.png"]
    assert Image.open(written[0]).size[1] > Image.open(written[0]).size[0]
    record = json.loads((tmp_path / "out" / "seen.boxes.json").read_text())
    bare = Image.open(io.BytesIO(base64.b64decode(record["jpeg"])))
    assert bare.size == (record["width"], record["height"]) == (60, 90)
    scores = [entry["score"] for entry in record["boxes"]]
    assert scores == sorted(scores, reverse=True)
    assert read_sample(tmp_path / "out" / "seen.boxes.json").name == "seen", "the report takes it"
    with pytest.raises(CapslogError, match=r"gone\.jpg is missing"):
        task.predict(task.build_chain(), [tmp_path / "gone.jpg"], tmp_path / "out")


def test_weights_from_a_path_are_in_the_chain(tmp_path: Path) -> None:
    torch.manual_seed(1)
    source = tiny_workload(tmp_path).build_chain()
    torch.save({"model": to_reference(source)}, tmp_path / "weights.pth")
    torch.manual_seed(2)
    loaded = tiny_workload(tmp_path, {"weights": str(tmp_path / "weights.pth"), "cut_points": "paper"}).build_chain()
    theirs, ours = to_reference(source), to_reference(loaded)
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)
    with pytest.raises(CapslogError, match=r"no\.pth' cannot be read"):
        tiny_workload(tmp_path, {"weights": str(tmp_path / "no.pth")}).build_chain()
    torch.save({"model": {"other": torch.zeros(2)}}, tmp_path / "other.pth")
    with pytest.raises(CapslogError, match=r"other\.pth: it fits 0 of \d+ tensors.*give weights of .* resnet18"):
        tiny_workload(tmp_path, {"weights": str(tmp_path / "other.pth")}).build_chain()


def test_how_much_of_the_weights_is_taken_is_said_or_refused(tmp_path: Path) -> None:
    """A file of which only one tensor fitted trained from scratch without a warning."""
    state = to_reference(tiny_workload(tmp_path, {"num_classes": 3}).build_chain())
    path, section = tmp_path / "weights.pth", {"weights": str(tmp_path / "weights.pth")}
    torch.save(state, path)
    (note,) = settle(tiny_workload(tmp_path, section).check())
    total = len(state)
    assert (
        f"weights.pth: it fits {total - 2} of {total} tensors, and 2 are left out (class_embed.weight: [4, 32]" in note
    )
    assert settle(tiny_workload(tmp_path, section | {"num_classes": 3}).check()) == []
    torch.save({name: tensor for name, tensor in state.items() if name.startswith("query")}, path)
    part = tiny_workload(tmp_path, section)
    for call in (lambda: settle(part.check()), part.build_chain):
        with pytest.raises(CapslogError, match=rf"fits 1 of {total} tensors, and {total - 1} .*; \.\.\.\).*init_from"):
            call()
    torch.save({name: tensor for name, tensor in state.items() if name.startswith("backbone")}, path)
    assert settle(tiny_workload(tmp_path, section).check()) == []


def test_import_weights_gives_addresses_and_skips_without_a_model_in_memory(tmp_path: Path) -> None:
    source = tiny_workload(tmp_path, {"num_classes": 3}).build_chain()
    torch.save({"model": to_reference(source)}, tmp_path / "weights.pth")
    state = torch.random.get_rng_state()
    tensors, skipped = tiny_workload(tmp_path).import_weights(tmp_path / "weights.pth")
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(tensors["encoder.0.linear1.weight"], source.named_parameters()["encoder.0.linear1.weight"])
    assert [line.partition(":")[0] for line in skipped] == ["class_embed.weight", "class_embed.bias"]


def test_frozen_norms_without_weights_are_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "detr_pipeline.task"):
        tiny_workload(tmp_path).train_data()
        assert caplog.records == []
        tiny_workload(tmp_path, {"norm": "frozen"}).train_data()
    assert "set model.norm=group" in caplog.text


def test_the_workload_samples_inputs(tmp_path: Path) -> None:
    task = tiny_workload(tmp_path, train={"minibatch_size": 4, "microbatch_size": 2})
    specs = task.sampled_inputs(2, count=6, seed=1)
    sizes = sampled_padded_sizes(task.data, 2, 4, 6, 1)
    assert [spec["images"].shape for spec in specs] == [(2, 3, h, w) for h, w in sizes]
    assert all(spec["sizes"].shape == (2, 2) for spec in specs)
    assert list(tmp_path.iterdir()) == []


def test_a_given_image_size_is_the_only_one(tmp_path: Path) -> None:
    task = tiny_workload(tmp_path, profile={"image_size": [64, 96]})
    assert task.sampled_inputs(2, count=6) == [task.profile_inputs(2)]


def test_chosen_variants_are_in_the_chain_and_close_to_the_plain_one(tmp_path: Path) -> None:
    plain = {"attention": "eager", "dropout": 0.0}
    chosen = {"variants": {"encoder.*": "chunked", "*decoder*": "sdpa"}, "numerics": "close"}
    results, inputs = [], None
    for sections in ({}, chosen):
        config = tiny_workload(tmp_path, plain, **sections).config
        task = load_workload(config)
        torch.manual_seed(0)
        chain = task.chosen_chain()
        kinds = {type(part) for layer in chain.layers for part in layer.module.modules()}
        assert (ChunkedAttention in kinds, EagerAttention in kinds) == ((True, False) if sections else (False, True))
        inputs = inputs or {
            name: torch.rand(spec.shape) if spec.dtype.is_floating_point else torch.tensor([spec.shape[-2:]]) * 40
            for name, spec in task.profile_inputs(1).items()
        }
        outputs = chain.run(inputs)
        (outputs["logits"].square().sum() + outputs["boxes"].sum()).backward()
        gradients = {name: p.grad for name, p in chain.named_parameters().items() if p.grad is not None}
        results.append((outputs, gradients))
    (expected, expected_gradients), (actual, gradients) = results
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)
    largest = max(float(gradient.abs().max()) for gradient in expected_gradients.values())
    for name, gradient in gradients.items():
        assert (gradient - expected_gradients[name]).abs().max() <= 1e-5 * largest, name
    with pytest.raises(CapslogError, match="numerics=same allows the same bits at most"):
        load_workload(tiny_workload(tmp_path, plain, variants=chosen["variants"]).config).chosen_chain()
