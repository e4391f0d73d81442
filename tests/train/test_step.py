"""One training step against a direct transcription of the losses, layer by layer, image by image, in numpy."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from families import masked, numbered
from tiny_models import noise_images, tiny_timm
from tiny_run import tiny_teacher
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend

from raptor.certificate.heads import Head
from raptor.certificate.linear_head import LinearHead
from raptor.phases.cut import Phases
from raptor.surrogate.block import CopiedBlock, PaperBlock, fast_switched
from raptor.surrogate.fast import FastBlock
from raptor.surrogate.surrogate import make_surrogate, shared_blocks
from raptor.train.frozen import PatchProduct, half_copy
from raptor.train.losses import HeadTerm, Targets, at_groups, groups_at, state_variance
from raptor.train.step import DistillStep, Parts, weighted_error
from raptor.vit.open import open_vit
from raptor.vit.view import ViT

LAST = {"cls": 0.34, "registers": 0.33, "patches": 0.33}
JOINT = {"cls": 0.45, "registers": 0.10, "patches": 0.45}
PLAIN = {"last_phase_weights": None, "stage2_weights": None}
PLAIN_COMPILE = torch.compile
KINDS = [
    *[("teacher", "table"), ("teacher", "mlp"), ("teacher", "none"), ("paper", "mlp"), ("paper", "table")],
    ("adapted", "none"),
    ("adapted mlp", "table"),
]


def images_for(vit: ViT, num: int = 3) -> Tensor:
    size = vit.preprocess.size
    return torch.randn(num, 3, size, size, generator=torch.Generator().manual_seed(7))


def student_of(teacher: ViT, lengths: tuple[int, ...], block: str = "teacher", conditioning: str = "table") -> ViT:
    """A surrogate with every trained weight moved, so that each depth acts differently.

    An `adapted` block is a copied one with adapters of rank 2, an `adapted mlp` has them on its MLP only.
    """
    adapters: dict[str, Any] = dict(block=block)
    if block.startswith("adapted"):
        adapters = dict(block="teacher", adapters=2, adapted=block.partition(" ")[2] or "all")
    student = make_surrogate(teacher, lengths, conditioning=conditioning, **adapters)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in shared_blocks(student).parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)
    return student


def some_variance(teacher: ViT) -> Tensor:
    generator = torch.Generator().manual_seed(4)
    return torch.rand(teacher.num_layers, teacher.groups.num_tokens, generator=generator) + 0.2


def coordinate_variance(teacher: ViT) -> Tensor:
    """One row of coordinates per layer and token group, (L, T, D)."""
    v_ltd = torch.empty(teacher.num_layers, teacher.groups.num_tokens, teacher.dim)
    generator = torch.Generator().manual_seed(5)
    for _, where in teacher.groups.present():
        v_ltd[:, where] = torch.rand(teacher.num_layers, 1, teacher.dim, generator=generator) + 0.2
    return v_ltd


def make_step(
    teacher: ViT,
    student: ViT,
    variance: Tensor | None = None,
    head_term: HeadTerm | None = None,
    weights: dict[str, Any] | None = None,
    **options: Any,
) -> DistillStep:
    """`weights` are entries of a recipe that weigh errors; `options` are the step's own."""
    phases = Phases.from_lengths(list(student.phases or ()))
    if variance is None:
        variance = torch.ones(teacher.num_layers, teacher.groups.num_tokens)
    recipe: dict[str, Any] = {"last_phase_weights": LAST, "stage2_weights": JOINT, **(weights or {})}
    return DistillStep(teacher, student, Targets.of(teacher, phases, variance, **recipe), head_term, **options)


def transcribed_error(s: Tensor, t: Tensor, weights: dict | None, v: Tensor, vit: ViT, cosine: float = 0) -> float:
    """`v` is (T,) or (T, D)."""
    a = s.detach().double().numpy()
    b = t.double().numpy()
    squared = ((a - b) ** 2 / v.double().reshape(len(v), -1).numpy()).mean(-1)
    angle = 1 - (a * b).sum(-1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1)
    values = squared + cosine * angle
    if weights is None:
        return values.mean()
    g = vit.groups
    bounds = {"cls": (0, g.cls), "registers": (g.cls, g.cls + g.registers), "patches": (g.cls + g.registers, None)}
    here = {k: slice(*bounds[k]) for k in weights if getattr(g, k)}
    total = sum(weights[k] for k in here)
    return sum(weights[k] / total * values[:, where].mean() for k, where in here.items())


