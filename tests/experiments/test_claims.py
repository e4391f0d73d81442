from __future__ import annotations

import copy
import inspect
import json
from pathlib import Path

import pytest
import yaml

from raptor.commands.reproduce import EXPERIMENTS, experiment
from raptor.experiments import claims
from raptor.experiments.stochastic_depth import statistics
from raptor.experiments.verdicts import (
    NOT_RUN,
    claims_ablation,
    claims_partitions,
    claims_stochastic_depth,
    claims_swaps,
    claims_table1,
    claims_untrained,
)
from raptor.recipes import FOLDER, recipe_names
from raptor.train.recipe import resolve_recipe


def sweep_row(p: float, similarity: float, r2: float, teacher: float, raptor: float) -> dict:
    curve = {"r2": [r2], "bounded_r2": [r2], "pearson": [r2]}
    return {
        "p": p, "seed": 0, "cell": f"p{p:g}-s0",
        "teacher": {"accuracy": teacher, "train_accuracy": 1.0},
        "similarity": {"off_diagonal": similarity, "within_phases": similarity},
        "raptor": {
            "accuracy": raptor, "num_images": 5000, "bounded_r2_last": r2, "r2_last": r2, "probe": raptor,
            "phases": [4, 4, 4], "curves": {"all": curve, "cls": curve, "patches": curve},
        },
    }  # fmt: skip


def sweep_values(rows: list[dict]) -> dict:
    return {"rows": rows, "statistics": statistics(rows)}


def test_a_sweep_that_does_all_the_paper_says_agrees_and_its_mirror_does_not() -> None:
    points = [i / 10 for i in range(10)]
    up = [
        sweep_row(p, 0.4 + 0.5 * p, 0.3 + 0.6 * p, 0.5 - (p - 0.4) ** 2, 0.4 - (p - 0.4) ** 2 + 0.1 * p) for p in points
    ]
    assert [c.agrees for c in claims_stochastic_depth(sweep_values(up))] == ["yes"] * 7
    down = [sweep_row(p, 0.9 - 0.5 * p, 0.9 - 0.6 * p, 0.5 - 0.4 * p, 0.5 - 0.5 * p) for p in points]
    verdicts = [c.agrees for c in claims_stochastic_depth(sweep_values(down))]
    assert verdicts == ["no"] * 6 + ["yes"]  # similarity and R2 still go together
    flat = copy.deepcopy(up)
    for row in flat:
        row["teacher"]["accuracy"] = 0.5 + (0.001 if row["p"] == 0.4 else 0.0)
    assert claims_stochastic_depth(sweep_values(flat))[4].agrees == "partly"  # 0.1 points on 5,000 images are no peak


def test_a_raptor_that_diverged_is_left_out_of_the_trends() -> None:
    rows = [sweep_row(i / 10, 0.4 + i / 20, 0.3 + i / 20, 0.5, 0.4) for i in range(10)]
    rows[0]["raptor"]["r2_last"] = None
    found = statistics(rows)
    assert found["trends"]["r2"]["num"] == 9 and found["trends"]["similarity"]["num"] == 10
    assert claims_stochastic_depth({"rows": rows, "statistics": found})[3].agrees == "yes"


def test_partitions_verdicts_follow_the_z_score() -> None:
    def values(z: float | None) -> dict:
        score = {"value": 0.5, "mean": 0.4, "deviation": 0.1, "z": z, "below": 0.9, "num": 10}
        return {"rows": [{}], "statistics": {"2": {"maxcut": {"accuracy": score, "r2_last": score}}}}

    found = [claims_partitions(values(z))[0].agrees for z in (1.4, 0.85, 0.3, -0.2, None)]
    assert found == ["yes", "yes", "partly", "no", "–"]
    early = values(None)
    early["statistics"]["2"]["maxcut"]["accuracy"] |= {"deviation": None, "num": 1}
    assert claims_partitions(early)[0].agrees == NOT_RUN
    assert "z = +1.40" in claims_partitions(values(1.4))[0].measured


def test_untrained_verdicts_need_every_seed_for_a_yes() -> None:
    def row(kind: str, similarity: float, plain: float, bounded: float) -> dict:
        curves = {"cls": {"r2": [plain], "bounded_r2": [bounded]}}
        means = {"within_phases": similarity, "off_diagonal": 1 - similarity}
        return {"kind": kind, "similarity": means, "raptor": {"curves": curves}}

    rows = [row("trained", 0.9, 0.2, 0.8), row("untrained", 0.7, 0.9, 0.5), row("overfitted", 0.8, 0.1, 0.6)]
    assert [c.agrees for c in claims_untrained({"rows": rows})] == [
        "no", "yes (one seed)", "yes (one seed)", "no", "no", "yes (one seed)",
    ]  # fmt: skip
    more = [*rows, *(row(r["kind"], *v) for r, v in zip(rows, ((0.91, 0.2, 0.8), (0.7, 0.9, 0.5), (0.8, 0.1, 0.6))))]
    assert claims_untrained({"rows": more})[1].agrees == "yes"
    rows.append(row("untrained", 0.95, 0.9, 0.55))
    assert claims_untrained({"rows": rows})[1].agrees == "partly"
    assert {c.agrees for c in claims_untrained({"rows": rows[:1]})} == {NOT_RUN}


def test_swaps_count_only_teachers_that_learned() -> None:
    def row(accuracy: float, within: float, across: float) -> dict:
        kept = {"within": within, "across": across, "within_matched": None, "across_matched": None}
        return {"accuracy": accuracy, "chance": 0.01, "compared_accuracy": kept}

    good, chance = row(0.5, 0.48, 0.1), row(0.012, 0.0, 0.012)
    assert [c.agrees for c in claims_swaps({"rows": [good, chance]})] == ["yes", "yes"]
    assert "96%" in claims_swaps({"rows": [good, chance]})[0].measured
    assert [c.agrees for c in claims_swaps({"rows": [row(0.5, 0.2, 0.45)]})] == ["no", "no"]
    assert [c.agrees for c in claims_swaps({"rows": [chance]})] == ["–", "–"]


