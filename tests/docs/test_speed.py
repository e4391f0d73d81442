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
    errors = [f"{row['gradient_error']:.4f}"[1:] for row in (now, before)]
    assert f"did not change: {errors[0]} of its norm, {errors[1]} before" in PAGE


def test_the_merged_step() -> None:
    before, now = THIRD["stage 2, copies"], THIRD["stage 2"]
    ratio = f"{now['images_per_s'] / before['images_per_s']:.2f}"
    row = f"`--limit 60`) | {_rate(before)} | | | {_rate(now)} | {ratio} | {now['tflops']:.0f} |"
    assert row in PAGE and f"at {ratio} with the merged code" in PAGE
    took = _found("small_step-merged")["attention_us"]
    forward, backward = (min(took[name] for name in took if name.startswith(kind)) for kind in ("forward", "backward"))
    theirs = took["torch forward"], took["torch forward and backward"] - took["torch forward"]
    words = f"forward takes {forward:.0f} us for {theirs[0]:.0f}, one backward {backward:.0f} for about {theirs[1]:.0f}"
    assert words in " ".join(PAGE.split())


def test_a_whole_run_is_computed_from_them() -> None:
    before = (SECOND["stage 2, copies"], FIRST["stage 1 forced, today"])
    now = (SECOND["stage 2, all"], SECOND["stage 1 forced"])
    old, new = (7 / 8 / joint["images_per_s"] + 1 / 8 / forced["images_per_s"] for joint, forced in (before, now))
    assert f"is {old / new:.2f} times as fast" in PAGE
    words = f"7/8 of the images at {_rate(now[0])} instead of {_rate(before[0])} images/s"
    assert words in " ".join(PAGE.split())
    before, now = (THIRD["stage 2, copies"], before[1]), (THIRD["stage 2"], now[1])
    old, new = (7 / 8 / joint["images_per_s"] + 1 / 8 / forced["images_per_s"] for joint, forced in (before, now))
    assert f"third run's rates of stage 2 it is {old / new:.2f}." in " ".join(PAGE.split())
    assert f"1/8 at {_rate(now[1])} (the" in PAGE and f"instead of {_rate(before[1])}." in PAGE


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
    batches = {
        (run["batch_size"], side): run["seconds"][side]
        for run in _found("passes")["runs"]
        if "small" in run["model"]
        for side in run["seconds"]
    }
    for side in ("teacher", "surrogate"):
        assert f"({1000 * batches[64, side]:.1f} and {1000 * batches[128, side]:.1f} ms" in " ".join(PAGE.split())


def test_optimizers_are_those_of_the_fourth_run() -> None:
    rows = _found("small_step-optimizer")["rows"]
    for words, ending in (
        ("AdamW", ", optimizer outside"),
        ("Muon, matrices of one shape together (before)", ", muon by shape, optimizer outside"),
        ("Muon, matrices with the same shorter side together (now)", ", muon, optimizer outside"),
        ("AdamW, with clipping in a CUDA graph of its own", ""),
        ("Muon, the same", ", muon"),
    ):
        rates = [f"{rows[batch + ending]['images_per_s']:,.0f}" for batch in ("batch of 64", "stage 2")]
        assert f"| {words} | {' | '.join(rates)} |" in PAGE