def block_calls(teacher: ViT, student: ViT, images: Tensor) -> tuple[list[Tensor], Any]:
    """The teacher's states by its own forward pass, and a function (layer, state) -> state by the student's blocks."""
    states = list(teacher.record(images)[0])
    _, context = teacher.embed(images)
    owner = [j for j, n in enumerate(student.phases or ()) for _ in range(n)]

    def call(layer: int, x: Tensor) -> Tensor:
        args, kwargs = context.calls[layer - 1]
        out = shared_blocks(student)[owner[layer - 1]](x, torch.tensor(float(layer)), *args, **kwargs)
        return out[0] if isinstance(out, tuple) else out

    return states, call


def transcribed_stage1(
    teacher: ViT, student: ViT, images: Tensor, lam: float, v_lt: Tensor, cosine: float = 0, early: dict | None = None
) -> list:
    """The mixed loss of every layer, phase by phase, as docs/method.md states it."""
    states, call = block_calls(teacher, student, images)
    lengths = student.phases or ()
    losses = []
    start = 0
    for j, n in enumerate(lengths):
        weights = early
        if j == len(lengths) - 1:
            weights = LAST
        x = states[start]
        for layer in range(start + 1, start + n + 1):
            x = call(layer, x)
            forced = call(layer, states[layer - 1])
            errors = [
                transcribed_error(s, states[layer], weights, v_lt[layer - 1], teacher, cosine) for s in (forced, x)
            ]
            losses.append(lam * errors[0] + (1 - lam) * errors[1])
        start += n
    return losses


def sum_of_phase_means(losses: list[float], lengths: tuple[int, ...]) -> float:
    edges = np.cumsum([0, *lengths])
    return sum(np.mean(losses[a:b]) for a, b in pairwise(edges))


def test_weighted_error_by_hand() -> None:
    """Two images of two tokens: mean squared errors 2, 4 and .5, 4, cosines 2 / sqrt 5, 0 and 1 / sqrt 2, 0."""
    student = torch.tensor([[[3.0, 1.0], [0.0, 2.0]], [[1.0, 1.0], [2.0, 0.0]]])
    teacher = torch.tensor([[[1.0, 1.0], [2.0, 0.0]], [[1.0, 0.0], [0.0, 2.0]]])
    weights_t = torch.tensor([0.25, 0.75])
    assert weighted_error(student, teacher, weights_t).item() == pytest.approx((0.5 + 3 + 0.125 + 3) / 2)
    # Squared errors by coordinate: (4, 0), (4, 4) and (0, 1), (4, 4).
    weights_td = torch.tensor([[0.5, 1.0], [2.0, 0.0]])
    assert weighted_error(student, teacher, weights_td).item() == pytest.approx((1 + 4 + 0.5 + 4) / 2)
    cosine_t = torch.tensor([2.0, 0.5])
    angles = (2 * (1 - 2 / 5**0.5) + 0.5 + 2 * (1 - 0.5**0.5) + 0.5) / 2
    found = weighted_error(student, teacher, weights_t, cosine_t).item()
    assert found == pytest.approx((0.5 + 3 + 0.125 + 3) / 2 + angles)


@pytest.mark.parametrize("lam", [0.0, 0.3, 1.0])
@pytest.mark.parametrize(("block", "conditioning"), KINDS)
def test_stage_1_is_the_sum_over_phases_of_the_mixture(block, conditioning, lam):
    teacher = tiny_teacher()
    student = student_of(teacher, (1, 3), block, conditioning)
    images = images_for(teacher)
    v_lt = some_variance(teacher)
    with torch.no_grad():
        loss, layers = make_step(teacher, student, variance=v_lt)(images, "stage1", lam)
        expected = transcribed_stage1(teacher, student, images, lam, v_lt)
    assert layers.numpy() == pytest.approx(expected, rel=2e-4)
    assert loss.item() == pytest.approx(sum_of_phase_means(expected, (1, 3)), rel=2e-4)


