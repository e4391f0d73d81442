"""What the page reads of a run folder, and that every result in docs/results can still be read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_models import shake, tiny_timm

from raptor.certificate.certificate import Certificate
from raptor.certificate.rate import Complexity
from raptor.commands.dynamics import dynamics
from raptor.commands.phases import phases
from raptor.commands.probe import probe
from raptor.dynamics.interventions import InterventionsFile
from raptor.dynamics.measure import DynamicsFile
from raptor.dynamics.tangents import TangentsFile
from raptor.files import RunError
from raptor.phases.study import PhasesFile
from raptor.report.page import build_page
from raptor.report.results import check_numbers, read_results
from raptor.run import ResultFile
from raptor.train.distilled import DistillSummary
from raptor.vit.view import ViT

RunOf = Callable[..., Path]
RESULTS = Path(__file__).parents[2] / "docs" / "results"
_FEW = dict(data="scenes", num_images=8, k=2)
_FEW_DYNAMICS = dict(**_FEW, sample_images=2, stability=False, interventions=False)
_FEW_PROBE = dict(data="scenes", train_images=64, num_images=8, closed_form="ridge")
# Made by benchmarks, experiments and trials.
OTHERS = {
    "authors-vitb",
    "budgets",
    "certificate-speed",
    "data-index",
    "claims",
    "distill_step",
    "dmd",
    "dynamics-suite",
    "dynamics-suite-cpu",
    "optimizers",
    "other-images",
    "passes",
    "predicted",
    "probes",
    "recipe",
    "scaling",
    "scenes",
    "scenes-models",
    "small_step",
    "small_step-attention",
    "small_step-merged",
    "small_step-optimizer",
    "function-cut",
    "trajectory",
    "training",
    "trajectory-cpu",
    "vitb16",
    "dinov2s-dmd",
    "vitb16-dmd",
    "sensitivity-slopes",
}


def kind_of(path: Path) -> tuple[type[ResultFile], str] | None:
    """The class that reads a committed file and the name that it has in a run folder."""
    if path.stem in OTHERS and path not in (RESULTS / "dynamics" / f"{name}.json" for name in ("scenes", "vitb16")):
        return None
    if path.name.startswith("phases-"):
        return PhasesFile, "phases.json"
    if path.stem.endswith("-certificate"):
        return Certificate, "certificate.json"
    if path.stem.endswith("-complexity"):
        return Complexity, "complexity.json"
    if path.stem.endswith("-interventions"):
        return InterventionsFile, "interventions.json"
    if path.stem.endswith("-tangents"):
        return TangentsFile, "tangents.json"
    return DynamicsFile, "dynamics.json"


COMMITTED = [p for p in sorted([*RESULTS.glob("*.json"), *RESULTS.glob("dynamics/*.json")]) if kind_of(p)]


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_committed_results_can_be_read(path: Path, tmp_path: Path) -> None:
    if path.stem.endswith("-summary"):
        shutil.copy(path, tmp_path / "summary.json")
        summary = read_results(tmp_path).summary
        assert isinstance(summary, DistillSummary) and read_results(tmp_path).curves is not None
        return
    found = kind_of(path)
    assert found is not None
    kind, name = found
    kind.read_file(path)
    shutil.copy(path, tmp_path / name)
    assert list(read_results(tmp_path).provenance()) == [name.removesuffix(".json")]


def test_every_file_is_read(full_run: Path, full_page: str) -> None:
    results = read_results(full_run)
    names = ["phases", "certificate", "complexity", "probe-classify", "dynamics", "interventions", "images"]
    assert list(results.provenance()) == names
    assert results.provenance()["certificate"].command == "raptor test"
    assert results.phase_lengths == [3, 3, 6] and results.facts is not None and results.facts.num_layers == 12


def test_a_wrong_type_names_the_file_and_the_key(run_of: RunOf) -> None:
    folder = run_of("dynamics.json")
    path = folder / "dynamics.json"
    saved = json.loads(path.read_text())
    saved["teacher"]["direction"]["norm"] = [1, 2]
    path.write_text(json.dumps(saved))
    with pytest.raises(
        RunError, match=r"dynamics\.json cannot be read \(teacher\.direction\.norm: Input should be an object"
    ):
        read_results(folder)


def test_folder_without_results_says_how_to_start(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="raptor phases MODEL --out"):
        read_results(tmp_path)
    with pytest.raises(RunError, match="not a folder"):
        read_results(tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["certificate", "dynamics", "probe-classify", "interventions"])
def test_a_page_of_two_models_is_refused_with_the_name_of_the_file(run_of: RunOf, name: str) -> None:
    """Phases of one model on the similarity of another would look like a finding."""
    folder = run_of("phases.json", "certificate.json", f"{name}.json")
    read_results(folder)
    path = folder / f"{name}.json"
    saved = json.loads(path.read_text())
    teacher = {"teacher": "another", "teacher_weights": "0" * 32}
    path.write_text(json.dumps(saved | {"subject": saved["subject"] | teacher}))
    with pytest.raises(RunError, match="a page shows one model") as error:
        read_results(folder)
    assert f"{name}.json" in str(error.value) and "another" in str(error.value) and "\n" not in str(error.value)


def test_a_comparison_with_another_model_is_refused_beside_a_certificate(run_of: RunOf) -> None:
    folder = run_of("phases.json", "certificate.json")
    path = folder / "phases.json"
    saved = json.loads(path.read_text())
    other = json.loads(json.dumps(saved["models"][0]))
    other["subject"] |= {"model": "another", "weights": "0" * 32}
    path.write_text(json.dumps({**saved, "models": [*saved["models"], other], "subject": None}))
    with pytest.raises(RunError, match=r"phases\.json is about another model, another, and certificate\.json"):
        read_results(folder)
    (folder / "certificate.json").unlink()
    assert len(read_results(folder).phases.models) == len(saved["models"]) + 1  # type: ignore[union-attr]


def test_a_probe_of_another_surrogate_of_the_same_teacher_is_refused(run_of: RunOf) -> None:
    folder = run_of("phases.json", "probe-classify.json", "certificate.json")
    path = folder / "probe-classify.json"
    saved = json.loads(path.read_text())
    other = {"model": "raptor k=2 of scenes", "weights": "another"}
    path.write_text(json.dumps(saved | {"subject": saved["subject"] | other}))
    message = r"probe-classify\.json is about another model, raptor k=2 of scenes, and phases\.json about raptor k=3"
    with pytest.raises(RunError, match=message):
        read_results(folder)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, ViT], dict[str, Path]]:
    """Two models of one shape, and a folder of results of each."""
    views = {name: replace(tiny_timm(num_classes=0), name=name) for name in ("m1", "m2")}
    shake(views["m2"].model, seed=1)
    folders = {name: tmp_path_factory.mktemp(name) for name in views}
    for name, folder in folders.items():
        phases(views[name], out=str(folder), **_FEW, twin=False)
        dynamics(views[name], out=str(folder), **_FEW_DYNAMICS)
        probe(views[name], out=str(folder), **_FEW_PROBE)
    return views, folders


def test_commands_do_not_add_results_of_another_model(
    measured: tuple[dict[str, ViT], dict[str, Path]], tmp_path: Path
) -> None:
    views, folders = measured
    folder = tmp_path / "held"
    shutil.copytree(folders["m1"], folder)
    (folder / "dynamics.json").unlink()
    with pytest.raises(RunError, match=r"phases.json is about another model, m1: choose another --out"):
        dynamics(views["m2"], out=str(folder), **_FEW_DYNAMICS)
    with pytest.raises(RunError, match=r"phases.json is about other weights of m1: choose another --out"):
        probe(replace(views["m2"], name="m1"), out=str(folder), **_FEW_PROBE)
    with pytest.raises(RunError, match=r"phases.json is about another model, m1: choose another --out"):
        phases(views["m2"], out=str(folder), **_FEW, twin=False)
    for file in folder.glob("*.json"):
        file.unlink()
    phases(views["m2"], data="scenes", num_images=8, k=[2], twin=False, out=str(folder))
    assert dynamics(replace(views["m2"], name="by another name"), out=str(folder), **_FEW_DYNAMICS).folder == folder


def test_results_of_another_model_are_refused_in_a_folder_that_is_no_run(
    measured: tuple[dict[str, ViT], dict[str, Path]], tmp_path: Path
) -> None:
    _, folders = measured
    folder = tmp_path / "mixed"
    shutil.copytree(folders["m1"], folder)
    read_results(folder)
    shutil.copy(folders["m2"] / "probe-classify.json", folder / "probe-classify.json")
    with pytest.raises(RunError, match=r"probe-classify\.json is about another model, m2, and phases\.json about m1"):
        read_results(folder)
    saved = json.loads((folder / "phases.json").read_text())
    saved["subject"]["weights"] = None  # of a model in half precision: names decide
    (folder / "phases.json").write_text(json.dumps(saved))
    with pytest.raises(RunError, match=r"probe-classify\.json is about another model, m2"):
        read_results(folder)


def test_images_of_another_model_are_measured_again(full_run: Path, full_page: str, run_of: RunOf) -> None:
    folder = run_of("phases.json", "images.json")
    assert read_results(folder).images is not None
    path = folder / "images.json"
    saved = json.loads(path.read_text())
    other = {"teacher": "another", "teacher_weights": "another"}
    path.write_text(json.dumps(saved | {"subject": saved["subject"] | other}))
    assert read_results(folder).images is None


@pytest.mark.parametrize(
    ("name", "keys", "value"),
    [
        ("complexity.json", ("fp16", "ratio"), float("nan")),
        ("dynamics.json", ("teacher", "direction", "norm", "cls", "mean", 0), float("nan")),
        ("certificate.json", ("curves", "patches", "r2"), None),
        ("certificate.json", ("nulls", "mean", "cls", "relative"), [0.5]),
        ("interventions.json", ("surrogate", "extrapolation", "speed", "all", "mean"), None),
        ("phases.json", ("models", 0, "similarity", "all", 2, 3), None),
        ("dynamics.json", ("surrogate", "direction", "gamma", "cls", "mean", 4), None),
        ("certificate.json", ("curves", "cls", "relative", 0), None),
        ("interventions.json", ("teacher", "repetition", "angle", 0, "all", "mean", 1), None),
        # Numbers that the page does not draw: a figure in a file, or none.
        ("dynamics.json", ("teacher", "gathering", "alignment", "patches", "mean", 2), None),
        ("dynamics.json", ("teacher", "direction", "norm", "cls", "quantiles", "q95", 3), None),
        ("dynamics.json", ("teacher", "modes", "cls", "sweep", "2", "median_modulus", "mean"), None),
        ("certificate.json", ("curves", "cls", "absolute", 4), None),
        ("complexity.json", ("rates", "points", 1, "agreement"), None),
    ],
)
def test_a_value_that_is_no_number_is_refused_with_the_name_of_its_file(
    run_of: RunOf, name: str, keys: tuple[str | int, ...], value: object
) -> None:
    folder = run_of(name)
    saved = json.loads((folder / name).read_text())
    part = saved
    for key in keys[:-1]:
        part = part[key]
    part[keys[-1]] = value
    (folder / name).write_text(json.dumps(saved))
    with pytest.raises(RunError, match=name):
        build_page(read_results(folder))


def test_a_number_may_be_missing_only_where_it_has_no_meaning() -> None:
    fine = {
        "norm": [None, None],  # not measured
        "scatter_ratio": [None, 1.0, 2.0],  # without the first block all images are the same
        "cost": [[None, 1.0], [1.0, None]],  # a block does not replace itself
        "eigenvalues": [[[1.0, 0.0], [None, None]]],  # past the rank of the fit
        "within": {"1": [0.9, None]},  # one phase has no other
        "matched_std": {"turn": [0.1, None]},  # no pairs of equal distance
        "pooled": {"mean": 0.5, "std": None, "quantiles": None},  # one number for all images
    }
    check_numbers(fine, "x.json")
    for values, place in (([1.0, None], "norm, position 1"), ([[0.5, 1.0], [None, 1.0]], "norm.1, position 0")):
        with pytest.raises(RunError, match=rf"x\.json lacks a number \(teacher\.{place}\)"):
            check_numbers({"teacher": {"norm": values}}, "x.json")
