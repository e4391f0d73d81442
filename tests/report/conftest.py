"""A small run folder with every part, measured from the built-in teacher and an untrained surrogate of it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

from raptor.certificate.complexity import levin_bounds
from raptor.certificate.heads import resolve_head
from raptor.certificate.measure import certify
from raptor.certificate.rate import Complexity, measure_rates
from raptor.certificate.shift import measure_shift
from raptor.certificate.stitching import stitch
from raptor.commands.report import report
from raptor.data import iterate, open_data
from raptor.dynamics.interventions import InterventionsFile, intervene
from raptor.dynamics.measure import DynamicsFile, measure_dynamics
from raptor.phases.study import PhasesFile, study_phases
from raptor.probes import probe
from raptor.probes.result import ProbeReport
from raptor.provenance import Provenance
from raptor.report.results import Results, read_results
from raptor.report.strips import add_pictures
from raptor.subject import Subject
from raptor.surrogate.surrogate import make_surrogate
from raptor.vit.open import open_vit
from raptor.vit.saved import save_vit

PHASES = (3, 3, 6)
RESULTS = Path(__file__).parents[2] / "docs" / "results"
ABOUT = Provenance("raptor test", {"raptor": "0.1.0"}, "cpu", 1.5)


@pytest.fixture(scope="session")
def full_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("full") / "run"
    folder.mkdir()
    teacher = open_vit("scenes")
    surrogate = make_surrogate(teacher, PHASES)
    save_vit(surrogate, folder / "surrogate")
    (folder / "config.yaml").write_text(yaml.safe_dump({"model": "scenes", "data": "scenes", "seed": 0}))
    train, val = open_data("scenes", "train", limit=60), open_data("scenes", "val", limit=24)
    batches = iterate(val, teacher.preprocess, 24)

    entry = study_phases(teacher, batches, k=(2, 3, 4))
    subject = Subject.of(teacher, val, surrogate)
    PhasesFile([replace(entry, data="scenes")], ABOUT, subject).write(folder)
    head, _ = resolve_head(teacher)
    certificate = certify(surrogate, teacher, batches, head=head, bootstrap=20)
    assert certificate.definition is not None
    add_pictures(certificate.definition, teacher, val)
    few = iterate(val.select(range(6)), teacher.preprocess, 6)
    certificate.stitching = stitch(surrogate, teacher, few, head=head, bootstrap=20)
    certificate.shift = [measure_shift(surrogate, teacher, few, name="noise:3", head=head, bootstrap=20)]
    replace(certificate, data="scenes", provenance=ABOUT).write(folder)
    rates = measure_rates(surrogate, teacher, few, head=head)
    Complexity(**levin_bounds(surrogate, teacher), rates=rates, data="scenes", provenance=ABOUT).write(folder)
    labels = sorted({c for c in val.labels if val.labels.count(c) > 1})[:3]
    some = dict(num_images=24, classes=labels, stability_images=1, rank_images=2, eps=(1e-2,))
    found, sides = {}, {}
    for side, vit in (("teacher", teacher), ("surrogate", surrogate)):
        found[side] = probe(vit, "classify", train, val, closed_form="ridge")
        sides[side] = measure_dynamics(vit, batches, **some)
    ProbeReport(ABOUT, "scenes", "classify", found, subject=subject).write(folder)
    DynamicsFile(
        **sides,
        data="scenes",
        num_images=24,
        phases=list(PHASES),
        class_names={str(c): val.classes[c] for c in labels},
        provenance=ABOUT,
        subject=subject,
    ).write(folder)
    with torch.no_grad():
        images = next(iter(batches)).images[:1]
        changed = intervene(teacher, surrogate, images, PHASES, None)
    findings = [f"{side}: {line}" for side, parts in changed.items() for line in parts.findings()]
    InterventionsFile(**changed, findings=findings, provenance=ABOUT, subject=subject).write(folder)
    return folder


@pytest.fixture(scope="session")
def committed(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """The results of DINOv2-S in docs/results as one run folder: both sides of everything but the certificate."""
    folder = tmp_path_factory.mktemp("committed")
    for source, name in (
        ("phases-dinov2s.json", "phases.json"),
        ("dynamics/dinov2s-k3.json", "dynamics.json"),
        ("dynamics/dinov2s-k3-interventions.json", "interventions.json"),
        ("dynamics/dinov2s-k3-summary.json", "summary.json"),
    ):
        shutil.copy(RESULTS / source, folder / name)
    return read_results(folder)


@pytest.fixture(params=["teacher", "surrogate"])
def one_sided(committed: Results, request: pytest.FixtureRequest) -> tuple[str, InterventionsFile]:
    """A side, and the committed interventions where the predictions of that side hardly vary: it has no agreement."""
    changed = committed.interventions
    assert changed is not None
    parts = changed.sides()[request.param]
    swaps, repetition = replace(parts.swaps, agreement=None), replace(parts.repetition, agreement=None)
    return request.param, replace(changed, **{request.param: replace(parts, swaps=swaps, repetition=repetition)})


@pytest.fixture(scope="session")
def full_page(full_run: Path) -> str:
    return report(str(full_run), num_images=2).path.read_text()


@pytest.fixture
def run_of(full_run: Path, tmp_path: Path) -> Callable[..., Path]:
    """A copy of the run folder with only some of its files."""

    def copy(*names: str) -> Path:
        folder = tmp_path / "run"
        folder.mkdir()
        for name in names:
            source = full_run / name
            (shutil.copytree if source.is_dir() else shutil.copy)(source, folder / name)
        return folder

    return copy
