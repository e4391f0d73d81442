"""The blocks that a surrogate ties: the paper's own, and a copy of one of the teacher's. Depth modulates both.

These are the formulas as they are meant to be read. `raptor.surrogate.fast` computes the same with fewer passes, unless
it is switched off:

    with fast_switched(False):
        ...
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raptor.surrogate.adapters import DepthAdapters, DepthLinear, Weights, adapt
from raptor.vit.calls import first_tensor, with_state

_NUM_FACTORS = 8


class Modulation(NamedTuple):
    """Factors that multiply and shift the parts of a block, each (D,), (1, 1, D), or (B, 1, D) with one depth per row.

    `t1` and `t2` scale the two branches and `t3` the output, as the paper names them. A table adds scales and shifts
    after the two norms, and a shift of the output; the paper's depth scaling leaves these None.
    """

    t1: Any
    t2: Any
    t3: Any
    scale1: Tensor | None = None
    shift1: Tensor | None = None
    scale2: Tensor | None = None
    shift2: Tensor | None = None
    shift3: Tensor | None = None

    def flattened(self, start: int) -> Modulation:
        """The axes from `start` on made one: vectors (D,) of a single depth with 0, rows (n, D) of n depths with 1."""
        # Only the last factors may be missing, so the others keep their places.
        return Modulation(*[part.flatten(start) for part in self if part is not None])

    def unbind(self) -> list[Modulation]:
        """Factors (n, D) of n depths as n modulations of one depth each."""
        parts = [part.unbind() for part in self if part is not None]
        return [Modulation(*row) for row in zip(*parts)]


UNMODULATED = Modulation(1.0, 1.0, 1.0)


class DepthMLP(nn.Module):
    """The paper's depth scaling: `(t1, t2, t3) = W2 SiLU(W1 l + b1) + b2 + 1`, with the layer l as a plain float."""

    def __init__(self, dim: int, hidden: int = 16):
        super().__init__()
        self.w1 = nn.Linear(1, hidden)
        self.w2 = nn.Linear(hidden, 3 * dim)
        # As in the paper: every depth starts with factors of almost 1.
        nn.init.normal_(self.w2.weight, std=1e-4)
        nn.init.normal_(self.w2.bias, std=1e-4)

    def forward(self, depth: Tensor) -> Modulation:
        # Never in bf16, which has no number closer to 1 than 1/256: depths would share their factors.
        with torch.autocast(depth.device.type, enabled=False):
            t = self.w2(F.silu(self.w1(depth.reshape(-1, 1, 1)))) + 1
        return Modulation(*t.chunk(3, dim=-1))


class DepthTable(nn.Module):
    """A learned row of scales and shifts for each depth `first..last`; deeper layers take the last row."""

    first: Tensor
    last: Tensor
    plain: Tensor  # added to a row: the row itself starts at zeros, so that weight decay pulls towards no modulation

    def __init__(self, dim: int, first: int, last: int):
        super().__init__()
        # Buffers rather than numbers: a compiled block would be compiled again for the numbers of each phase.
        self.register_buffer("first", torch.tensor(float(first)), persistent=False)
        self.register_buffer("last", torch.tensor(float(last)), persistent=False)
        self.rows = nn.Parameter(torch.zeros(last - first + 1, _NUM_FACTORS * dim))
        is_scale = torch.tensor([not name.startswith("shift") for name in Modulation._fields])
        self.register_buffer("plain", is_scale.float().repeat_interleave(dim), persistent=False)

    def forward(self, depth: Tensor) -> Modulation:
        """Vectors (D,) for one depth given as a 0-d tensor, otherwise rows (n, 1, D)."""
        row = (depth.reshape(-1).clamp(self.first, self.last) - self.first).long()
        factors = self.rows[row] + self.plain
        if depth.ndim == 0:
            factors = factors.flatten()
        else:
            factors = factors[:, None]  # between the rows of a batch and their features stand the tokens
        return Modulation(*factors.chunk(_NUM_FACTORS, dim=-1))


