"""Results of probes: mean and deviation, what is written and read."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_probe import run

from raptor.certificate.linear_head import LinearHead
from raptor.files import RunError
from raptor.probes import ProbeReport, ProbeResult, recovery
from raptor.provenance import Provenance
from raptor.vit.view import ViT


def test_seeds_give_mean_and_deviation(vit: ViT) -> None:
    calls: list[tuple[int, int]] = []
    result = run(
        vit, "classify", [1e-3, 0.1], seeds=(0, 1, 2), progress=lambda done, total: calls.append((done, total))
    )
    scores = [seed.chosen.reported["accuracy"] for seed in result.seeds]
    assert len({tuple(map(tuple, seed.split_scores)) for seed in result.seeds}) == 3
    assert min(scores) > 0.5, "four colours are easy to tell apart"
    assert result.chosen.mean["accuracy"] == pytest.approx(np.mean(scores))
    assert result.chosen.deviation["accuracy"] == pytest.approx(np.std(scores, ddof=1))
    assert calls[-1][0] == calls[-1][1] == len(calls)


def test_saved_result(vit: ViT, tmp_path: Path) -> None:
    result = run(vit, "classify", [1e-2, 1e30])
    folder = result.save(tmp_path / "probe")
    written = json.loads((folder / "probe.json").read_text())
    assert written["chosen"]["mean"]["accuracy"] == pytest.approx(result.score)
    assert written["size"] == [24, 24] and written["grid"][0] == 1e-2
    head = load_file(folder / "head.safetensors")
    assert head["weight"].shape == (4, 64) and torch.equal(head["weight"], result.head[0])
    assert LinearHead.load(folder / "head.safetensors").num_classes == 4
    assert recovery(result, result) == 1


def test_what_is_read_is_what_was_written(vit: ViT, tmp_path: Path) -> None:
    """Also where a head diverged, whose score is null in the file."""
    result = run(vit, "segment", [1e-3, 1e38], seeds=(0, 1))
    written = result.to_dict()
    result.write(tmp_path)
    again = ProbeResult.read(tmp_path)
    assert again.to_dict() == written and again.score == result.score
    keys = ["task", "model", "layer", "metric", "higher_is_better", "size", "grid", "closed_form", "num_images"]
    keys += ["settings", "at_edge", "unfinished", "seconds", "chance", "floors", "subject", "chosen", "last", "seeds"]
    assert sorted(written) == sorted(keys)

    report = ProbeReport(Provenance.since(0.0), "scenes", "segment", {"teacher": result, "surrogate": result})
    path = report.write(tmp_path)
    assert path == tmp_path / "probe-segment.json"
    saved = json.loads(path.read_text())
    assert set(saved) >= {"provenance", "data", "split", "task", "results", "recovery"} and saved["recovery"] == 1
    assert ProbeReport.read(tmp_path, "segment").to_dict() == saved
    (tmp_path / "probe-depth.json").write_text("{}")
    with pytest.raises(RunError, match=r"probe-depth\.json cannot be read"):
        ProbeReport.read(tmp_path, "depth")


def test_a_diverged_head_is_not_chosen(vit: ViT) -> None:
    result = run(vit, "segment", [1e-3, 1e38])
    assert result.seeds[0].chosen.value == 1e-3
    assert result.to_dict()["seeds"][0]["split_scores"][-1][1] is None
