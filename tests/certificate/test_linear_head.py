"""The files of linear heads, and a model's own head as one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from tiny_certified import blobs, plain_vit

from raptor.certificate.linear_head import LinearHead, own_linear_head
from raptor.certificate.ridge import fit_ridge
from raptor.vit.open import open_vit


def test_head_files(tmp_path: Path) -> None:
    features, labels = blobs()
    head = fit_ridge(features, labels, 4)
    again = LinearHead.load(head.save(tmp_path / "run" / "head.safetensors"))
    torch.testing.assert_close(again(features), head(features), rtol=0, atol=0)
    torch.save({"linear.weight": head.weight, "linear.bias": head.bias}, tmp_path / "head.pth")
    torch.testing.assert_close(LinearHead.load(tmp_path / "head.pth")(features), head(features), rtol=0, atol=0)
    with pytest.raises(ValueError, match="no head at"):
        LinearHead.load(tmp_path / "absent.safetensors")
    with pytest.raises(ValueError, match="takes 9 features, the model gives 4"):
        head(features[:, :4])


@pytest.mark.parametrize("options", [{}, {"class_token": False, "global_pool": "avg", "fc_norm": False}])
def test_a_models_own_head_as_one_on_cls_and_mean_patch(options: dict[str, object]) -> None:
    torch.manual_seed(0)
    shape: dict[str, Any] = dict(img_size=32, patch_size=8, embed_dim=24, depth=3, num_heads=2, num_classes=5)
    vit = open_vit(timm.create_model("vit_tiny_patch16_224", **shape, **options).eval())
    head = own_linear_head(vit, torch.randn(4, 3, 32, 32))
    assert head is not None and not head.weight.requires_grad
    images = torch.randn(5, 3, 32, 32)
    with torch.no_grad():
        states, output = vit.record(images)
        torch.testing.assert_close(head(vit.features(states[-1])), output, rtol=1e-4, atol=1e-5)
    assert own_linear_head(plain_vit(), images) is None


@pytest.mark.parametrize("name", ["head.safetensors", "head.pth"])
@pytest.mark.parametrize("junk", [b"", b"not a head at all", b"\x80\x04\x95junk"])
def test_a_junk_head_is_one_line(tmp_path: Path, name: str, junk: bytes) -> None:
    (tmp_path / name).write_bytes(junk)
    with pytest.raises(ValueError, match="is no linear head") as error:
        LinearHead.load(tmp_path / name)
    assert "\n" not in str(error.value)


def test_a_file_without_named_tensors_is_no_head(tmp_path: Path) -> None:
    for holds in (torch.zeros(3), {"weight": 3}):
        torch.save(holds, tmp_path / "head.pth")
        with pytest.raises(ValueError, match="no named tensors"):
            LinearHead.load(tmp_path / "head.pth")


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.full((3, 4), float("nan")), "12 of 12 values of weight are NaN or infinite"),
        (torch.ones(3, 4, dtype=torch.int8), "it has int8 weights"),
        (torch.ones(0, 4), "it has no classes"),
    ],
)
def test_a_head_with_such_weights_is_refused(tmp_path, weight, message) -> None:
    save_file({"weight": weight, "bias": torch.zeros(len(weight))}, tmp_path / "head.safetensors")
    with pytest.raises(ValueError, match=message):
        LinearHead.load(tmp_path / "head.safetensors")
