"""The options of `distill`: what does not go together, budgets, k=auto, phase jobs, starts, its result."""

from __future__ import annotations

import json
import math
import shutil
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from tiny_models import tiny_timm
from tiny_run import OPTIONS, blocks_of, metrics, tiny_run, tiny_teacher, write_recipe

from raptor.data import iterate, open_data
from raptor.open import OtherTeacher, open_pair, open_vit
from raptor.phases import Phases, find_phases
from raptor.report.results import read_results
from raptor.run import Interrupted, RunError, read_config
from raptor.similarity.cosine import measure_similarity
from raptor.surrogate.surrogate import surrogate_spec
from raptor.train import DistillSummary, Scores, distill
from raptor.train.distill import Job
from raptor.train.loop import Loop
from raptor.train.recipe import resolve_recipe
from raptor.vit.trajectory import Trajectories


def test_one_stage_alone_is_as_long_as_beside_the_other():
    recipe = resolve_recipe("paper", {})
    for stage, name in (("1", "stage1"), ("2", "stage2")):
        assert Job(None, recipe, None, None, None, stage=stage).stages() == {name: 0.5}  # type: ignore[arg-type]
    joint = replace(recipe, stage1_share=0.0)
    assert Job(None, joint, None, None, None).stages() == {"stage2": 1.0}  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="leaves nothing for stage 1"):
        Job(None, joint, None, None, None, stage="1").stages()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(recipe="papper"), "unknown recipe 'papper': did you mean paper?"),
        (dict(recipe="missing.yaml"), "unknown recipe 'missing.yaml'"),
        (dict(stage="3"), "unknown --stage '3'"),
        (dict(stage="2", phase=1), "--phase is a job of stage 1"),
        (dict(k="two", phases=None), "cannot read --k 'two'"),
        (dict(k=0, phases=None), "k"),
        (dict(k=9, phases=None), "k"),
        (dict(k=2, target="r2=.5"), "--target goes with --k auto"),
        (dict(k="auto", phases=None), "--k auto needs --target"),
        (dict(k="auto", phases=None, target="r2=high"), "--k auto needs --target"),
        (dict(k="auto", phases=None, target="loss=1"), "--k auto needs --target"),
        (dict(k="auto", target="r2=.5"), "leave out --phases"),
        (dict(k=3), "--k 3 contradicts the 2 phases of --phases"),
        (dict(graph=True), "a CUDA graph needs a single GPU"),
        (dict(phases=[2, 3]), r"phases \[2, 3\] do not sum to the 4 blocks"),
        (dict(phase=3), r"phase 3 is not one of 1\.\.2"),
        (dict(batch_size=0), "batch_size must be from 1"),
        (dict(batch_size=1000), "cannot be filled from 64 images"),
        (dict(budget="soon"), "cannot read the budget"),
        (dict(block="mine"), "unknown block"),
        (dict(conditioning="time"), "unknown conditioning"),
        (dict(normalise="all"), "unknown normalise"),
        (dict(augment="blur"), "unknown augment"),
        (dict(track="paper"), "unknown tracker"),
        (dict(device="tpu"), "unknown device"),
        (dict(precision="fp8"), "unknown precision"),
        (dict(stage="2"), "stage 2 needs every phase"),
        (dict(start="nowhere"), "unknown model 'nowhere'"),
    ],
)
def test_wrong_options_are_one_line(tmp_path, options, message):
    with pytest.raises(ValueError, match=message) as error:
        tiny_run(tmp_path / "run", **options)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run" / "summary.json").exists()


@pytest.mark.parametrize(("budget", "stages"), [("6steps", (3, 3)), ("1epochs", (4, 4)), ("5steps", (2, 3))])
def test_budgets_of_steps_and_epochs(tmp_path, budget, stages):
    """64 images in batches of 8 are 8 steps an epoch, shared by two stages."""
    result = tiny_run(tmp_path / "run", budget=budget)
    assert result.summary.num_steps == dict(zip(("stage1", "stage2"), stages))


def test_one_step_cannot_be_shared_by_two_stages(tmp_path):
    with pytest.raises(ValueError, match="give --budget 2steps or more"):
        tiny_run(tmp_path / "run", budget="1steps")
    assert tiny_run(tmp_path / "run", budget="1steps", stage1_share=0.0).summary.num_steps == {"stage2": 1}


