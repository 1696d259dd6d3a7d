"""Batch norms that train on one sample at a time are named, in a plan and in `fit`."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

import varuna_capslog as capslog
from varuna_capslog.model.batch_norm import warning_of_one_sample
from varuna_capslog.start import prepare
from varuna_capslog.start.ordinary import OrdinaryModel, ordinary_config


def convolutions() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4))


def test_the_first_that_trains_is_named_and_the_others_counted() -> None:
    model = convolutions()
    note = warning_of_one_sample(model.named_modules(), "a microbatch", "choose 2")
    assert note is not None
    assert note.startswith("'1' is a BatchNorm2d (and 1 more like it), and a microbatch has one sample")
    assert "; choose 2, replace it by a GroupNorm, or freeze it with eval()" in note
    model[1].eval()
    assert (warning_of_one_sample(model.named_modules(), "", "") or "").startswith("'3' is a BatchNorm2d, and")
    assert warning_of_one_sample(model.eval().named_modules(), "", "") is None


@pytest.mark.parametrize(("samples", "notes"), [(1, 1), (2, 0)])
def test_a_plan_names_it_where_its_microbatches_have_one_sample(samples: int, notes: int) -> None:
    model = nn.Sequential(nn.BatchNorm1d(64), nn.ReLU())
    plan = capslog.plan(model, torch.zeros(samples, 64, 64), devices=1, device="cuda:t4")
    named = [note for note in plan.notes if "BatchNorm1d" in note]
    assert len(named) == notes
    assert all("a microbatch (train.microbatch_size=1) has one sample" in note for note in named)


def test_a_run_with_a_measured_profile_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A measured profile brings no built chain along."""
    profile = capslog.estimate(convolutions(), torch.zeros(1, 3, 16, 16), device="cpu")
    model = OrdinaryModel(f"{__name__}:convolutions", "input=float32[1,3,16,16]")
    config = ordinary_config(model, {"devices": 1}, device="cpu", measured=True)
    monkeypatch.setattr(prepare, "profile_and_variants", lambda config, *rest, **options: (config, profile))
    plan = prepare.settled_plan(config, False, list[str]().append)[2]
    assert [note for note in plan.notes if "BatchNorm2d (and 1 more like it)" in note]


def test_fit_warns_once_and_not_of_larger_batches(caplog: pytest.LogCaptureFixture) -> None:
    x = torch.zeros(2, 2, 3)
    with caplog.at_level(logging.WARNING):
        fitted = capslog.fit(nn.Sequential(nn.BatchNorm1d(2)), x, "1GB")
        assert not caplog.records
        fitted.fit_for((x[:1],), {})
        fitted.fit_for((x[:1, :, :2],), {})
    assert [record.message for record in caplog.records] == [
        "'0' is a BatchNorm1d, and the batch has one sample, so that each is normalised by itself, unlike in "
        "evaluations; give larger batches, replace it by a GroupNorm, or freeze it with eval()"
    ]
