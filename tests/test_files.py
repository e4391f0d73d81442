"""Files that hold text: damaged ones are named, a failed write keeps the old one."""

from __future__ import annotations

import errno
import os

import pytest
import torch
from safetensors.torch import save_file

from raptor.files import (
    RunError,
    WriteError,
    read_json,
    replacing,
    slug,
)


def test_damaged_json_names_its_file(tmp_path):
    (tmp_path / "summary.json").write_text("{")
    with pytest.raises(RunError, match=r"summary\.json cannot be read"):
        read_json(tmp_path / "summary.json")
    with pytest.raises(RunError, match=r"nothing\.json cannot be read"):
        read_json(tmp_path / "nothing.json")


def test_a_slug_is_one_folders_name():
    assert slug("timm/vit_base.fb in1k") == "timm_vit_base.fb_in1k"
    assert slug("hub/facebook/dino:vit") == "hub_facebook_dino_vit"
    assert slug("../up/") == "up"
    assert slug("..") == "model"


def test_a_failed_write_names_the_file_and_keeps_the_old_one(tmp_path):
    path = tmp_path / "phases.json"
    path.write_text("old")
    with pytest.raises(WriteError, match=r"cannot write .*phases\.json: the disk is full; make room"):
        with replacing(path) as partial:
            partial.write_text("ne")
            raise OSError(errno.ENOSPC, "No space left on device")
    assert path.read_text() == "old" and [entry.name for entry in tmp_path.iterdir()] == ["phases.json"]


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)])
def test_a_file_has_the_permissions_that_the_umask_leaves(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        with replacing(tmp_path / "head.safetensors") as partial:
            save_file({"weight": torch.zeros(2)}, partial)
        assert os.umask(umask) == umask
    finally:
        os.umask(before)
    assert (tmp_path / "head.safetensors").stat().st_mode & 0o777 == mode
