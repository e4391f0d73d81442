"""A linear classifier on pooled features, and the file that holds it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from raptor.files import replacing
from raptor.streaming import decode_text
from raptor.vit.view import ViT
from raptor.vit.weights import check_weights, load_tensors


class LinearHead(nn.Module):
    """A linear classifier on pooled features (N, F), as `ViT.features` gives them.

    Attributes:
        weight: (C, F), any standardisation of the features folded in.
        bias: (C,).
        alpha: the ridge penalty it was fitted with, None when it came from elsewhere.
        classes: the names of its outputs, None where its file holds none.
    """

    weight: Tensor
    bias: Tensor

    def __init__(
        self,
        weight_cf: Tensor,
        bias_c: Tensor,
        alpha: float | None = None,
        classes: Sequence[str] | None = None,
    ):
        super().__init__()
        if weight_cf.ndim != 2 or bias_c.shape != weight_cf.shape[:1]:
            shapes = f"{tuple(weight_cf.shape)} and {tuple(bias_c.shape)}"
            raise ValueError(f"a head needs weight (C, F) and bias (C,), not {shapes}")
        if weight_cf.numel() == 0:
            raise ValueError(f"a head needs at least one class and one feature, not weight {tuple(weight_cf.shape)}")
        # safetensors refuses tensors that are not contiguous.
        self.register_buffer("weight", weight_cf.float().contiguous())
        self.register_buffer("bias", bias_c.float().contiguous())
        self.alpha = alpha
        self.classes = classes

    @property
    def num_classes(self) -> int:
        return self.weight.shape[0]

    def forward(self, features_nf: Tensor) -> Tensor:
        """Logits (N, C), in float32."""
        if features_nf.shape[-1] != self.weight.shape[1]:
            raise ValueError(f"the head takes {self.weight.shape[1]} features, the model gives {features_nf.shape[-1]}")
        # Not in bf16: with a thousand classes its logits tie.
        with torch.autocast(features_nf.device.type, enabled=False):
            return F.linear(features_nf.float(), self.weight, self.bias)

    def save(self, path: str | Path, fitted_on: dict[str, str] | None = None) -> Path:
        """Write weight and bias as safetensors, with its classes and what it was fitted on as metadata."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        metadata = {**(fitted_on or {}), **classes_metadata(self.classes)}
        if self.alpha is not None:
            metadata.setdefault("alpha", str(self.alpha))
        with replacing(path) as partial:  # other processes may be reading the old file
            save_file({"weight": self.weight.cpu(), "bias": self.bias.cpu()}, partial, metadata)
        return path

    @classmethod
    def load(cls, path: str | Path) -> LinearHead:
        """Read a head: safetensors, or a weights-only .pth, with `weight` and `bias` (under any common prefix)."""
        path = Path(path)
        if not path.is_file():
            raise ValueError(f"no head at {path}: give a safetensors file with weight (C, F) and bias (C,)")
        fault = f"{path} is no linear head:"
        remedy = "give a file with weight (C, F) and bias (C,)"
        try:
            tensors = load_tensors(path)
        except ValueError as error:
            raise ValueError(f"{fault} it cannot be read ({str(error)[:120]}): {remedy}") from None
        if not isinstance(tensors, dict) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
            raise ValueError(f"{fault} it holds no named tensors: {remedy}")
        # A checkpoint of a probe may hold its layer under a prefix, such as `head.` or `linear.`.
        found = {str(name).rsplit(".", 1)[-1]: tensor for name, tensor in tensors.items()}
        if len(tensors) > 2 or set(found) not in ({"weight", "bias"}, {"weight"}):
            raise ValueError(f"{fault} it holds {', '.join(sorted(map(str, tensors))[:4])}, not weight and bias")
        weight = found["weight"]
        if not weight.is_floating_point():
            raise ValueError(f"{fault} it has {str(weight.dtype).removeprefix('torch.')} weights: {remedy}")
        if not weight.numel():
            raise ValueError(f"{fault} it has no classes: {remedy}")
        check_weights(tensors, path)
        classes = None
        text = read_metadata(path).get("classes")
        if text is not None:
            try:
                classes = decode_text(list[str], text)
            except ValueError:
                classes = []
            if len(classes) != len(weight):
                raise ValueError(f"{fault} its metadata does not name its {len(weight)} classes: save it again")
        return cls(weight, found.get("bias", weight.new_zeros(len(weight))), classes=classes)


def head_logits(vit: ViT, linear: LinearHead | None, state_btd: Tensor, output: Tensor | None = None) -> Tensor:
    """Logits (B, C) of a last state in float32: by the linear head or, without one, by the model's own.

    output: of the model itself, where it has run already.
    """
    if linear is not None:
        return linear.to(state_btd.device)(vit.features(state_btd))
    if output is None:
        output = vit.finish(state_btd)
    return output.float()


def head_fingerprint(file: str | Path) -> str:
    """A short name of the content of a head's file."""
    return hashlib.blake2b(Path(file).read_bytes(), digest_size=8).hexdigest()


def classes_metadata(classes: Sequence[str] | None) -> dict[str, str]:
    """The names of a head's outputs, in their order, as its file holds them."""
    return {} if classes is None else {"classes": json.dumps(list(classes))}


def read_metadata(path: str | Path) -> dict[str, str]:
    """The metadata of a saved head: its task, its layer, its fit; empty when the file is damaged or has none."""
    try:
        with safe_open(path, framework="pt") as file:
            return file.metadata() or {}
    except SafetensorError:
        return {}


@torch.no_grad()
def own_linear_head(vit: ViT, images_bchw: Tensor) -> LinearHead | None:
    """The model's own head as a linear head on cls and mean patch; None if it is not linear in them."""
    layers = [m for m in vit.model.modules() if isinstance(m, nn.Linear) and m.out_features == vit.num_classes]
    if not layers or layers[-1].in_features != vit.dim:
        return None
    states, output = vit.record(images_bchw.to(vit.device))
    features = vit.features(states[-1])
    weight = layers[-1].weight.detach()
    bias = weight.new_zeros(len(weight))
    if layers[-1].bias is not None:
        bias = layers[-1].bias.detach()
    # A head may read cls only or the mean patch only: the other half of the features then has weight 0.
    none = weight.new_zeros(len(weight), features.shape[1] - vit.dim)
    for parts in ([weight, none], [none, weight]):
        head = LinearHead(torch.cat(parts, dim=1), bias).to(vit.device)
        # Compared with the model itself, because nothing else says what its head reads.
        if torch.allclose(head(features), output.float(), rtol=1e-3, atol=1e-3):
            return head
    return None
