"""The options of `distill`: what does not go together, k=auto, images, labels and phases that are chosen."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from families import Block, Unheard
from tiny_run import OPTIONS, blocks_of, metrics, tiny_run, tiny_teacher, write_recipe
from torch import Tensor, nn

from raptor.data import ChosenData, ImageData, iterate, open_data
from raptor.files import RunError
from raptor.phases.cut import Phases, find_phases
from raptor.phases.function import measure_replacement
from raptor.phases.similarity import measure_similarity
from raptor.run import read_config
from raptor.surrogate.surrogate import surrogate_spec
from raptor.train import distill
from raptor.vit.open import open_vit
from raptor.vit.pair import open_pair
from raptor.vit.trajectory import Trajectories
from raptor.vit.view import ViT


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(recipe="papper"), "unknown recipe 'papper': did you mean paper?"),
        (dict(stage="3"), "--stage must be one of all, 1, 2, got 3"),
        (dict(k="two", phases=None), "two is no number of blocks and no target"),
        (dict(k=9, phases=None), "k"),
        (dict(k="r2=high", phases=None), "write 3, recovery=.95 or r2=.6"),
        (dict(k="loss=1", phases=None), "write 3, recovery=.95 or r2=.6"),
        (dict(k="recovery=nan", phases=None), "r2 is at most 1, recovery at most 2"),
        (dict(k="recovery=95", phases=None), "recovery at most 2"),
        (dict(k="r2=1.02", phases=None), "r2 is at most 1"),
        (dict(k="r2=.5"), "leave out --phases"),
        (dict(k=3), "--k 3 contradicts the 2 phases of --phases"),
        (dict(method="function"), "--method function cuts depth, and --phases says where"),
        (dict(copy="representative"), "add it, or change --copy"),
        (dict(phases=[2, 3]), r"phases \[2, 3\] do not sum to the 4 blocks"),
        (dict(batch_size=1000), "cannot be filled from 64 images"),
        (dict(budget="soon"), "cannot read the budget"),
        (dict(sizes=[24], first_size_until=0.6), "--first_size_until goes from one size to another: give two --sizes"),
        (dict(sizes=[24, 32], augment="none"), "take --augment crop"),
        (dict(adapted="mlp"), "--adapted mlp says which matrices adapters change: give --adapters"),
        (dict(jitter=0.4, augment="none"), "--jitter and --grey are of random crops"),
        (dict(cutmix=0.5, batch_size=1), "need a second image in the batch"),
        (dict(stage="2"), "--stage 2 goes on from a surrogate: give --start"),
        (dict(start="nowhere"), "unknown model 'nowhere'"),
    ],
)
def test_wrong_options_are_one_line(tmp_path, options, message):
    with pytest.raises(ValueError, match=message) as error:
        tiny_run(tmp_path / "run", **options)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run" / "summary.json").exists()


@pytest.mark.parametrize("train_images", [None, 64])
def test_a_batch_that_cannot_be_filled_is_refused_before_the_images_are_compared(tmp_path, monkeypatch, train_images):
    """Comparing them with the held-out ones decodes some of both. A limit that is too small is known at once."""

    def opened(*_: object, **__: object) -> None:
        raise AssertionError("opened too early")

    monkeypatch.setattr(ChosenData, "judged", opened)
    if train_images is not None:
        monkeypatch.setattr(ChosenData, "training", opened)
    with pytest.raises(ValueError, match="a batch of 1000000 cannot be filled"):
        tiny_run(tmp_path / "run", batch_size=10**6, train_images=train_images)


@pytest.mark.parametrize(("factor", "normalise", "told"), [(1, "group", 0), (1e4, "group", 1), (1e4, "coordinate", 0)])
def test_it_says_where_the_loss_would_be_that_of_a_few_coordinates(tmp_path, capsys, factor, normalise, told):
    teacher = tiny_teacher()
    with torch.no_grad():
        teacher.model.patch_embed.proj.weight[3] *= factor
    distill(teacher, "scenes", recipe=write_recipe(tmp_path), normalise=normalise, out=str(tmp_path / "run"), **OPTIONS)
    said = capsys.readouterr().err
    assert said.count("1 % of the coordinates hold 100% of the variance of patches at layer") == told
    assert said.count("--normalise coordinate weighs all alike") == told
    assert read_config(tmp_path / "run")["recipe"]["normalise"] == normalise


def test_a_budget_of_seconds_is_kept_and_what_was_timed_is_undone(tmp_path):
    result = tiny_run(tmp_path / "run", budget="2s", stage1_share=0.0)
    assert 0.3 < result.summary.seconds < 12
    steps = result.summary.num_steps["stage2"]
    exact = tiny_run(tmp_path / "exact", budget=f"{steps}steps", stage1_share=0.0)
    ours = blocks_of(result)
    theirs = blocks_of(exact)
    assert all(torch.equal(ours[n], theirs[n]) for n in ours)


def without_head(num_labels: int) -> tuple[ViT, tuple[ImageData, ImageData]]:
    """A teacher without a classifier, and images of which `num_labels` sets (0 or 2) have labels."""
    teacher = open_vit(tiny_teacher().model, size=24, head_classes=0)
    pair = [open_data("scenes", part, limit=num, size=24) for part, num in (("train", 64), ("val", 8))]
    if num_labels == 0:
        pair = [data.with_labels(None, None) for data in pair]
    return teacher, (pair[0], pair[1])


def test_the_head_term_takes_a_ridge_head_where_there_are_labels_and_says_so_where_not(tmp_path):
    options = dict(phases=[2, 2], recipe=write_recipe(tmp_path, budget="4steps"), head_weight=0.1, device="cpu")
    teacher, labelled = without_head(2)
    done = distill(teacher, labelled, out=str(tmp_path / "run"), **options)
    assert (done.folder / "head.safetensors").is_file()
    assert [line["head_loss"] >= 0 for line in metrics(done.folder) if "head_loss" in line]
    plan = distill(teacher, labelled, out=str(tmp_path / "plan"), dry_run=True, **options)
    assert plan.parts[1].name == "stage2" and not (tmp_path / "plan").exists()
    teacher, plain = without_head(0)
    with pytest.raises(ValueError, match=r"--head_weight compares classes, and .* has no classifier: give --head_file"):
        distill(teacher, plain, out=str(tmp_path / "none"), **options)
    assert not (tmp_path / "none").exists()


def test_auto_stops_at_the_smallest_k_that_passes(tmp_path, capfd):
    options = dict(phases=None, budget="4steps")
    scores = {}
    for k in (1, 2):
        one = tiny_run(tmp_path / f"alone-{k}", **{**options, "k": k})
        scores[k] = one.summary.validation.r2_lowest
    assert scores[1] < scores[2]
    between = (scores[1] + scores[2]) / 2
    result = tiny_run(tmp_path / "auto", **options, k=f"r2={between}")
    assert result.surrogate.phases is not None and len(result.surrogate.phases) == 2
    assert result.folder == tmp_path / "auto" / "k2"
    assert result.summary.validation.r2_lowest == scores[2]
    assert not (tmp_path / "auto" / "k3").exists()
    assert capfd.readouterr().out == ""
    first = tiny_run(tmp_path / "easy", **options, k=f"r2={scores[1]}")
    assert first.folder.name == "k1"


def test_auto_says_when_no_k_passes(tmp_path):
    with pytest.raises(ValueError, match=r"no k passes r2=1: at k=4 it is"):
        tiny_run(tmp_path / "run", phases=None, k="r2=1", budget="2steps")


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


def test_a_tensor_can_be_given_and_is_recorded_by_its_name(tmp_path: Path) -> None:
    pictures = torch.rand(40, 3, 24, 24, generator=torch.Generator().manual_seed(0))
    options = {"phases": [2, 2], "budget": "2steps", "batch_size": 4, "device": "cpu", "out": str(tmp_path / "run")}
    run = distill(tiny_teacher(), pictures, **options)
    assert read_config(run.folder)["data"] == "a Tensor of 40"


def test_k_may_repeat_the_phases_and_is_three_without_them(tmp_path):
    assert tiny_run(tmp_path / "same", k=2, budget="2steps").surrogate.phases == Phases((2, 2))
    assert len(tiny_run(tmp_path / "three", phases=None, budget="2steps").surrogate.phases or ()) == 3


def test_an_untrained_teacher_is_the_same_each_time_and_kept_with_the_run(tmp_path):
    options = dict(pretrained=False, size=32, phases=[6, 6], budget="2steps", batch_size=2, train_images=8)
    options |= dict(num_images=4, device="cpu", out=str(tmp_path / "run"))
    first = distill("timm/vit_tiny_patch16_224", "scenes", **options)
    assert read_config(tmp_path / "run")["pretrained"] is False
    (tmp_path / "run" / "summary.json").unlink()
    again = distill("timm/vit_tiny_patch16_224", "scenes", **options)  # the teacher of its config
    assert all(torch.equal(value, blocks_of(first)[name]) for name, value in blocks_of(again).items())
    assert open_vit(tmp_path / "run").phases == first.surrogate.phases
    with pytest.raises(RunError, match="another config"):
        distill("timm/vit_tiny_patch16_224", "scenes", **{**options, "seed": 1})


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


def test_a_hub_entry_with_other_weights_each_time_is_refused(tmp_path):
    entry = "def {name}(**_):\n    {seed}\n    return timm.create_model('vit_tiny_patch16_224', img_size=32, depth=2)\n"
    kinds = {"fixed": "torch.manual_seed(0)", "random": "torch.seed()"}
    lines = [entry.format(name=name, seed=seed) for name, seed in kinds.items()]
    (tmp_path / "hubconf.py").write_text("import timm\nimport torch\n" + "".join(lines))
    options = dict(k=1, budget="2steps", batch_size=4, train_images=8, num_images=4, trust_hub=True)
    with pytest.raises(ValueError, match=r"hub/.*:random has other weights each time it is opened: give a weight file"):
        distill(f"hub/{tmp_path}:random", "scenes", out=str(tmp_path / "run"), device="cpu", **options)
    assert not (tmp_path / "run").exists()
    done = distill(f"hub/{tmp_path}:fixed", "scenes", out=str(tmp_path / "run"), device="cpu", **options)
    assert open_pair(done.folder, trust_hub=True)[1].num_layers == 2


def test_more_phases_than_blocks_are_refused_before_images_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[distill.__module__], "measure_similarity", lambda *_: pytest.fail("measured"))
    with pytest.raises(ValueError, match="k=5 phases of at least 1 layers need 5 layers, but there are 4"):
        tiny_run(tmp_path / "run", phases=None, k=5)


def test_a_model_of_your_own_is_not_distilled_on_drawn_images_by_itself(tmp_path):
    options = dict(OPTIONS, recipe=write_recipe(tmp_path), out=str(tmp_path / "run"), dry_run=True)
    with pytest.raises(ValueError, match="works on: --data photos"):
        distill(tiny_teacher(), **options)
    assert distill(tiny_teacher(), "scenes", **options).data == "scenes"


def test_given_phases_leave_nothing_to_cut_by_tokens(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_run(tmp_path / "a", phases=[2, 2], budget="2steps")
    assert "no effect" not in capsys.readouterr().err
    tiny_run(tmp_path / "b", phases=[2, 2], tokens="all", budget="2steps")
    assert "--tokens all has no effect: --phases says where depth is cut" in capsys.readouterr().err


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_training_takes_gradients_whatever_the_callers_mode(mode: type, tmp_path: Path) -> None:
    plain = blocks_of(tiny_run(tmp_path / "plain", budget="4steps"))
    with mode():
        found = blocks_of(tiny_run(tmp_path / "within", budget="4steps"))
    assert found.keys() == plain.keys() and all(torch.equal(found[name], plain[name]) for name in plain)


class Frozen(Block):
    """A user's block whose forward takes no gradients."""

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


