"""The temporary folder of a job on Varuna; without Varuna."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.varuna_plugin.install import make_temporary_folder, temporary_folder


def test_a_temporary_folder_that_is_somebody_elses_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder's name can be guessed, so another user of the machine may create it first, with links in it."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = Path(temporary_folder("1234"))
    for _ in range(2):  # by this process, and by another one of the job
        make_temporary_folder(str(folder))
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    with pytest.raises(CapslogError, match=r"varuna-[0-9]+-1234 is there already, and others may write into it"):
        make_temporary_folder(str(folder))
    folder.rmdir()
    folder.symlink_to(tmp_path)
    with pytest.raises(CapslogError, match="no folder of yours"):
        make_temporary_folder(str(folder))
    folder.unlink()
    folder.mkdir(0o700)
    owner = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    with pytest.raises(CapslogError, match="no folder of yours"):
        make_temporary_folder(str(folder))
