"""The overview: one sentence from the strongest evidence, with the numbers of the files."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from raptor.certificate.certificate import Certificate
from raptor.phases.cut import within_and_across
from raptor.phases.study import PhasesFile
from raptor.report.overview import overview
from raptor.report.results import Results, read_results
from raptor.vit.pair import OTHER_TEACHER

RESULTS = Path(__file__).parents[2] / "docs" / "results"


def test_a_surrogate_is_told_by_its_curves(committed: Results) -> None:
    html = overview(committed).html
    curves = committed.curves
    assert curves is not None
    r2 = curves.r2["all"]
    assert "Three tied blocks (" in html and f"R² {r2[-1]:.2f} at the last layer" in html
    assert f"relative error at most {curves.relative['all'].max():.2f} at any layer" in html
    assert f">{r2[-1]:.3f}<" in html


def test_what_is_larger_and_which_images_are_meant(committed: Results) -> None:
    certificate = Certificate.read_file(RESULTS / "dinov2s-732-certificate.json")

    def html(**changes: Any) -> str:
        return overview(replace(committed, certificate=replace(certificate, **changes))).html

    costs = certificate.costs
    assert "4.0 times fewer block parameters" in html() and "of held-out images" in html()
    assert "; as many block parameters" in html(costs={**costs, "surrogate": costs["teacher"]})
    swapped = html(costs={"teacher": costs["surrogate"], "surrogate": costs["teacher"]}, split="train")
    assert "4.0 times as many block parameters" in swapped and "of training images" in swapped


def test_a_certificate_of_other_images_says_so_and_is_not_joined_with_the_runs_own_scores(committed: Results) -> None:
    saved = Certificate.read_file(RESULTS / "dinov2s-732-certificate.json")
    agreement = {"agreement": saved.predictions["agreement"]}  # the others have no labels
    size = committed.facts.image_size if committed.facts else 0
    certificate = replace(saved, data="photos", image_size=size, predictions=agreement)
    assert committed.distilled is not None and committed.distilled.validation.recovery_head is not None
    own, others = (
        overview(replace(committed, certificate=certificate, config={"data": data})).html for data in ("photos", "pets")
    )
    assert "of held-out images;" in own and ", on photos" not in own and "accuracy kept" in own
    assert ", measured on photos: " in others and ", on photos" in others and "accuracy kept" not in others


def test_a_certificate_at_another_size_or_against_another_teacher_says_so(committed: Results) -> None:
    saved = Certificate.read_file(RESULTS / "dinov2s-732-certificate.json")
    assert committed.facts is not None
    size, name = committed.facts.image_size, f"m2{OTHER_TEACHER}"

    def html(**changes: Any) -> str:
        certificate = replace(saved, **{"image_size": size, "predictions": {}, **changes})
        return overview(replace(committed, certificate=certificate)).html

    assert "measured at" not in html() and OTHER_TEACHER not in html() and "accuracy kept" in html()
    larger = html(image_size=2 * size)
    assert f"blocks of {committed.facts.name}, measured at {2 * size} px: " in larger
    assert f", at {2 * size} px<" in larger and "accuracy kept" not in larger
    other = html(teacher=name)
    assert f", measured against {name}: " in other and f", against {name}<" in other and "accuracy kept" not in other
    assert f"images, against {name}" in other.replace(f" of {saved.data}", "")  # the verdict's first line


def test_phases_are_told_by_their_means(tmp_path: Path) -> None:
    found = PhasesFile.read_file(RESULTS / "phases-dinov2s.json")
    found.write(tmp_path)
    results = read_results(tmp_path)
    html, lengths = overview(results).html, results.phase_lengths
    assert lengths is not None and f"fall into {len(lengths)} phases ({' | '.join(map(str, lengths))})" in html
    within, across = found.models[0].within[len(lengths)]
    assert f"{within:.3g} between layers of one phase, {across:.3g} between" in html


def test_given_phases_are_told_by_their_own_means(committed: Results) -> None:
    found, measured = PhasesFile.read_file(RESULTS / "phases-dinov2s.json"), committed.dynamics
    (entry,), lengths = found.models, [10, 1, 1]
    assert measured is not None and list(entry.phases[3]) != lengths
    html = overview(Results(committed.folder, phases=found, dynamics=replace(measured, phases=lengths))).html
    within, across = within_and_across(entry.similarity[entry.tokens], lengths)
    assert within is not None and abs(within - (entry.within[3][0] or 0)) > 1e-3
    assert (
        f"(10 | 1 | 1): mean cosine similarity {within:.3g} between layers of one phase, {across:.3g} between" in html
    )


def test_a_model_without_phases_is_said_to_have_none(tmp_path: Path) -> None:
    (saved,) = PhasesFile.read_file(RESULTS / "phases-vitb16.json").models
    entry = replace(saved, structure="no more phase structure than its untrained twin")
    html = overview(Results(tmp_path, phases=PhasesFile([entry]))).html
    assert f"fall into no phases: {entry.structure}" in html
    evidence = {k: replace(cut, smooth=1.0) for k, cut in saved.evidence.items()}
    html = overview(Results(tmp_path, phases=PhasesFile([replace(saved, evidence=evidence)]))).html
    assert "change gradually. Cut into" in html


def test_dynamics_are_told_by_norm_and_direction(committed: Results) -> None:
    only = Results(committed.folder, dynamics=committed.dynamics)
    html = overview(only).html
    assert committed.dynamics is not None
    gamma = committed.dynamics.teacher.direction.gamma["all"].mean
    assert f"at layer {[g >= 0.9 for g in gamma].index(True)}." in html


def test_each_null_model_is_named_once_for_all_token_groups(committed: Results) -> None:
    certificate = Certificate.read_file(RESULTS / "dinov2s-732-certificate.json")
    html = overview(replace(committed, certificate=certificate)).html
    groups = certificate.judged.groups
    assert html.count("against a linear map per phase") == 1
    row = re.search(r"against a linear map per phase</th>(.*?)</tr>", html)
    assert row is not None
    words = {"better": "better", "alike": "no different", "worse": "worse"}
    for cell, group in zip(re.findall(r"<td>(.*?)</td>", row[1]), groups.values(), strict=True):
        (found,) = [word for kind, word in words.items() if "linear" in getattr(group, kind)]
        assert cell == found
    assert all(f"<td>{group.r2_last}</td>" in html for group in groups.values())
