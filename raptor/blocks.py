"""The blocks a surrogate ties: the paper's, or a copy of a teacher's, and how the layer number conditions them."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raptor.vit import ViT, first_tensor


class Modulation(NamedTuple):
    """Per-depth factors, each (1 or B, 1, D) or None: what multiplies and shifts each part of a block.

    `t1`, `t2` scale the two branches, `t3` the output, as the paper names them. The rest exist with a table alone:
    scales and shifts after the two norms, and a shift of the output.
    """

    t1: Tensor
    t2: Tensor
    t3: Tensor
    scale1: Tensor | None = None
    shift1: Tensor | None = None
    scale2: Tensor | None = None
    shift2: Tensor | None = None
    shift3: Tensor | None = None


class DepthMLP(nn.Module):
    """The paper's depth scaling: `(t1, t2, t3) = W2 SiLU(W1 l + b1) + b2 + 1`, with l as a plain float."""

    def __init__(self, dim: int, hidden: int = 16):
        super().__init__()
        self.w1 = nn.Linear(1, hidden)
        self.w2 = nn.Linear(hidden, 3 * dim)
        nn.init.normal_(self.w2.weight, std=1e-4)
        nn.init.normal_(self.w2.bias, std=1e-4)

    def forward(self, depth: Tensor) -> Modulation:
        t = self.w2(F.silu(self.w1(depth.reshape(-1, 1, 1)))) + 1
        return Modulation(*t.chunk(3, dim=-1))


class DepthTable(nn.Module):
    """A learned row of scales and shifts for each depth `first..last`; past the last depth its last row is held."""

    def __init__(self, dim: int, first: int, last: int):
        super().__init__()
        self.first, self.last = first, last
        self.rows = nn.Parameter(torch.zeros(last - first + 1, 8 * dim))

    def forward(self, depth: Tensor) -> Modulation:
        row = (depth.reshape(-1).clamp(self.first, self.last) - self.first).long()
        t1, t2, t3, scale1, shift1, scale2, shift2, shift3 = self.rows[row][:, None].chunk(8, dim=-1)
        return Modulation(t1 + 1, t2 + 1, t3 + 1, scale1 + 1, shift1, scale2 + 1, shift2, shift3)


