"""The surrogate: a ViT like any other, over k blocks that are stored once."""

from __future__ import annotations

import copy
from itertools import combinations, pairwise
from pathlib import Path

import pytest
import torch
from families import Unheard, each_family, opened
from safetensors.torch import load_file, save_file
from tiny_models import noise_images, same_tensors, shake, tiny_timm
from tiny_surrogates import BLOCKS, CONDITIONINGS, TEACHERS, conditioned, every_kind
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from raptor.phases.cut import Phases
from raptor.surrogate.surrogate import block_parameters, check_trainable, make_surrogate, shared_blocks, surrogate_spec
from raptor.vit.open import open_vit
from raptor.vit.saved import save_vit
from raptor.vit.trajectory import perturb, swap_blocks
from raptor.vit.view import ViT


def test_seed(teacher: ViT) -> None:
    state = torch.random.get_rng_state()
    first, second, other = (make_surrogate(teacher, [2, 2], block="paper", seed=s) for s in (3, 3, 4))
    assert torch.equal(state, torch.random.get_rng_state())
    assert same_tensors(first.model.state_dict(), second.model.state_dict())
    assert not same_tensors(first.model.state_dict(), other.model.state_dict())
    one, two = shared_blocks(first)
    assert not torch.equal(one.block.qkv.weight, two.block.qkv.weight)


@pytest.mark.parametrize("name", TEACHERS)
@pytest.mark.parametrize("conditioning", ["none", "table"])
@torch.no_grad()
def test_as_many_blocks_as_layers_is_the_teacher(name: str, conditioning: str) -> None:
    teacher = TEACHERS[name]()
    surrogate = make_surrogate(teacher, [1, 1, 1, 1], block="teacher", conditioning=conditioning)
    images = noise_images(teacher)
    wanted, output = teacher.record(images)
    found, surrogate_output = surrogate.record(images)
    torch.testing.assert_close([*found, surrogate_output], [*wanted, output], rtol=0, atol=0)
    assert torch.equal(surrogate.finish(found[-1]), surrogate_output)


@each_family
@torch.no_grad()
def test_copies_of_all_blocks_and_a_swap_by_hand_for_every_family(family: str) -> None:
    vit = opened(family)
    images = noise_images(vit)
    wanted, output = vit.record(images)
    for conditioning in ("table", "none"):
        found, same = make_surrogate(vit, [1] * vit.num_layers, conditioning=conditioning).record(images)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted))
        # torch's own attention in the head of SigLIP rounds otherwise where its weights take no gradients.
        assert torch.allclose(same, output, rtol=1e-5, atol=1e-5)
    swapped = copy.deepcopy(vit)
    first, *middle, last = list(swapped.blocks)
    swapped.blocks._modules.update(zip(list(swapped.blocks._modules), (last, *middle, first)))
    with swap_blocks(vit, 1, vit.num_layers):
        assert torch.equal(vit(images), swapped(images)) and not torch.allclose(vit(images), output, atol=1e-3)
    assert torch.equal(vit(images), output)


@pytest.mark.parametrize("name", TEACHERS)
def test_every_teacher_trains_at_every_conditioning(name: str) -> None:
    """k = 2: each shared weight has a gradient from the last state, and the table's rows differ by depth."""
    teacher = TEACHERS[name]()
    for conditioning in CONDITIONINGS:
        surrogate = make_surrogate(teacher, [3, 1], conditioning=conditioning)
        states, _ = surrogate.record(noise_images(teacher))
        sum((s**2).mean() for s in states).backward()
        missing = [n for n, p in shared_blocks(surrogate).named_parameters() if p.grad is None]
        assert not missing
        if conditioning == "table":
            rows = shared_blocks(surrogate)[0].conditioning.rows.grad
            assert rows.shape == (3, 8 * 48)
            # t1, t2, t3, and the scale and shift after each norm: none is left out of the block
            assert (rows.reshape(3, 8, 48).abs().sum(-1) > 0).all()


