"""`probe` end to end on small models and scenes: the choice, the seeds, public heads, surrogates, layers."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file
from sklearn.linear_model import LogisticRegression, Ridge

from raptor.data import DenseData, ImageData, open_dense
from raptor.data.scenes import SceneFrames
from raptor.fidelity.heads import LinearHead
from raptor.open import open_vit
from raptor.probes import ProbeReport, ProbeResult, probe, recovery
from raptor.probes.classify import Classify, logistic_path
from raptor.probes.depth import Depth
from raptor.probes.features import normed_tokens, view_at
from raptor.provenance import Provenance
from raptor.run import RunError
from raptor.surrogate.surrogate import make_surrogate
from raptor.vit.view import ViT, pool

NUM = {"classify": (200, 80), "segment": (48, 16), "depth": (32, 12)}
COLOURS = np.array([[140, 110, 110], [110, 140, 110], [110, 110, 140], [130, 130, 130]])


class Coloured(ImageData):
    """Noisy pictures of four colours that overlap."""

    def __init__(self, split: str, num_images: int) -> None:
        names = [f"{split}/{i:03d}.png" for i in range(num_images)]
        super().__init__("coloured", names, [i % 4 for i in range(num_images)], ["r", "g", "b", "w"])
        self.offset = 0 if split == "train" else 10_000

    def read(self, position: int) -> Image.Image:
        rng = np.random.default_rng(self.offset + position)
        base = COLOURS[position % 4] + rng.normal(0, 15, 3)
        return Image.fromarray((base + rng.normal(0, 30, (24, 24, 3))).clip(0, 255).astype(np.uint8))


def data_for(task: str) -> tuple[ImageData | DenseData, ImageData | DenseData]:
    num_train, num_val = NUM[task]
    if task == "classify":
        return Coloured("train", num_train), Coloured("val", num_val)
    train = open_dense("scenes", "train", task, limit=num_train, size=24)
    return train, open_dense("scenes", "val", task, limit=num_val, size=24)


def run(vit: ViT, task: str, lrs: list[float], **options: object) -> ProbeResult:
    options = {"epochs": 2, "batch_size": 16, **options}
    return probe(vit, task, *data_for(task), lrs=lrs, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("task", ["classify", "segment", "depth"])
def test_a_grid_is_its_heads_trained_alone(vit: ViT, task: str) -> None:
    lrs = [1e-3, 1e-2, 0.1]
    together = run(vit, task, lrs)
    alone = [run(vit, task, [lr]) for lr in lrs]
    table = np.array(together.seeds[0].split_scores)
    assert table.shape == (2, 3)
    np.testing.assert_allclose(table, np.hstack([np.array(r.seeds[0].split_scores) for r in alone]), rtol=1e-5)
    chosen = together.seeds[0].chosen
    same = alone[lrs.index(chosen.value)].seeds[0]
    assert chosen.epoch == same.chosen.epoch
    for mine, theirs in zip(chosen.head, same.chosen.head):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    assert chosen.reported[together.metric] == pytest.approx(same.chosen.reported[together.metric], rel=1e-5)


def test_the_choice_is_the_best_of_the_split(vit: ViT) -> None:
    result = run(vit, "depth", [1e-4, 1e-2, 0.3], epochs=3)
    seed = result.seeds[0]
    table = np.array(seed.split_scores)
    epoch, g = np.unravel_index(table.argmin(), table.shape)
    assert (seed.chosen.value, seed.chosen.epoch) == (result.grid[g], seed.epochs[epoch])
    assert result.at_edge == (g != 1)
    assert (seed.last.value, seed.last.epoch) == (result.grid[table[-1].argmin()], 3)


class Scrambled(SceneFrames):
    """Validation scenes with other targets."""

    def batch(
        self, indices: torch.Tensor, size: tuple[int, int], device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        images, targets = super().batch(indices, size, device)
        return images, targets.flip(-1, -2) if self.task == "segment" else 11.0 - targets.clamp(max=10)


@pytest.mark.parametrize("task", ["classify", "segment", "depth"])
def test_the_choice_never_sees_the_reported_set(vit: ViT, task: str) -> None:
    train, val = data_for(task)
    if isinstance(val, ImageData):
        other: ImageData | DenseData = copy.copy(val)
        other.labels = [(label + 1) % 4 for label in val.labels or []]  # type: ignore[union-attr]
    else:
        other = Scrambled("val", task, 24).select(range(len(val)))
    lrs = [1e-3, 1e-2, 0.1]
    first, second = (probe(vit, task, train, v, lrs=lrs, epochs=2, batch_size=16) for v in (val, other))
    assert first.seeds[0].split_scores == second.seeds[0].split_scores
    assert (first.seeds[0].chosen.value, first.seeds[0].chosen.epoch) == (
        second.seeds[0].chosen.value,
        second.seeds[0].chosen.epoch,
    )
    assert torch.equal(first.head[0], second.head[0])
    assert first.score != second.score


def test_reported_rmse_in_numpy(vit: ViT) -> None:
    train, val = data_for("depth")
    assert isinstance(train, DenseData) and isinstance(val, SceneFrames)
    result = probe(vit, "depth", train, val, lrs=[0.05], epochs=2, batch_size=16)
    images, true = val.batch(torch.arange(len(val)), val.frame, torch.device("cpu"))
    tokens = normed_tokens(vit, vit.preprocess.normalise(images), 3, "fp32")
    features = torch.cat([tokens[:, 3:], tokens[:, :1].expand(-1, 16, -1)], dim=-1).view(-1, 4, 4, 64)
    weight, bias = result.head
    fine = torch.nn.functional.interpolate(
        (features @ weight.T + bias).permute(0, 3, 1, 2), scale_factor=4, mode="bilinear"
    )
    depth = (fine.softmax(1) * torch.linspace(1e-3, 12, 256).view(1, -1, 1, 1)).sum(1, keepdim=True)
    guess = torch.nn.functional.interpolate(depth, size=(24, 24), mode="bilinear")[:, 0]
    assert result.score == pytest.approx(math.sqrt(float(((guess - true).double() ** 2).mean())), rel=1e-5)


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
    keys += ["settings", "at_edge", "seconds", "chosen", "last", "seeds"]
    assert sorted(written) == sorted(keys)

    report = ProbeReport(Provenance.since(0.0), "scenes", "segment", {"teacher": result, "surrogate": result})
    path = report.write(tmp_path)
    assert path == tmp_path / "probe-segment.json"
    saved = json.loads(path.read_text())
    assert list(saved) == ["provenance", "data", "task", "results", "recovery"] and saved["recovery"] == 1
    assert ProbeReport.read(tmp_path, "segment").to_dict() == saved
    (tmp_path / "probe-depth.json").write_text("{}")
    with pytest.raises(RunError, match=r"probe-depth\.json cannot be read"):
        ProbeReport.read(tmp_path, "depth")


def test_a_diverged_head_is_not_chosen(vit: ViT) -> None:
    result = run(vit, "segment", [1e-3, 1e38])
    assert result.seeds[0].chosen.value == 1e-3
    assert result.to_dict()["seeds"][0]["split_scores"][-1][1] is None


def test_public_head_takes_part_as_epoch_0(vit: ViT, tmp_path: Path) -> None:
    path = tmp_path / "head.pth"
    weight, bias = run(vit, "classify", [], closed_form="ridge").head
    torch.save({"weight": weight, "bias": bias}, path)
    ruined = run(vit, "classify", [100.0], init_head=path)
    assert ruined.seeds[0].epochs == [0, 1, 2]
    assert ruined.seeds[0].chosen.epoch == 0 and torch.equal(ruined.head[0], weight)
    assert ruined.seeds[0].last.epoch == 2
    torch.save({"weight": torch.zeros(4, 160), "bias": bias}, path)
    with pytest.raises(ValueError, match="one-layer head"):
        run(vit, "classify", [0.1], init_head=path)
    with pytest.raises(ValueError, match="knows 1000 classes"):
        run(vit, "classify", [0.1], init_head=LinearHead(torch.zeros(1000, 64), torch.zeros(1000)))


def _with_head(num_classes: int) -> ViT:
    torch.manual_seed(0)
    shape: dict[str, Any] = dict(img_size=24, patch_size=6, embed_dim=32, depth=3, num_heads=2)
    return open_vit(timm.create_model("vit_tiny_patch16_224", **shape, num_classes=num_classes), size=24)


def test_a_models_own_head_takes_part_as_epoch_0() -> None:
    own = _with_head(4)
    still = run(own, "classify", [1e-12])  # ties go to the first
    assert still.settings.init_head == "own" and still.seeds[0].epochs == [0, 1, 2]
    assert still.seeds[0].chosen.epoch == 0
    torch.testing.assert_close(still.head[0], torch.cat([own.model.head.weight, torch.zeros(4, 32)], dim=1))
    # It is of the last layer and of as many classes; and it need not be wanted.
    elsewhere = [run(own, "classify", [0.1], layer=2), run(_with_head(7), "classify", [0.1])]
    for other in (*elsewhere, run(own, "classify", [0.1], init_head="random")):
        assert other.settings.init_head == "random" and other.seeds[0].epochs == [1, 2]


def test_closed_forms_are_scikit_learns(vit: ViT) -> None:
    train, val = data_for("classify")
    assert isinstance(train, ImageData) and isinstance(val, ImageData)
    task = Classify(vit, 3, train, val, batch_size=64, precision="fp32")
    x, y = (t.numpy().astype(np.float64) for t in task.features(task.fit_data))
    z = (x - x.mean(0)) / x.std(0)
    for (weight, bias), penalty in zip(
        logistic_path(torch.tensor(x), torch.tensor(y).long(), 4, [0.1, 0.01]), [0.1, 0.01]
    ):
        reference = LogisticRegression(C=1 / (penalty * len(x)), tol=1e-8, max_iter=5000).fit(z, y)
        mine = torch.softmax(torch.tensor(x).float() @ weight.T + bias, dim=1).numpy()
        np.testing.assert_allclose(mine, reference.predict_proba(z), atol=2e-4)
    result = probe(vit, "classify", train, val, lrs=[30.0], closed_form="ridge")
    reference = Ridge(alpha=30.0).fit(z, np.eye(4)[y.astype(int)])
    features, labels = task.features(val)
    guess = reference.predict((features.numpy() - x.mean(0)) / x.std(0)).argmax(1)
    assert result.score == pytest.approx((guess == labels.numpy()).mean())


def test_surrogates_layers_and_models_without_cls(vit: ViT, bare_vit: ViT) -> None:
    surrogate = make_surrogate(vit, [2, 1])
    images = torch.randn(2, 3, 24, 24)
    for view in (vit, surrogate, bare_vit):
        states, _ = view.record(images)
        for layer in (0, 2, 3):
            expected = view.norm(states[layer])
            torch.testing.assert_close(normed_tokens(view, images, layer, "fp32"), expected, rtol=1e-5, atol=1e-5)
    result = run(surrogate, "segment", [1e-2], layer=2, epochs=1)
    assert result.layer == 2 and "k=2" in result.model
    assert run(bare_vit, "depth", [1e-2], epochs=1).head[0].shape == (256, 32)
    assert run(bare_vit, "classify", [1e-2], epochs=1).head[0].shape == (4, 32)
    with pytest.raises(ValueError, match="layer 4"):
        run(vit, "classify", [1e-2], layer=4)


def test_other_sizes_pad_and_stay_finite(vit: ViT) -> None:
    result = run(vit, "depth", [1e-2], size=27, epochs=1)
    assert result.size == (27, 27) and math.isfinite(result.score)
    train, val = data_for("depth")
    assert isinstance(train, DenseData) and isinstance(val, DenseData)
    task = Depth(vit, 3, train, val, batch_size=8, precision="fp32", size=27)
    assert task.geometry.padded == (30, 30) and task.geometry.grid == (5, 5)
    assert task.predict(torch.zeros(1, 5, 5, 256)).shape == (1, 24, 24)
    big = run(vit, "classify", [1e-2], size=36, epochs=1)
    assert big.size == (36, 36)
    tokens = normed_tokens(view_at(vit, 36, 36), torch.zeros(1, 3, 36, 36), 3, "fp32")
    assert tokens.shape == (1, 3 + 36, 32) and pool(tokens, vit.groups).shape == (1, 64)


@pytest.mark.parametrize("task", ["segment", "depth"])
def test_real_frames(vit: ViT, task: str) -> None:
    folder = Path(__file__).parents[3] / "shared" / "data"
    if not (folder / "nyuv2-train.zip").is_file():
        pytest.skip("the real NYUv2 frames are not at hand")
    train = open_dense(f"nyuv2:{folder / 'nyuv2-train.zip'}", "all", task, limit=40)
    val = open_dense(f"nyuv2:{folder / 'nyuv2-test.zip'}", "all", task, limit=12)
    result = probe(vit, task, train, val, size=45, lrs=[1e-3, 3e-2], epochs=3, batch_size=8)
    assert result.size == (45, 60) and result.num_images["reported"] == 12
    scores = result.chosen.mean
    if task == "depth":
        true = np.stack([val.load(i)[1] for i in range(12)])
        guess_of_5_metres = math.sqrt(((true[true > 0] - 5.0) ** 2).mean())
        assert scores["rmse"] < guess_of_5_metres and 0 < scores["rmse_eigen"] < guess_of_5_metres
    else:
        assert 0 < scores["miou"] < 1 and 1 < scores["num_classes"] <= 39


@pytest.mark.parametrize("task", ["classify", "segment", "depth"])
def test_half_precision_is_near(vit: ViT, task: str) -> None:
    exact, half = (run(vit, task, [1e-2], precision=precision) for precision in ("fp32", "bf16"))
    assert half.settings.precision == "bf16" and half.head[0].dtype == torch.float32
    difference = (half.head[0] - exact.head[0]).norm() / exact.head[0].norm()
    assert 0 < difference < 0.1
    assert half.score == pytest.approx(exact.score, rel=0.15)


def test_a_transformers_model_at_another_size() -> None:
    transformers = pytest.importorskip("transformers")
    options = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    model = transformers.ViTModel(transformers.ViTConfig(**options, image_size=24, patch_size=6))
    view = view_at(open_vit(model, size=24), 30, 42)
    assert normed_tokens(view, torch.randn(2, 3, 30, 42), 2, "fp32").shape == (2, 1 + 5 * 7, 32)


def test_a_model_of_one_size_says_so() -> None:
    torch.manual_seed(0)
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=24, patch_size=6, embed_dim=32, depth=2, num_heads=2, num_classes=0
    )
    with pytest.raises(ValueError, match="does not take images of 30 x 42"):
        view_at(open_vit(model, size=24), 30, 42)


def test_time_ends_a_run(vit: ViT) -> None:
    result = run(vit, "classify", [1e-2], epochs=10_000, max_seconds=0.5)
    assert result.seconds < 10 and 1 <= result.seeds[0].last.epoch < 10_000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": "sort"}, "unknown task"),
        ({"task": "depth", "closed_form": "ridge"}, "for the task classify"),
        ({"closed_form": "lasso"}, "unknown closed form"),
        ({"epochs": 0}, "at least one epoch"),
        ({"lrs": [-1.0]}, "above 0"),
        ({"size": (24, 24)}, "square"),
    ],
)
def test_bad_input_is_named(vit: ViT, options: dict, message: str) -> None:
    task = options.pop("task", "classify")
    with pytest.raises(ValueError, match=message):
        run(vit, task, options.pop("lrs", [1e-2]), **options) if task != "sort" else probe(vit, task, "scenes")


def test_data_must_fit_the_task(vit: ViT) -> None:
    train, val = data_for("depth")
    with pytest.raises(ValueError, match="not opened for segment"):
        probe(vit, "segment", train, val)
    with pytest.raises(ValueError, match="open_data"):
        probe(vit, "classify", train, val)
    with pytest.raises(ValueError, match="give val_data"):
        probe(vit, "depth", train)
    bare = Coloured("train", 20)
    bare.labels = None
    with pytest.raises(ValueError, match="no labels"):
        probe(vit, "classify", bare, bare)
    other = Coloured("val", 20)
    other.classes = ["w", "b", "g", "x"]
    with pytest.raises(ValueError, match="class x"):
        probe(vit, "classify", Coloured("train", 20), other)
    other.classes, other.labels = ["w", "b", "g", "r"], [3 - label for label in other.labels or []]
    renamed, plain = (probe(vit, "classify", Coloured("train", 80), v, closed_form="ridge") for v in (other, data_20()))
    assert renamed.score == plain.score


def data_20() -> ImageData:
    return Coloured("val", 20)
