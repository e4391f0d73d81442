"""The kernels behind `activations`, in their own file so that Triton is loaded only where they run."""

import triton
import triton.language as tl


@triton.jit
def swiglu_kernel(
    grad,
    z,
    bias,
    dz,
    sums,
    num_rows,
    num_columns,
    num_across,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STRIP: tl.constexpr,
):
    # Programs that run together share rows, because a row is contiguous in memory.
    block = tl.program_id(0) // num_across
    column = tl.program_id(0) % num_across * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < num_columns
    bias_p = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    bias_q = tl.load(bias + num_columns + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    sum_p = tl.zeros((STRIP, COLUMNS), tl.float32)
    sum_q = tl.zeros((STRIP, COLUMNS), tl.float32)
    for start in range(0, ROWS, STRIP):
        row = (block * ROWS + start + tl.arange(0, STRIP)).to(tl.int64)[:, None]
        mask = (row < num_rows) & inside[None, :]
        at = row * (2 * num_columns) + column[None, :]
        g = tl.load(grad + row * num_columns + column[None, :], mask=mask, other=0.0).to(tl.float32)
        p = tl.load(z + at, mask=mask, other=0.0).to(tl.float32) + bias_p
        q = tl.load(z + at + num_columns, mask=mask, other=0.0).to(tl.float32) + bias_q
        gate = tl.sigmoid(p)
        dp = g * q * gate * (1 + p * (1 - gate))
        dq = g * p * gate
        tl.store(dz + at, dp.to(dz.dtype.element_ty), mask=mask)
        tl.store(dz + at + num_columns, dq.to(dz.dtype.element_ty), mask=mask)
        sum_p += dp
        sum_q += dq
    to = sums + block.to(tl.int64) * (2 * num_columns) + column
    tl.store(to, tl.sum(sum_p, axis=0), mask=inside)
    tl.store(to + num_columns, tl.sum(sum_q, axis=0), mask=inside)


@triton.jit
def gelu_kernel(
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
