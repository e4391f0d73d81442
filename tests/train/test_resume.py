"""Runs that are there already: phase jobs, starts from other runs, legs of a larger budget, the teacher kept."""

from __future__ import annotations

import copy
import json
import os
import shutil
from functools import partial

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from tiny_images import colour, save_array
from tiny_models import tiny_timm
from tiny_run import OPTIONS, blocks_of, metrics, tiny_run, tiny_teacher, write_recipe
from torch import nn

from raptor.open import OtherTeacher, open_pair, open_vit
from raptor.phases import Phases
from raptor.report.results import read_results
from raptor.run import Interrupted, RunError, read_config
from raptor.surrogate.surrogate import surrogate_spec
from raptor.train import DistillSummary, distill, resume
from raptor.train.loop import Loop

LEGS = dict(stage1_share=0.5, warmup=0.5)


def test_phase_jobs_then_stage_2_equal_one_run_to_the_last_bit(tmp_path):
    whole = tiny_run(tmp_path / "whole")
    together = tiny_run(tmp_path / "together", stage="1")
    for phase in (1, 2):
        job = tiny_run(tmp_path / "jobs", phase=phase)
        assert job.folder == tmp_path / "jobs" / f"phase-{phase}"
        ours, theirs = blocks_of(job), blocks_of(together)
        own = [n for n in ours if n.startswith(f"{phase - 1}.")]
        assert own and all(torch.equal(ours[n], theirs[n]) for n in own)
        lines = [line for line in metrics(job.folder) if "loss" in line]
        assert all(len(line["layer_loss"]) == 2 for line in lines)
    joined = tiny_run(tmp_path / "jobs", stage="2")
    assert all(torch.equal(blocks_of(joined)[n], v) for n, v in blocks_of(whole).items())
    assert open_vit(tmp_path / "jobs", teacher=tiny_teacher()).phases == Phases((2, 2))
    from_start = tiny_run(tmp_path / "started", stage="2", start=str(tmp_path / "together"))
    assert all(torch.equal(blocks_of(from_start)[n], v) for n, v in blocks_of(whole).items())


def test_stage_2_refuses_phases_that_are_missing_unfinished_or_of_another_cut(tmp_path):
    tiny_run(tmp_path / "run", phase=1)
    with pytest.raises(RunError, match=r"phase-2 is missing; run --phase 2 first"):
        tiny_run(tmp_path / "run", stage="2")
    tiny_run(tmp_path / "run", phase=2)
    summary = tmp_path / "run" / "phase-2" / "summary.json"
    kept = summary.read_text()
    summary.unlink()
    with pytest.raises(RunError, match="phase-2 is not finished"):
        tiny_run(tmp_path / "run", stage="2")
    summary.write_text(kept)
    with pytest.raises(RunError, match=r"phase-1 was trained with phases \[2, 2\], this run has \[1, 3\]"):
        tiny_run(tmp_path / "run", stage="2", phases=[1, 3])


def test_start_must_be_a_surrogate_of_the_same_make(tmp_path):
    tiny_run(tmp_path / "first", budget="2steps")
    start = str(tmp_path / "first")
    with pytest.raises(ValueError, match=r"has phases 2 \| 2, this run 1 \| 3"):
        tiny_run(tmp_path / "second", start=start, phases=[1, 3])
    with pytest.raises(ValueError, match="has conditioning table, this run mlp"):
        tiny_run(tmp_path / "third", start=start, conditioning="mlp")
    with pytest.raises(ValueError, match="has adapters 0, this run 2: give the same --adapters"):
        tiny_run(tmp_path / "adapted", start=start, adapters=2)
    with pytest.raises(ValueError, match="scenes is not a surrogate"):
        tiny_run(tmp_path / "fourth", start="scenes")


def test_a_teacher_changed_in_memory_is_saved_with_the_run(tmp_path):
    """Opened by name, then changed: the name no longer gives these weights."""
    teacher = tiny_timm()
    tiny_run(tmp_path / "run", teacher, budget="2steps")
    surrogate, found = open_pair(tmp_path / "run")
    assert torch.equal(found.model.pos_embed, teacher.model.pos_embed) and surrogate is not None
    (tmp_path / "run").rename(tmp_path / "moved")
    assert open_pair(tmp_path / "moved")[1].name == found.name
    with pytest.raises(OtherTeacher, match="was not made from"):
        tiny_run(tmp_path / "next", tiny_timm(shaken=False), start=str(tmp_path / "moved"), budget="2steps")
    tiny_run(
        tmp_path / "next",
        tiny_timm(shaken=False),
        start=str(tmp_path / "moved"),
        budget="2steps",
        allow_other_teacher=True,
    )