@pytest.mark.parametrize(("block", "conditioning"), KINDS[::3])
def test_each_coordinate_may_have_a_variance_of_its_own(block, conditioning):
    teacher = tiny_teacher()
    student = student_of(teacher, (1, 3), block, conditioning)
    images = images_for(teacher)
    v_ltd = coordinate_variance(teacher)
    step = make_step(teacher, student, variance=v_ltd, weights={"cosine": 0.2})
    with torch.no_grad():
        _, stage1 = step(images, "stage1", 0.3)
        _, stage2 = step(images, "stage2")
        expected = transcribed_stage1(teacher, student, images, 0.3, v_ltd, cosine=0.2)
        one_ltd = v_ltd[..., :1].expand_as(v_ltd)
        joint = make_step(teacher, student, variance=one_ltd, weights={"cosine": 0.2})(images, "stage2")[1]
        same = make_step(teacher, student, variance=v_ltd[..., 0], weights={"cosine": 0.2})(images, "stage2")[1]
    assert stage1.numpy() == pytest.approx(expected, rel=2e-4)
    assert joint.numpy() == pytest.approx(same.numpy(), rel=1e-5)  # equal coordinates are one variance per token
    assert not torch.allclose(stage2, same, rtol=1e-2)


@pytest.mark.parametrize("early", [None, {"cls": 0.6, "registers": 0.0, "patches": 0.4}])
def test_phases_before_the_last_have_weights_of_their_own(early):
    teacher = tiny_teacher()
    student = student_of(teacher, (1, 2, 1))
    images = images_for(teacher)
    v_lt = some_variance(teacher)
    with torch.no_grad():
        _, layers = make_step(teacher, student, variance=v_lt, weights={"stage1_weights": early})(images, "stage1", 0.3)
        expected = transcribed_stage1(teacher, student, images, 0.3, v_lt, early=early)
    assert layers.numpy() == pytest.approx(expected, rel=2e-4)


def test_a_batch_of_another_size_has_the_same_loss_per_token():
    teacher = tiny_teacher()
    student = student_of(teacher, (1, 2, 1))
    images = torch.randn(2, 3, 40, 40, generator=torch.Generator().manual_seed(7))
    groups = groups_at(teacher, 40)
    assert (groups.cls, groups.registers, groups.patches) == (1, 2, 25)
    v_lt = at_groups(some_variance(teacher), teacher.groups, groups)
    assert torch.equal(v_lt[:, 3:], v_lt[:, 3:4].expand(-1, 25)) and v_lt.shape == (4, 28)
    v_ltd = at_groups(coordinate_variance(teacher), teacher.groups, groups)
    assert torch.equal(v_ltd[:, 3:], v_ltd[:, 3:4].expand(-1, 25, -1)) and v_ltd.shape == (4, 28, teacher.dim)
    step = make_step(teacher, student, variance=some_variance(teacher), weights={"sizes": (40,)})
    with torch.no_grad():
        _, layers = step(images, "stage1", 0.3)
        expected = transcribed_stage1(teacher, student, images, 0.3, v_lt)
    assert layers.numpy() == pytest.approx(expected, rel=2e-4)
    assert len(step(images_for(teacher), "stage2")[1]) == 4


@pytest.mark.parametrize(
    ("make", "size"),
    [
        (tiny_teacher, 44),
        (lambda: tiny_teacher(dynamic_img_size=False), 40),
        (lambda: tiny_timm("beit_base_patch16_224", img_size=32), 48),
    ],
)
def test_a_size_that_the_model_does_not_take_is_refused_in_one_line(make, size):
    with pytest.raises(ValueError, match=f"does not take images of {size} px beside .*or no --sizes") as error:
        groups_at(make(), size)
    assert "\n" not in str(error.value)


def test_lambda_as_a_tensor_gives_the_same_loss():
    teacher = tiny_teacher()
    step = make_step(teacher, student_of(teacher, (1, 3)))
    images = images_for(teacher)
    with torch.no_grad():
        for lam in (0.0, 0.3, 1.0):
            number, tensor = (step(images, "stage1", value)[0] for value in (lam, torch.tensor(lam)))
            assert tensor.item() == pytest.approx(number.item(), rel=1e-6)


