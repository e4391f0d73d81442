"""The overview: one sentence from the strongest evidence, with the numbers of the files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from raptor.certificate.certificate import Certificate
from raptor.phases.cut import within_and_across
from raptor.phases.study import PhasesFile
from raptor.report.overview import judgement, overview
from raptor.report.results import Results, read_results

RESULTS = Path(__file__).parents[2] / "docs" / "results"


def test_a_surrogate_is_told_by_its_curves(committed: Results) -> None:
    html = overview(committed).html
    curves = committed.curves
    assert curves is not None
    r2 = curves.r2["all"]
    assert "Three tied blocks (" in html and f"R² {r2[-1]:.2f} at the last layer" in html
    assert f"relative error at most {curves.relative['all'].max():.2f} at any layer" in html
    assert f">{r2[-1]:.3f}<" in html


def test_a_certificate_tells_what_the_surrogate_costs_and_on_which_images(committed: Results) -> None:
    certificate = Certificate.read_file(RESULTS / "dinov2s-732-certificate.json")
    teacher, surrogate = certificate.costs["teacher"], certificate.costs["surrogate"]
    parameters = surrogate.block_parameters / teacher.block_parameters
    html = overview(replace(committed, certificate=certificate)).html
    assert f"{parameters:.2f} times the block parameters and {surrogate.flops / teacher.flops:.2f} times" in html
    assert "of held-out images" in html
    html = overview(replace(committed, certificate=replace(certificate, split="train"))).html
    assert "of training images" in html


def test_a_certificate_is_not_joined_with_the_runs_own_scores(committed: Results) -> None:
    """Their images may differ: without labels, the certificate says nothing about accuracy."""
    saved = Certificate.read_file(RESULTS / "dinov2s-732-certificate.json")
    assert "accuracy kept" in overview(committed).html
    agreement = {"agreement": saved.predictions["agreement"]}
    html = overview(replace(committed, certificate=replace(saved, predictions=agreement, data="photos"))).html
    assert "the same prediction on" in html and "accuracy kept" not in html


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


def test_a_bad_surrogate_says_so_first_and_in_its_colour(committed: Results) -> None:
    saved = Certificate.read_file(RESULTS / "dinov2s-732-certificate.json")
    judged = saved.verdict
    assert judgement(judged, None) == ("open", "Not certified yet.")
    group = replace(judged.groups["all"], worse=["linear"], better=["mean"])
    worse = replace(judged, groups={"all": group})
    assert judgement(worse, None) == ("poor", "The surrogate is no better than a linear map per phase.")
    bad = replace(worse, groups={"all": replace(group, no_better_than_mean=True)}, undertrained=["2 steps"])
    tone, words = judgement(bad, None)
    assert tone == "bad" and words.startswith("The surrogate does not follow its teacher")
    assert words.endswith("The surrogate is undertrained: 2 steps.")
    html = overview(replace(committed, certificate=replace(saved, verdict=bad))).html
    assert html.index(words.partition(":")[0]) < html.index("tied blocks")
    assert '<p class="verdict bad"><strong>The surrogate does not follow' in html


def test_definition_1_decides_where_an_eps_was_asked_for(full_run: Path) -> None:
    certificate = read_results(full_run).certificate
    assert certificate is not None and certificate.definition is not None
    good = replace(certificate.verdict, undertrained=[])
    group = replace(good.groups["all"], worse=[], alike=[], no_better_than_mean=False)
    good.groups = {"all": group}
    asked = replace(certificate.definition, is_given=True, eps=0.5, holds=True)
    assert judgement(good, asked) == ("good", "Definition 1 holds for ε = 0.5.")
    failed = replace(asked, holds=False, layer=7)
    assert judgement(good, failed) == ("bad", "Definition 1 fails for ε = 0.5 at layer 7.")


def test_the_demo_says_that_it_is_an_example(full_run: Path, committed: Results) -> None:
    assert "the built-in model on built-in images" in overview(read_results(full_run)).html
    assert "built-in" not in overview(committed).html


def test_no_number_is_a_negative_zero(committed: Results) -> None:
    assert committed.distilled is not None
    found = committed.distilled.validation
    curves = {group: {**values, "r2": [-1e-5] * len(values["r2"])} for group, values in found.curves.items()}
    summary = replace(committed.distilled, validation=replace(found, curves=curves))
    html = overview(replace(committed, summary=summary)).html
    assert "R² 0.00 at the last layer" in html and ">0.000<" in html
