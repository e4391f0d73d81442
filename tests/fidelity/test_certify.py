"""The certificate: curves, eps, null models, bootstrap intervals, predictions, JSON, table and figure."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from torch import Tensor

from raptor.data.stream import Batch
from raptor.fidelity.bootstrap import quantile_intervals, resampled_means, statistic_interval
from raptor.fidelity.certificate import Certificate, certify
from raptor.fidelity.heads import collect_features, resolve_head
from raptor.fidelity.null_models import LinearFit, fit_null_models
from raptor.open import open_vit
from raptor.report.figures_fidelity import figure_certificate
from raptor.surrogate.surrogate import make_surrogate
from raptor.vit.view import ViT

PHASES = (2, 3)


def tiny_vit(num_classes: int = 0, depth: int = 5) -> ViT:
    torch.manual_seed(0)
    model = timm.create_model(
        "vit_tiny_patch16_224",
        img_size=32,
        patch_size=8,
        embed_dim=24,
        depth=depth,
        num_heads=2,
        num_classes=num_classes,
        reg_tokens=2,
    ).eval()
    for block in model.blocks:
        for p in block.parameters():
            if p.ndim > 1:
                torch.nn.init.normal_(p, std=0.12)
    return open_vit(model)


def image_batches(seed: int, sizes: tuple[int, ...] = (8, 8, 5), labels: bool = True) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    made = []
    for num in sizes:
        label = torch.arange(num) % 3
        images = torch.randn(num, 3, 32, 32, generator=generator) + label[:, None, None, None]
        made.append(Batch(images, label if labels else None, torch.arange(num)))
    return made


def all_states(vit: ViT, batches: list[Batch]) -> list[Tensor]:
    with torch.no_grad():
        return [x.double() for x in vit.record(torch.cat([b.images for b in batches]))[0]]


@pytest.fixture(scope="module")
def teacher() -> ViT:
    return tiny_vit()


@pytest.fixture(scope="module")
def surrogate(teacher: ViT) -> ViT:
    return make_surrogate(teacher, PHASES, conditioning="none", copy="last")


@pytest.fixture(scope="module")
def certificate(teacher: ViT, surrogate: ViT) -> Certificate:
    train = image_batches(0)
    head, _ = resolve_head(teacher, train)
    return certify(surrogate, teacher, image_batches(1), train_batches=train, head=head, bootstrap=200)


def frobenius(x: Tensor) -> Tensor:
    return torch.linalg.matrix_norm(x)


def test_curves_and_eps_by_brute_force(teacher: ViT, surrogate: ViT, certificate: Certificate) -> None:
    t, s = all_states(teacher, image_batches(1)), all_states(surrogate, image_batches(1))
    absolute = [float(frobenius(a - b).mean()) for a, b in zip(t[1:], s[1:])]
    relative = [e / float(frobenius(a).mean()) for e, a in zip(absolute, t[1:])]
    np.testing.assert_allclose(certificate.curves.absolute["all"], absolute, rtol=1e-4)
    np.testing.assert_allclose(certificate.curves.relative["all"], relative, rtol=1e-4)
    eps = certificate.eps["relative"]["all"]
    assert eps.value == pytest.approx(max(relative), rel=1e-4) and eps.layer == int(np.argmax(relative)) + 1
    assert eps.upper is not None and eps.upper > eps.value
    assert certificate.eps["absolute"]["all"].value == pytest.approx(max(absolute), rel=1e-4)
    assert certificate.curves.num_images == 21


def test_a_model_certifies_itself(teacher: ViT) -> None:
    certificate = certify(teacher, teacher, image_batches(1), null_models=False, bootstrap=50)
    assert certificate.eps["absolute"]["all"].value == 0
    assert np.allclose(certificate.curves.r2["cls"], 1)
    assert certificate.nulls == {} and certificate.run_time_ratio == pytest.approx(1, abs=0.5)


def test_null_models_by_brute_force(teacher: ViT, certificate: Certificate) -> None:
    train, held_out = all_states(teacher, image_batches(0)), all_states(teacher, image_batches(1))
    patches = teacher.groups.slice("patches")

    def r2(layer: int, predicted: Tensor) -> float:
        t = held_out[layer][:, patches]
        return float(1 - (predicted[:, patches] - t).square().sum() / (t - t.mean((0, 1))).square().sum())

    linear = held_out[0]
    tied = held_out[0]
    layer = 0
    for first, last in ((1, 2), (3, 5)):
        x = torch.cat([train[i - 1].flatten(0, 1) for i in range(first, last + 1)])
        y = torch.cat([train[i].flatten(0, 1) for i in range(first, last + 1)])
        x = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], dim=1)
        matrix = torch.from_numpy(np.linalg.lstsq(x.numpy(), y.numpy(), rcond=None)[0])
        middle = teacher.blocks[(first + last) // 2 - 1]
        for _ in range(first, last + 1):
            layer += 1
            linear = linear @ matrix[:-1] + matrix[-1]
            with torch.no_grad():
                tied = middle(tied.float()).double()
            mean = train[layer][:, patches].mean((0, 1)).expand_as(held_out[layer])
            expected = {"identity": held_out[0], "mean": mean, "tied": tied, "linear": linear}
            for name, states in expected.items():
                assert certificate.nulls[name].r2["patches"][layer - 1] == pytest.approx(r2(layer, states), abs=2e-4), (
                    name
                )
    assert "21 training images" in certificate.notes[0]


def test_null_models_are_fitted_on_the_held_out_images_when_there_are_no_others(teacher: ViT, surrogate: ViT) -> None:
    certificate = certify(surrogate, teacher, image_batches(1), bootstrap=0)
    np.testing.assert_allclose(certificate.nulls["mean"].r2["cls"], 0, atol=1e-5)
    assert "held-out" in certificate.notes[0]
    assert np.isnan(certificate.intervals["r2"]).all()
    json.dumps(certificate.to_dict(), allow_nan=False)


def test_null_models_on_every_second_batch(teacher: ViT, surrogate: ViT) -> None:
    train, held_out = image_batches(0), image_batches(1)
    some = certify(surrogate, teacher, held_out, train_batches=train, bootstrap=0, null_every=2)
    alone = certify(surrogate, teacher, held_out[::2], train_batches=train, bootstrap=0)
    np.testing.assert_allclose(some.nulls["tied"].r2["all"], alone.nulls["tied"].r2["all"], rtol=1e-6)
    assert some.curves.num_images == 21 and some.nulls["tied"].num_images == 13
    assert "13 of the held-out images" in some.notes[-1]


def test_linear_fit_survives_a_huge_coordinate_and_offset() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 6, generator=generator) * torch.tensor([1.0, 1, 1, 1, 1, 500]) + torch.tensor(
        [0, 0, 300.0, 0, 0, 0]
    )
    weight = torch.randn(6, 4, generator=generator)
    y = x @ weight + 3
    fit = LinearFit()
    for a, b in zip(x.split(90), y.split(90)):
        fit.update(a[None], b[None])
    matrix = fit.solve()
    torch.testing.assert_close(matrix[:-1], weight, atol=1e-4, rtol=1e-4)
    assert (y - x @ matrix[:-1] - matrix[-1]).abs().max() < 0.02


def test_null_models_leave_the_teacher_alone(teacher: ViT) -> None:
    before = [p.clone() for p in teacher.model.parameters()]
    fit_null_models(teacher, PHASES, image_batches(0), "fp32")
    assert all(torch.equal(a, b) for a, b in zip(before, teacher.model.parameters()))


def test_predictions(teacher: ViT, surrogate: ViT, certificate: Certificate) -> None:
    head, _ = resolve_head(teacher, image_batches(0))
    assert head is not None and head.linear is not None
    chosen = {}
    for side, vit in (("teacher", teacher), ("surrogate", surrogate)):
        features, labels, _ = collect_features(vit, image_batches(1))
        chosen[side] = head.linear(features).argmax(1)
        expected = (chosen[side] == labels).double().mean().item()
        assert certificate.predictions[f"{side}_accuracy"].value == pytest.approx(expected)
    same = (chosen["teacher"] == chosen["surrogate"]).double().mean().item()
    entry = certificate.predictions["agreement"]
    assert entry.value == pytest.approx(same) and entry.lower <= same <= entry.upper  # type: ignore[operator]


def test_own_head_and_no_labels() -> None:
    teacher = tiny_vit(num_classes=4, depth=2)
    head, _ = resolve_head(teacher)
    certificate = certify(teacher, teacher, image_batches(1, labels=False), head=head, null_models=False, bootstrap=20)
    assert set(certificate.predictions) == {"agreement"} and certificate.predictions["agreement"].value == 1


def test_costs(teacher: ViT, surrogate: ViT, certificate: Certificate) -> None:
    ours, theirs = certificate.costs["surrogate"], certificate.costs["teacher"]
    assert theirs.num_parameters == sum(p.numel() for p in teacher.model.parameters())
    assert ours.block_parameters * 5 == theirs.block_parameters * 2
    assert theirs.num_parameters - ours.num_parameters == theirs.block_parameters - ours.block_parameters
    assert ours.flops == theirs.flops and ours.seconds_per_image > 0


def test_intervals_hold_the_estimate(certificate: Certificate) -> None:
    for metric in ("absolute", "relative", "cosine", "r2"):
        lower, upper = certificate.intervals[metric]
        value = np.stack([getattr(certificate.curves, metric)[g] for g in certificate.curves.groups], axis=1)
        inside = (lower <= value + 1e-6) & (value <= upper + 1e-6)
        assert inside.mean() > 0.9, metric
        assert (upper > lower).all()


def test_resampled_means_have_the_standard_error() -> None:
    values = np.random.default_rng(0).normal(3, 2, size=(400, 3))
    means = resampled_means(values, 2000, seed=1)
    np.testing.assert_allclose(means.mean(0), values.mean(0), atol=0.02)
    np.testing.assert_allclose(means.std(0), values.std(0) / 20, rtol=0.06)
    ends = statistic_interval([values], lambda v: v, 2000, seed=1)
    np.testing.assert_allclose(ends[1] - ends[0], 2 * 1.96 * values.std(0) / 20, rtol=0.08)


def test_quantile_intervals_are_the_bootstraps() -> None:
    values = np.random.default_rng(0).exponential(size=(301, 2))
    quantiles, ends = quantile_intervals(values, (0.25, 0.5), 4000, seed=1)
    np.testing.assert_allclose(quantiles, np.quantile(values, (0.25, 0.5), axis=0, method="inverted_cdf"))
    rng = np.random.default_rng(2)
    drawn = values[rng.integers(301, size=(4000, 301))]
    brute = np.quantile(np.quantile(drawn, (0.25, 0.5), axis=1, method="inverted_cdf"), (0.025, 0.975), axis=1)
    np.testing.assert_allclose(ends, brute.swapaxes(0, 1), atol=0.03)


def test_bf16_is_close_to_fp32(teacher: ViT, surrogate: ViT, certificate: Certificate) -> None:
    rounded = certify(surrogate, teacher, image_batches(1), precision="bf16", null_models=False, bootstrap=0)
    np.testing.assert_allclose(rounded.curves.relative["all"], certificate.curves.relative["all"], atol=0.02)


def test_json_and_table(certificate: Certificate) -> None:
    from rich.console import Console

    text = json.loads(json.dumps(certificate.to_dict(), allow_nan=False))
    assert Certificate.from_dict(text).to_dict() == text
    assert text["curves"]["cls"]["r2"] == pytest.approx(certificate.curves.r2["cls"].tolist())
    assert set(text["nulls"]) == {"identity", "mean", "tied", "linear"}
    median = text["quantiles"]["relative"]["q50"]
    assert len(median["value"]["all"]) == 5 and len(median["interval"]["all"]) == 2
    assert [row["phase"] for row in certificate.rows()] == [1, 1, 2, 2, 2]
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(certificate.table("patches"), certificate.summary_table())
    assert f"{certificate.curves.r2['patches'][4]:.3f}" in console.export_text()


def test_figure(certificate: Certificate, tmp_path: Path) -> None:
    figure = figure_certificate(certificate)
    axes = figure.axes[0]
    lines = {line.get_label(): line for line in axes.get_lines()}
    np.testing.assert_allclose(lines["cls"].get_ydata(), certificate.curves.r2["cls"])
    np.testing.assert_allclose(lines["null: linear"].get_ydata(), certificate.nulls["linear"].r2["all"])
    assert [line.get_xdata()[0] for line in axes.get_lines() if len(line.get_xdata()) == 2] == [2.5]
    figure.savefig(tmp_path / "certificate.png")
    assert (tmp_path / "certificate.png").stat().st_size > 10_000


def test_models_that_do_not_fit_are_refused(teacher: ViT) -> None:
    with pytest.raises(ValueError, match="layers 3, not 5"):
        certify(tiny_vit(depth=3), teacher, image_batches(1))
    with pytest.raises(ValueError, match="empty"):
        certify(teacher, teacher, [], null_models=False)