class PaperBlock(nn.Module):
    """The paper's block: pre-norm attention and SwiGLU, LayerScale `g1` and `g2`, biases everywhere.

        u = x + t1 g1 MHA(LN1(x))
        v = u + t2 g2 M(LN2(u)),   M(y) = Wo (SiLU(p) q) + bo,   [p, q] = Wi y + bi
        output = t3 v

    With a table the norms and the output are scaled and shifted as well (docs/method.md).
    """

    def __init__(self, dim: int, num_heads: int, mlp_ratio: int = 4, layer_scale: float = 1e-5):
        super().__init__()
        self.num_heads = num_heads
        self.norm1 = nn.LayerNorm(dim, eps=1e-5)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.norm2 = nn.LayerNorm(dim, eps=1e-5)
        self.wi = nn.Linear(dim, 2 * mlp_ratio * dim)
        self.wo = nn.Linear(mlp_ratio * dim, dim)
        # With a small LayerScale the block starts close to the identity.
        self.g1 = nn.Parameter(torch.full((dim,), layer_scale))
        self.g2 = nn.Parameter(torch.full((dim,), layer_scale))
        # The defaults of torch's nn.MultiheadAttention.
        nn.init.xavier_uniform_(self.qkv.weight)
        nn.init.zeros_(self.qkv.bias)
        nn.init.zeros_(self.proj.bias)

    def forward(self, x_btd: Tensor, modulation: Modulation | None = None, *_args: Any, **_kwargs: Any) -> Tensor:
        """The next state. Whatever else the teacher passes to its blocks is ignored."""
        m = modulation or UNMODULATED
        y_btd = film(self.norm1(x_btd), m.scale1, m.shift1)
        u_btd = x_btd + (m.t1 * self.g1) * self.proj(attend(self.qkv(y_btd), self.num_heads))
        z_btd = film(self.norm2(u_btd), m.scale2, m.shift2)
        v_btd = u_btd + (m.t2 * self.g2) * self.wo(swiglu(self.wi(z_btd)))
        return film(v_btd, m.t3, m.shift3)