def test_a_budget_of_seconds_is_kept_and_what_was_timed_is_undone(tmp_path):
    result = tiny_run(tmp_path / "run", budget="2s", stage1_share=0.0)
    assert 0.3 < result.summary.seconds < 12
    steps = result.summary.num_steps["stage2"]
    exact = tiny_run(tmp_path / "exact", budget=f"{steps}steps", stage1_share=0.0)
    ours, theirs = blocks_of(result), blocks_of(exact)
    assert all(torch.equal(ours[n], theirs[n]) for n in ours)


def test_auto_stops_at_the_smallest_k_that_passes(tmp_path, capfd):
    options = dict(phases=None, k="auto", budget="4steps")
    scores = {}
    for k in (1, 2):
        one = tiny_run(tmp_path / f"alone-{k}", **{**options, "k": k})
        scores[k] = one.summary.validation.r2_lowest
    assert scores[1] < scores[2]
    between = (scores[1] + scores[2]) / 2
    result = tiny_run(tmp_path / "auto", **options, target=f"r2={between}")
    assert result.surrogate.phases is not None and len(result.surrogate.phases) == 2
    assert result.folder == tmp_path / "auto" / "k2"
    assert result.summary.validation.r2_lowest == scores[2]
    assert not (tmp_path / "auto" / "k3").exists()
    assert capfd.readouterr().out == ""
    first = tiny_run(tmp_path / "easy", **options, target=f"r2={scores[1]}")
    assert first.folder.name == "k1"


def test_auto_says_when_no_k_passes(tmp_path):
    with pytest.raises(ValueError, match=r"no k passes r2=2: at k=4 it is"):
        tiny_run(tmp_path / "run", phases=None, k="auto", target="r2=2", budget="2steps")


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


def test_a_phase_job_is_measured_amid_the_teachers_other_blocks(tmp_path):
    job = tiny_run(tmp_path / "run", phase=2)
    r2 = job.summary.validation.r2
    assert r2[:2] == pytest.approx([1.0, 1.0], abs=1e-6)
    assert max(r2[2:]) < 1 - 1e-4
    teacher_blocks = list(job.teacher.blocks)
    assert not any(block in teacher_blocks for block in job.surrogate.blocks)


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


def test_distilling_leaves_the_teacher_as_it_was(tmp_path):
    teacher = tiny_teacher()
    before = {k: v.clone() for k, v in teacher.model.state_dict().items()}
    result = tiny_run(tmp_path / "run", teacher, lr=1e-2)
    after = teacher.model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[k], after[k]) for k in before)
    assert result.teacher is teacher
    frozen = result.surrogate.model.state_dict()
    assert all(torch.equal(frozen[k], v) for k, v in before.items() if not k.startswith("blocks."))


def test_opened_data_can_be_given(tmp_path):
    from raptor.data import open_data

    pair = (open_data("scenes", "train", limit=64, size=24), open_data("scenes", "val", limit=8, size=24))
    named = tiny_run(tmp_path / "named", budget="4steps")
    given = distill(
        tiny_teacher(),
        pair,
        phases=[2, 2],
        recipe=write_recipe(tmp_path, budget="4steps"),
        out=str(tmp_path / "given"),
        device="cpu",
    )
    assert all(torch.equal(blocks_of(named)[n], v) for n, v in blocks_of(given).items())


def test_labels_of_the_judged_images_give_accuracy_where_the_training_images_have_none(tmp_path):
    train = open_data("scenes", "train", limit=32, size=24).without_labels()
    val = open_data("scenes", "val", limit=12, size=24)
    recipe = write_recipe(tmp_path, budget="2steps")
    teacher = tiny_teacher(num_classes=len(val.classes))
    done = distill(teacher, (train, val), phases=[2, 2], recipe=recipe, out=str(tmp_path / "run"), device="cpu")
    (batch,) = iterate(val, teacher.preprocess, len(val))
    with torch.no_grad():
        right = [
            float((vit(batch.images).argmax(-1) == batch.labels).float().mean()) for vit in (teacher, done.surrogate)
        ]
    scores = done.summary.validation
    assert [scores.teacher_accuracy, scores.accuracy] == pytest.approx(right)
    assert scores.probe is None  # a ridge probe would need labels to fit on


def test_k_may_repeat_the_phases_and_is_three_without_them(tmp_path):
    assert tiny_run(tmp_path / "same", k=2, budget="2steps").surrogate.phases == Phases((2, 2))
    assert len(tiny_run(tmp_path / "three", phases=None, budget="2steps").surrogate.phases or ()) == 3


