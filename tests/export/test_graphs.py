"""Files of torch.export and ONNX: every state is the model's, and tied weights stand in them once."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import torch
from tiny_models import noise_images, tiny_timm
from tiny_surrogates import TEACHERS, conditioned
from torch import nn

from raptor.export.graphs import fixed, read_onnx, read_pt2, trace, write_onnx, write_pt2
from raptor.export.weights import stored_bytes, with_weights
from raptor.vit.open import open_vit
from raptor.vit.view import ViT


def check(exported, model: ViT, tolerance: float = 1e-4) -> None:
    """Another batch size than the one it was traced with, and again for the plain output."""
    images = noise_images(model, num=5)
    with torch.no_grad():
        states, output = model.record(images)
    found, own = exported.record(images)
    assert len(found) == len(states)
    for ours, theirs in zip(found, states):
        torch.testing.assert_close(ours, theirs.float(), atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(own, output.float(), atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(exported.run(images), own, atol=1e-6, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "weights"), [("dinov2-registers", "int8"), ("dinov3", "fp32"), ("siglip", "int4")])
def test_round_trips(family: str, weights: str, tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    surrogate = conditioned(TEACHERS[family](), (3, 1))
    model = with_weights(surrogate, weights)
    ready = fixed(with_weights(surrogate, weights))
    write_pt2(ready, tmp_path / "model.pt2")
    with zipfile.ZipFile(tmp_path / "model.pt2") as archive:  # torchao is not needed to read it
        assert not any(b"torchao" in archive.read(name) for name in archive.namelist())
    check(read_pt2(tmp_path / "model.pt2", ready), model)
    states = write_onnx(ready, tmp_path / "model.onnx", stored_bytes(surrogate, weights))
    check(read_onnx(tmp_path / "model.onnx", states), model)

    found = onnx.load(tmp_path / "model.onnx")
    assert [one.name for one in found.graph.output] == ["output"]
    num_bytes = sum(onnx.numpy_helper.to_array(one).nbytes for one in found.graph.initializer)
    assert num_bytes < 1.1 * stored_bytes(surrogate, weights) + 4 * 10 * surrogate.dim * 13
    for path in tmp_path.iterdir():  # no paths of this machine
        assert str(Path(torch.__file__).parents[1]).encode() not in path.read_bytes()


def test_an_onnx_graph_with_copied_weights_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnx")
    monkeypatch.setattr("raptor.export.graphs._CONSTANTS", 0)
    vit = tiny_timm(depth=2)
    with pytest.raises(ValueError, match="tied weights were copied, so the file is not written; take --to pt2"):
        write_onnx(fixed(with_weights(vit, "fp32")), tmp_path / "model.onnx", stored_bytes(vit, "fp32") // 2)
    assert not list(tmp_path.iterdir())


class Asks(nn.Module):
    """A ViT whose path depends on the values of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.vit = tiny_timm(depth=2).model

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if images.sum() > 1e9:
            images = images * 0
        return self.vit(images)


def test_a_model_that_torch_export_refuses_is_one_line() -> None:
    vit = open_vit(Asks(), size=32)
    with pytest.raises(ValueError, match=r"torch\.export refuses Asks .*take --to timm or --to folder") as error:
        trace(vit)
    assert "\n" not in str(error.value)
