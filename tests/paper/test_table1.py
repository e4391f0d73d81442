from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import figure5
import pytest
import table1
from PIL import Image
from records import (
    Figure5,
    GroupCurves,
    MeanOverSeeds,
    ProbedRaptor,
    ProbedTeacher,
    ProbeScores,
    Table1,
)

from raptor.commands.evaluate import evaluate
from raptor.run import read_config


def test_table1_and_figure5(sweep_folder: Path, tiny: SimpleNamespace, tmp_path: Path) -> None:
    model = str(sweep_folder / "teachers" / "p0-s0" / "teacher")
    done = table1.run(
        **tiny.images,
        model=model,
        segment="scenes",
        depth="scenes",
        k=[2],
        seeds=[0, 1],
        budget="4steps",
        batch_size=16,
        classify_epochs=1,
        segment_epochs=1,
        depth_epochs=1,
        out=str(tmp_path),
    )
    assert list(done.result.cells) == ["teacher", "k2-s0", "k2-s1"]
    remembered = json.loads((tmp_path / "cells" / "teacher.json").read_text())["images"]
    assert {option: of["val"]["num_images"] for option, of in remembered.items()} == dict.fromkeys(
        ("data", "segment", "depth"), tiny.images["val_images"]
    )
    teacher, k2 = done.result.rows
    scores = [done.result.cells[f"k2-s{s}"].probes["depth"].score for s in (0, 1)]
    assert k2.scores["depth"].mean == pytest.approx(sum(scores) / 2)
    assert k2.scores["depth"].deviation == pytest.approx(abs(scores[0] - scores[1]) / 2**0.5)
    of_teacher = teacher.scores["depth"].mean
    assert k2.scores["depth"].recovery.mean == pytest.approx(sum(of_teacher / s for s in scores) / 2)
    miou = [done.result.cells[c].probes["segment"].score for c in ("teacher", "k2-s0", "k2-s1")]
    assert k2.scores["segment"].recovery.mean == pytest.approx(sum(miou[1:]) / 2 / miou[0])
    assert k2.num_seeds == 2 and k2.scores["classify"].size == [32, 32]
    drawn = figure5.run(table=str(tmp_path), out=str(tmp_path / "drawn"))
    assert (tmp_path / "drawn" / "figure5.png").exists()
    assert drawn.result.points[0].r2.mean == k2.r2["all"].r2.mean
    assert Table1.read(tmp_path) == done.result and Figure5.read(tmp_path / "drawn") == drawn.result


def test_more_data_is_distilled_on_and_heads_keep_the_labelled_images(
    sweep_folder: Path, tiny: SimpleNamespace, tmp_path: Path
) -> None:
    colours = [(40 * i, 255 - 40 * i, 80) for i in range(6)]
    for i, colour in enumerate(colours):
        (tmp_path / "more").mkdir(exist_ok=True)
        Image.new("RGB", (32, 32), colour).save(tmp_path / "more" / f"{i}.png")
    done = table1.run(
        **tiny.images,
        more_data=[str(tmp_path / "more")],
        model=str(sweep_folder / "teachers" / "p0-s0" / "teacher"),
        k=[2],
        seeds=[0],
        budget="2steps",
        batch_size=16,
        optimizer="adamw",
        classify_epochs=1,
        out=str(tmp_path / "out"),
    )
    config = read_config(tmp_path / "out" / "raptors" / "k2-s0")
    assert config["images"]["train"]["num_images"] == tiny.images["limit"] and config["data"] == [
        "scenes",
        str(tmp_path / "more"),
    ]
    assert config["recipe"]["lr"] == 1e-3 and "optimizer" not in config["recipe"]  # the default's is muon
    assert "optimizer" not in done.result.settings  # as in cells of AdamW that earlier versions made, which go on so
    cell = done.result.cells["k2-s0"]
    assert cell.probe is not None and cell.accuracy is not None and done.result.settings["more_data"]
    again = evaluate(str(tmp_path / "out" / "raptors" / "k2-s0"), num_images=4, bootstrap=2)
    assert again.certificate.data == tiny.images["data"]  # judged on the held-out images, without --data


def test_probes_of_unequal_steps_have_no_recovery() -> None:
    """With --probe_seconds a busy machine trains one probe for fewer steps than the other."""

    def probes(num_steps: int) -> dict[str, ProbeScores]:
        return {
            "classify": ProbeScores(score=0.5, higher_is_better=True, size=[8, 8], at_edge=False, num_steps=num_steps)
        }

    def recovery(num_steps: int) -> float | None:
        scores = dict(r2_lowest=0.5, recovery_head=0.9, recovery=0.9, parameters=1)
        raptor = ProbedRaptor(k=2, seed=0, phases=[2, 2], curves={}, probes=probes(num_steps), **scores)
        _, row = table1.summarise(ProbedTeacher(parameters=1, probes=probes(84)), [raptor])
        return row.scores["classify"].recovery.mean

    assert recovery(84) == 1.0 and recovery(33) is None


def test_means_are_shown_with_their_deviation() -> None:
    assert table1.shown(MeanOverSeeds(mean=0.9612, deviation=0.004), percent=True, unit=" %") == "96.1 ± 0.4 %"


def test_a_probe_without_a_score_leaves_the_table_standing() -> None:
    def probes(score: float | None) -> dict[str, ProbeScores]:
        return {"depth": ProbeScores(score=score, higher_is_better=False, size=[8, 8], at_edge=False)}

    def raptor(seed: int, score: float | None) -> ProbedRaptor:
        curves = {"all": GroupCurves(r2=[0.5], bounded_r2=[0.5])}
        scores = dict(r2_lowest=0.5, recovery_head=0.9, recovery=0.9, parameters=1)
        return ProbedRaptor(k=2, seed=seed, phases=[2, 2], curves=curves, probes=probes(score), **scores)

    teacher = ProbedTeacher(parameters=1, probes=probes(0.5))
    rows = table1.summarise(teacher, [raptor(0, None), raptor(1, 0.6)])
    assert rows[1].scores["depth"].recovery == MeanOverSeeds(mean=None, deviation=None)
    assert "| 2 | 2+2 |" in table1.table(rows)