def test_a_result_says_its_scores_and_folder(tmp_path):
    done = tiny_run(tmp_path / "run", budget="2steps")
    scores = done.summary.validation
    assert scores.recovery == (scores.probe / scores.teacher_probe if scores.teacher_probe else None)
    scores.recovery = None  # of a teacher that is never right
    assert "recovery" not in done.text()
    scores.recovery = 0.5
    text = done.text()
    assert "phases 2 2" in text and text.endswith(f"run folder {tmp_path / 'run'}")
    assert f"{scores.r2_last:.3f}" in text and f"recovery of the ridge probe {scores.recovery:.1%}" in text
    assert f"ridge probe {scores.probe:.1%} (teacher {scores.teacher_probe:.1%})" in text
    assert "unreadable" not in text and done.summary.bad_images == []


def test_images_passed_over_are_named_in_the_summary(tmp_path):
    for name in [*(f"train/{i:02d}" for i in range(16)), *(f"val/{i:02d}" for i in range(4))]:
        path = tmp_path / "images" / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.effect_noise((24, 24), 60).save(path)
        if name in ("train/05", "val/02"):
            path.write_bytes(b"broken")
    options = dict(recipe=write_recipe(tmp_path), phases=[2, 2], budget="4steps", device="cpu")
    with pytest.raises(ValueError, match=r"train/05\.png"):
        distill(tiny_teacher(), str(tmp_path / "images"), out=str(tmp_path / "strict"), **options)
    done = distill(tiny_teacher(), str(tmp_path / "images"), out=str(tmp_path / "run"), skip_bad=True, **options)
    assert done.summary.bad_images == ["train/05.png", "val/02.png"]
    assert "2 unreadable images" in done.text()


def test_a_summary_is_read_as_it_was_written(tmp_path):
    scores = Scores([0.5, None], 0.25, 0.25, [0.9, 0.8], {"all": {"r2": [0.5, None]}}, 7, agreement=0.5)
    facts = tiny_teacher(depth=2).facts()
    summary = DistillSummary(Phases.from_lengths([1, 1]), facts, facts, {"stage1": 3}, 1.5, scores)
    summary.write(tmp_path)
    saved = json.loads((tmp_path / "summary.json").read_text())
    assert saved["phases"] == [1, 1] and saved["validation"]["r2"] == [0.5, None]
    found = DistillSummary.read(tmp_path)
    assert found.provenance.versions and replace(found, provenance=summary.provenance) == summary
    scores.r2_last = math.nan  # of a teacher whose states do not vary
    summary.write(tmp_path)
    assert math.isnan(DistillSummary.read(tmp_path).validation.r2_last)
    (tmp_path / "summary.json").write_text(json.dumps({"accuracy": 0.5, "seconds": 1.0}))
    with pytest.raises(RunError, match=r"summary\.json cannot be read"):
        DistillSummary.read(tmp_path)


def test_a_summary_of_an_earlier_version_is_read(tmp_path):
    """Its validation has no key for what was not measured, and it knows nothing of bad images."""
    tiny_run(tmp_path / "run", budget="2steps")
    path = tmp_path / "run" / "summary.json"
    values = json.loads(path.read_text())
    del values["bad_images"], values["validation"]["recovery"]
    path.write_text(json.dumps({**values, "unknown": 1}))
    old = DistillSummary.read(tmp_path / "run")
    assert old.bad_images == [] and old.validation.recovery is None
    assert old.phases == Phases((2, 2))


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


def test_an_untrained_teacher_is_the_same_each_time_and_kept_with_the_run(tmp_path):
    options = dict(pretrained=False, layer_scale=None, size=32, phases=[6, 6], budget="2steps", batch_size=2, limit=8)
    options |= dict(val_images=4, head_images=8, device="cpu", out=str(tmp_path / "run"))
    first = distill("timm/vit_tiny_patch16_224", "scenes", **options)
    assert read_config(tmp_path / "run")["pretrained"] is False
    (tmp_path / "run" / "summary.json").unlink()
    again = distill("timm/vit_tiny_patch16_224", "scenes", **options)  # the teacher of its config
    assert all(torch.equal(value, blocks_of(first)[name]) for name, value in blocks_of(again).items())
    assert open_vit(tmp_path / "run").phases == first.surrogate.phases
    with pytest.raises(RunError, match="another config"):
        distill("timm/vit_tiny_patch16_224", "scenes", **{**options, "seed": 1})


