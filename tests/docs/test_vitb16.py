"""docs/results/vitb16.md, the recipe and the README say what the JSON of the ViT-B/16 runs holds."""

from __future__ import annotations

import json
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import yaml
from pages import ROOT, read

from raptor import certify, iterate, open_data
from raptor.certificate.heads import resolve_head
from raptor.surrogate.surrogate import make_surrogate
from raptor.vit.open import open_vit
from raptor.vit.saved import save_vit

EIGHT = json.loads((ROOT / "docs/results/vitb16/eight-minutes.json").read_text())
VARIED = json.loads((ROOT / "docs/results/vitb16/varied.json").read_text())
COORDINATES = json.loads((ROOT / "docs/results/vitb16/coordinates.json").read_text())
FOUND = json.loads((ROOT / "docs/results/vitb16.json").read_text())
PAGE = read("docs/results/vitb16.md")


def _short(value: float) -> str:
    return f"{value:.3f}".replace("0.", ".", 1)


def _interval(share: dict[str, float]) -> str:
    return f"{100 * share['value']:.1f} [{100 * share['lower']:.1f}, {100 * share['upper']:.1f}]"


def test_every_surrogate_is_a_row() -> None:
    readme = read("README.md")
    assert [row["k"] for row in EIGHT["rows"]] == [2, 3, 4]
    for row in EIGHT["rows"]:
        r2, phases = row["r2_last"], "\\|".join(map(str, row["phases"]))
        cells = [f"{row['block_parameters'] / 1e6:.1f} M", _interval(row["top1"])]
        cells += [f"{100 * value:.1f}" for value in (row["kept"], row["agreement"]["value"])]
        cells += [_short(value) for value in (r2["all"], row["r2_uniform_last"]["all"], r2["cls"])]
        cells += [_short(row["relative_error"]["all"]), f"{row['levin_megabits']['int8']['surrogate']:.0f}"]
        assert f"| {row['k']} ({phases}) | {' | '.join(cells)} |" in PAGE
        share = row["block_parameters"] / row["teacher_block_parameters"]
        cells = [f"{100 * share:.0f} %", f"{100 * row['top1']['value']:.1f} %"]
        cells += [f"{100 * value:.0f} %" for value in (row["kept"], row["agreement"]["value"])]
        assert f"| {row['k']} ({phases}) | {' | '.join(cells)} |" in readme
        assert row["layers_ahead_of_null_models"] == 12
        assert f"{row['gpu_seconds'] / 60:.1f} GPU minutes" in PAGE
        assert _short(row["levin_ratio"]["int8"]) in PAGE


def test_the_runs_before_are_rows_too() -> None:
    assert [row["k"] for row in VARIED["rows"]] == [2, 3, 4]
    for row in VARIED["rows"]:
        assert f"| {row['k']} | {_interval(row['top1'])} | {100 * row['kept']:.1f} |" in PAGE
        assert row["layers_ahead_of_null_models"] == 12


def test_agreement_on_images_trained_on_and_not() -> None:
    def cell(share: float, interval: list[float]) -> str:
        return f"{100 * share:.0f} [{100 * interval[0]:.0f}, {100 * interval[1]:.0f}]"

    names = {
        "photos-diverse.zip, train": "photos-diverse, trained on",
        "photos-diverse.zip, val": "photos-diverse, held out",
        "imagenet-20-*.zip, train": "imagenet-20-train, trained on",
        "imagenet-20-*.zip, val": "imagenet-20-val",
    }
    new = json.loads((ROOT / "docs/results/vitb16/eight-minutes/agreement.json").read_text())["sets"]
    for key, name in names.items():
        cells = [cell(row["agreement"], row["interval"]) for row in new[f"DATA/{key}"].values()]
        assert f"| {name} | {' | '.join(cells)} |" in PAGE
    seen, others = ([*new[f"DATA/photos-diverse.zip, {split}"].values()][-1] for split in ("train", "val"))
    words = " ".join(read("README.md").split())
    for row, of in ((seen, "of the diverse photographs"), (others, "of others")):
        low, high = (100 * end for end in row["interval"])
        assert f"on {100 * row['agreement']:.0f} % [{low:.0f}, {high:.0f}] {of}" in words


