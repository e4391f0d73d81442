"""Features of any layer, at any image size."""

from __future__ import annotations

import pytest
import timm
import torch
from tiny_probe import run

from raptor.probes.features import normed_tokens, view_at
from raptor.surrogate.surrogate import make_surrogate
from raptor.vit.open import open_vit
from raptor.vit.view import ViT


def test_surrogates_layers_and_models_without_cls(vit: ViT, bare_vit: ViT) -> None:
    surrogate = make_surrogate(vit, [2, 1])
    images = torch.randn(2, 3, 24, 24)
    for view in (vit, surrogate, bare_vit):
        states, _ = view.record(images)
        for layer in (0, 2, 3):
            expected = view.norm(states[layer])
            torch.testing.assert_close(normed_tokens(view, images, layer, "fp32"), expected, rtol=1e-5, atol=1e-5)
    result = run(surrogate, "segment", [1e-2], layer=2, epochs=1)
    assert result.layer == 2 and "k=2" in result.model
    assert run(bare_vit, "depth", [1e-2], epochs=1).head[0].shape == (256, 32)
    assert run(bare_vit, "classify", [1e-2], epochs=1).head[0].shape == (4, 32)
    with pytest.raises(ValueError, match="layer 4"):
        run(vit, "classify", [1e-2], layer=4)


def test_a_transformers_model_at_another_size() -> None:
    transformers = pytest.importorskip("transformers")
    options = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    model = transformers.ViTModel(transformers.ViTConfig(**options, image_size=24, patch_size=6))
    view = view_at(open_vit(model, size=24), 30, 42)
    assert normed_tokens(view, torch.randn(2, 3, 30, 42), 2, "fp32").shape == (2, 1 + 5 * 7, 32)


def test_a_model_of_one_size_says_so() -> None:
    torch.manual_seed(0)
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=24, patch_size=6, embed_dim=32, depth=2, num_heads=2, num_classes=0
    )
    with pytest.raises(ValueError, match=r"does not take images of 30 x 42.*: frames are not square"):
        view_at(open_vit(model, size=24), 30, 42)