LEGS = dict(stage1_share=0.5, warmup=0.5)


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
    monkeypatch.setattr(
        sys.modules["raptor.train.distill"], "read_config", lambda folder: (read.append(folder), read_config(folder))[1]
    )
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


def test_legs_of_seconds_and_of_stage_1(tmp_path):
    for budget in ("0.2s", "0.4s"):
        done = tiny_run(tmp_path / "timed", budget=budget, stage1_share=0.0)
    assert list(done.summary.num_steps) == ["stage2", "stage2-leg2"] and min(done.summary.num_steps.values()) >= 1
    for budget in ("8steps", "12steps"):
        done = tiny_run(tmp_path / "first", budget=budget, stage="1")
    assert done.summary.num_steps == {"stage1": 4, "stage1-leg2": 2}


def test_phases_are_cut_by_the_tokens_that_are_asked_for(tmp_path):
    teacher = tiny_teacher(depth=6)
    data = open_data("scenes", "train", limit=64, size=24)
    batches = iterate(data, teacher.preprocess, 32, limit=32)
    found = measure_similarity((s for s, _, _ in Trajectories(teacher, batches)), 6, teacher.groups)
    cuts = {tokens: find_phases(found.matrices[tokens], 2) for tokens in ("registers", "patches")}
    assert cuts["registers"] != cuts["patches"]
    for tokens, expected in cuts.items():
        done = tiny_run(tmp_path / tokens, teacher, phases=None, k=2, tokens=tokens, budget="2steps")
        assert done.summary.phases == expected and read_config(done.folder)["tokens"] == tokens
    with pytest.raises(ValueError, match="has no 'pixels' tokens"):
        tiny_run(tmp_path / "run", teacher, phases=None, k=2, tokens="pixels")


def test_a_head_of_0_classes_is_no_classifier(tmp_path):
    """The user's word: what the head gives are no class scores, so a ridge head stands in for it."""
    module = tiny_teacher().model
    done = tiny_run(tmp_path / "run", module, size=24, head_classes=0, budget="2steps")
    assert done.teacher.num_classes == 0 and "ridge" in str(done.summary.validation.head)
    own = tiny_run(tmp_path / "own", module, size=24, budget="2steps")
    assert own.teacher.num_classes == 6 and "ridge" not in str(own.summary.validation.head)


def test_a_hub_entry_with_other_weights_each_time_is_refused(tmp_path):
    entry = "def {name}(**_):\n    {seed}\n    return timm.create_model('vit_tiny_patch16_224', img_size=32, depth=2)\n"
    kinds = {"fixed": "torch.manual_seed(0)", "random": "torch.seed()"}
    lines = [entry.format(name=name, seed=seed) for name, seed in kinds.items()]
    (tmp_path / "hubconf.py").write_text("import timm\nimport torch\n" + "".join(lines))
    options = dict(k=1, budget="2steps", batch_size=4, limit=8, val_images=4, phase_images=4, trust_hub=True)
    with pytest.raises(ValueError, match=r"hub/.*:random has other weights each time it is opened: give a weight file"):
        distill(f"hub/{tmp_path}:random", "scenes", out=str(tmp_path / "run"), device="cpu", **options)
    assert not (tmp_path / "run").exists()
    done = distill(f"hub/{tmp_path}:fixed", "scenes", out=str(tmp_path / "run"), device="cpu", **options)
    assert open_pair(done.folder, trust_hub=True)[1].num_layers == 2


def test_more_phases_than_blocks_are_refused_before_images_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[distill.__module__], "measure_similarity", lambda *_: pytest.fail("measured"))
    with pytest.raises(ValueError, match="k=5 phases of at least 1 layers need 5 layers, but there are 4"):
        tiny_run(tmp_path / "run", phases=None, k=5)


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


def test_drawn_images_are_told_of_where_nobody_chose_them(tmp_path, capsys):
    options = dict(OPTIONS, recipe=write_recipe(tmp_path), out=str(tmp_path / "run"), dry_run=True)
    for given, told in (((), True), (("scenes",), False)):
        assert distill(tiny_teacher(), *given, **options).data == "scenes"
        assert ("built-in scenes, which are drawn" in capsys.readouterr().err) is told
