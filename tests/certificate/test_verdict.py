"""The verdict: when a surrogate is called undertrained, and which null models it beats."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_certified import PHASES, image_batches, tiny_vit

from raptor.certificate.certificate import Certificate
from raptor.certificate.measure import certify
from raptor.certificate.verdict import Training, judge, loss_fall, read_training
from raptor.files import RunError
from raptor.report.fidelity import certificate_charts
from raptor.report.figures import drawn
from raptor.surrogate.surrogate import make_surrogate


def test_an_untrained_surrogate_is_no_better_than_the_data_mean_and_says_so(tmp_path: Path) -> None:
    teacher = tiny_vit()
    surrogate = make_surrogate(teacher, PHASES)
    with torch.no_grad():
        for parameter in surrogate.model.parameters():
            parameter.add_(torch.randn_like(parameter))
    batches = image_batches(0)
    training = Training({"stage1": 2, "stage2": 150}, 64, 2000)
    found = certify(surrogate, tiny_vit(), batches, bootstrap=200, training=training)
    verdict = found.judged
    assert verdict.undertrained == ["fewer than 100 steps: 2 in stage1"]
    first = verdict.lines()[0]
    assert first.startswith(
        "undertrained (fewer than 100 steps: 2 in stage1): trained 152 steps (2 + 150) of 64 images"
    )
    assert first.endswith("measured on 21 held-out images")
    group = verdict.groups["all"]
    assert group.no_better_than_mean and "mean" in group.worse and group.r2_last.lower is not None
    assert group.r2_last.lower <= group.r2_last.value <= group.r2_last.upper
    assert verdict.lines()[1].count("no better than the mean of the images") == 1
    found.write(tmp_path)
    saved = json.loads((tmp_path / "certificate.json").read_text())
    assert list(saved)[:4] == ["subject", "lines", "definition", "verdict"]
    assert saved["verdict"]["lines"] == verdict.lines()
    assert Certificate.read(tmp_path).judged.lines() == verdict.lines()


def test_a_perfect_surrogate_beats_every_null_model() -> None:
    found = certify(tiny_vit(), tiny_vit(), image_batches(0), bootstrap=200)
    group = found.judged.groups["patches"]
    assert set(group.better) == {"identity", "mean", "tied", "linear"} and not group.worse and not group.alike
    assert "better than all 4 null models" in found.judged.lines()[-1]
    assert found.judged.lines()[-1].endswith("smaller mean error than every null model at 5 of 5 layers")
    assert judge(found.curves, {}).groups["all"].no_better_than_mean is False
    near = replace(group, alike=["mean"], better=["identity"], no_better_than_mean=True)
    words = replace(found.judged, groups={"patches": near}).lines()[-1]
    assert "no better than the mean of the images; better than the input repeated" in words


@pytest.mark.filterwarnings("error")
def test_one_image_decides_nothing() -> None:
    found = certify(tiny_vit(), tiny_vit(), image_batches(0, sizes=(1,)), bootstrap=200)
    for group in found.judged.groups.values():
        assert not group.better and not group.worse and not group.alike and group.r2_last.lower is None
    assert not found.judged.groups["patches"].no_better_than_mean
    assert Certificate.from_dict(found.to_dict()).judged.lines() == found.judged.lines()
    assert not any("null model" in line for line in found.judged.lines())


def test_the_r2_axis_is_clipped_with_a_note() -> None:
    found = certify(tiny_vit(), tiny_vit(), image_batches(0), bootstrap=0)
    found.curves.r2["cls"][0] = -470.0
    axes = drawn("certificate", certificate_charts(found), "").axes[0]
    assert axes.get_ylim()[0] > -1.2 and [text.get_text() for text in axes.texts] == ["off the axis: cls to -470"]
    found.notes.append("head: the head of scenes itself")
    assert found.head == "the head of scenes itself"


def test_the_rules_of_undertraining() -> None:
    assert Training({"stage1": 100, "stage2": 100}).undertrained() == []
    assert Training({"stage1": 30}, start="scenes-k3").undertrained() == []
    whole = Training({"stage1": 100, "stage2": 100})
    assert whole.undertrained() == [] and str(whole).startswith("trained 200 steps (100 + 100)")
    steep = Training({"stage1": 500}, loss_fall=0.2).undertrained()
    assert steep == ["the loss still fell by 20% within the last quarter"]
    assert loss_fall([1.0] * 32) == 0.0 and loss_fall([1.0] * 5) is None
    assert loss_fall([1.0] * 28 + [0.5] * 4) == pytest.approx(0.5)


def test_training_is_read_from_a_run_folder(tmp_path: Path) -> None:
    assert read_training(tmp_path) is None
    training = Training({"stage1": 3}, 8, 20)
    (tmp_path / "summary.json").write_text(json.dumps({"verdict": {"training": training.to_dict()}}))
    assert read_training(tmp_path) == training
    (tmp_path / "summary.json").write_text(json.dumps({"verdict": {"training": {"num_steps": 3}}}))
    with pytest.raises(RunError, match="damaged summary"):
        read_training(tmp_path)
