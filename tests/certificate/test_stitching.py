"""Stitching against the composition of blocks, called one by one."""

from __future__ import annotations

import pytest
import torch
from tiny_certified import image_batches, tiny_vit
from torch import Tensor, nn

from raptor.certificate.heads import resolve_head
from raptor.certificate.stitching import Stitching, stitch
from raptor.files import RunError
from raptor.surrogate.surrogate import make_surrogate
from raptor.vit.view import ViT


def through(blocks: list[nn.Module], x_btd: Tensor) -> Tensor:
    for block in blocks:
        x_btd = block(x_btd)
    return x_btd


@torch.no_grad()
def test_both_directions_by_direct_composition() -> None:
    """timm's blocks take only the state: T_(l..L)(ã_l) is blocks l+1..L called on what the surrogate's first l give."""
    teacher = tiny_vit(num_classes=3)
    surrogate = make_surrogate(teacher, (2, 3), conditioning="none", copy="last")
    head, _ = resolve_head(teacher)
    found = stitch(surrogate, teacher, image_batches(1), head=head, bootstrap=50)
    images = torch.cat([batch.images for batch in image_batches(1)])
    start = teacher.embed(images)[0]
    of_teacher, of_surrogate = list(teacher.blocks), list(surrogate.blocks)
    target = through(of_teacher, start)
    chosen = teacher(images).argmax(-1)
    for layer in range(6):
        stitched = {
            "by_teacher": through(of_teacher[layer:], through(of_surrogate[:layer], start)),
            "by_surrogate": through(of_surrogate[layer:], through(of_teacher[:layer], start)),
        }
        for name, last in stitched.items():
            error = sum((last[i] - target[i]).norm() for i in range(21)) / sum(target[i].norm() for i in range(21))
            assert getattr(found, name).error[layer] == pytest.approx(float(error), rel=1e-4, abs=1e-6)
            own = teacher.model.forward_head(teacher.norm(last)).argmax(-1)
            same = (own == chosen).double().mean().item()
            assert getattr(found, name).agreement[layer] == pytest.approx(same)
    assert found.num_images == 21
    assert Stitching.from_dict(found.to_dict()).to_dict() == found.to_dict()


def test_the_ends_are_the_model_itself_and_the_surrogates_own_error(teacher: ViT, surrogate: ViT) -> None:
    found = stitch(surrogate, teacher, image_batches(1), bootstrap=50)
    own = found.by_teacher.error[-1]
    assert found.by_teacher.error[0] == found.by_surrogate.error[-1] == 0
    assert found.by_surrogate.error[0] == pytest.approx(own) and own > 0
    assert (found.by_teacher.interval[0] <= found.by_teacher.error + 1e-9).all()
    assert (found.by_teacher.interval[1] >= found.by_teacher.error - 1e-9).all()
    assert found.by_teacher.agreement is None


def test_the_line_names_the_block_that_differs(teacher: ViT) -> None:
    """A surrogate that is its teacher but for one block makes all its error there."""
    surrogate = make_surrogate(teacher, (1, 1, 1, 1, 1), conditioning="none")
    with torch.no_grad():
        for parameter in surrogate.model.shared_blocks[2].parameters():
            parameter.mul_(1.5)
    found = stitch(surrogate, teacher, image_batches(1), bootstrap=0)
    assert found.by_teacher.error[:3].max() < 1e-6 < found.by_teacher.error[3]
    error = found.by_teacher.error
    share = (error[3] / error[5]) ** 2
    assert found.line().startswith(
        f"most error that the teacher does not repair is made in block 3: {share:.0%} of the squared error"
    )
    assert found.by_surrogate.error[3:].max() < 1e-6


def test_another_teacher_is_refused(surrogate: ViT) -> None:
    other = tiny_vit()
    with torch.no_grad():
        next(other.model.parameters()).add_(1)
    with pytest.raises(RunError, match="was not made from"):
        stitch(surrogate, other, image_batches(1))
