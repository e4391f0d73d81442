"""The kernel behind `gelu_backward`, in its own file so that Triton is loaded only where it runs."""

import triton
import triton.language as tl


@triton.jit
def kernel(
    grad,
    z,
    dz,
    sums,
    num_rows,
    num_columns,
    num_across,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    C0: tl.constexpr,
    C1: tl.constexpr,
    C2: tl.constexpr,
    C3: tl.constexpr,
    LAST: tl.constexpr,
):
    # Programs that run together share rows, because a row is contiguous in memory.
    block = tl.program_id(0) // num_across
    column = (tl.program_id(0) % num_across * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    total = tl.zeros((1, COLUMNS), tl.float32)
    for n in range(ROWS):
        row = (block * ROWS + n + tl.arange(0, 1)).to(tl.int64)[:, None]
        mask = (row < num_rows) & (column < num_columns)
        at = row * num_columns + column
        g = tl.load(grad + at, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(z + at, mask=mask, other=0.0).to(tl.float32)
        t = tl.minimum(x * x, LAST)
        cdf = tl.sigmoid(x * (C0 + t * (C1 + t * (C2 + t * C3))))
        density = cdf * (1 - cdf) * (C0 + t * (3 * C1 + t * (5 * C2 + t * (7 * C3))))
        dx = g * (cdf + x * density)
        tl.store(dz + at, dx.to(dz.dtype.element_ty), mask=mask)
        total += dx
    to = sums + block.to(tl.int64) * num_columns + column
    tl.store(to, total, mask=column < num_columns)