@torch.no_grad()
@pytest.mark.parametrize(("copied", "first_block"), [("first", 0), ("middle", 1), ((2, 4), 1), ((3, 4), 2)])
def test_surrogate_states_are_the_powers_of_its_blocks(
    teacher: ViT, copied: str | tuple[int, ...], first_block: int
) -> None:
    surrogate = make_surrogate(teacher, [3, 1], conditioning="none", copy=copied)
    images = noise_images(teacher)
    x = teacher.record(images)[0][0]
    states, output = surrogate.record(images)
    for layer, block in zip(range(1, 5), [first_block, first_block, first_block, 3]):
        x = teacher.blocks[block](x)
        assert torch.equal(states[layer], x)
    assert torch.equal(output, teacher.finish(x))


@every_kind
def test_tied_weights_are_one_tensor(teacher: ViT, block: str, conditioning: str) -> None:
    """A step on only the loss of layer 1 changes every depth of the phase, and no other phase."""
    surrogate = conditioned(teacher, (3, 1), block=block, conditioning=conditioning)
    images = noise_images(teacher)
    a_0, context = surrogate.embed(images)
    with torch.no_grad():
        before = [surrogate.step(layer, a_0, context) for layer in range(1, 5)]
    optimizer = torch.optim.SGD([p for p in surrogate.model.parameters() if p.requires_grad], lr=1.0)
    surrogate.step(1, a_0, context).square().mean().backward()
    optimizer.step()
    with torch.no_grad():
        after = [surrogate.step(layer, a_0, context) for layer in range(1, 5)]
    assert [torch.equal(a, b) for a, b in zip(before, after)] == [False, False, False, True]
    assert len({id(step.tied) for step in surrogate.blocks}) == 2


@every_kind
def test_safetensors_takes_the_state_dict(teacher: ViT, block: str, conditioning: str, tmp_path: Path) -> None:
    surrogate = conditioned(teacher, (2, 2), block=block, conditioning=conditioning)
    save_file(surrogate.model.state_dict(), tmp_path / "model.safetensors")
    stored = load_file(tmp_path / "model.safetensors")
    assert sum(v.numel() for v in stored.values()) == sum(p.numel() for p in surrogate.model.parameters())
    assert not [k for k in stored if k.startswith("blocks.")]
    assert len({p.data_ptr() for p in surrogate.model.parameters()}) == len(list(surrogate.model.parameters()))
    names = [n for n, p in surrogate.model.named_parameters() if p.requires_grad]
    assert names and all(n.startswith("shared_blocks.") for n in names)
    assert len(names) == len(list(shared_blocks(surrogate).parameters()))


@torch.no_grad()
def test_hooks_fire_once_a_layer(teacher: ViT) -> None:
    surrogate = make_surrogate(teacher, [3, 1])
    fired: list[str] = []
    for i, step in enumerate(surrogate.blocks):
        step.register_forward_hook(lambda *_, i=i: fired.append(f"layer {i + 1}"))
    for j, tied in enumerate(shared_blocks(surrogate)):
        tied.register_forward_hook(lambda *_, j=j: fired.append(f"phase {j + 1}"))
    surrogate(noise_images(surrogate))
    assert [f for f in fired if "layer" in f] == ["layer 1", "layer 2", "layer 3", "layer 4"]
    assert [f for f in fired if "phase" in f] == ["phase 1", "phase 1", "phase 1", "phase 2"]
    assert len({id(b) for b in surrogate.blocks}) == 4


@every_kind
@torch.no_grad()
def test_deepcopy_is_tied_and_detached(teacher: ViT, block: str, conditioning: str) -> None:
    surrogate = conditioned(teacher, (3, 1), block=block, conditioning=conditioning)
    images = noise_images(surrogate)
    output = surrogate(images)
    model = copy.deepcopy(surrogate.model)
    assert torch.equal(model(images), output)
    assert [step.tied is model.shared_blocks[j] for step, j in zip(model.blocks, [0, 0, 0, 1])] == [True] * 4
    shake(model.shared_blocks, seed=8)
    assert not torch.allclose(model(images), output)
    assert torch.equal(surrogate(images), output)
    own = {p.data_ptr() for p in surrogate.model.parameters()}
    assert not own & {p.data_ptr() for p in model.parameters()}


