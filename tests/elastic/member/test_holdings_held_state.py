"""State that an elastic run leaves on disk between two checkpoints, and runs that resume from it."""

import dataclasses

import pytest
import torch

from tests.elastic.machines import write_config
from tests.engine import models
from varuna_capslog import cli
from varuna_capslog.base import files
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.supervisor import Supervisor
from varuna_capslog.elastic.member.holdings import recover, write_held
from varuna_capslog.membership.generation import Generation, Stamp
from varuna_capslog.training import layer_state
from varuna_capslog.training.checkpoint import latest_checkpoint
from varuna_capslog.training.stored_layers import from_checkpoint

CHAIN = models.build_chain()
RECORD = Generation(2, ("a",), checkpoint=Stamp(0, 0))


def leave(run_dir, step, layers=None, record=RECORD):
    """Write the layers that a member held at a boundary; all parameters have the boundary's number as value."""
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
    leave(tmp_path, 5, [0, 1])  # by one member; the other layers of step 5 are lost
    recovered = recover(tmp_path)
    assert recovered == tmp_path / "checkpoints/step-00000004"
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
    """A member that was cut off holds step 5 of generation 1, but generation 2 continued from step 3."""
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
    """Regression: a plain run in the folder of an elastic run that had ended by notice began anew, and 40 steps were
    silently lost.
    """
    config = write_config(tmp_path)
    leave(tmp_path / "run", 5)
    checkpoints = []
    monkeypatch.setattr(
        Supervisor, "run", lambda self: checkpoints.append(latest_checkpoint(tmp_path / "run/checkpoints")[0])
    )
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", str(config), "elastic.enabled=false", f"resume={resume}"])
    assert not ended.value.code
    assert [checkpoint and checkpoint.step for checkpoint in checkpoints] == [5 if resume == "auto" else None]
    assert files.read_json(tmp_path / "run/plan-0.json")["num_layers"] == len(CHAIN.layers)


def spoil(path, change):
    content = files.read_json(path)
    change(content)
    files.write_json(path, content)


@pytest.mark.parametrize("name", ["x-y", "3-1-1", "-", "4-", "99999999999999999999-1", "\u00b2-1"])
def test_folders_that_no_member_wrote_are_passed_over(tmp_path, name):
    """Regression: a folder `x-y` in a run's held/ was a ValueError at every start, until it was removed."""
    leave(tmp_path, 4)
    (tmp_path / "held" / name).mkdir()
    recover(tmp_path)
    assert step_of(tmp_path) == 4


def test_a_link_in_the_place_of_a_boundary_is_passed_over(tmp_path):
    """Otherwise files of the link's target would be removed."""
    leave(tmp_path, 4)
    leave(tmp_path / "other", 5)
    elsewhere = tmp_path / "other/held/00000005-000001"
    (tmp_path / "held/00000005-000001").symlink_to(elsewhere)
    recover(tmp_path)
    assert step_of(tmp_path) == 4
    assert len(list(elsewhere.glob("*.pt.json"))) == len(CHAIN.layers)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda about: about.pop("record"), "record: format is not"),
        (lambda about: about.pop("manifest"), "manifest is null; it must be an object"),
        (lambda about: about["manifest"].pop("layers"), "layers is null; it must be a list"),
        (lambda about: about["record"].update(checkpoint=[0]), "checkpoint has 1 entries; it must have 2"),
        (lambda about: about["record"].update(lineage=[3]), "lineage is a number; it must be a list"),
        (lambda about: about["record"].update(lineage=[[]]), "lineage has 0 entries; it must have 3"),
        (lambda about: about["record"].update(regress="no"), "regress is 'no'; it must be true or false"),
        (lambda about: about["record"].update(motion=[1]), "motion is a list; it must be an object"),
    ],
)
def test_a_record_of_another_shape_is_one_sentence_and_nothing_is_lost(tmp_path, change, message):
    """Regression: such a record was a KeyError or a TypeError ("this is a defect") at every start of the run."""
    leave(tmp_path, 4)
    spoil(tmp_path / "held/record-000002.json", change)
    with pytest.raises(CapslogError, match=f"held/.*{message}.*; remove the folder held/"):
        recover(tmp_path)
    assert (tmp_path / "held/00000004-000001").is_dir()


@pytest.mark.parametrize(
    "change",
    [lambda entry: entry.pop("bytes"), lambda entry: entry.pop("digest"), lambda entry: entry.update(bytes=5)],
)
def test_a_boundary_with_a_damaged_file_is_passed_over_for_an_older_one(tmp_path, caplog, change):
    """Regression: the checkpoint made of this boundary could not be read, and all other boundaries had been removed."""
    leave(tmp_path, 4)
    leave(tmp_path, 5)
    spoil(tmp_path / "held/00000005-000001/layer-0001.pt.json", change)
    recover(tmp_path)
    assert step_of(tmp_path) == 4
    assert "passed over what was held after step 5: " in caplog.text


def test_an_entry_names_no_file_but_its_own(tmp_path):
    leave(tmp_path, 4)
    spoil(tmp_path / "held/00000004-000001/layer-0001.pt.json", lambda entry: entry.update(file="../../secret"))
    recover(tmp_path)
    checkpoint, _ = latest_checkpoint(tmp_path / "checkpoints")
    assert [entry["file"] for entry in checkpoint.manifest["layers"].values()][1] == "layer-0001.pt"