class PaperBlock(nn.Module):
    """The paper's block: pre-norm attention and SwiGLU, LayerScale, biases everywhere (SPEC section 3)."""

    def __init__(self, dim: int, num_heads: int, mlp_ratio: int = 4, layer_scale: float = 1e-5):
        super().__init__()
        self.num_heads = num_heads
        self.norm1 = nn.LayerNorm(dim, eps=1e-5)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.norm2 = nn.LayerNorm(dim, eps=1e-5)
        self.wi = nn.Linear(dim, 2 * mlp_ratio * dim)
        self.wo = nn.Linear(mlp_ratio * dim, dim)
        self.g1 = nn.Parameter(torch.full((dim,), layer_scale))
        self.g2 = nn.Parameter(torch.full((dim,), layer_scale))
        # torch's defaults for nn.MultiheadAttention
        nn.init.xavier_uniform_(self.qkv.weight)
        nn.init.zeros_(self.qkv.bias)
        nn.init.zeros_(self.proj.bias)

    def forward(self, x_btd: Tensor, modulation: Modulation | None = None, *_args: Any, **_kwargs: Any) -> Tensor:
        m = modulation
        attended = self.g1 * self.attention(_film(self.norm1(x_btd), m and m.scale1, m and m.shift1))
        u_btd = x_btd + (attended if m is None else m.t1 * attended)
        mixed = self.g2 * self.mlp(_film(self.norm2(u_btd), m and m.scale2, m and m.shift2))
        v_btd = u_btd + (mixed if m is None else m.t2 * mixed)
        return v_btd if m is None else _film(v_btd, m.t3, m.shift3)

    def attention(self, x_btd: Tensor) -> Tensor:
        b, t, d = x_btd.shape
        q, k, v = self.qkv(x_btd).view(b, t, 3, self.num_heads, d // self.num_heads).permute(2, 0, 3, 1, 4).unbind(0)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, d))

    def mlp(self, x_btd: Tensor) -> Tensor:
        p, q = self.wi(x_btd).chunk(2, dim=-1)
        return self.wo(F.silu(p) * q)


class CopiedBlock(nn.Module):
    """A copy of one of the teacher's blocks, always in eval mode (no dropout, no drop-path), modulated by depth.

    Where the block has two norms and two branches, `t1`, `t2` act at the branches' ends and the other scales and
    shifts after the norms. A block of another make is modulated as a whole: `t1` scales its whole update.
    """

    def __init__(self, teacher: ViT, layer: int, modulated: bool):
        super().__init__()
        self.block = copy.deepcopy(teacher.blocks[layer - 1])
        self.block.requires_grad_(True)
        self.points: list[str] = _modulation_points(teacher, layer) if modulated else []
        for name in self.points:
            setattr(self.block, name, Modulated(getattr(self.block, name)))
        self.train(self.training)

    def train(self, mode: bool = True) -> CopiedBlock:
        super().train(mode)
        self.block.eval()
        return self

    def forward(self, x_btd: Tensor, modulation: Modulation | None = None, *args: Any, **kwargs: Any) -> Tensor:
        m = modulation
        if m is None:
            return first_tensor(self.block(x_btd, *args, **kwargs))
        self._set(m)
        state = first_tensor(self.block(x_btd, *args, **kwargs))
        self._set(None)
        if not self.points:
            state = x_btd + m.t1 * (state - x_btd)
        return _film(state, m.t3, m.shift3)

    def _set(self, m: Modulation | None) -> None:
        factors = (None,) * 4 if m is None else ((m.scale1, m.shift1), (m.t1, None), (m.scale2, m.shift2), (m.t2, None))
        for name, factor in zip(self.points, factors):
            getattr(self.block, name).factor = factor


class Modulated(nn.Module):
    """A module whose output is scaled and shifted by what `factor` holds at the time of the call."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner
        self.factor: tuple[Tensor | None, Tensor | None] | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = self.inner(*args, **kwargs)
        if self.factor is None:
            return output
        state = _film(first_tensor(output), *self.factor)
        return (state, *output[1:]) if isinstance(output, tuple) else state


def num_heads_of(block: nn.Module, dim: int) -> int:
    """Attention heads of a teacher's block, as it states them; one for each 64 coordinates when it does not."""
    for module in block.modules():
        for name in ("num_heads", "num_attention_heads"):
            value = getattr(module, name, None)
            if isinstance(value, int) and value > 0 and dim % value == 0:
                return value
    return max(1, dim // 64)


def _film(x: Tensor, scale: Tensor | None, shift: Tensor | None) -> Tensor:
    if scale is not None:
        x = x * scale.to(x.dtype)
    return x if shift is None else x + shift.to(x.dtype)


def _modulation_points(teacher: ViT, layer: int) -> list[str]:
    """Names of (first norm, end of first branch, second norm, end of second branch) among the block's children.

    A branch ends at the last child with parameters called before the second norm, or before the block returns. Blocks
    that do not go norm, branch, norm, branch give an empty list.
    """
    block = teacher.blocks[layer - 1]
    called: list[str] = []
    handles = []
    for name, child in block.named_children():
        if any(True for _ in child.parameters()):
            handles.append(child.register_forward_hook(lambda *_, name=name: called.append(name)))
    size = teacher.preprocess.size
    try:
        with torch.no_grad():
            x_btd, context = teacher.embed(torch.zeros(1, 3, size, size).to(next(teacher.model.parameters())))
            teacher.step(layer, x_btd, context)
    finally:
        for handle in handles:
            handle.remove()
    norms = [i for i, name in enumerate(called) if _is_norm(getattr(block, name), teacher.dim)]
    if (
        len(norms) != 2
        or norms[0] != 0
        or norms[1] < 2
        or norms[1] == len(called) - 1
        or len(set(called)) != len(called)
    ):
        return []
    return [called[0], called[norms[1] - 1], called[norms[1]], called[-1]]


def _is_norm(module: nn.Module, dim: int) -> bool:
    shapes = {tuple(p.shape) for p in module.parameters()}
    return "norm" in type(module).__name__.lower() and shapes == {(dim,)}
