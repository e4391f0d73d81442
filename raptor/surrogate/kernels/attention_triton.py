"""The kernels behind `attention`, in their own file so that Triton is loaded only where they run.

A sequence is cut in whole tiles and one smaller tile for what is left: 261 tokens are four tiles of 64 and one of 16.
Queries, keys and values lie beside each other, `(B, T, 3, H, D)`.
"""

import triton
import triton.language as tl


@triton.jit
def _tile(at, first, T: tl.constexpr, STRIDE: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr, WHOLE: tl.constexpr):
    """Tokens `first..first + SIZE` of one head, (SIZE, D); zeros behind the last."""
    token = first + tl.arange(0, SIZE)
    where = at + token[:, None] * STRIDE + tl.arange(0, D)[None, :]
    if WHOLE:
        x = tl.load(where)
    else:
        x = tl.load(where, mask=token[:, None] < T, other=0.0)
    return x


@triton.jit
def _put(at, x, first, T: tl.constexpr, STRIDE: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr):
    token = first + tl.arange(0, SIZE)
    where = at + token[:, None] * STRIDE + tl.arange(0, D)[None, :]
    tl.store(where, x.to(at.dtype.element_ty), mask=token[:, None] < T)


@triton.jit
def _softmax_part(q, k, v, acc, high, total, scale, first, T: tl.constexpr, SIZE: tl.constexpr, WHOLE: tl.constexpr):
    """The running sums of one tile of rows with one more tile of columns."""
    s = tl.dot(q, tl.trans(k)) * scale
    if not WHOLE:
        s = tl.where((first + tl.arange(0, SIZE))[None, :] < T, s, float("-inf"))
    # The largest score so far is taken out, so that no exponential overflows.
    now = tl.maximum(high, tl.max(s, 1))
    p = tl.exp2(s - now[:, None])
    # Sums below an earlier maximum have to be brought to the new one.
    before = tl.exp2(high - now)
    acc = tl.dot(p.to(v.dtype), v, acc * before[:, None])
    return acc, now, total * before + tl.sum(p, 1)