@pytest.mark.parametrize(("lam", "unused"), [(0.0, "_teacher_forced"), (1.0, "_autoregress")])
def test_a_loss_without_weight_is_not_computed(monkeypatch, lam, unused):
    """Times zero it could still be NaN."""
    teacher = tiny_teacher()
    step = make_step(teacher, student_of(teacher, (1, 3)))
    images = images_for(teacher)
    with torch.no_grad():
        expected = step(images, "stage1", lam)[1]
        monkeypatch.setattr(step, unused, None)
        for value in (lam, torch.tensor(lam)):
            assert torch.equal(step(images, "stage1", value, Parts.of(lam))[1], expected)


@pytest.mark.parametrize("lam", [0.0, 1.0])
@pytest.mark.parametrize("make", [tiny_teacher, lambda: rotary("vit_small_patch16_rope_mixed_224")])
@torch.no_grad()
def test_the_students_stream_is_fp32_beside_a_half_teacher(make, lam):
    teacher = make()
    student = student_of(teacher, (1, 3))
    step = make_step(teacher, student, half_teacher=True)
    seen = []
    for block in step._blocks:
        block.register_forward_hook(lambda _m, args, out: seen.extend((args[0].dtype, out.dtype)))
    with torch.autocast("cpu", torch.bfloat16):
        assert step.teacher_states(images_for(teacher))[0][0].dtype == torch.bfloat16
        step(images_for(teacher).bfloat16(), "stage1", lam)
    assert seen and set(seen) == {torch.float32}


@pytest.mark.parametrize("cosine", [0.0, 0.5])
@pytest.mark.parametrize(("block", "conditioning"), KINDS)
def test_stage_2_is_the_mean_over_all_layers_run_end_to_end(block, conditioning, cosine):
    teacher = tiny_teacher()
    student = student_of(teacher, (3, 1), block, conditioning)
    images = images_for(teacher)
    v_lt = some_variance(teacher)
    with torch.no_grad():
        loss, layers = make_step(teacher, student, variance=v_lt, weights={"cosine": cosine})(images, "stage2")
        own = list(student.record(images)[0])
        states = list(teacher.record(images)[0])
    assert torch.equal(own[0], states[0])
    expected = [
        transcribed_error(own[layer], states[layer], JOINT, v_lt[layer - 1], teacher, cosine) for layer in range(1, 5)
    ]
    assert layers.numpy() == pytest.approx(expected, rel=2e-4)
    assert loss.item() == pytest.approx(np.mean(expected), rel=2e-4)


def written_out_logits(teacher: ViT, linear: LinearHead | None, x_btd: Tensor) -> Tensor:
    """Class scores of a last state, with the tiny teacher's own layers: a cls token, two registers, nine patches."""
    model: Any = teacher.model
    normed_btd = nn.functional.layer_norm(x_btd, (32,), model.norm.weight, model.norm.bias, model.norm.eps)
    if linear is None:
        return normed_btd[:, 0] @ model.head.weight.T + model.head.bias
    features_bf = torch.cat([normed_btd[:, 0], normed_btd[:, 3:].mean(1)], dim=1)
    return features_bf @ linear.weight.T + linear.bias