def attend(qkv_btf: Tensor, num_heads: int) -> Tensor:
    """Softmax attention over queries, keys and values stacked along the last axis, (B, T, 3 D)."""
    b, t, f = qkv_btf.shape
    q, k, v = qkv_btf.view(b, t, 3, num_heads, f // 3 // num_heads).permute(2, 0, 3, 1, 4).unbind(0)
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, f // 3)


def swiglu(pq_btf: Tensor) -> Tensor:
    """`SiLU(p) q` of the two halves p and q of the last axis."""
    p, q = pq_btf.chunk(2, dim=-1)
    return F.silu(p) * q


def film(x: Tensor, scale: Any, shift: Tensor | None) -> Tensor:
    """`scale x + shift`. A bf16 x is promoted, because bf16 factors near 1 would be off by up to 1/256."""
    if scale is not None:
        x = x * scale
    if shift is not None:
        x = x + shift
    return x


class CopiedBlock(nn.Module):
    """A copy of one of the teacher's blocks, always in eval mode (no dropout, no drop-path), modulated by depth.

    Args:
        block: the copy itself.
        points: names of its (first norm, end of first branch, second norm, end of second branch). `t1` and `t2` act at
            the ends of the branches, the other scales and shifts after the norms. Without points the block is
            modulated as a whole: `t1` scales its update.
        adapted: names of its linear layers that take the weights of a depth.
    """

    def __init__(self, block: nn.Module, points: Sequence[str] = (), adapted: Sequence[str] = ()):
        super().__init__()
        self.block = block
        self.block.requires_grad_(True)
        self.adapted = list(adapted)
        self.layers: list[DepthLinear] = adapt(self.block, adapted)
        self.points = list(points)
        for name in self.points:
            setattr(self.block, name, Modulated(getattr(self.block, name)))
        # Only `train` puts the copy in eval mode.
        self.train(self.training)

    def train(self, mode: bool = True) -> CopiedBlock:
        super().train(mode)
        self.block.eval()  # the teacher's states, which it learns, are without dropout and drop-path
        return self

    def forward(
        self,
        x_btd: Tensor,
        modulation: Modulation | None = None,
        *args: Any,
        weights: Weights | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """The next state. `weights` are the adapted layers' at one depth, or at n depths, whose rows then follow each
        other. The other arguments are what the teacher passes to its blocks.
        """
        # The block's own forward calls its parts, and knows of no depth: its parts hold their factors during the call.
        self._set(modulation, weights)
        try:
            state = first_tensor(self.block(x_btd, *args, **kwargs))
        finally:
            self._set(None, None)
        if modulation is None:
            return state
        if not self.points:
            # So that factors of 1 give the state of the copy to the last bit.
            state = state + (modulation.t1 - 1) * (state - x_btd)
        return film(state, modulation.t3, modulation.shift3)

    def _set(self, m: Modulation | None, weights: Weights | None) -> None:
        """Hand each part of the copy its factors and weights for the next call."""
        factors: Sequence[Any] = (None,) * 4
        if m is not None:
            # In the order of `points`. Only the norms are shifted, because the branches end in a sum.
            factors = ((m.scale1, m.shift1), (m.t1, None), (m.scale2, m.shift2), (m.t2, None))
        for name, factor in zip(self.points, factors):
            getattr(self.block, name).factor = factor
        own: Sequence[Any] = [None] * len(self.layers)
        if weights is not None:
            own = weights
        for layer, one in zip(self.layers, own):
            layer.now = one


class Modulated(nn.Module):
    """A module whose output is scaled and shifted by whatever `factor` holds at the time of the call."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner
        self.factor: tuple[Tensor | None, Tensor | None] | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = self.inner(*args, **kwargs)
        if self.factor is None:
            return output
        return with_state(output, film(first_tensor(output), *self.factor))


class TiedBlock(nn.Module):
    """The shared block of one phase, modulated by `conditioning` at the depth that is asked for.

    With `adapters` the depth also changes its matrices. `view` is the block's `FastBlock`, if there is one.
    """

    def __init__(
        self,
        block: nn.Module,
        conditioning: nn.Module | None,
        adapters: DepthAdapters | None = None,
        view: Any = None,
    ):
        super().__init__()
        self.block = block
        self.conditioning = conditioning
        self.adapters = adapters
        self._view = (view,)  # in a tuple, so that its modules are not registered a second time

    @property
    def fast(self) -> Any:
        """The block's fast view, unless fast views are switched off or somebody has changed the block."""
        view = self._view[0]
        if view is None or not fast_is_on() or not view.stands_for(self.block):
            return None
        return view

    def modulation(self, depth: Tensor) -> Modulation | None:
        """The block's factors at the depths `(n,)`, or at one, a 0-d tensor; None without conditioning."""
        if self.conditioning is None:
            return None
        return self.conditioning(depth)

    def weights(self, depth: Tensor) -> Weights | None:
        """The weights of the block's layers at the depths `(n,)`, or at one, a 0-d tensor; None without adapters."""
        if self.adapters is None:
            return None
        return self.adapters(self.block.layers, depth)

    def forward(self, x_btd: Tensor, depth: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """State after the layer `depth`: one number as a 0-d tensor, or one per row, `(B,)`."""
        modulation = self.modulation(depth)
        weights = self.weights(depth)
        # A compiler fuses the formula by itself. With a gradient the formula is differentiable as often as one likes,
        # and torch.jit.trace, which compares a trace with gradients to one without, must see the same path in both.
        is_recorded = torch.compiler.is_compiling() or torch.jit.is_tracing()
        if depth.ndim == 0 and not torch.is_grad_enabled() and not is_recorded:
            view = self.fast
            if view is not None and view.takes(args, kwargs):
                return view.infer(x_btd, modulation, weights)
        if weights is not None:
            kwargs["weights"] = weights
        return self.block(x_btd, modulation, *args, **kwargs)


# Which of the two ways blocks run.

_fast = True


def fast_is_on() -> bool:
    """Whether blocks run through their fast views."""
    return _fast


@contextmanager
def fast_switched(on: bool) -> Iterator[None]:
    """Inside the context blocks run through their fast views, or exactly as written. Training steps keep what was set
    when they were made.
    """
    global _fast
    before = _fast
    _fast = on
    try:
        yield
    finally:
        _fast = before
