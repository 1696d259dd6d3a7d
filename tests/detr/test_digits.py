"""The embedded data set: complete or absent, the same for every user, without overlap of its splits."""

import json
import multiprocessing
import tempfile

import numpy as np
import pytest
from PIL import Image

from detr_pipeline import digits
from detr_pipeline.coco import read_coco
from detr_pipeline.digits import DIGIT_NAMES, DigitsConfig, default_digits_root, digits_dataset
from tests.homeless import homeless
from varuna_capslog.base.errors import CapslogError

SMALL = DigitsConfig(train_images=30, val_images=10)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return digits_dataset(tmp_path_factory.mktemp("digits"), SMALL)


def test_it_is_a_sound_coco_data_set(folder):
    train = read_coco(folder / "annotations/instances_train.json", strict=True)
    val = read_coco(folder / "annotations/instances_val.json", strict=True)
    assert (len(train), len(val)) == (30, 10)
    assert train.names == val.names == DIGIT_NAMES
    assert not set(train.image_ids) & set(val.image_ids)
    counts = [len(train.targets(image)[1]) for image in range(len(train))]
    assert min(counts) >= 1
    assert max(counts) <= SMALL.most_digits
    assert set(train.widths.tolist() + train.heights.tolist()) <= set(range(64, 97))
    assert len(set(zip(train.widths.tolist(), train.heights.tolist(), strict=True))) > 10


def test_every_box_holds_ink_up_to_its_edges(folder):
    """Boxes are tight: every side of every box touches something brighter than the canvas."""
    index = read_coco(folder / "annotations/instances_train.json")
    for position, name in enumerate(index.file_names):
        pixels = np.asarray(Image.open(folder / "train" / name)).astype(int)
        assert pixels.shape == (index.heights[position], index.widths[position])
        ground = np.bincount(pixels.ravel()).argmax()
        for x1, y1, x2, y2 in index.targets(position)[0].astype(int).tolist():
            inside = pixels[y1:y2, x1:x2] > ground + 20
            assert inside[0].any()
            assert inside[-1].any()
            assert inside[:, 0].any()
            assert inside[:, -1].any()


def test_equal_parameters_give_equal_pictures_and_others_do_not(folder, tmp_path):
    again = digits_dataset(tmp_path, SMALL)
    assert again.name == folder.name
    for path in sorted(folder.rglob("*.*")):
        assert path.read_bytes() == (again / path.relative_to(folder)).read_bytes()
    reseeded = digits_dataset(tmp_path, SMALL.model_copy(update={"seed": 1}))
    assert reseeded != again
    assert (reseeded / "train/000000.png").read_bytes() != (again / "train/000000.png").read_bytes()


def test_train_and_val_share_no_digit(monkeypatch, tmp_path):
    from sklearn.datasets import load_digits  # half a second, too long for every process that collects tests

    drawn = []
    original = digits._picture

    def spy(rng, pictures, labels, part, config):
        drawn.append(set(part.tolist()))
        return original(rng, pictures, labels, part, config)

    monkeypatch.setattr(digits, "_picture", spy)
    digits_dataset(tmp_path, DigitsConfig(train_images=2, val_images=2))
    assert not drawn[0] & drawn[-1]
    assert len(drawn[0] | drawn[-1]) == len(load_digits().target)


def _ask(root, answers):
    answers.put(str(digits_dataset(root, SMALL)))


def test_several_processes_may_ask_at_once(tmp_path):
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    workers = [context.Process(target=_ask, args=(tmp_path, answers)) for _ in range(3)]
    for worker in workers:
        worker.start()
    folders = {answers.get(timeout=180) for _ in workers}
    for worker in workers:
        worker.join(60)
    assert len(folders) == 1
    assert len(read_coco(f"{folders.pop()}/annotations/instances_train.json")) == 30
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == [digits_dataset(tmp_path, SMALL).name]


def test_an_interrupted_write_leaves_nothing_that_looks_finished(monkeypatch, tmp_path):
    def fail(*_args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(digits, "_picture", fail)
        with pytest.raises(KeyboardInterrupt):
            digits_dataset(tmp_path, SMALL)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]
    assert json.loads((digits_dataset(tmp_path, SMALL) / "annotations/instances_val.json").read_text())["images"]


def test_default_root_honours_the_cache_variable(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_digits_root() == tmp_path / "varuna-capslog"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert default_digits_root() == tmp_path / "home/.cache/varuna-capslog"


def test_the_root_of_a_user_without_a_home_is_a_folder_of_his_alone(monkeypatch, tmp_path):
    """Without HOME and passwd entry the digits ended in a RuntimeError; a folder that another user made is refused."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    homeless(monkeypatch)
    folder = default_digits_root()
    assert folder.parent == tmp_path
    assert default_digits_root() == folder
    for made in (lambda: folder.mkdir() or folder.chmod(0o777), lambda: folder.symlink_to(tmp_path), folder.touch):
        folder.unlink() if folder.is_symlink() or folder.is_file() else folder.rmdir()
        made()
        with pytest.raises(CapslogError, match="no folder of this user alone"):
            default_digits_root()


def test_a_root_under_a_home_that_is_not_known_is_one_sentence(monkeypatch):
    homeless(monkeypatch)
    with pytest.raises(CapslogError, match=r"~/x names a home folder that is not known here"):
        digits_dataset("~/x", SMALL)


def test_a_root_that_is_a_file_is_refused_in_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CapslogError, match="cannot be written"):
        digits_dataset(tmp_path / "file", SMALL)


def test_digits_larger_than_the_canvas_are_refused():
    with pytest.raises(ValueError, match="8 <= digit <= canvas"):
        DigitsConfig(digit=(10, 100), canvas=(64, 96))