@triton.jit
def _forward(
    head_at,
    out_at,
    lse_at,
    first,
    scale,
    T: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    WHOLE_ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TAIL: tl.constexpr,
):
    q = _tile(head_at, first, T, 3 * H * D, D, ROWS, WHOLE_ROWS)
    acc = tl.zeros((ROWS, D), tl.float32)
    high = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    for column in range(0, T // COLUMNS * COLUMNS, COLUMNS):
        k = _tile(head_at + H * D, column, T, 3 * H * D, D, COLUMNS, True)
        v = _tile(head_at + 2 * H * D, column, T, 3 * H * D, D, COLUMNS, True)
        acc, high, total = _softmax_part(q, k, v, acc, high, total, scale, column, T, COLUMNS, True)
    if TAIL > 0:
        k = _tile(head_at + H * D, T // COLUMNS * COLUMNS, T, 3 * H * D, D, TAIL, False)
        v = _tile(head_at + 2 * H * D, T // COLUMNS * COLUMNS, T, 3 * H * D, D, TAIL, False)
        acc, high, total = _softmax_part(
            q, k, v, acc, high, total, scale, T // COLUMNS * COLUMNS, T, TAIL, T % COLUMNS == TAIL
        )
    _put(out_at, acc / total[:, None], first, T, H * D, D, ROWS)
    token = first + tl.arange(0, ROWS)
    tl.store(lse_at + token, high + tl.log2(total), mask=token < T)


@triton.jit
def forward(
    qkv,
    out,
    lse,
    scale,
    T: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROW_TAIL: tl.constexpr,
    COLUMN_TAIL: tl.constexpr,
):
    num_tiles: tl.constexpr = T // ROWS + (ROW_TAIL > 0)
    tile = tl.program_id(0) % num_tiles
    head = tl.program_id(0) // num_tiles
    image = (head // H).to(tl.int64)
    h = head % H
    head_at = qkv + image * T * 3 * H * D + h * D
    out_at = out + image * T * H * D + h * D
    lse_at = lse + head.to(tl.int64) * T
    if tile < T // ROWS:
        _forward(head_at, out_at, lse_at, tile * ROWS, scale, T, H, D, ROWS, True, COLUMNS, COLUMN_TAIL)
    elif ROW_TAIL > 0:
        _forward(head_at, out_at, lse_at, T // ROWS * ROWS, scale, T, H, D, ROW_TAIL, False, COLUMNS, COLUMN_TAIL)


@triton.jit
def _vector(at, first, T: tl.constexpr, SIZE: tl.constexpr, other: tl.constexpr):
    token = first + tl.arange(0, SIZE)
    return tl.load(at + token, mask=token < T, other=other)


@triton.jit
def _keys_part(
    k,
    v,
    dk,
    dv,
    q_at,
    grad_at,
    lse_at,
    delta_at,
    row,
    scale,
    T: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    SIZE: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """The running sums of a tile of keys and values with one more tile of queries."""
    q = _tile(q_at, row, T, 3 * H * D, D, SIZE, WHOLE)
    grad = _tile(grad_at, row, T, H * D, D, SIZE, WHOLE)
    p = tl.exp2(tl.dot(k, tl.trans(q)) * scale - _vector(lse_at, row, T, SIZE, float("inf"))[None, :])
    dv = tl.dot(p.to(grad.dtype), grad, dv)
    ds = p * (tl.dot(v, tl.trans(grad)) - _vector(delta_at, row, T, SIZE, 0.0)[None, :])
    return tl.dot(ds.to(q.dtype), q, dk), dv


@triton.jit
def _keys(
    head_at,
    grad_at,
    lse_at,
    delta_at,
    dhead_at,
    first,
    scale,
    factor,
    T: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    SIZE: tl.constexpr,
    WHOLE: tl.constexpr,
    INNER: tl.constexpr,
    TAIL: tl.constexpr,
):
    k = _tile(head_at + H * D, first, T, 3 * H * D, D, SIZE, WHOLE)
    v = _tile(head_at + 2 * H * D, first, T, 3 * H * D, D, SIZE, WHOLE)
    dk = tl.zeros((SIZE, D), tl.float32)
    dv = tl.zeros((SIZE, D), tl.float32)
    for row in range(0, T // INNER * INNER, INNER):
        dk, dv = _keys_part(k, v, dk, dv, head_at, grad_at, lse_at, delta_at, row, scale, T, H, D, INNER, True)
    if TAIL > 0:
        row = T // INNER * INNER
        dk, dv = _keys_part(k, v, dk, dv, head_at, grad_at, lse_at, delta_at, row, scale, T, H, D, TAIL, False)
    _put(dhead_at + H * D, dk * factor, first, T, 3 * H * D, D, SIZE)
    _put(dhead_at + 2 * H * D, dv, first, T, 3 * H * D, D, SIZE)


@triton.jit
def _queries_part(
    q,
    grad,
    lse,
    delta,
    dq,
    head_at,
    column,
    scale,
    T: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    SIZE: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """The running sum of a tile of queries with one more tile of keys; those behind the last are zeros and add none."""
    k = _tile(head_at + H * D, column, T, 3 * H * D, D, SIZE, WHOLE)
    v = _tile(head_at + 2 * H * D, column, T, 3 * H * D, D, SIZE, WHOLE)
    p = tl.exp2(tl.dot(q, tl.trans(k)) * scale - lse[:, None])
    ds = p * (tl.dot(grad, tl.trans(v)) - delta[:, None])
    return tl.dot(ds.to(k.dtype), k, dq)


@triton.jit
def _queries(
    head_at,
    grad_at,
    lse_at,
    delta_at,
    dhead_at,
    first,
    scale,
    factor,
    T: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    SIZE: tl.constexpr,
    WHOLE: tl.constexpr,
    INNER: tl.constexpr,
    TAIL: tl.constexpr,
):
    q = _tile(head_at, first, T, 3 * H * D, D, SIZE, WHOLE)
    grad = _tile(grad_at, first, T, H * D, D, SIZE, WHOLE)
    lse = _vector(lse_at, first, T, SIZE, 0.0)
    delta = _vector(delta_at, first, T, SIZE, 0.0)
    dq = tl.zeros((SIZE, D), tl.float32)
    for column in range(0, T // INNER * INNER, INNER):
        dq = _queries_part(q, grad, lse, delta, dq, head_at, column, scale, T, H, D, INNER, True)
    if TAIL > 0:
        dq = _queries_part(q, grad, lse, delta, dq, head_at, T // INNER * INNER, scale, T, H, D, TAIL, False)
    _put(dhead_at, dq * factor, first, T, 3 * H * D, D, SIZE)


@triton.jit
def backward(
    qkv,
    grad,
    lse,
    delta,
    dqkv,
    scale,
    factor,
    T: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    OUTER: tl.constexpr,
    INNER: tl.constexpr,
    OUTER_TAIL: tl.constexpr,
    INNER_TAIL: tl.constexpr,
):
    """A program takes one tile of keys and values through all queries, then as many queries through all keys."""
    num_tiles: tl.constexpr = T // OUTER + (OUTER_TAIL > 0)
    tile = tl.program_id(0) % num_tiles
    head = tl.program_id(0) // num_tiles
    image = (head // H).to(tl.int64)
    h = head % H
    at = qkv + image * T * 3 * H * D + h * D
    grad_at = grad + image * T * H * D + h * D
    to = dqkv + image * T * 3 * H * D + h * D
    lse_at = lse + head.to(tl.int64) * T
    delta_at = delta + head.to(tl.int64) * T
    first = tile * OUTER
    if tile < T // OUTER:
        _keys(at, grad_at, lse_at, delta_at, to, first, scale, factor, T, H, D, OUTER, True, INNER, INNER_TAIL)
        _queries(at, grad_at, lse_at, delta_at, to, first, scale, factor, T, H, D, OUTER, True, INNER, INNER_TAIL)
    elif OUTER_TAIL > 0:
        _keys(at, grad_at, lse_at, delta_at, to, first, scale, factor, T, H, D, OUTER_TAIL, False, INNER, INNER_TAIL)
        _queries(at, grad_at, lse_at, delta_at, to, first, scale, factor, T, H, D, OUTER_TAIL, False, INNER, INNER_TAIL)