@pytest.mark.parametrize("source", ["own", "ridge"])
def test_the_head_term_is_the_divergence_of_the_teachers_classes_from_the_students(source):
    teacher = tiny_teacher()
    student = student_of(teacher, (1, 3))
    images = images_for(teacher)
    linear = None
    if source == "ridge":
        generator = torch.Generator().manual_seed(3)
        linear = LinearHead(torch.randn(4, 64, generator=generator), torch.randn(4, generator=generator))
    plain = make_step(teacher, student)
    step = make_step(teacher, student, head_term=HeadTerm(Head(source, 6, linear), 0.3))
    plain_loss, plain_layers = plain(images, "stage2")
    loss, losses = step(images, "stage2")
    assert torch.equal(losses[:4], plain_layers) and losses.shape == (5,)
    with torch.no_grad():
        p_bc = written_out_logits(teacher, linear, teacher.record(images)[0][-1]).softmax(-1)
    x_btd = student.record(images)[0][-1]  # with gradients of the shared blocks
    q_bc = written_out_logits(teacher, linear, x_btd).softmax(-1)
    divergence = (p_bc * (p_bc.log() - q_bc.log())).sum(-1).mean()
    assert divergence.item() > 1e-3
    assert losses[4].item() == pytest.approx(divergence.item(), rel=1e-4)
    assert loss.item() == pytest.approx(plain_loss.item() + 0.3 * divergence.item(), rel=1e-5)
    parameters = [parameter for _, parameter in step.trained_parameters()]
    of_layers = torch.autograd.grad(plain_loss, parameters, allow_unused=True)
    of_head = torch.autograd.grad(divergence, parameters, allow_unused=True)
    ours = torch.autograd.grad(loss, parameters, allow_unused=True)
    for mine, layer, head in zip(ours, of_layers, of_head):
        if mine is not None:
            torch.testing.assert_close(mine, layer + 0.3 * head, rtol=1e-3, atol=1e-6)
    assert all(parameter.grad is None for parameter in teacher.model.parameters())


def test_stage_1_has_no_head_term():
    teacher = tiny_teacher()
    student = student_of(teacher, (1, 3))
    images = images_for(teacher)
    plain = make_step(teacher, student)
    weighted = make_step(teacher, student, head_term=HeadTerm(Head("own", 6), 0.3))
    with torch.no_grad():
        assert torch.equal(weighted(images, "stage1", 0.5)[1], plain(images, "stage1", 0.5)[1])


def test_a_phase_that_hands_over_early_leaves_its_state_to_the_rest_of_the_phase():
    teacher = tiny_teacher()
    student = student_of(teacher, (3, 1))
    images = images_for(teacher)
    v_lt = some_variance(teacher)
    step = make_step(teacher, student, v_lt, HeadTerm(Head("own", 6), 0.3, every_phase=True))
    with torch.no_grad():
        loss, losses = step(images, "stage2", lengths=[1, 1])
        states = list(teacher.record(images)[0])
        x_btd, context = student.embed(images)
        early_btd = student.step(1, x_btd, context)
        last_btd = student.step(4, early_btd, context)
        own = [early_btd, early_btd, early_btd, last_btd]
        p_bc = written_out_logits(teacher, None, states[-1]).log_softmax(-1)
        read = []
        for end_btd in (early_btd, last_btd):
            q_bc = written_out_logits(teacher, None, end_btd).log_softmax(-1)
            read.append(float((p_bc.exp() * (p_bc - q_bc)).sum(-1).mean()))
        expected = [
            transcribed_error(state, states[layer], JOINT, v_lt[layer - 1], teacher, 0.0)
            for layer, state in enumerate(own, start=1)
        ]
        # All steps of every phase are no hand-over at all.
        assert torch.equal(step(images, "stage2", lengths=[3, 1])[1], step(images, "stage2")[1])
    assert losses[:4].numpy() == pytest.approx(expected, rel=2e-4)
    assert losses[4].item() == pytest.approx(np.mean(read), rel=1e-4)
    assert loss.item() == pytest.approx(np.mean(expected) + 0.3 * np.mean(read), rel=2e-4)


def rotary(name: str = "vit_small_patch16_dinov3", **changes: Any) -> ViT:
    options = dict(pretrained=False, embed_dim=48, num_heads=3, depth=4, size=32, num_classes=5) | changes
    return open_vit(f"timm/{name}", **options)


MODELS = {
    "plain": tiny_teacher,
    "no cls, no registers": lambda: tiny_teacher(class_token=False, reg_tokens=0, global_pool="avg"),
    "dinov3": rotary,
    "eva02": lambda: rotary("eva02_tiny_patch14_224", size=28),
    "a rotary table for each depth": lambda: rotary("vit_small_patch16_rope_mixed_224"),
}