@every_kind
def test_building_and_training_leave_the_teacher_alone(teacher: ViT, block: str, conditioning: str, snapshot) -> None:
    next(iter(teacher.model.blocks[1].parameters())).requires_grad_(False)
    teacher.model.head.requires_grad_(False)
    weights, wanted = snapshot(teacher.model), [p.requires_grad for p in teacher.model.parameters()]
    modules = [(n, id(m)) for n, m in teacher.model.named_modules()]
    images = noise_images(teacher)
    with torch.no_grad():
        output = teacher(images)
    surrogate = make_surrogate(teacher, [2, 2], block=block, conditioning=conditioning)
    parameters = [p for p in surrogate.model.parameters() if p.requires_grad]
    assert len(parameters) == len(list(shared_blocks(surrogate).parameters()))
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    surrogate(images).square().sum().backward()
    optimizer.step()
    surrogate.model.train()
    shake(surrogate.model)
    assert same_tensors(weights, teacher.model.state_dict())
    assert [p.requires_grad for p in teacher.model.parameters()] == wanted
    assert all(p.grad is None for p in teacher.model.parameters())
    assert [(n, id(m)) for n, m in teacher.model.named_modules()] == modules
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in teacher.model.modules())
    assert not teacher.model.training
    with torch.no_grad():
        assert torch.equal(teacher(images), output)


def test_moving_the_model_moves_its_shared_blocks(teacher: ViT) -> None:
    surrogate = make_surrogate(teacher, [2, 2])
    surrogate.model.to(torch.float64)
    assert surrogate(noise_images(surrogate).double()).dtype == torch.float64
    surrogate.model.to("meta")
    assert all(p.is_meta for step in surrogate.blocks for p in step.tied.parameters())


@every_kind
@torch.no_grad()
def test_timms_own_api(teacher: ViT, block: str, conditioning: str) -> None:
    surrogate = conditioned(teacher, (3, 1), block=block, conditioning=conditioning)
    model, images = surrogate.model, noise_images(surrogate)
    states, output = surrogate.record(images)
    features = model.forward_features(images)
    assert torch.equal(features, model.norm(states[-1]))
    assert torch.equal(model.forward_head(features), output)
    last, intermediates = model.forward_intermediates(images, return_prefix_tokens=True, output_fmt="NLC")
    assert torch.equal(last, features)
    assert len(intermediates) == 4
    for (patches, prefix), state in zip(intermediates, states[1:]):
        assert torch.equal(torch.cat([prefix, patches], 1), state)
    (two,) = model.get_intermediate_layers(images, n=[1], return_prefix_tokens=False)
    assert torch.equal(two, states[2][:, 3:])


@pytest.mark.parametrize("fixture", ["teacher", "rotary"])
def test_gradient_checkpointing(fixture: str, request) -> None:
    surrogate = conditioned(request.getfixturevalue(fixture), (3, 1))
    images = noise_images(surrogate)

    def gradients() -> list[Tensor]:
        surrogate.model.zero_grad()
        surrogate(images).square().sum().backward()
        return [p.grad.clone() for p in shared_blocks(surrogate).parameters()]

    plain = gradients()
    surrogate.model.set_grad_checkpointing(True)
    surrogate.model.train()  # timm checkpoints while gradients flow
    for a, b in zip(plain, gradients()):
        assert torch.allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("conditioning", ["none", "mlp", "table"])
@torch.no_grad()
def test_rotary_models(rotary: ViT, conditioning: str) -> None:
    surrogate = conditioned(rotary, (3, 1), conditioning=conditioning)
    images = noise_images(surrogate)
    states, output = surrogate.record(images)
    a_0, context = surrogate.embed(images)
    assert all(torch.equal(a, b) for a, b in zip(states, surrogate.unroll(a_0, context)))
    assert torch.equal(surrogate.finish(states[-1]), output)
    assert torch.equal(surrogate.model.forward_head(surrogate.model.forward_features(images)), output)
    _, intermediates = surrogate.model.forward_intermediates(images, output_fmt="NLC")
    assert torch.equal(intermediates[1], states[2][:, 5:])


@torch.no_grad()
def test_interventions_on_a_surrogate(teacher: ViT) -> None:
    surrogate = conditioned(teacher, (3, 1))
    images = noise_images(surrogate)
    states, output = surrogate.record(images)
    _, context = surrogate.embed(images)
    with perturb(surrogate, 1, torch.ones(48), "registers"):
        found, _ = surrogate.record(images)
    assert torch.equal(found[1][:, 1:3], states[1][:, 1:3] + 1)
    assert torch.equal(found[-1], surrogate.unroll(found[1], context, 1)[-1])
    with swap_blocks(surrogate, 1, 4):
        swapped, _ = surrogate.record(images)
    assert torch.equal(swapped[1], surrogate.blocks[3](states[0]))
    assert torch.equal(surrogate(images), output)