def test_agreement_is_measured_again_by_a_script(tmp_path: Path) -> None:
    assert "python benchmarks/agreement.py" in PAGE
    spec = spec_from_file_location("agreement", ROOT / "benchmarks" / "agreement.py")
    assert spec is not None and spec.loader is not None
    script = module_from_spec(spec)
    spec.loader.exec_module(script)
    teacher = open_vit("scenes")
    half = teacher.num_layers // 2
    raw = make_surrogate(teacher, (half, teacher.num_layers - half), copy="first")  # not trained
    name = str(save_vit(raw, tmp_path / "raw"))
    words = ["scenes-k2", name, "--data", "scenes", "--limit", "24", "--device", "cpu"]
    found = script.main([*words, "--out", str(tmp_path / "agreement.json")])
    assert json.loads((tmp_path / "agreement.json").read_text()) == found
    assert found["command"] == " ".join(
        ["python benchmarks/agreement.py", *words, "--out", f"{tmp_path}/agreement.json"]
    )
    assert list(found["sets"]) == ["scenes, train", "scenes, val"]
    images = iterate(open_data("scenes", "val", size=teacher.preprocess.size), teacher.preprocess, 16, limit=24)
    certificate = certify(raw, teacher, images, null_models=False, bootstrap=5, head=resolve_head(teacher)[0])
    row = found["sets"]["scenes, val"][name]
    assert row["agreement"] == pytest.approx(certificate.predictions["agreement"].value) and row["agreement"] < 1
    assert row["num_images"] == 24 and row["interval"][0] <= row["agreement"] < row["interval"][1]
    with pytest.raises(ValueError, match="scenes is not a surrogate: give a run folder"):
        script.main(["scenes", "--data", "scenes", "--limit", "4"])


def test_the_main_numbers() -> None:
    training, final = FOUND["training"], FOUND["final"]
    recipe = read("raptor/recipes/vitb16.yaml")
    assert f"{training['gpu_seconds_alone'] / 60:.1f} minutes" in recipe
    assert f"{training['images_per_s']:,} images/s" in recipe
    assert f"| {FOUND['images']['distinct']:,} |" in PAGE
    assert f"| {100 * final['top1']:.1f} [" in PAGE and f"| {100 * final['kept']:.1f} |" in PAGE
    assert all(f"{EIGHT['images_per_s'][name]:,.0f}" in PAGE for name in ("all runs", "all runs, teacher forcing"))


@pytest.mark.parametrize("name", ["varied", "coordinates"])
def test_the_recipes_are_what_was_run(name: str) -> None:
    text, found = read(f"raptor/recipes/vitb16-{name}.yaml"), {"varied": VARIED, "coordinates": EIGHT}[name]
    written = yaml.safe_load(text)
    assert {entry: found["recipe"][entry] for entry in written} == written
    for row in found["rows"]:
        assert f"{100 * row['top1']['value']:.1f}" in text and f"{row['gpu_seconds'] / 60:.1f} minutes" in text


def test_the_run_with_coordinates_weighed_alike_stands_beside_the_earlier_one() -> None:
    [new] = COORDINATES["rows"]
    old = next(row for row in VARIED["rows"] if row["k"] == new["k"])
    certificates = [read(f"docs/results/vitb16/{name}/certificate-k4.json") for name in ("varied", "coordinates")]
    for row, certificate, name in zip(
        (old, new), map(json.loads, certificates), ("each token group", "**each coordinate**"), strict=True
    ):
        top1 = row["top1"]
        cells = [f"{row['images_seen'] / 1e6:.2f}", f"{row['gpu_seconds'] / 60:.1f}"]
        cells += [f"{100 * top1['value']:.1f} [{100 * top1['lower']:.1f}, {100 * top1['upper']:.1f}]"]
        cells += [f"{100 * value:.1f}" for value in (row["kept"], row["agreement"]["value"])]
        r2 = certificate["curves"]
        cells += [_short(value) for value in (r2["all"]["r2"][-1], r2["all"]["r2_uniform"][-1], r2["cls"]["r2"][-1])]
        assert f"| {name} | {' | '.join(cells)} |" in PAGE
    assert new["layers_ahead_of_null_models"] == 12
    written = yaml.safe_load(read("raptor/recipes/vitb16-coordinates.yaml"))
    assert {name: COORDINATES["recipe"][name] for name in written} | {"budget": written["budget"]} == written
    assert f"{COORDINATES['recipe']['budget']}" in PAGE
