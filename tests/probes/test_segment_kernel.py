"""The kernel of raptor.probes.segment_kernel against autograd of the upsampled loss, in Triton's interpreter."""

from __future__ import annotations

from interpreted import check_interpreted

KERNEL = """
import torch
import torch.nn.functional as F
from raptor.probes.frames import Geometry
from raptor.probes.segment import fused_gradient

generator = torch.Generator().manual_seed(0)
for height, width, patch, num_classes in ((14, 28, 14, 5), (12, 17, 8, 17), (9, 6, 4, 1)):
    geometry = Geometry(height, width, patch, (height, width))
    logits = 4 * torch.randn(2, *geometry.grid, 2, num_classes, generator=generator)
    labels = torch.randint(num_classes, (2, height, width), generator=generator)
    labels[torch.rand(labels.shape, generator=generator) < 0.3] = 255
    cells = [side.cells() for side in geometry.sides]
    ours = fused_gradient(logits, labels, *cells, patch, (labels != 255).sum())
    (top, left), exact = geometry.start, logits.double().requires_grad_()
    for g in range(2):
        large = F.interpolate(exact[..., g, :].permute(0, 3, 1, 2), geometry.padded, mode="bilinear")
        F.cross_entropy(large[..., top : top + height, left : left + width], labels, ignore_index=255).backward()
    torch.testing.assert_close(ours.double(), exact.grad, rtol=1e-4, atol=1e-6)
    assert ours.shape == logits.shape
none = fused_gradient(logits, torch.full_like(labels, 255), *cells, patch, torch.tensor(1))
assert (none == 0).all() and none.shape == logits.shape
"""


def test_the_kernel_gives_the_gradient_of_the_upsampled_entropy() -> None:
    """Run by Triton's interpreter on the CPU: frames that fill their patches and that do not, classes that fill a tile
    and that do not."""
    check_interpreted(KERNEL)