@pytest.mark.parametrize("phases", [(4,), (3, 1), (1, 1, 1, 1)])
@every_kind
@torch.no_grad()
def test_open_vit_takes_a_surrogates_model(teacher: ViT, phases, block: str, conditioning: str) -> None:
    surrogate = conditioned(teacher, phases, block=block, conditioning=conditioning)
    view = open_vit(surrogate.model, size=28)
    assert (view.num_layers, view.groups, view.num_classes) == (4, teacher.groups, 5)
    images = noise_images(view)
    assert all(torch.equal(a, b) for a, b in zip(view.record(images)[0], surrogate.record(images)[0]))


@torch.no_grad()
def test_a_depth_for_each_row(teacher: ViT) -> None:
    x = torch.randn(4, 7, 48)
    depths = torch.tensor([3.0, 1.0, 4.0, 3.0])
    for block in BLOCKS:
        for conditioning in CONDITIONINGS:
            tied = shared_blocks(conditioned(teacher, (4,), block=block, conditioning=conditioning))[0]
            rows = tied(x, depths)
            single = torch.cat([tied(x[i : i + 1], depths[i]) for i in range(4)])
            assert torch.allclose(rows, single, atol=1e-5), (block, conditioning)
            differ = not torch.allclose(tied(x, torch.tensor(1.0)), tied(x, torch.tensor(4.0)), atol=1e-3)
            assert differ is (conditioning != "none")


def test_a_depth_for_each_row_with_rotary_arguments(rotary: ViT) -> None:
    surrogate = conditioned(rotary, (4,))
    a_0, context = surrogate.embed(noise_images(surrogate))
    args, kwargs = context.calls[0]
    tied = shared_blocks(surrogate)[0]
    with torch.no_grad():
        rows = tied(a_0, torch.tensor([1.0, 4.0, 2.0]), *args, **kwargs)
        for i, layer in enumerate((1, 4, 2)):
            assert torch.allclose(rows[i], surrogate.step(layer, a_0, context)[i], atol=1e-5)


def compiled_graphs(surrogate: ViT) -> tuple[int, dict[str, int]]:
    """Graphs made while one compiled surrogate runs through its depth twice, and the reasons of graph breaks."""
    images = noise_images(surrogate)
    with torch.no_grad():
        eager = surrogate(images)
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        counter = CompileCounter()
        for tied in shared_blocks(surrogate):
            tied.compile(backend=counter)
        with torch._dynamo.config.patch(error_on_recompile=len(surrogate.phases) == 1):
            for _ in range(2):
                assert torch.allclose(surrogate(images), eager, atol=1e-5)
    breaks = dict(torch._dynamo.utils.counters["graph_break"])
    torch._dynamo.reset()
    return counter.frame_count, breaks


@every_kind
def test_one_graph_for_twelve_depths(block: str, conditioning: str) -> None:
    teacher = tiny_timm("vit_small_patch14_reg4_dinov2", depth=12)
    surrogate = conditioned(teacher, (12,), block=block, conditioning=conditioning)
    assert compiled_graphs(surrogate) == (1, {})


def test_one_graph_for_twelve_rotary_depths() -> None:
    surrogate = conditioned(tiny_timm("vit_small_patch16_dinov3", depth=12), (12,))
    assert compiled_graphs(surrogate) == (1, {})


@pytest.mark.parametrize("conditioning", CONDITIONINGS)
def test_twelve_phases_stay_under_the_recompile_limit(conditioning: str) -> None:
    """Past the limit a block silently runs uncompiled."""
    teacher = tiny_timm("vit_small_patch14_reg4_dinov2", depth=12)
    surrogate = conditioned(teacher, (1,) * 12, conditioning=conditioning)
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        num_graphs, breaks = compiled_graphs(surrogate)
    assert breaks == {}
    assert num_graphs < 8


def test_the_whole_surrogate_compiles_in_one_graph(teacher: ViT) -> None:
    surrogate = conditioned(teacher, (3, 1))
    images = noise_images(surrogate)
    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(surrogate.model, backend="eager", fullgraph=True)
        assert torch.allclose(compiled(images), surrogate(images), atol=1e-5)
    torch._dynamo.reset()


