"""Predicted rate, time and memory of the paper's distillation on ImageNet-1k for shapes that were not measured.

    python benchmarks/predicted.py --out docs/results/predicted.json

A step is one forward pass of the teacher and three of the student (one forward, two backward). A shape's images/s are
the TFLOP/s that were measured on the nearest shape, divided by its own FLOPs per image: the rate of stage 2, and of
stage 1 without teacher forcing. Hours count the forced steps too. Memory grows by the bytes per image that ViT-B and
ViT-L kept in a forced step, the largest. Several devices divide the time: that is a bound, because the exchange of
gradients and smaller batches cost time. Only the formula's check runs; measured rates are read from docs/results/scale.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple

IMAGES = 40e6  # 2 x 20 epochs of 1,000,000 images
BATCH = 64
DEVICES = (1, 8, 32)
GIB = 2**30
FULL_SIZE = Path(__file__).parents[1] / "docs" / "results" / "scale" / "full-size.json"
CASES: dict[str, dict[str, Any]] = {row["case"]: row for row in json.loads(FULL_SIZE.read_text())["rows"]}
"""What benchmarks/full_size.py measured, by shape and images per device: `base:64`."""


def stage2_rate(case: str) -> float:
    """images/s of a full-size case in stage 2."""
    return CASES[case]["images_per_s_by_kind"]["stage2"]


def forced_factor(case: str) -> float:
    """Time of the recipe over its time at the rate of stage 2: an eighth of it has both losses of stage 1."""
    return 1 + (stage2_rate(case) / CASES[case]["images_per_s_by_kind"]["stage1 with teacher forcing"] - 1) / 8


FORCED = forced_factor("base:64")


class Shape(NamedTuple):
    """A ViT at 224 px; `gated`: its MLP is SwiGLU."""

    layers: int
    width: int
    tokens: int
    hidden: int
    patch: int = 14
    gated: bool = False


SHAPES = {
    "vit_small_patch14_dinov2": Shape(12, 384, 257, 1536),
    "vit_small_patch14_reg4_dinov2": Shape(12, 384, 261, 1536),
    "vit_small_patch16_dinov3": Shape(12, 384, 201, 1536, 16),
    "vit_base_patch14_dinov2": Shape(12, 768, 257, 3072),
    "vit_base_patch14_reg4_dinov2": Shape(12, 768, 261, 3072),
    "vit_base_patch16_dinov3": Shape(12, 768, 201, 3072, 16),
    "vit_base_patch16_224": Shape(12, 768, 197, 3072, 16),
    "vit_large_patch14_dinov2": Shape(24, 1024, 257, 4096),
    "vit_large_patch14_reg4_dinov2": Shape(24, 1024, 261, 4096),
    "vit_large_patch16_dinov3": Shape(24, 1024, 201, 4096, 16),
    "vit_giant_patch14_dinov2": Shape(40, 1536, 257, 4096, gated=True),
    "vit_giant_patch14_reg4_dinov2": Shape(40, 1536, 261, 4096, gated=True),
}


def teacher_flops(shape: Shape) -> float:
    """FLOPs of a forward pass per image: matrix products and attention."""
    attention = 8 * shape.width**2 + 4 * shape.tokens * shape.width
    mlp = (6 if shape.gated else 4) * shape.width * shape.hidden
    embedding = 6 * shape.patch**2 * shape.width * (224 // shape.patch) ** 2
    return shape.layers * shape.tokens * (attention + mlp) + embedding


def paper_block_flops(shape: Shape) -> float:
    """The same of L applications of the paper's block, whose SwiGLU has 4 D hidden units."""
    return shape.layers * shape.tokens * (32 * shape.width**2 + 4 * shape.tokens * shape.width)


def step_flops(shape: Shape, paper: bool = True) -> float:
    """FLOPs of a training step per image; `paper`: with its block, else with a copy of the teacher's."""
    student = paper_block_flops(shape) if paper else teacher_flops(shape)
    return teacher_flops(shape) + 3 * student


# images/s on one NVIDIA H200, and the FLOPs per image of what was run (docs/results: experiments/table1/reading.md,
# scale/full-size.json, vitb16.md)
MEASURED = {
    "small": (3900.0, step_flops(SHAPES["vit_small_patch14_reg4_dinov2"], paper=False), "DINOv2-S, default recipe"),
    "base": (
        stage2_rate("base:64"),
        step_flops(SHAPES["vit_base_patch14_reg4_dinov2"]),
        "ViT-B/14-reg, paper's block, batch 64",
    ),
    "base16": (2470.0, step_flops(SHAPES["vit_base_patch16_224"], paper=False), "ViT-B/16, default recipe"),
    "large": (
        stage2_rate("large:64"),
        step_flops(SHAPES["vit_large_patch14_reg4_dinov2"]),
        "ViT-L/14-reg, paper's block, batch 64",
    ),
}


def bytes_per_state(name: str) -> float:
    """Bytes that a step with both losses keeps per image, layer, token and channel: at 64 images against 8."""
    shape = SHAPES[f"vit_{name}_patch14_reg4_dinov2"]
    more = CASES[f"{name}:64"]["step_peak_gib"] - CASES[f"{name}:8"]["step_peak_gib"]
    return more * GIB / (64 - 8) / (shape.layers * shape.tokens * shape.width)


def predict(name: str) -> dict[str, Any]:
    """Rate, hours and memory of one shape."""
    shape = SHAPES[name]
    near = "small" if shape.width < 768 else "large" if shape.width > 768 else "base16" if shape.patch == 16 else "base"
    rate, flops, what = MEASURED[near]
    images_per_s = rate * flops / step_flops(shape)
    hours = IMAGES * FORCED / images_per_s / 3600
    block = 16 * shape.width**2
    weights = shape.layers * (4 + (3 if shape.gated else 2) * shape.hidden / shape.width) * shape.width**2
    fixed = 6 * weights + 16 * 3 * block  # fp32 and bf16 teacher; three blocks with gradient and two moments
    kept = bytes_per_state("base" if shape.width <= 768 else "large") * shape.layers * shape.tokens * shape.width
    return {
        "shape": shape._asdict(),
        "step_gflops_per_image": round(step_flops(shape) / 1e9, 1),
        "rate_from": what,
        "images_per_s": round(images_per_s),
        "hours": {str(num): round(hours / num, 1) for num in DEVICES},
        "gib_per_device": {str(num): round((fixed + kept * BATCH / num) / GIB, 1) for num in DEVICES},
    }


def check_formula(name: str) -> float:
    """FLOPs of the formula over those that Raptor counts."""
    from raptor import open_vit
    from raptor.certificate.complexity import count_flops

    return teacher_flops(SHAPES[name]) / count_flops(open_vit(f"timm/{name}", pretrained=False, num_classes=0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=None)
    args = parser.parse_args()
    result = {
        "images": IMAGES,
        "forced": round(FORCED, 3),
        "bytes_per_state": {name: round(bytes_per_state(name), 1) for name in ("base", "large")},
        "formula_over_counted": round(check_formula("vit_small_patch14_reg4_dinov2"), 4),
        "tflops": {what: round(rate * flops / 1e12) for rate, flops, what in MEASURED.values()},
        "models": {name: predict(name) for name in SHAPES},
    }
    print(json.dumps(result, indent=1))
    if args.out:
        Path(args.out).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
