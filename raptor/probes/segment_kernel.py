"""The kernel behind `fused_gradient`, in its own file so that Triton is loaded only where it runs."""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def kernel(
    logits,
    labels,
    out,
    starts_y,
    starts_x,
    shares_y,
    shares_x,
    num_valid,
    height,
    width,
    rows,
    columns,
    heads,
    classes,
    IGNORE: tl.constexpr,
    PIXELS: tl.constexpr,
    CLASSES: tl.constexpr,
):
    # One cell: the pixels between four neighbouring patch centres, for one head. Heads of a cell share its labels.
    head, cell = tl.program_id(0) % heads, tl.program_id(0) // heads
    across, cell = cell % (columns + 1), cell // (columns + 1)
    down, image = cell % (rows + 1), (cell // (rows + 1)).to(tl.int64)
    c = tl.arange(0, CLASSES)
    inside = c < classes
    above, below = tl.maximum(down - 1, 0), tl.minimum(down, rows - 1)
    before, after = tl.maximum(across - 1, 0), tl.minimum(across, columns - 1)
    first, second = (image * rows + above) * columns, (image * rows + below) * columns
    at_ab = ((first + before) * heads + head) * classes + c
    at_aa = ((first + after) * heads + head) * classes + c
    at_bb = ((second + before) * heads + head) * classes + c
    at_ba = ((second + after) * heads + head) * classes + c
    # In units of log 2; entries beyond the classes get the same tiny weight at all four corners.
    z_ab = tl.load(logits + at_ab, mask=inside, other=-1e30) * LOG2_E
    z_aa = tl.load(logits + at_aa, mask=inside, other=-1e30) * LOG2_E
    z_bb = tl.load(logits + at_bb, mask=inside, other=-1e30) * LOG2_E
    z_ba = tl.load(logits + at_ba, mask=inside, other=-1e30) * LOG2_E
    x = tl.load(starts_x + across) + tl.arange(0, PIXELS)
    is_x = x < tl.load(starts_x + across + 1)
    share_x = tl.load(shares_x + x, mask=is_x, other=0.0)[:, None]
    sum_a = tl.zeros((PIXELS, CLASSES), tl.float32)
    sum_b = tl.zeros((PIXELS, CLASSES), tl.float32)
    for y in range(tl.load(starts_y + down), tl.load(starts_y + down + 1)):
        share_y = tl.load(shares_y + y)
        left = z_ab + share_y * (z_bb - z_ab)
        right = z_aa + share_y * (z_ba - z_aa)
        z = left[None, :] + share_x * (right - left)[None, :]
        label = tl.load(labels + (image * height + y) * width + x, mask=is_x, other=IGNORE).to(tl.int32)
        valid = label != IGNORE
        e = tl.exp2(z - tl.max(z, axis=1)[:, None])
        scale = tl.where(valid, 1 / tl.sum(e, axis=1), 0.0)
        hit = c[None, :] == tl.where(valid, label, -1)[:, None]
        gradient = e * scale[:, None] - tl.where(hit, 1.0, 0.0)
        sum_a += (1 - share_y) * gradient
        sum_b += share_y * gradient
    # The count is read on the device, so that no step waits for the host.
    weight = 1 / tl.load(num_valid).to(tl.float32)
    # In 64 bits, because four corners of all cells, heads and classes may exceed 2^31 numbers.
    place = tl.program_id(0).to(tl.int64) * classes + c
    corner = tl.num_programs(0).to(tl.int64) * classes
    tl.store(out + place, tl.sum(sum_a * (1 - share_x), axis=0) * weight, mask=inside)
    tl.store(out + corner + place, tl.sum(sum_a * share_x, axis=0) * weight, mask=inside)
    tl.store(out + 2 * corner + place, tl.sum(sum_b * (1 - share_x), axis=0) * weight, mask=inside)
    tl.store(out + 3 * corner + place, tl.sum(sum_b * share_x, axis=0) * weight, mask=inside)