@pytest.mark.parametrize("block", BLOCKS)
@torch.no_grad()
def test_any_k(teacher: ViT, block: str) -> None:
    images = noise_images(teacher)
    for k in range(1, 5):
        for cuts in combinations(range(1, 4), k - 1):
            phases = [b - a for a, b in pairwise((0, *cuts, 4))]
            surrogate = make_surrogate(teacher, phases, block=block, conditioning="none")
            assert surrogate.phases == Phases.from_lengths(phases) == Phases(surrogate_spec(surrogate).phases)
            assert len(shared_blocks(surrogate)) == k
            assert surrogate.num_layers == 4
            single = block_parameters(make_surrogate(teacher, [4], block=block, conditioning="none"))
            assert block_parameters(surrogate) == k * single
            states, output = surrogate.record(images)
            assert len(states) == 5
            assert output.shape == (3, 5)


@pytest.mark.parametrize(
    ("phases", "options", "message"),
    [
        ((2, 3), {}, "do not sum to the 4 blocks"),
        ((), {}, "positive integers"),
        ((4, 0), {}, "positive integers"),
        ((5, -1), {}, "positive integers"),
        ((4,), dict(block="swin"), "teacher, paper"),
        ((4,), dict(conditioning="rope"), "table, mlp, none"),
        ((4,), dict(copy="best"), "middle, first, last"),
    ],
)
def test_wrong_requests(teacher: ViT, phases, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_surrogate(teacher, phases, **options)


def test_a_teacher_is_not_a_surrogate(teacher: ViT) -> None:
    with pytest.raises(ValueError, match="not a surrogate"):
        shared_blocks(teacher)
    with pytest.raises(ValueError, match="not a surrogate"):
        surrogate_spec(teacher)


@every_kind
def test_a_surrogate_of_a_surrogate(teacher: ViT, block: str, conditioning: str, tmp_path: Path) -> None:
    inner = conditioned(teacher, (2, 2), block="teacher", conditioning="table")
    images = noise_images(teacher)
    exact = make_surrogate(inner, [1, 1, 1, 1], conditioning="none")
    with torch.no_grad():
        assert torch.equal(exact(images), inner(images))
    outer = make_surrogate(inner, [3, 1], block=block, conditioning=conditioning)
    with torch.no_grad():
        inner_output = inner(images)
    optimizer = torch.optim.SGD([p for p in outer.model.parameters() if p.requires_grad], lr=0.01)
    before = outer(images)
    before.square().sum().backward()
    weights = [n for n, p in shared_blocks(outer).named_parameters() if p.grad is not None]
    assert [n for n in weights if n.startswith("0.block.")], "the copied block has no weights to train"
    optimizer.step()
    with torch.no_grad():
        assert not torch.equal(outer(images), before)
        assert torch.equal(inner(images), inner_output)
        again = open_vit(save_vit(outer, tmp_path))
        assert torch.equal(again(images), outer(images))


class UnderInference(Unheard):
    """A model that never lets gradients through."""

    @torch.inference_mode()
    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images)


def test_a_model_that_runs_under_inference_mode_is_refused_before_training() -> None:
    surrogate = make_surrogate(open_vit(UnderInference(), size=32), [3, 2])
    with pytest.raises(ValueError, match=r"UnderInference runs under inference_mode: let it run without"):
        check_trainable(surrogate)


def test_a_module_that_cannot_be_copied_is_refused_in_one_line(tmp_path: Path) -> None:
    model = Unheard()
    with (tmp_path / "log").open("w") as file:
        model.log = file
        with pytest.raises(ValueError, match=r"^Unheard cannot be copied \(cannot pickle"):
            make_surrogate(open_vit(model, size=32), [3, 2])


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("grad", [True, False])
@every_kind
def test_a_surrogate_is_traced_where_its_teacher_is(teacher: ViT, block: str, conditioning: str, grad: bool) -> None:
    surrogate = conditioned(teacher, (3, 1), block=block, conditioning=conditioning)
    with torch.set_grad_enabled(grad):
        traced = torch.jit.trace(surrogate.model, noise_images(surrogate))
        others = noise_images(surrogate, num=5, seed=2)
        torch.testing.assert_close(traced(others), surrogate(others))