def test_ablation_verdicts() -> None:
    def values(*accuracies: float) -> dict:
        lines = [
            {"number": str(i), "accuracy": a, "teacher_accuracy": 0.845} for i, a in enumerate(accuracies, start=1)
        ]
        return {"table": lines, "rows": [{"num_images": 50_000, "seed": s} for s in (0, 1)]}

    paper = claims_ablation(values(0.039, 0.727, 0.752, 0.767, 0.824, 0.830))
    assert [c.agrees for c in paper] == ["yes"] * 6
    assert paper[0].measured == "3.9%, the teacher 84.5%: 5% kept"
    assert paper[1].measured == "+68.8 points, to 72.7% (± 0.3)"
    part = claims_ablation(values(0.039, 0.727, 0.752))
    assert [c.agrees for c in part[:3]] == ["yes", "partly", "yes"]  # the largest of those known, which are not all
    other = claims_ablation(values(0.6, 0.65, 0.64, 0.7, 0.8))
    assert [c.agrees for c in other] == ["no", "no", "no", "yes", "yes", NOT_RUN]  # another gain is larger
    # On 5,000 images two standard errors are 1.9 points: a rise of less, or one that another row equals, is not clear.
    few = {**values(0.3, 0.325, 0.328, 0.35, 0.375), "rows": [{"num_images": 5000, "seed": 0}]}
    sampled = claims_ablation(few)
    assert [c.agrees for c in sampled] == ["partly", "partly", "partly", "yes (one seed)", "yes (one seed)", NOT_RUN]
    assert sampled[1].measured == "+2.5 points, to 32.5% (± 0.9)"
    assert {c.agrees for c in claims_ablation({"table": few["table"]})[1:5]} == {"partly"}  # nothing known of the error


def test_table1_verdicts() -> None:
    def row(k: str, recovery: float, r2: float) -> dict:
        score = {"mean": recovery, "deviation": None, "recovery": {"mean": recovery, "deviation": 0.01}}
        return {"k": k, "scores": {"classify": score}, "r2": {"all": {"r2": {"mean": r2}}}}

    found = claims_table1({"rows": [row("2", 0.95, 0.5), row("3", 0.93, 0.6), row("4", 0.9, 0.7)]})
    assert [c.agrees for c in found[:3]] == ["yes", "partly", "no"]
    assert {c.agrees for c in found[3:9]} == {NOT_RUN}
    assert found[9].agrees == "partly"  # R2 rises, accuracy does not


def test_the_page_says_what_was_not_run(sweep_folder: Path, tmp_path: Path) -> None:
    results = tmp_path / "results" / "sweep"
    results.mkdir(parents=True)
    for kind in ("json", "md", "png"):
        (results / f"stochastic-depth.{kind}").write_bytes((sweep_folder / f"stochastic-depth.{kind}").read_bytes())
    (tmp_path / "results" / "other.json").write_text(json.dumps({"rows": []}))
    (tmp_path / "results" / "reading.md").write_text("All in all.\n")
    (results / "reading.md").write_text("It rises.\n")
    page = claims.run(results=str(tmp_path / "results"))
    text = (tmp_path / "results" / "experiments.md").read_text()
    places = [text.index(part) for part in ("All in all.", "## Paper says", "stochastic-depth.png", "It rises.")]
    assert places == sorted(places) and text.count("It rises.") == 1
    assert "![When block recurrence emerges](sweep/stochastic-depth.png)" in text
    assert text.count("Not run: `raptor reproduce") == 5
    by_experiment = {c.where: c.agrees for c in page.claims}
    assert by_experiment["swaps"] == NOT_RUN and by_experiment["stochastic-depth, scenes"] != NOT_RUN
    assert all(c.says in text for c in page.claims)


@pytest.mark.parametrize(
    ("spec", "label"),
    [
        ("shared/data/tiny-imagenet-100-*.zip", "tiny-imagenet-100"),
        ("x/imagenet-20-train-0.zip,x/imagenet-20-val.zip", "imagenet-20"),
        ("cifar10:/somewhere/package", "cifar10"),
        ("photos/", "photos"),
        ("scenes", "scenes"),
    ],
)
def test_data_labels(spec: str, label: str) -> None:
    assert claims.data_label(spec) == label


def test_recipes_are_those_of_a_distillation_or_options_of_an_experiment() -> None:
    assert set(recipe_names()) >= {"paper", "authors", "default"}
    for name in recipe_names():
        resolve_recipe(name, {})
    others = [path for path in FOLDER.glob("*.yaml") if "raptor reproduce" in path.read_text()]
    assert len(others) >= 10 and not {path.stem for path in others} & set(recipe_names())
    for path in others:
        command = next(line for line in path.read_text().splitlines() if "raptor reproduce" in line)
        name = command.split("raptor reproduce ")[1].split()[0]
        assert name in EXPERIMENTS and f"--config raptor/recipes/{path.name}" in command
        signature = inspect.signature(experiment(name))
        unknown = set(yaml.safe_load(path.read_text())) - set(signature.parameters)
        assert not unknown, f"{path.name}: {unknown}"


@pytest.mark.parametrize("name", sorted(EXPERIMENTS))
def test_every_experiment_can_be_run_by_name(name: str) -> None:
    assert callable(experiment(name)) and experiment(name).__doc__
