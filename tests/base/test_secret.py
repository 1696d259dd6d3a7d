"""The secret of a run: its sources, its file's permissions, and that it is never shown."""

from __future__ import annotations

import os
import pickle
import stat

import pytest

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.secret import FILE_VARIABLE, VARIABLE, Secret, SecretMissing, run_secret

TEXT = "0123456789abcdef" * 2


def test_the_host_that_begins_makes_a_file_that_only_its_owner_reads_and_others_find_the_same_secret(tmp_path):
    with pytest.raises(SecretMissing, match="the machine that begins the run makes it"):
        run_secret(tmp_path, environment={})
    made = run_secret(tmp_path / "run", create=True, environment={})
    file = tmp_path / "run" / "secret"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert len(file.read_text().strip()) == 64
    for again in (run_secret(tmp_path / "run", True, {}), run_secret(tmp_path / "run", environment={})):
        assert again.key("a") == made.key("a")
    assert made.key("a") != made.key("b")
    assert run_secret(tmp_path / "other", create=True, environment={}).key("a") != made.key("a")


def test_a_variable_holds_it_or_names_its_file(tmp_path):
    file = tmp_path / "mine"
    file.touch(mode=0o600)
    file.write_text(f" {TEXT}\n")
    secret = run_secret(tmp_path, environment={FILE_VARIABLE: str(file)})
    assert secret.key("x") == Secret(TEXT).key("x") == run_secret(tmp_path, environment={VARIABLE: TEXT}).key("x")
    elsewhere = {FILE_VARIABLE: str(tmp_path / "new" / "secret")}
    assert run_secret(tmp_path, True, elsewhere).key("x") == run_secret(tmp_path, False, elsewhere).key("x")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o666])
def test_a_file_that_others_may_read_is_refused_without_showing_it(tmp_path, mode):
    file = tmp_path / "secret"
    file.write_text(TEXT)
    file.chmod(mode)
    for create in (False, True):
        with pytest.raises(
            CapslogError, match=rf"others may read the run's secret in .*mode {mode:03o}.*chmod 600"
        ) as error:
            run_secret(tmp_path, create, {})
        assert TEXT not in str(error.value)


@pytest.mark.parametrize("text", ["short", "", "x" * 5000])
def test_a_secret_that_is_too_short_or_too_long_is_refused_without_showing_it(tmp_path, text):
    with pytest.raises(CapslogError, match=rf"the variable {VARIABLE} has {len(text)} characters") as error:
        run_secret(tmp_path, environment={VARIABLE: text})
    assert not text or text not in str(error.value)


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CapslogError, match=r"cannot be written to .*name another file in CAPSLOG_SECRET_FILE"):
        run_secret(tmp_path / "file", True, {})


def test_it_is_neither_printed_nor_pickled():
    secret = Secret(TEXT)
    assert TEXT not in f"{secret} {secret!r} {vars(type(secret))}"
    with pytest.raises(TypeError):
        pickle.dumps(secret)
    assert os.environ.get(VARIABLE) is None
