"""A teacher and a run small enough to repeat many times. As a script: runs given as JSON."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn

from raptor.train import Distilled, distill
from raptor.train.teacher import train_teacher
from raptor.vit.open import open_vit
from raptor.vit.view import ViT

RECIPE = dict(
    block="teacher",
    conditioning="table",
    batch_size=8,
    lr=1e-3,
    lam=0.5,
    normalise="layer",
    last_phase_weights=dict(cls=0.34, registers=0.33, patches=0.33),
    stage2_weights=dict(cls=0.45, registers=0.10, patches=0.45),
    budget="12steps",
    augment="crop",
)
OPTIONS = dict(phases=[2, 2], train_images=64, num_images=8, device="cpu")
TEACHER = dict(
    size=24,
    patch=8,
    dim=32,
    depth=3,
    heads=2,
    registers=2,
    budget="12steps",
    batch_size=8,
    train_images=64,
    num_images=16,
    device="cpu",
    drop=0.3,
    mixup=0.2,
    cutmix=1.0,
)


def tiny_teacher(depth: int = 4, **changes: Any) -> ViT:
    """dim 32, 24 px, patch 8: a cls token, two registers, nine patches, as a module of the user's own."""
    torch.manual_seed(0)
    options: dict[str, Any] = dict(
        img_size=24, patch_size=8, embed_dim=32, depth=depth, num_heads=2, num_classes=6, reg_tokens=2
    )
    model = timm.create_model("vit_tiny_patch16_224", **{**options, "dynamic_img_size": True, **changes})
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)
    return open_vit(model, size=24)


def write_recipe(folder: Path, **changes: Any) -> str:
    """A recipe file; JSON is YAML. Several processes may write the same one at once."""
    path = folder / "recipe.yaml"
    own = folder / f"recipe-{os.getpid()}"
    own.write_text(json.dumps({**RECIPE, **changes}))
    os.replace(own, path)
    return str(path)


def tiny_run(out: Path, teacher: ViT | nn.Module | None = None, **options: Any) -> Distilled:
    """`distill` of the tiny teacher with the tiny recipe; options that are a recipe's entries go into it."""
    entries = {key: options.pop(key) for key in list(options) if key in RECIPE or key in ("cosine", "clip")}
    out.parent.mkdir(parents=True, exist_ok=True)
    recipe = options.pop("recipe", None) or write_recipe(out.parent, **entries)
    return distill(teacher or tiny_teacher(), "scenes", recipe=recipe, out=str(out), **{**OPTIONS, **options})


def train_tiny(out: Path, **changes: Any) -> ViT:
    """`train_teacher` of a tiny ViT."""
    options: dict[str, Any] = {**TEACHER, **changes}
    return train_teacher("vit_tiny_patch16_224", "scenes", out=str(out), **options)


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def blocks_of(result: Distilled) -> dict[str, Tensor]:
    return result.surrogate.model.shared_blocks.state_dict()  # type: ignore[union-attr, operator]


def run_and_report(out: Path, options: dict[str, Any], report: Path) -> None:
    """A run in a process of its own; what went wrong is left in `report`."""
    torch.set_num_threads(1)
    try:
        tiny_run(out, **options)
    except ValueError as error:
        report.write_text(str(error))


def _checksum(state: dict[str, Tensor]) -> float:
    return sum(float(v.double().abs().sum()) for v in state.values())


def main() -> None:
    """Runs one after the other, given as JSON {out: options}; each rank leaves what it ended with beside `out`."""
    torch.set_num_threads(1)
    sys.modules["raptor.train.loop"].LOG_EVERY = 1  # type: ignore[attr-defined]
    for out, options in json.loads(sys.argv[1]).items():
        rank = int(os.environ.get("RANK", "0"))
        if options.pop("teacher", False):
            state = train_tiny(Path(out), **options).model.state_dict()
            Path(f"{out}-rank{rank}.json").write_text(json.dumps({"checksum": _checksum(state)}))
            continue
        done = tiny_run(Path(out), **options)
        report = {
            "checksum": _checksum(blocks_of(done)),
            "r2": done.summary.validation.r2_last,
            "folder": str(done.folder),
        }
        report["phases"] = list(done.surrogate.phases or ())
        Path(f"{out}-rank{rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
