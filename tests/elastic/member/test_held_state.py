"""What an elastic run leaves on disk between two checkpoints, and who goes on from it."""

import dataclasses

import pytest
import torch

from tests.elastic.machines import write_config
from tests.engine import models
from varuna_capslog import cli
from varuna_capslog.base import files
from varuna_capslog.base.supervisor import Supervisor
from varuna_capslog.elastic.member.held_state import recover, write_held
from varuna_capslog.membership.generation import Generation, Stamp
from varuna_capslog.training import layer_state
from varuna_capslog.training.checkpoint import latest_checkpoint
from varuna_capslog.training.stored_layers import from_checkpoint

CHAIN = models.build_chain()
RECORD = Generation(2, ("a",), checkpoint=Stamp(0, 0))


def leave(run_dir, step, layers=None, record=RECORD):
    """The layers that somebody held at a boundary; parameters of that boundary all have its number as value."""
    held = {}
    for index in range(len(CHAIN.layers)) if layers is None else layers:
        state = {key: torch.full_like(value, step) for key, value in layer_state.initial(CHAIN, index).items()}
        held[index, Stamp(step, 1)] = state
    write_held(run_dir, CHAIN, held, record, 1, {"constants": {}, "cuts": [0]})


def step_of(run_dir):
    return latest_checkpoint(run_dir / "checkpoints")[0].step


def test_the_newest_boundary_that_is_there_whole_becomes_a_checkpoint(tmp_path):
    last = len(CHAIN.layers) - 1
    leave(tmp_path, 4)
    leave(tmp_path, 5, [0, 1])  # by one member; what the others held of step 5 is lost
    found = recover(tmp_path)
    assert found == tmp_path / "checkpoints/step-00000004"
    checkpoint, skipped = latest_checkpoint(tmp_path / "checkpoints")
    assert (checkpoint.step, skipped) == (4, [])
    assert all((value == 4).all() for value in from_checkpoint(checkpoint, CHAIN, last).values())
    assert not (tmp_path / "held").exists()


def test_several_members_make_a_boundary_whole_together(tmp_path):
    leave(tmp_path, 5, range(4))
    leave(tmp_path, 5, range(2, len(CHAIN.layers)))
    recover(tmp_path)
    assert step_of(tmp_path) == 5


def test_what_lies_beyond_where_the_run_went_on_is_void(tmp_path):
    """A member that was cut off holds step 5 of generation 1, but generation 2 had gone on from step 3."""
    record = dataclasses.replace(RECORD, number=3, lineage=((2, Stamp(3, 1)),))
    leave(tmp_path, 3, record=record)
    leave(tmp_path, 5, record=record)
    recover(tmp_path)
    assert step_of(tmp_path) == 3


def test_what_is_older_than_the_checkpoint_is_thrown_away(tmp_path):
    leave(tmp_path, 5)
    recover(tmp_path)
    leave(tmp_path, 4)
    assert recover(tmp_path) is None
    assert step_of(tmp_path) == 5
    assert not (tmp_path / "held").exists()


def test_layers_without_any_record_are_thrown_away_and_do_not_mix_with_later_ones(tmp_path):
    """A member was killed while it wrote; the next run counts its generations anew, so the stamps come again."""
    leave(tmp_path, 5, [0])
    (tmp_path / "held/record-000002.json").unlink()
    assert recover(tmp_path) is None
    assert not (tmp_path / "held").exists()


@pytest.mark.parametrize("resume", ["auto", "never"])
def test_a_run_whose_members_never_change_goes_on_from_it_too(tmp_path, monkeypatch, resume):
    """A plain run of a folder that an elastic one had left by notice began anew, and 40 steps were lost unsaid."""
    config = write_config(tmp_path)
    leave(tmp_path / "run", 5)
    found = []
    monkeypatch.setattr(
        Supervisor, "run", lambda self: found.append(latest_checkpoint(tmp_path / "run/checkpoints")[0])
    )
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", str(config), "elastic.enabled=false", f"resume={resume}"])
    assert not ended.value.code
    assert [checkpoint and checkpoint.step for checkpoint in found] == [5 if resume == "auto" else None]
    assert files.read_json(tmp_path / "run/plan-0.json")["num_layers"] == len(CHAIN.layers)
