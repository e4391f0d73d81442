"""What the page reads of a run folder, and that every result in docs/results can still be read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_models import tiny_timm

from raptor.dynamics.interventions import InterventionsFile
from raptor.dynamics.measure import DynamicsFile
from raptor.fidelity.certificate import Certificate
from raptor.fidelity.complexity import Complexity
from raptor.open import open_vit, save_vit
from raptor.phases import PhasesFile
from raptor.provenance import Provenance
from raptor.report.page import build_page
from raptor.report.results import Results, read_results
from raptor.run import ResultFile, RunError
from raptor.surrogate.surrogate import make_surrogate
from raptor.train.distilled import DistillSummary
from raptor.train.teacher import TeacherSummary

RunOf = Callable[..., Path]
RESULTS = Path(__file__).parents[2] / "docs" / "results"
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


def test_a_run_of_an_own_module_is_opened_with_it(tmp_path: Path) -> None:
    """As it was typed, where a command of the run says so."""
    teacher = open_vit(tiny_timm().model, size=32)
    save_vit(make_surrogate(teacher, (1, 3)), tmp_path / "surrogate")
    results = Results(tmp_path)
    assert results.adds("dynamics") == f"raptor dynamics {tmp_path} --module FILE.py:FUNCTION"
    about = Provenance("raptor distill --module mine.py:make --k 2")
    results.summary = TeacherSummary(teacher.facts(), accuracy=0.5, seconds=3.0, device="cpu", provenance=about)
    assert results.on_run("probe", "--task depth") == f"raptor probe {tmp_path} --task depth --module mine.py:make"
    (tmp_path / "surrogate" / "config.json").write_text("{ raptor")
    assert results.on_run("report") == f"raptor report {tmp_path}"


def test_a_teacher_has_seconds_and_device_without_provenance(tmp_path: Path) -> None:
    TeacherSummary(open_vit("scenes").facts(), accuracy=0.5, seconds=3.0, device="cpu").write(tmp_path)
    found = read_results(tmp_path).provenance()["summary"]
    assert (found.seconds, found.device) == (3.0, "cpu") and found.versions


def test_a_wrong_type_names_the_file_and_the_key(run_of: RunOf) -> None:
    folder = run_of("dynamics.json")
    path = folder / "dynamics.json"
    saved = json.loads(path.read_text())
    saved["teacher"]["direction"]["norm"] = [1, 2]
    path.write_text(json.dumps(saved))
    with pytest.raises(RunError, match=r"dynamics\.json cannot be read \(teacher\.direction\.norm: expected an object"):
        read_results(folder)


def test_folder_without_results_says_how_to_start(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="raptor phases MODEL --out"):
        read_results(tmp_path)
    with pytest.raises(RunError, match="no folder"):
        read_results(tmp_path / "nowhere")


def test_what_is_of_a_model_of_another_shape_is_left_out(committed: Results, tmp_path: Path) -> None:
    """Phases of one model on the similarity of another would look like a finding."""
    folder = tmp_path / "run"
    shutil.copytree(committed.folder, folder)
    for name, models in (("phases", lambda saved: saved["models"]), ("dynamics", lambda saved: [saved["teacher"]])):
        saved = json.loads((folder / f"{name}.json").read_text())
        for entry in models(saved):
            entry["model"] |= {"dim": 999, "name": "another"}
        (folder / f"{name}.json").write_text(json.dumps(saved))
    found = read_results(folder)
    assert found.phases is None and found.dynamics is None
    assert found.notes["phases"] == f"phases.json is of another, not of this run's {found.facts.name}, and is left out."
    page = build_page(found)
    assert all(found.notes[name].partition("'")[0] in page for name in ("phases", "dynamics"))
