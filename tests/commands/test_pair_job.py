"""What the commands about a surrogate open, and which phases they mean."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import noise_images

from raptor.commands.pair_job import chosen_phases, open_job
from raptor.config import CorrectConfig, DepthConfig
from raptor.phases.cut import Phases


def test_a_job_has_both_models_and_their_head(tmp_path: Path) -> None:
    config = DepthConfig("scenes-k3", num_images=4, device="cpu", out=str(tmp_path / "out"))
    job = open_job(config, "depth", "depth.json")
    job.find_head()
    images = noise_images(job.teacher, 2)
    with torch.no_grad():
        states, output = job.surrogate.record(images)
        assert torch.equal(job.read_out(job.surrogate)(states[-1]), output)
    assert len(job.judged) == 4 and list(job.phases) == [3, 3, 6] and job.folder.is_dir() and job.fitted is None
    assert job.subject.teacher == "scenes" and job.about(["one"])["num_images"] == 4
    assert job.batch_size == 8
    config = CorrectConfig("scenes-k3", num_images=4, device="cpu", out=str(tmp_path / "other"))
    job = open_job(config, "correct", "correct.json", train_images=6)
    assert job.batch_size == 64 and job.fitted is not None and len(job.fitted) == 6


def test_phases_are_one_or_all() -> None:
    assert chosen_phases(Phases((3, 3, 6)), None) == [1, 2, 3] and chosen_phases(Phases((3, 3, 6)), 2) == [2]
    with pytest.raises(ValueError, match="there is no phase 0: --at takes 1 to 3"):
        chosen_phases(Phases((3, 3, 6)), 0)
