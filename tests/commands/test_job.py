"""What every command about a model opens and checks."""

from __future__ import annotations

from pathlib import Path

from raptor.commands.job import Job
from raptor.config import DynamicsConfig
from raptor.data import ChosenData


def test_a_job_about_one_model(tmp_path: Path) -> None:
    config = DynamicsConfig("scenes", num_images=4, device="cpu", out=str(tmp_path / "out"))
    job = Job(config)
    job.about_models("dynamics", config.model, *job.open_pair(config.model))
    assert list(job.sides) == ["teacher"] and not job.fits_head and not job.folder.exists()
    job.judge(ChosenData.of("scenes", vars(config)).judged(4, 48), "dynamics.json")
    assert (job.subject.model, job.subject.teacher, job.subject.num_images) == ("scenes", None, 4)
    assert sum(len(batch.images) for batch in job.stream()) == 4 and job.bad_images() == []
