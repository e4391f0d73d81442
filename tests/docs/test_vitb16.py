"""docs/results/vitb16.md, the recipe and the README say what docs/results/vitb16.json holds."""

from __future__ import annotations

import json

from pages import ROOT, read

FOUND = json.loads((ROOT / "docs/results/vitb16.json").read_text())
PAGE = read("docs/results/vitb16.md")


def _short(value: float) -> str:
    return f"{value:.3f}".replace("0.", ".", 1)


def test_every_point_of_the_curve_is_a_row() -> None:
    assert len(FOUND["curve"]) == 8
    for point in FOUND["curve"]:
        r2 = point["r2_last"]
        cells = [f"{point['images'] / 1e6:.2f}", f"{point['gpu_seconds_alone']:.0f}"]
        cells += [f"{100 * point[name]:.1f}" for name in ("top1", "kept", "agreement")]
        cells += [_short(r2["all"]), _short(r2["cls"])]
        assert f"| {point['stage'][-1]}, {point['step']:,} | {' | '.join(cells)} |" in PAGE


def test_every_set_of_images_is_a_row() -> None:
    for name, found in FOUND["gap"]["sets"].items():
        low, high = found["agreement_interval"]
        cells = [str(found["num_images"]), f"{100 * found['agreement']:.0f} [{100 * low:.0f}, {100 * high:.0f}]"]
        right = [f"{100 * found[name]:.0f}" for name in ("top1", "teacher_top1") if name in found]
        cells += [" / ".join(right) or "–", *(_short(found["r2"][group][-1]) for group in ("cls", "patches"))]
        assert f"| {name} | {' | '.join(cells)} | {_short(found['loss']['weighted'][-1])} |" in PAGE


def test_the_main_numbers() -> None:
    training, final, levin = FOUND["training"], FOUND["final"], FOUND["levin"]
    recipe = read("raptor/recipes/vitb16.yaml")
    minutes = f"{training['gpu_seconds_alone'] / 60:.1f} minutes"
    rate = f"{training['images_per_s']:,} images/s"
    assert all(word in page for word in (minutes, rate) for page in (PAGE, recipe))
    assert f"{FOUND['images']['distinct']:,} photographs" in PAGE
    assert f"{100 * final['top1']:.1f} %" in PAGE and f"{100 * final['kept']:.1f} %" in PAGE
    assert f"{levin['megabits']['int8']['surrogate']:.0f} for {levin['megabits']['int8']['teacher']:.0f} Mbit" in PAGE
    assert f"{100 * final['kept']:.0f} %" in read("README.md")