@pytest.mark.parametrize("batch", [1, 3, 4])
@pytest.mark.parametrize("name", MODELS)
def test_teacher_forcing_in_one_call_equals_a_call_a_layer(name, batch):
    """Four patches: a batch of four must not be taken for the rows of the rotary table."""
    teacher = MODELS[name]()
    student = student_of(teacher, (1, 3))
    images = images_for(teacher, batch)
    v_lt = some_variance(teacher)
    with torch.no_grad():
        _, layers = make_step(teacher, student, variance=v_lt)(images, "stage1", 1.0)
        states, call = block_calls(teacher, student, images)
        expected = [
            transcribed_error(
                call(layer, states[layer - 1]), states[layer], LAST if layer > 1 else None, v_lt[layer - 1], teacher
            )
            for layer in range(1, 5)
        ]
    assert layers.numpy() == pytest.approx(expected, rel=2e-4)


def test_teacher_states_are_those_of_the_teachers_own_forward_pass():
    for make in MODELS.values():
        teacher = make()
        images = images_for(teacher)
        with torch.no_grad():
            expected = teacher.record(images)[0]
            got, _ = make_step(teacher, student_of(teacher, (2, 2))).teacher_states(images)
        assert len(got) == teacher.num_layers + 1
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(got, expected))


def gradients(step: DistillStep, images: Tensor, stage: str, lam: float) -> dict[str, Tensor]:
    step.zero_grad()
    step(images, stage, lam)[0].backward()
    return {n: p.grad.clone() for n, p in step.trained_parameters() if p.grad is not None}


def test_clipping_takes_phases_apart_in_stage_1_and_together_in_stage_2():
    student = student_of(tiny_teacher(), (2, 2))
    step = make_step(tiny_teacher(), student)
    blocks = [set(block.parameters()) for block in shared_blocks(student)]
    assert [set(group) for group in step.clip_groups("stage1")] == blocks
    assert [set(group) for group in step.clip_groups("stage2")] == [blocks[0] | blocks[1]]


def test_nothing_but_the_shared_blocks_is_trained():
    teacher = tiny_teacher()
    student = student_of(teacher, (2, 2))
    step = make_step(teacher, student)
    step.train()
    assert not teacher.model.training
    step(images_for(teacher), "stage2")[0].backward()
    assert {id(p) for p in step.parameters()} == {id(p) for p in shared_blocks(student).parameters()}
    assert all(p.grad is None for p in teacher.model.parameters())
    outside = {id(p) for p in student.model.parameters()} - {id(p) for p in step.parameters()}
    assert outside and all(p.grad is None for p in student.model.parameters() if id(p) in outside)


def test_a_teacher_left_in_training_mode_still_gives_its_eval_states():
    teacher = tiny_teacher(proj_drop_rate=0.5)
    images = images_for(teacher)
    with torch.no_grad():
        expected = teacher.record(images)[0][-1].clone()
        student = student_of(teacher, (2, 2))
        teacher.model.train()
        got = make_step(teacher, student).teacher_states(images)[0][-1]
    assert torch.allclose(got, expected, atol=1e-6)


@pytest.mark.parametrize(("stage", "lam"), [("stage1", 0.5), ("stage2", 0.0)])
@pytest.mark.parametrize("block", ["teacher", "adapted"])
def test_recomputed_activations_change_nothing(stage, lam, block):
    teacher = tiny_teacher()
    student = student_of(teacher, (2, 2), block)
    images = images_for(teacher)
    plain = gradients(make_step(teacher, student), images, stage, lam)
    again = gradients(make_step(teacher, student, checkpointing=True), images, stage, lam)
    for name, grad in plain.items():
        torch.testing.assert_close(again[name], grad, rtol=1e-4, atol=1e-6)


def compiled_with(monkeypatch: pytest.MonkeyPatch, backend: CompileCounter) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", lambda f, **_: PLAIN_COMPILE(f, backend=backend, fullgraph=True))