def test_the_teachers_own_folder_is_no_run_folder(tmp_path):
    tiny_run(tmp_path / "first", tiny_timm(), budget="2steps")
    (tmp_path / "first" / "teacher").rename(tmp_path / "mine")
    with pytest.raises(RunError, match="holds the teacher itself"):
        tiny_run(tmp_path / "mine", open_vit(tmp_path / "mine"), budget="2steps")


def test_a_finished_run_writes_its_surrogate_again(tmp_path, capsys):
    first = tiny_run(tmp_path / "run", budget="2steps")
    folder = tmp_path / "run" / "surrogate"
    before = (folder / "model.safetensors").read_bytes()

    def delete():
        shutil.rmtree(folder)

    def truncate():
        (folder / "model.safetensors").write_bytes(before[: len(before) // 2])

    def empty():
        (folder / "config.json").write_text("")

    for damage in (delete, truncate, empty):
        damage()
        again = tiny_run(tmp_path / "run", budget="2steps")
        assert again.summary.to_dict() == first.summary.to_dict()
        assert "written again" in capsys.readouterr().err
        assert (folder / "model.safetensors").read_bytes() == before
        assert json.loads((folder / "config.json").read_text())["surrogate"]["phases"] == list(first.summary.phases)
    tiny_run(tmp_path / "run", budget="2steps")
    assert "written again" not in capsys.readouterr().err


def test_a_checkpoint_that_is_not_finite_is_never_saved_as_a_surrogate(tmp_path):
    tiny_run(tmp_path / "run", budget="2steps")
    shutil.rmtree(tmp_path / "run" / "surrogate")
    (path,) = (tmp_path / "run" / "checkpoint" / (tmp_path / "run/checkpoint/latest").read_text()).glob("*.safetensors")
    tensors = load_file(path)
    name = next(n for n in tensors if n.startswith("block.") and n.endswith("weight"))
    tensors[name] = torch.full_like(tensors[name], float("nan"))
    save_file(tensors, path)
    state = json.loads((path.parent / "state.json").read_text())
    (path.parent / "state.json").write_text(json.dumps({**state, "tensor_bytes": path.stat().st_size}))
    with pytest.raises(ValueError, match=r"checkpoint: .* are NaN or infinite"):
        tiny_run(tmp_path / "run", budget="2steps")
    assert not (tmp_path / "run" / "surrogate").exists()


def leg_run(folder, budget, **options):
    return tiny_run(folder, recipe=write_recipe(folder.parent, budget=budget, **LEGS), checkpoint_minutes=0, **options)


def losses_of(folder):
    return [(line["stage"], line["step"], line["loss"], line["lr"]) for line in metrics(folder) if "loss" in line]


@pytest.fixture(scope="module")
def two_legs(tmp_path_factory):
    """6 steps, then 16 in all."""
    folder = tmp_path_factory.mktemp("legs") / "run"
    leg_run(folder, "6steps")
    (folder / "certificate.json").write_text("of the first leg")
    return leg_run(folder, "16steps")


def test_more_budget_on_a_finished_run_is_a_leg_with_its_own_warm_up(two_legs):
    folder, summary = two_legs.folder, two_legs.summary
    assert summary.num_steps == {"stage1": 3, "stage2": 3, "stage2-leg2": 10}
    assert summary.verdict is not None and "trained 16 steps (3 + 3 + 10) of 8 images" in summary.verdict.lines()[0]
    config = read_config(folder)
    assert (config["legs"], config["recipe"]["budget"]) == (["6steps", "16steps"], "16steps")
    rates = [lr for stage, _, _, lr in losses_of(folder) if stage == "stage2-leg2"]
    assert rates[:5] == pytest.approx([2e-4, 4e-4, 6e-4, 8e-4, 1e-3]) and rates[-1] == pytest.approx(1e-6)
    assert (folder / "leg1" / "certificate.json").exists() and not (folder / "certificate.json").exists()
    assert DistillSummary.read(folder / "leg1").num_steps == {"stage1": 3, "stage2": 3}
    curve = [row for row in read_results(folder).training if row.stage == "stage2"]
    assert [row.step for row in curve] == list(range(13))
    jump = abs(curve[3].loss - curve[2].loss)  # from the weights that the first leg ended with
    assert jump < 0.5 * abs(curve[-1].loss - curve[0].loss)
    assert leg_run(folder, "16steps").summary.num_steps == summary.num_steps  # finished: given back


def test_a_run_from_before_muon_was_the_default_goes_on_with_adamw(tmp_path):
    run = partial(distill, tiny_teacher(), "scenes", out=str(tmp_path / "run"), batch_size=8, **OPTIONS)
    run(recipe="adamw", budget="2steps")
    assert "optimizer" not in read_config(tmp_path / "run")["recipe"]
    with pytest.raises(RunError, match="holds a run of adamw, not of muon: add --optimizer adamw to go on with it"):
        run(budget="4steps")
    assert run(optimizer="adamw", budget="2steps").summary.num_steps == {"stage1": 1, "stage2": 1}
    assert run(optimizer="adamw", budget="4steps").summary.num_steps["stage2-leg2"] == 2
    for other in ("shape: vit_tiny_patch16_224", "recipe: default"):  # a teacher's run, a file of options
        (tmp_path / "run" / "config.yaml").write_text(other)
        with pytest.raises(RunError, match="holds a run with another config"):
            run(budget="4steps")


def test_a_run_on_frames_from_before_their_sizes_were_known_goes_on(tmp_path):
    for i in range(12):
        part = "train" if i < 8 else "test"
        save_array(tmp_path / "nyu" / part / "rgb" / f"{i:04d}.png", colour(i, 24, 24))
        save_array(tmp_path / "nyu" / part / "depth" / f"{i:04d}.png", np.full((6, 8), i, np.uint8))
    data, recipe = f"nyuv2:{tmp_path / 'nyu'}", write_recipe(tmp_path, batch_size=4, budget="2steps")
    run = partial(distill, tiny_teacher(), data, recipe=recipe, out=str(tmp_path / "run"), **OPTIONS)
    run()
    config = read_config(tmp_path / "run")
    for part in ("train", "val"):  # as earlier versions wrote it
        config["images"][part]["fingerprint"] = config["images"][part].pop("earlier_fingerprint")
    (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump(config))
    run()
    assert run(budget="4steps").summary.num_steps["stage2-leg2"] == 2
    assert read_config(tmp_path / "run")["images"] == config["images"]
    run(out=str(tmp_path / "other"))
    save_array(tmp_path / "nyu" / "train" / "rgb" / "0003.png", np.zeros((24, 24, 3), np.uint8))
    with pytest.raises(RunError, match=r"the train images changed since .*other began"):
        run(out=str(tmp_path / "other"))


def test_a_finished_run_is_not_given_back_for_another_head(tmp_path):
    """The accuracy and agreement of its summary are those of the head it was made with."""
    files = [str(tmp_path / f"{name}.safetensors") for name in ("one", "two")]
    for seed, file in enumerate(files):
        weight = torch.randn(6, 64, generator=torch.Generator().manual_seed(seed))
        save_file({"weight": weight, "bias": torch.zeros(6)}, file)
    run = partial(tiny_run, tmp_path / "run", budget="2steps")
    done = run(head_file=files[0])
    assert run(head_file=files[0]).summary.validation == done.summary.validation
    for other in (files[1], None):
        with pytest.raises(RunError, match=r"holds a run with another config \(head_file: "):
            run(head_file=other)
    config = read_config(tmp_path / "run")
    del config["head_file"]  # as earlier versions wrote it
    (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump(config))
    run(head_file=os.path.relpath(files[0]))
    for other in (files[1], None):
        with pytest.raises(RunError, match=r"holds a finished run with --head_file .*one.safetensors, whose scores"):
            run(head_file=other)
    tiny_run(tmp_path / "plain", budget="2steps")
    with pytest.raises(RunError, match="holds a finished run with no --head_file"):
        tiny_run(tmp_path / "plain", budget="2steps", head_file=files[0])


def test_a_leg_resumed_in_its_middle_ends_with_the_same_bits(tmp_path, two_legs, monkeypatch):
    folder = tmp_path / "run"
    leg_run(folder, "6steps")
    with monkeypatch.context() as patch:
        stops = ("stage2-leg2", 4)
        patch.setattr(Loop, "_stop_or_save", lambda loop, step: ((loop.state.stage, step) == stops, True))
        with pytest.raises(Interrupted, match="stopped after step 4 of stage2-leg2"):
            leg_run(folder, "16steps")
    assert DistillSummary.read(folder).num_steps == {"stage1": 3, "stage2": 3}  # still that of its surrogate
    for budget in ("6steps", "20steps"):
        with pytest.raises(RunError, match="is on its way to a budget of 16steps"):
            leg_run(folder, budget)
    result = leg_run(folder, "16steps")
    assert losses_of(folder) == losses_of(two_legs.folder)
    ours, theirs = blocks_of(result), blocks_of(two_legs)
    assert all(torch.equal(ours[n], theirs[n]) for n in ours)
    assert result.summary.num_steps == two_legs.summary.num_steps


def test_a_leg_that_cannot_be_is_refused_with_one_line(tmp_path, monkeypatch):
    tiny_run(tmp_path / "run", budget="4steps", stage1_share=0.0)
    read = []
    monkeypatch.setattr(resume, "read_config", lambda folder: (read.append(folder), read_config(folder))[1])
    tiny_run(tmp_path / "run", budget="4steps", stage1_share=0.0)
    assert len(read) == 1
    for budget in ("3steps", "60s"):
        with pytest.raises(RunError, match=rf"finished with a budget of 4steps: .*in the same unit, not {budget}"):
            tiny_run(tmp_path / "run", budget=budget, stage1_share=0.0)
    with pytest.raises(RunError, match="another config"):
        tiny_run(tmp_path / "run", budget="8steps", stage1_share=0.0, lr=2e-3)
    shutil.rmtree(tmp_path / "run" / "checkpoint")
    with pytest.raises(RunError, match=r"no checkpoint to go on from: add --start .* --stage 2"):
        tiny_run(tmp_path / "run", budget="8steps", stage1_share=0.0)


def test_phase_jobs_with_adapters_are_one_run(tmp_path):
    options = dict(adapters=2, table_start="teacher", mixup=0.4, budget="4steps")
    whole = tiny_run(tmp_path / "whole", **options)
    recorded = read_config(whole.folder)["recipe"]
    assert {name: recorded[name] for name in options} == options
    again = open_vit(whole.folder, teacher=tiny_teacher())
    assert surrogate_spec(again).adapters == 2
    for phase in (1, 2):
        tiny_run(tmp_path / "jobs", **options, phase=phase)
    with pytest.raises(RunError, match="was trained with adapters 2, this run has None"):
        tiny_run(tmp_path / "jobs", **{**options, "adapters": None}, stage="2")
    joined = tiny_run(tmp_path / "jobs", **options, stage="2")
    assert all(torch.equal(blocks_of(joined)[n], v) for n, v in blocks_of(whole).items())


def test_stage_2_refuses_phases_of_another_teacher_and_from_the_middle_of_a_leg(tmp_path):
    """A teacher of the same name may have other weights; while a leg runs, the summary of the one before is there."""
    run = partial(tiny_run, tmp_path / "run", budget="4steps")
    other = tiny_teacher()
    with torch.no_grad():
        for parameter in other.model.parameters():
            parameter.add_(0.01)
    run(phase=1, teacher=tiny_teacher())
    run(phase=2, teacher=other)
    with pytest.raises(
        RunError, match=r"phase-2 was trained on another .* \(its weights differ\): run --phase 2 again"
    ):
        run(stage="2", teacher=tiny_teacher())
    shutil.rmtree(tmp_path / "run" / "phase-2")
    run(phase=2, teacher=tiny_teacher())
    config = read_config(tmp_path / "run" / "phase-1")
    (tmp_path / "run" / "phase-1" / "config.yaml").write_text(yaml.safe_dump({**config, "legs": ["4steps", "8steps"]}))
    with pytest.raises(RunError, match=r"phase-1 is not finished; run --phase 1 first"):
        run(stage="2", teacher=tiny_teacher())


def test_a_run_goes_on_where_a_parameter_gets_no_gradient(tmp_path):
    class Unused(nn.Module):
        def __init__(self, block: nn.Module):
            super().__init__()
            self.inner, self.unused = block, nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)

    def teacher():
        vit = tiny_teacher()
        model = copy.deepcopy(vit.model)
        model.blocks = nn.Sequential(*map(Unused, model.blocks))
        torch.manual_seed(0)
        return model

    for optimizer in ("muon", "adamw"):
        out = tmp_path / optimizer
        tiny_run(out, teacher(), budget="2steps", optimizer=optimizer)
        assert tiny_run(out, teacher(), budget="4steps", optimizer=optimizer).summary.num_steps["stage2-leg2"] == 2
