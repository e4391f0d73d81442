"""The result of a distillation, its summary as it is written and read, and what a later run finds of it."""

from __future__ import annotations

import copy
import json
import math
import shutil
from dataclasses import replace
from functools import partial

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from tiny_models import tiny_timm
from tiny_run import blocks_of, metrics, tiny_run, tiny_teacher, write_recipe
from torch import nn

from raptor.files import RunError
from raptor.phases.cut import Phases
from raptor.run import Interrupted, read_config
from raptor.surrogate.surrogate import surrogate_spec
from raptor.train import DistillSummary, Scores, distill
from raptor.train.distilled import check_run_folder
from raptor.train.loop import Loop
from raptor.vit.open import open_vit
from raptor.vit.pair import OtherTeacher, open_pair


def test_a_result_says_its_scores_and_folder(tmp_path):
    done = tiny_run(tmp_path / "run", budget="2steps")
    scores = done.summary.validation
    assert scores.recovery == (scores.probe / scores.teacher_probe if scores.teacher_probe else None)
    scores.recovery = None  # of a teacher that is never right
    assert "recovery" not in done.text()
    scores.recovery = 0.5
    text = done.text()
    assert text.splitlines()[0].endswith("measured on 8 held-out images of scenes")
    assert "phases 2 2, trained on scenes\n" in text and text.endswith(f"run folder {tmp_path / 'run'}")
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


def test_stages_one_after_the_other_equal_one_run_to_the_last_bit(tmp_path):
    whole = tiny_run(tmp_path / "whole")
    first = tiny_run(tmp_path / "first", stage="1")
    assert {line["stage"] for line in metrics(first.folder)} == {"stage1"}
    second = tiny_run(tmp_path / "second", stage="2", start=str(first.folder))
    assert all(torch.equal(blocks_of(second)[n], v) for n, v in blocks_of(whole).items())
    assert open_vit(tmp_path / "second", teacher=tiny_teacher()).phases == Phases((2, 2))
    with pytest.raises(ValueError, match="--stage 2 goes on from a surrogate: give --start"):
        tiny_run(tmp_path / "third", stage="2")


def test_stages_with_adapters_are_one_run(tmp_path):
    options = dict(adapters=2, mixup=0.4, budget="4steps")
    options |= dict(cutmix=0.5, jitter=0.4, grey=0.2, sizes=[24, 32], first_size_until=0.6)
    whole = tiny_run(tmp_path / "whole", **options, average_last=0.5)
    recorded = read_config(whole.folder)["recipe"]
    assert {name: recorded[name] for name in options} == options
    assert surrogate_spec(open_vit(whole.folder, teacher=tiny_teacher())).adapters == 2
    tiny_run(tmp_path / "first", **options, stage="1")
    joined = tiny_run(tmp_path / "second", **options, average_last=0.5, stage="2", start=str(tmp_path / "first"))
    assert all(torch.equal(blocks_of(joined)[n], v) for n, v in blocks_of(whole).items())


@pytest.mark.parametrize("budget", ["8steps", "3steps", "60s"])
def test_a_finished_run_is_not_trained_on_with_another_budget(tmp_path, budget):
    done = tiny_run(tmp_path / "run", budget="4steps")
    assert tiny_run(tmp_path / "run", budget="4steps").summary.num_steps == done.summary.num_steps  # given back
    with pytest.raises(RunError, match=r"run is finished with a budget of 4steps: .* add --start .*run and choose an"):
        tiny_run(tmp_path / "run", budget=budget)
    with pytest.raises(RunError, match="another config"):
        tiny_run(tmp_path / "run", budget=budget, lr=2e-3)


def test_a_finished_run_goes_on_from_its_weights_in_another_folder(tmp_path):
    first = tiny_run(tmp_path / "first", budget="4steps")
    more = tiny_run(tmp_path / "more", budget="1steps", stage1_share=0.0, lr=1e-12, start=str(first.folder))
    for name, value in blocks_of(first).items():
        assert torch.allclose(blocks_of(more)[name], value, atol=1e-9), name


def test_start_must_be_a_surrogate_of_the_same_make(tmp_path):
    tiny_run(tmp_path / "first", budget="2steps")
    start = str(tmp_path / "first")
    with pytest.raises(ValueError, match=r"has phases 2 \| 2, this run 1 \| 3"):
        tiny_run(tmp_path / "second", start=start, phases=[1, 3])
    with pytest.raises(ValueError, match="has conditioning table, this run mlp"):
        tiny_run(tmp_path / "third", start=start, conditioning="mlp")
    with pytest.raises(ValueError, match="has adapters 0, this run 2: give the same --adapters"):
        tiny_run(tmp_path / "adapted", start=start, adapters=2)
    tiny_run(tmp_path / "mlp", budget="2steps", adapters=2, adapted="mlp")
    with pytest.raises(ValueError, match="has adapted mlp, this run all: give the same --adapted"):
        tiny_run(tmp_path / "all", start=str(tmp_path / "mlp"), adapters=2)
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


def test_the_teachers_own_folder_is_no_run_folder(tmp_path):
    tiny_run(tmp_path / "first", tiny_timm(), budget="2steps")
    (tmp_path / "first" / "teacher").rename(tmp_path / "mine")
    check_run_folder(open_vit(tmp_path / "mine"), tmp_path / "another")
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
        with pytest.raises(RunError, match=r"holds a run with another config \(--head_file: "):
            run(head_file=other)
    tiny_run(tmp_path / "plain", budget="2steps")
    with pytest.raises(RunError, match=r"holds a run with another config \(--head_file: None -> "):
        tiny_run(tmp_path / "plain", budget="2steps", head_file=files[0])


def test_a_run_goes_on_where_a_parameter_gets_no_gradient(tmp_path, monkeypatch):
    class Unused(nn.Module):
        def __init__(self, block: nn.Module):
            super().__init__()
            self.inner = block
            self.unused = nn.Linear(3, 3)

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
        with monkeypatch.context() as patch, pytest.raises(Interrupted):
            patch.setattr(Loop, "_stop_or_save", lambda loop: (loop.state.step == 0, True))
            tiny_run(out, teacher(), budget="6steps", optimizer=optimizer)
        assert tiny_run(out, teacher(), budget="6steps", optimizer=optimizer).summary.num_steps["stage2"] == 3