@pytest.mark.parametrize(
    ("block", "conditioning", "folds", "most"),
    [
        *[("teacher", "table", True, 7), ("adapted", "none", True, 7), ("paper", "mlp", True, 8)],
        *[("paper", "table", True, 8), ("teacher", "table", False, 5), ("adapted", "none", False, 6)],
    ],
)
@pytest.mark.slow
def test_compiled_steps_do_not_recompile_by_depth_or_phase(monkeypatch, block, conditioning, folds, most):
    """At most eight graphs without a break: the teacher's block; a state without and with a gradient; the layers of a
    block that folds in phases of one depth, of the first length, of any; where teacher forcing is one call, that at its
    first size and at any other, and that of adapted layers at one depth."""
    for lengths in ((1, 4, 2, 5), (3, 1, 1, 1, 1, 2, 1, 1, 1)):
        counter = CompileCounter()
        compiled_with(monkeypatch, counter)
        teacher = tiny_teacher(depth=12)
        with fast_switched(folds):
            step = make_step(teacher, student_of(teacher, lengths, block, conditioning), compile_blocks=True)
        images = images_for(teacher)
        for stage, lam in (("stage1", 0.5), ("stage1", 0.0), ("stage2", 0.0), ("stage2", 0.0)):
            step(images, stage, lam)[0].backward()
        assert counter.frame_count <= most


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("conditioning", ["none", "mlp", "table"])
def test_weights_folded_once_a_phase_give_the_same_gradient(conditioning, checkpointing):
    teacher = tiny_teacher()
    student = student_of(teacher, (1, 3), "paper", conditioning)
    images = images_for(teacher)
    folded = make_step(teacher, student, checkpointing=checkpointing)
    assert all(type(block) is FastBlock for block in folded._blocks)
    once = gradients(folded, images, "stage2", 0.0)
    with fast_switched(False):
        plain = make_step(teacher, student)
    assert all(type(block) is PaperBlock for block in plain._blocks)
    for name, grad in gradients(plain, images, "stage2", 0.0).items():
        torch.testing.assert_close(once[name], grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("block", ["teacher", "adapted"])
@pytest.mark.parametrize("conditioning", ["none", "mlp", "table"])
@pytest.mark.parametrize("layer_scale", [None, 1e-3])
def test_a_copied_block_that_folds_gives_the_same_losses_and_gradients(block, conditioning, layer_scale):
    teacher = tiny_teacher(init_values=layer_scale)
    student = student_of(teacher, (1, 3), block, conditioning)
    images = images_for(teacher)
    v_lt = some_variance(teacher)
    folded = make_step(teacher, student, variance=v_lt)
    assert all(type(block) is FastBlock for block in folded._blocks)
    with fast_switched(False):
        plain = make_step(teacher, student, variance=v_lt)
    assert all(type(block) is CopiedBlock for block in plain._blocks)
    for stage, lam in (("stage1", 0.4), ("stage1", 1.0), ("stage2", 0.0)):
        grads = gradients(folded, images, stage, lam)
        for name, grad in gradients(plain, images, stage, lam).items():
            torch.testing.assert_close(grads[name], grad, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(folded(images, stage, lam)[1], plain(images, stage, lam)[1])


def test_blocks_of_another_make_do_not_fold():
    """Rotary embedding, SwiGLU, normed queries and keys, no bias, another GELU."""
    others = (
        rotary(),
        rotary("eva02_tiny_patch14_224", size=28),
        tiny_teacher(qk_norm=True),
        tiny_teacher(qkv_bias=False),
        tiny_teacher(act_layer="gelu_tanh"),
    )
    for teacher in others:
        assert type(make_step(teacher, student_of(teacher, (2, 2)))._blocks[0]) is CopiedBlock
    adapted = student_of(others[0], (2, 2), "adapted", "none")
    assert type(make_step(others[0], adapted)._blocks[0]) is CopiedBlock


def test_many_batch_sizes_in_one_process_stay_compiled(monkeypatch):
    counter = CompileCounter()
    compiled_with(monkeypatch, counter)
    teacher = tiny_teacher()
    student = student_of(teacher, (4,))
    for num in range(2, 8):
        step = make_step(teacher, student, compile_blocks=True)
        step(images_for(teacher, num), "stage2")[0].backward()
    assert counter.frame_count >= 6  # a graph or more for each, none left uncompiled


@pytest.mark.parametrize(
    ("make", "block", "conditioning"),
    [
        *[(tiny_teacher, "teacher", "table"), (rotary, "teacher", "table"), (tiny_teacher, "paper", "mlp")],
        *[(tiny_teacher, "adapted", "table"), (rotary, "adapted", "none")],
    ],
)
def test_a_compiled_step_gives_the_same_loss_and_gradient(monkeypatch, make, block, conditioning):
    compiled_with(monkeypatch, CompileCounterWithBackend("aot_eager"))
    teacher = make()
    student = student_of(teacher, (1, 3), block, conditioning)
    images = images_for(teacher)
    steps = make_step(teacher, student), make_step(teacher, student, compile_blocks=True)
    for stage, lam in (("stage1", 0.5), ("stage2", 0.0)):
        plain, compiled = (gradients(step, images, stage, lam) for step in steps)
        assert plain.keys() == compiled.keys()
        for name in plain:
            assert torch.allclose(plain[name], compiled[name], rtol=1e-3, atol=1e-6), name


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("patch", "size"), [((14, 14), (42, 28)), ((3, 5), (12, 10)), ((4, 4), (15, 18))])
def test_a_patch_product_is_the_convolution(patch: tuple[int, int], size: tuple[int, int], bias: bool) -> None:
    conv = nn.Conv2d(3, 10, patch, stride=patch, bias=bias).double()
    images = torch.randn(2, 3, *size, dtype=torch.float64)
    torch.testing.assert_close(PatchProduct(conv)(images), conv(images))


def test_the_half_copy_has_no_convolution_left_and_the_same_states() -> None:
    vit = tiny_timm()
    copied = half_copy(vit)
    assert not any(isinstance(m, nn.Conv2d) for m in copied.model.modules())
    assert any(isinstance(m, nn.Conv2d) for m in vit.model.modules())
    images = noise_images(vit)
    with torch.no_grad():
        exact = vit.embed(images)[0]
        half = copied.embed(images.bfloat16())[0]
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), exact, rtol=0.05, atol=0.05)


