"""docs/results/speed.md and vitb16.md say what the JSON files of a small ViT's step and of forward passes hold."""

from __future__ import annotations

import json
from typing import Any

from pages import ROOT, read

PAGE = read("docs/results/speed.md")


def _found(name: str) -> dict[str, Any]:
    return json.loads((ROOT / f"docs/results/{name}.json").read_text())


def _rate(row: dict[str, Any]) -> str:
    return f"{row['images_per_s']:,.0f}"


FIRST, SECOND, THIRD = (_found(name)["rows"] for name in ("small_step", "small_step-attention", "small_step-merged"))


def test_the_steps_of_the_first_run() -> None:
    names = {"stage 2, k = 2 ([first run](small_step.json))": "stage 2", "stage 2, k = 3 (first)": "stage 2, k=3"}
    names |= {"stage 1, k = 2 (first)": "stage 1", "stage 1 with teacher forcing, k = 2 (first)": "stage 1 forced"}
    for label, name in names.items():
        before, now = FIRST[f"{name}, today"], FIRST[f"{name}, all"]
        ratio = now["images_per_s"] / before["images_per_s"]
        assert f"| {label} | {_rate(before)} | {_rate(now)} | {ratio:.2f} |" in PAGE


def test_the_step_of_the_second_run() -> None:
    before, folded, now = (SECOND[name] for name in ("stage 2, copies", "stage 2", "stage 2, all"))
    ratios = [f"{row['images_per_s'] / before['images_per_s']:.2f}" for row in (folded, now)]
    cells = [_rate(before), _rate(folded), ratios[0], _rate(now), ratios[1], f"{now['tflops']:.0f}"]
    assert f"([second run](small_step-attention.json)) | {' | '.join(cells)} |" in PAGE
    error = f"{now['gradient_error']:.4f}"[1:]
    assert f"stayed at {error} of its norm" in PAGE


def test_the_merged_step() -> None:
    before, now = THIRD["stage 2, copies"], THIRD["stage 2"]
    ratio = f"{now['images_per_s'] / before['images_per_s']:.2f}"
    row = f"`--limit 60`) | {_rate(before)} | | | {_rate(now)} | {ratio} | {now['tflops']:.0f} |"
    assert row in PAGE and f"| {ratio} times as fast | 1.3 |" in PAGE
    took = _found("small_step-merged")["attention_us"]
    forward = min(took[name] for name in took if name.startswith("forward"))
    assert f"takes {forward:.0f} us for torch's {took['torch forward']:.0f}" in " ".join(PAGE.split())


def test_a_surrogates_forward_pass_on_a_gpu() -> None:
    ratio: dict[tuple[str, int], str] = {}
    for run in _found("passes")["runs"]:
        milliseconds = f"{1000 * run['seconds']['teacher'] / run['batch_size']:.3f}".removeprefix("0")
        ratios = [f"{run['ratios'][name]:.2f}" for name in ("surrogate", "one by one")]
        again, key = (
            ", another day" if "day" in run and run["batch_size"] == 128 else "",
            (run["model"], run["batch_size"]),
        )
        named = "" if again or run["batch_size"] == 64 else f"(`{run['model']}`) "
        assert f"{named}| {run['batch_size']}{again} | {milliseconds} | {' | '.join(ratios)} |" in PAGE
        ratio[key] = ratios[0]
    words = " ".join(read("docs/results/vitb16.md").split())
    large, small = (ratio["timm/vit_base_patch16_224", batch] for batch in (128, 64))
    assert f"takes {large} times the teacher's time at 128 images, and {small} times at 64" in words


def test_optimizers_are_those_of_the_fourth_run() -> None:
    rows = _found("small_step-optimizer")["rows"]
    for words, ending in (
        ("AdamW", ", optimizer outside"),
        ("Muon, matrices with the same shorter side together", ", muon, optimizer outside"),
    ):
        rates = [f"{rows[batch + ending]['images_per_s']:,.0f}" for batch in ("batch of 64", "stage 2")]
        assert f"| {words} | {' | '.join(rates)} |" in PAGE