@pytest.mark.parametrize("conditioning", ["none", "table"])
def test_blocks_without_gradients_are_refused_before_training(conditioning: str, tmp_path: Path) -> None:
    """Without a table it was a traceback, with one only the table was trained."""
    model = Unheard(num_blocks=4)
    model.trunk.stack = nn.ModuleList(Frozen(24) for _ in range(4))
    with pytest.raises(ValueError, match=r"block 1 of .* gives its weights no gradients"):
        tiny_run(tmp_path / "run", open_vit(model, size=24), conditioning=conditioning)


def test_cut_by_function_starts_each_phase_from_its_representative(tmp_path: Path) -> None:
    teacher = tiny_teacher()
    images = open_data("scenes", "train", limit=8)
    cost = measure_replacement(teacher, iterate(images, teacher.preprocess, 8))["block"].cost
    options = dict(phases=None, k=2, method="function", train_images=8, batch_size=4)

    done = tiny_run(tmp_path / "run", teacher, budget="2steps", **options)

    # Brute force over the compositions of 4 into 2.
    def cost_of(edge: int) -> float:
        return cost[:edge, :edge].sum(0).min() + cost[edge:, edge:].sum(0).min()

    edge = min(range(1, 4), key=cost_of)
    representatives = (int(cost[:edge, :edge].sum(0).argmin()) + 1, edge + int(cost[edge:, edge:].sum(0).argmin()) + 1)
    assert tuple(done.surrogate.phases) == (edge, 4 - edge)
    assert surrogate_spec(done.surrogate).copy == representatives
    assert surrogate_spec(open_vit(str(tmp_path / "run"), teacher=teacher)).copy == representatives
    assert read_config(tmp_path / "run")["method"] == "function"
    middle = tiny_run(tmp_path / "middle", teacher, budget="2steps", copy="middle", **options)
    assert surrogate_spec(middle.surrogate).copy == "middle"
    plan = tiny_run(tmp_path / "plan", teacher, budget="2steps", dry_run=True, **options)
    assert plan.other_seconds > 0 and not (tmp_path / "plan").exists()


def test_dp_cuts_the_similarity_exactly(tmp_path: Path) -> None:
    options = dict(phases=None, k=2, method="dp", train_images=8, batch_size=4, budget="2steps")
    assert tuple(tiny_run(tmp_path / "run", **options).surrogate.phases) == (2, 2)  # the only one of at least 2