def test_other_convolutions_stay() -> None:
    vit = tiny_timm()
    for conv in (
        nn.Conv2d(3, 8, 3, stride=2),
        nn.Conv2d(3, 8, 4, stride=4, padding=1),
        nn.Conv2d(4, 8, 2, 2, groups=2),
    ):
        vit.model.extra = conv
        try:
            assert type(half_copy(vit).model.extra) is type(conv)
        finally:
            del vit.model.extra


@pytest.mark.parametrize(("factor", "normalise"), [(float("nan"), "group"), (1e25, "group"), (float("nan"), "none")])
def test_teacher_states_that_are_not_finite_are_refused(factor: float, normalise: str) -> None:
    teacher = tiny_teacher()
    teacher.blocks[2].register_forward_hook(lambda _block, _args, x_btd: x_btd * factor)
    stream: Any = SimpleNamespace(batch=lambda *_args, **_options: images_for(teacher))
    with pytest.raises(ValueError, match="are not finite at layer 3 on training images"):
        state_variance(teacher, stream, normalise, "fp32")


@pytest.mark.parametrize("lengths", [(3, 2, 1), (2, 2, 2), (6,)])
def test_a_step_trains_the_surrogate_where_only_some_blocks_have_a_mask(lengths: tuple[int, ...]) -> None:
    """Whatever the block that was copied is called with: the tied one runs at depths with and without a mask."""
    teacher = open_vit(masked(1, 3, 5), size=32)
    student = student_of(teacher, lengths)
    images = images_for(teacher)
    with torch.no_grad():
        states = teacher.record(images)[0]
        own = student.record(images)[0]
    step = make_step(teacher, student, weights=PLAIN)
    _, losses = step(images, "stage2")
    expected = [(a - b).square().mean() for a, b in zip(own[1:], states[1:])]
    torch.testing.assert_close(losses.detach(), torch.stack(expected), rtol=1e-4, atol=0)


def test_teacher_forcing_gives_each_depth_its_own_number() -> None:
    teacher = open_vit(numbered(), size=32)
    assert teacher.depth_conditioned
    student = student_of(teacher, (3, 3))
    images = images_for(teacher)
    states = teacher.record(images)[0]
    (_, context) = student.embed(images)
    step = make_step(teacher, student, weights=PLAIN)
    _, losses = step(images, "stage1", 1.0)
    expected = [(student.step(n, states[n - 1], context) - states[n]).square().mean() for n in range(1, 7)]
    torch.testing.assert_close(losses, torch.stack(expected), rtol=1e-4, atol=0)
