"""The blocks a surrogate ties: the paper's, or a copy of a teacher's, and how the layer number conditions them."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raptor.surrogate.adapters import DepthLinear, Weights, adapt, matrix_names
from raptor.surrogate.attention import attend
from raptor.surrogate.gelu import gelu
from raptor.surrogate.swiglu import swiglu
from raptor.vit.view import Context, ViT, first_tensor, with_state


class Modulation(NamedTuple):
    """Per-depth factors, each (D,), (1, 1, D), (B, 1, D) with one depth a row, or None.

    They multiply and shift the parts of a block.

    `t1`, `t2` scale the two branches, `t3` the output, as the paper names them. The rest exist only with a table:
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

    def flattened(self, start: int) -> Modulation:
        """All axes from `start` on made one: vectors (D,) of one depth with 0, rows (n, D) of n depths with 1."""
        if self.t1.ndim == start + 1:
            return self
        return Modulation(*(None if part is None else part.flatten(start) for part in self))  # type: ignore[arg-type]


class DepthMLP(nn.Module):
    """The paper's depth scaling: `(t1, t2, t3) = W2 SiLU(W1 l + b1) + b2 + 1`, with l as a plain float."""

    def __init__(self, dim: int, hidden: int = 16):
        super().__init__()
        self.w1 = nn.Linear(1, hidden)
        self.w2 = nn.Linear(hidden, 3 * dim)
        nn.init.normal_(self.w2.weight, std=1e-4)
        nn.init.normal_(self.w2.bias, std=1e-4)

    def forward(self, depth: Tensor) -> Modulation:
        # Not in bf16: near 1 it knows no factor closer than 1/256.
        with torch.autocast(depth.device.type, enabled=False):
            t = self.w2(F.silu(self.w1(depth.reshape(-1, 1, 1)))) + 1
        return Modulation(*t.chunk(3, dim=-1))


class DepthTable(nn.Module):
    """A learned row of scales and shifts for each depth `first..last`; past the last depth its last row is held."""

    first: Tensor
    last: Tensor
    plain: Tensor  # the factors of rows that are zero

    def __init__(self, dim: int, first: int, last: int):
        super().__init__()
        # Tensors, since a compiled block would be made anew for each phase's numbers.
        self.register_buffer("first", torch.tensor(float(first)), persistent=False)
        self.register_buffer("last", torch.tensor(float(last)), persistent=False)
        self.rows = nn.Parameter(torch.zeros(last - first + 1, 8 * dim))
        plain = torch.tensor(_factors(None)).repeat_interleave(dim)
        self.register_buffer("plain", plain, persistent=False)

    def forward(self, depth: Tensor) -> Modulation:
        """Vectors (D,) for one depth as a 0-d tensor, else rows (n, 1, D)."""
        row = (depth.reshape(-1).clamp(self.first, self.last) - self.first).long()
        factors = self.rows[row] + self.plain
        factors = factors.flatten() if depth.ndim == 0 else factors[:, None]
        return Modulation(*factors.chunk(8, dim=-1))


class Folded(NamedTuple):
    """A paper block with all that scales or shifts beside its linear layers moved into them.

    `layers` has weight and bias of qkv, proj, wi and wo, with the norms' gains and biases, LayerScale and the depth's
    factors in them; `t3` and `shift3` are left for the sum.
    """

    layers: tuple[tuple[Tensor, Tensor], ...]
    t3: Any
    shift3: Any


class PaperBlock(nn.Module):
    """The paper's block: pre-norm attention and SwiGLU, LayerScale, biases everywhere (docs/method.md).

    `kernel_tokens` are the numbers of tokens at which training takes attention by our kernels; its step sets them.
    """

    kernel_tokens: tuple[int, ...] = ()

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

    def forward(
        self,
        x_btd: Tensor,
        modulation: Modulation | None = None,
        *_args: Any,
        folded: Folded | None = None,
        normed_btd: Tensor | None = None,
        **_kwargs: Any,
    ) -> Tensor:
        """The next state. `folded` and `normed_btd` are the results of `fold` and of `norm_ahead`, if known.

        Training passes `folded`, and the gradients of SwiGLU and attention are then taken in one kernel each.
        """
        m = modulation
        if not _one_depth(m):
            return self._one_depth_a_row(x_btd, m)  # type: ignore[arg-type]
        if folded is None and not torch.is_grad_enabled():
            return self.infer(x_btd, m)
        fused = folded is not None
        if folded is None:
            folded = self.fold(None if m is None else m.flattened(0))
        qkv, proj, wi, wo = folded.layers
        y_btd = F.linear(_plain_norm(x_btd, self.norm1) if normed_btd is None else normed_btd, *qkv)
        if fused:  # the gradients of biases added to the stream are sums of its gradient, taken where that is made
            kernel = y_btd.shape[1] in self.kernel_tokens
            u_btd = x_btd + proj[1] + F.linear(attend(y_btd, self.num_heads, kernel), proj[0])
            h_btf = self.hidden(_plain_norm(u_btd, self.norm2), *wi, fused=fused)
            return folded.t3 * u_btd + (wo[1] + folded.shift3) + F.linear(h_btf, wo[0])
        u_btd = x_btd + F.linear(attend(y_btd, self.num_heads), *proj)
        h_btf = self.hidden(_plain_norm(u_btd, self.norm2), *wi, fused=fused)
        return folded.t3 * u_btd + F.linear(h_btf, *wo) + folded.shift3

    def fold(self, modulation: Modulation | None = None, weights: Weights | None = None) -> Folded:
        """The block's layers at a depth whose factors are vectors (D,).

        Or at n depths, with factors (n, D): what differs between depths then has a first axis of n, the rest has none.
        `weights` stand for those of qkv, proj, wi and wo.
        """
        t1, t2, t3, scale1, shift1, scale2, shift2, shift3 = _factors(modulation)
        own = [(layer.weight, layer.bias) for layer in (self.qkv, self.proj, self.wi, self.wo)]
        qkv, proj, wi, wo = own if weights is None else weights
        qkv, wi = _folded_norm(self.norm1, qkv, scale1, shift1), _folded_norm(self.norm2, wi, scale2, shift2)
        proj, wo = _scaled(proj, t1 * self.g1), _scaled(wo, t3 * t2 * self.g2)
        return Folded((qkv, proj, wi, wo), t3, shift3)

    def infer(self, x_btd: Tensor, modulation: Modulation | None, weights: Weights | None = None) -> Tensor:
        """The next state at one depth, for no gradient: as many passes over the states as without any modulation.

        The norms take the depth's gains and offsets, and only proj and wo are scaled. Scaling all four layers, as
        `fold` does, costs a sixth to a third of the forward pass of a single image on a CPU.
        """
        m = None if modulation is None else modulation.flattened(0)
        t1, t2, t3, scale1, shift1, scale2, shift2, shift3 = _factors(m)
        own = [(layer.weight, layer.bias) for layer in (self.qkv, self.proj, self.wi, self.wo)]
        qkv, proj, wi, wo = own if weights is None else weights
        y_btd = F.linear(_modulated_norm(x_btd, self.norm1, scale1, shift1), *qkv)
        gain1, gain2 = self.gains()
        u_btd = x_btd + _modulated_linear(attend(y_btd, self.num_heads), proj, _product(t1, gain1))
        h_btf = self.hidden(_modulated_norm(u_btd, self.norm2, scale2, shift2), *wi)  # type: ignore[arg-type]
        v_btd = _modulated_linear(h_btf, wo, _product(t3, t2, gain2), shift3)
        if m is None:
            return u_btd + v_btd
        with torch.autocast(x_btd.device.type, enabled=False):  # which would write v_btd in fp32 first
            return torch.addcmul(v_btd, u_btd, t3)

    def gains(self) -> tuple[Any, Any]:
        """LayerScale of the two branches; the number 1 where there is none."""
        return self.g1, self.g2

    def norm_ahead(self, x_btd: Tensor) -> Tensor:
        """What the next block of this kind makes of its input first, in the precision of the products.

        Taken together with the loss on that input, neither it nor its gradient costs a further pass over memory.
        """
        normed_btd = _plain_norm(x_btd, self.norm1)
        return normed_btd.to(product_dtype(normed_btd))

    def _one_depth_a_row(self, x_btd: Tensor, m: Modulation) -> Tensor:
        """The same, with scales and shifts that differ between rows and so cannot be folded into the weights."""
        y_btd = self.qkv(_film(self.norm1(x_btd), m.scale1, m.shift1))
        u_btd = x_btd + (m.t1 * self.g1) * self.proj(attend(y_btd, self.num_heads))
        h_btf = self.hidden(_film(self.norm2(u_btd), m.scale2, m.shift2), self.wi.weight, self.wi.bias)
        v_btd = u_btd + (m.t2 * self.g2) * self.wo(h_btf)
        return _film(v_btd, m.t3, m.shift3)

    def hidden(self, x_btd: Tensor, weight_fd: Tensor, bias_f: Tensor, fused: bool = False) -> Tensor:
        """The hidden activations of the MLP."""
        return swiglu(x_btd, weight_fd, bias_f, fused)


def product_dtype(tensor: Tensor) -> torch.dtype:
    """The precision in which a matrix product takes `tensor`: autocast's, or its own."""
    kind = tensor.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else tensor.dtype


def _one_depth(m: Modulation | None) -> bool:
    """Whether all rows of a batch are at the same depth."""
    return m is None or m.t1.ndim < 3 or m.t1.shape[0] == 1


def _factors(m: Modulation | None) -> list[Any]:
    """All factors in `Modulation`'s order; plain ones (scales) and zeros (shifts) where there are none."""
    plain = [0.0 if name.startswith("shift") else 1.0 for name in Modulation._fields]
    return plain if m is None else [default if value is None else value for value, default in zip(m, plain)]


# Scales and shifts along the features are folded into the weights of the linear layer beside them: in the backward
# pass their gradients then come out of the weight's, and no sum over all tokens is needed for each.


def _folded_norm(norm: nn.LayerNorm, linear: Any, scale: Any, shift: Any) -> tuple[Tensor, Tensor]:
    """Weight and bias that make `linear(scale * norm(x) + shift)` of `_plain_norm(x, norm)`."""
    (weight, bias), gain = linear, (scale * norm.weight)[..., None, :]
    offset = (scale * norm.bias + shift)[..., None, :]
    return weight * gain, bias + (weight * offset).sum(dim=-1)


def _scaled(linear: Any, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Weight and bias that make `scale * linear(x)`."""
    weight, bias = linear
    return scale[..., None] * weight, scale * bias


def _plain_norm(x: Tensor, norm: nn.LayerNorm) -> Tensor:
    """LayerNorm without gain and bias."""
    return F.layer_norm(x, norm.normalized_shape, eps=norm.eps)


# Without a gradient a factor that is a number is 1 or 0, and costs no operation: on a GPU the many small ones of a
# depth take longer to launch than to run.


def _product(*factors: Any) -> Any:
    """The product of the factors that are tensors; the number 1 where none is."""
    tensors = [factor for factor in factors if isinstance(factor, Tensor)]
    return math.prod(tensors[1:], start=tensors[0]) if tensors else 1.0


def _affine(values: Tensor, scale: Any, shift: Any) -> Tensor:
    """`scale * values + shift` in one operation."""
    if not isinstance(shift, Tensor):
        return scale * values if isinstance(scale, Tensor) else values
    return torch.addcmul(shift, scale, values) if isinstance(scale, Tensor) else values + shift


def _modulated_norm(x: Tensor, norm: nn.LayerNorm, scale: Any, shift: Any) -> Tensor:
    """`scale * norm(x) + shift` in one pass."""
    gain, offset = _affine(norm.weight, scale, 0.0), _affine(norm.bias, scale, shift)
    return F.layer_norm(x, norm.normalized_shape, gain, offset, norm.eps)


def _modulated_linear(x: Tensor, linear: Any, scale: Any, shift: Any = 0.0) -> Tensor:
    """`scale * linear(x) + shift`, with the smaller of weight and output scaled."""
    if isinstance(scale, Tensor) and x.shape[:-1].numel() < x.shape[-1]:
        return _film(F.linear(x, *linear), scale, shift if isinstance(shift, Tensor) else None)
    weight, bias = linear
    return F.linear(x, scale[:, None] * weight if isinstance(scale, Tensor) else weight, _affine(bias, scale, shift))


class CopiedBlock(nn.Module):
    """A copy of one of the teacher's blocks, always in eval mode (no dropout, no drop-path), modulated by depth.

    Where the block has two norms and two branches, `t1`, `t2` act at the branches' ends and the other scales and
    shifts after the norms. A block of another make is modulated as a whole: `t1` scales its whole update.

    `layers` are its linear layers that take the weights of a depth: those that `adapted` names.
    """

    def __init__(self, teacher: ViT, layer: int, modulated: bool, adapted: Sequence[str] = ()):
        super().__init__()
        self.block = _own_copy(teacher.blocks[layer - 1])
        self.block.requires_grad_(True)
        self.adapted = list(adapted)
        self.layers: list[DepthLinear] = adapt(self.block, adapted)
        self.points: list[str] = _modulation_points(teacher, layer) if modulated else []
        for name in self.points:
            setattr(self.block, name, _Modulated(getattr(self.block, name)))
        self.train(self.training)
        self._plain: tuple[PlainBlock | None] = (None,)  # in a tuple, so that it is not registered a second time
        x_btd, context = _first_state(teacher)
        self._plain = (_plain_block(self, x_btd, [context.calls[n] for n in context.distinct()]),)

    @property
    def plain(self) -> PlainBlock | None:
        """This block as a `PlainBlock`, if it is of that make and nobody has changed it since."""
        plain = self._plain[0]
        return plain if plain is not None and plain.stands_for(self.block) else None

    def train(self, mode: bool = True) -> CopiedBlock:
        super().train(mode)
        self.block.eval()
        return self

    def forward(
        self,
        x_btd: Tensor,
        modulation: Modulation | None = None,
        *args: Any,
        weights: Weights | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """The next state. `weights` are those of `layers`: of one depth, or of n whose rows follow each other."""
        m = modulation
        if m is None and weights is None:
            return first_tensor(self.block(x_btd, *args, **kwargs))
        if not torch.is_grad_enabled() and not torch.compiler.is_compiling():  # a compiler fuses the factors by itself
            only_state = all(value is None or value is False for value in (*args, *kwargs.values()))
            one_depth = _one_depth(m) and (weights is None or weights[0][0].ndim == 2)
            plain = self.plain if only_state and one_depth else None
            if plain is not None:
                return plain.infer(x_btd, m, weights)
        self._set(m, weights)
        try:
            state = first_tensor(self.block(x_btd, *args, **kwargs))
        finally:
            self._set(None, None)
        if m is None:
            return state
        if not self.points:
            state = x_btd + m.t1 * (state - x_btd)
        return _film(state, m.t3, m.shift3)

    def _set(self, m: Modulation | None, weights: Weights | None) -> None:
        factors = (None,) * 4 if m is None else ((m.scale1, m.shift1), (m.t1, None), (m.scale2, m.shift2), (m.t2, None))
        for name, factor in zip(self.points, factors):
            getattr(self.block, name).factor = factor
        for i, layer in enumerate(self.layers):
            layer.now = None if weights is None else weights[i]


class _Modulated(nn.Module):
    """A module whose output is scaled and shifted by what `factor` holds at the time of the call."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner
        self.factor: tuple[Tensor | None, Tensor | None] | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = self.inner(*args, **kwargs)
        if self.factor is None:
            return output
        return with_state(output, _film(first_tensor(output), *self.factor))


class PlainBlock(PaperBlock):
    """A copied block of the most common make, on the copy's own modules: the paper's block with GELU for SwiGLU.

    It computes what the copy computes, with all that scales or shifts folded into the linear layers.
    """

    def __init__(self, copied: CopiedBlock):
        nn.Module.__init__(self)
        parts = [_part(copied.block, path) for path in _PLAIN_PARTS]
        self.norm1, self.qkv, self.proj, self.norm2, self.wi, self.wo = parts  # type: ignore[assignment]
        self.num_heads = num_heads_of(copied.block, self.proj.out_features)
        self.ls1, self.ls2 = _part(copied.block, "ls1"), _part(copied.block, "ls2")
        self._compared = [(module, tuple(module._modules.values())) for module in copied.block.modules()]

    @property
    def g1(self) -> Tensor:  # type: ignore[override]
        return self._or_ones(self.gains()[0])

    @property
    def g2(self) -> Tensor:  # type: ignore[override]
        return self._or_ones(self.gains()[1])

    def gains(self) -> tuple[Any, Any]:
        return getattr(self.ls1, "gamma", 1.0), getattr(self.ls2, "gamma", 1.0)

    def _or_ones(self, gain: Any) -> Tensor:
        return gain if isinstance(gain, Tensor) else torch.ones_like(self.norm1.weight)

    def stands_for(self, block: nn.Module) -> bool:
        """Whether the copy's `block` is still what this view was made of.

        It is not once a module was exchanged or hooked into, or the weights were made of another kind (quantised).
        """
        if block is not self._compared[0][0]:
            return False
        for module, children in self._compared:  # as fast as it can be: it is asked before every step
            if module._forward_hooks or module._forward_pre_hooks or tuple(module._modules.values()) != children:
                return False
        return all(type(layer.weight) in (nn.Parameter, Tensor) for layer in (self.proj, self.wo))

    def hidden(self, x_btd: Tensor, weight_fd: Tensor, bias_f: Tensor, fused: bool = False) -> Tensor:
        return gelu(x_btd, weight_fd, bias_f, fused)


_PLAIN_PARTS = ("norm1", "attn.qkv", "attn.proj", "norm2", "mlp.fc1", "mlp.fc2")
_PLAIN_LINEAR = [path for path in _PLAIN_PARTS if "." in path]


@torch.no_grad()
def _plain_block(
    copied: CopiedBlock, x_btd: Tensor, calls: Sequence[tuple[tuple[Any, ...], dict[str, Any]]]
) -> PlainBlock | None:
    """`copied` as a `PlainBlock`, or None where on `x_btd` with the arguments of one of `calls` it computes something
    else: a tied block runs at several depths, which may have other arguments than the one it was copied from.

    Both are compared with random weights in place of its own, which may not be loaded yet and may hide a difference: a
    position bias of zeros, inputs of an activation near 0.

    With adapters it takes the weights of each depth, if the adapted layers are its four.
    """
    if copied.adapted not in ([], _PLAIN_LINEAR):
        return None
    kinds = [type(_part(copied.block, path)) for path in _PLAIN_PARTS]
    if not all(issubclass(kind, nn.Linear if "." in path else nn.LayerNorm) for kind, path in zip(kinds, _PLAIN_PARTS)):
        return None
    if any(_part(copied.block, f"{path}.{name}") is None for path in _PLAIN_PARTS for name in ("weight", "bias")):
        return None
    wide = "cpu" if x_btd.device.type == "mps" else x_btd.device
    exact, x_btd = copy.deepcopy(copied).to(wide, torch.float64), x_btd.to(wide, torch.float64)
    generator = torch.Generator().manual_seed(0)
    for parameter in exact.parameters():
        scale = parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 1.0
        parameter.copy_(scale * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    factors = torch.linspace(0.5, 1.5, 8 * x_btd.shape[-1], dtype=torch.float64, device=wide).view(8, -1)
    modulation = Modulation(*factors) if copied.points else None
    try:
        ours = PlainBlock(exact)(x_btd, modulation) - x_btd
        for call in calls:
            args, kwargs = _in_double(call, wide)
            update = exact(x_btd, modulation, *args, **kwargs) - x_btd
            if not (ours - update).norm() <= 1e-6 * update.norm():  # nor if they are NaN
                return None
    except (RuntimeError, TypeError):  # its layers or arguments do not fit together
        return None
    return PlainBlock(copied)


@torch.no_grad()
def _first_state(teacher: ViT) -> tuple[Tensor, Context]:
    """`a_0` of one image, and what the teacher calls its blocks with beside the state."""
    size = teacher.preprocess.size
    image = torch.linspace(-1, 1, 3 * size * size).view(1, 3, size, size)
    return teacher.embed(image.to(next(teacher.model.parameters())))


def _example(teacher: ViT, layer: int) -> tuple[Tensor, tuple[Any, ...], dict[str, Any]]:
    """A state of one image, and what the teacher calls the block of `layer` with beside it."""
    x_btd, context = _first_state(teacher)
    return x_btd, *context.calls[layer - 1]


def _part(module: Any, path: str) -> Any:
    """What stands at `path` below `module`, with modulated modules taken as those they modulate; None if nothing."""
    for name in path.split("."):
        module = getattr(module, name, None)
        module = module.inner if isinstance(module, _Modulated) else module
    return module


@torch.no_grad()
def start_table(table: DepthTable, block: CopiedBlock, teacher: ViT, first: int) -> None:
    """Start a table from the norms and LayerScale of each depth's own block, from layer `first` on.

    The copied block's own gains become their root mean squares over the depths, so that no factor is above sqrt(n).
    """
    if not block.points:
        raise ValueError(f"the blocks of {teacher.name} have no two norms for a table: take table_start plain")
    num = len(table.rows)
    blocks = [_own_copy(block) for block in teacher.blocks[first - 1 : first - 1 + num]]
    between = [
        _factors_between(getattr(block.block, name).inner, [getattr(own, name) for own in blocks], teacher.dim)
        for name in block.points
    ]
    (scale1, shift1), (t1, _), (scale2, shift2), (t2, _) = between
    none = torch.zeros_like(shift1)
    table.rows.copy_(torch.cat([t1 - 1, t2 - 1, none, scale1 - 1, shift1, scale2 - 1, shift2, none], dim=1))


def _factors_between(shared: nn.Module, own: Sequence[nn.Module], dim: int) -> tuple[Tensor, Tensor]:
    """Scales and shifts (n, D) that make a norm or LayerScale each of `own`; ones and zeros for other modules."""
    gains, offsets = zip(*(_gain_and_offset(module, dim) for module in own))
    gain_nd, offset_nd = torch.stack(gains), torch.stack(offsets)
    gain, offset = _gain_and_offset(shared, dim)
    gain.copy_(gain_nd.square().mean(0).sqrt())
    scale_nd = (gain_nd / gain).nan_to_num(1.0)
    return scale_nd, offset_nd - scale_nd * offset


def _gain_and_offset(module: nn.Module, dim: int) -> tuple[Tensor, Tensor]:
    """The gain and bias (D,) of a norm or LayerScale; new ones and zeros for another module."""
    found = list(module.parameters())
    if len(found) == 1 and found[0].shape == (dim,):  # LayerScale, or a norm without bias
        return found[0], torch.zeros_like(found[0])
    if _is_norm_of_width(module, dim):
        return module.weight, module.bias  # type: ignore[return-value]
    return torch.ones(dim).to(found[0]), torch.zeros(dim).to(found[0])


def adapted_layers(teacher: ViT, layer: int, rank: int) -> list[str]:
    """Names of the linear layers of a teacher's block that adapters of this rank change; ValueError if none can."""
    block = _own_copy(teacher.blocks[layer - 1])
    names = matrix_names(block, *_example(teacher, layer))
    if not names:
        raise ValueError(
            f"the blocks of {teacher.name} do not call linear layers that hold their matrices: leave out --adapters"
        )
    most = min(min(block.get_submodule(name).weight.shape) for name in names)  # type: ignore[union-attr, arg-type]
    if rank > most:
        raise ValueError(f"adapters of rank {rank} are larger than the matrices of {teacher.name}: at most {most}")
    return names


def own_layers(teacher: ViT, layer: int, names: Sequence[str]) -> list[nn.Linear]:
    """The linear layers `names` of the teacher's own block."""
    block = _own_copy(teacher.blocks[layer - 1])
    return [block.get_submodule(name) for name in names]  # type: ignore[misc]


def _own_copy(block: nn.Module) -> nn.Module:
    """A copy that holds its own weights, also of a step of a surrogate, whose weights its model holds."""
    copied = copy.deepcopy(block)
    own = getattr(copied, "own", None)
    if own is not None:
        own()
    return copied


@torch.no_grad()
def uses_places(teacher: ViT) -> bool:
    """Whether a block of the teacher treats patches by their place: rotary, bias, window, mask.

    Such a block does not commute with a permutation of the patches while its other arguments stay. The paper's block
    takes only the state, so it would lose what the arguments say. The first, middle and last block are looked at, and
    one of each kind of call.
    """
    size, num = teacher.preprocess.size, teacher.num_layers
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(1, 3, size, size, generator=generator).to(teacher.device)
    x_btd, context = teacher.embed(image)
    where = teacher.groups.slice("patches")
    order = torch.arange(x_btd.shape[1], device=x_btd.device)
    order[where] = order[where].roll(1)
    wide = "cpu" if x_btd.device.type == "mps" else x_btd.device
    x_btd, order = x_btd.to(wide, torch.float64), order.to(wide)
    for layer in sorted({1, (num + 1) // 2, num, *(n + 1 for n in context.distinct())}):
        # In float64: with a LayerScale of 1e-5 a block's update is lost in the rounding of float32.
        block = _own_copy(teacher.blocks[layer - 1]).to(wide, torch.float64)
        args, kwargs = _in_double(context.calls[layer - 1], wide)
        update = first_tensor(block(x_btd, *args, **kwargs)) - x_btd
        moved = first_tensor(block(x_btd[:, order], *args, **kwargs)) - x_btd[:, order]
        if not (moved - update[:, order]).norm() <= 1e-5 * update.norm():  # nor if they are NaN
            return True
    return False


def _in_double(value: Any, device: torch.device | str) -> Any:
    """All tensors in nested tuples, lists and dictionaries on `device`, real ones as float64."""
    if isinstance(value, Tensor):
        return value.to(device, torch.float64 if value.is_floating_point() else value.dtype)
    if isinstance(value, dict):
        return {name: _in_double(item, device) for name, item in value.items()}
    return type(value)(_in_double(item, device) for item in value) if type(value) in (tuple, list) else value


def num_heads_of(block: nn.Module, dim: int) -> int:
    """Attention heads of a teacher's block, as it states them; one for each 64 coordinates when it does not."""
    for module in block.modules():
        for name in ("num_heads", "num_attention_heads"):
            value = getattr(module, name, None)
            if isinstance(value, int) and value > 0 and dim % value == 0:
                return value
    return max(1, dim // 64)


def _film(x: Tensor, scale: Tensor | None, shift: Tensor | None) -> Tensor:
    # A bf16 x is promoted: bf16 factors near 1 would be off by up to 1/256.
    if scale is not None:
        x = x * scale
    return x if shift is None else x + shift


def _modulation_points(teacher: ViT, layer: int) -> list[str]:
    """Names of (first norm, end of first branch, second norm, end of second branch) among the block's children.

    A branch ends at the last child with parameters called before the second norm, or before the block returns. Blocks
    that do not go norm, branch, norm, branch, or whose branches end in more than their own update, give an empty list.
    """
    block = teacher.blocks[layer - 1]
    if isinstance(block, nn.TransformerEncoderLayer):  # its fast path reads its children's weights and never calls them
        return []
    called: list[str] = []
    handles = []
    for name, child in block.named_children():
        if any(True for _ in child.parameters()):
            handles.append(child.register_forward_hook(lambda *_, name=name: called.append(name)))
    x_btd, args, kwargs = _example(teacher, layer)
    try:
        with torch.no_grad():
            block(x_btd, *args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    norms = [i for i, name in enumerate(called) if _is_norm_of_width(getattr(block, name), teacher.dim)]
    if (
        len(norms) != 2
        or norms[0] != 0
        or norms[1] < 2
        or norms[1] == len(called) - 1
        or len(set(called)) != len(called)
    ):
        return []
    ends = called[norms[1] - 1], called[-1]
    handles = [getattr(block, name).register_forward_hook(_no_update) for name in ends]
    try:
        with torch.no_grad():
            left = first_tensor(block(x_btd, *args, **kwargs))
    finally:
        for handle in handles:
            handle.remove()
    # Without its updates a block returns the state; a child that adds the state itself has taken it along.
    return [called[0], ends[0], called[norms[1]], ends[1]] if torch.equal(left.to(x_btd), x_btd) else []


def _no_update(_module: nn.Module, _inputs: Any, output: Any) -> Any:
    return with_state(output, torch.zeros_like(first_tensor(output)))


def _is_norm_of_width(module: nn.Module, dim: int) -> bool:
    shapes = {tuple(p.shape) for p in module.parameters()}
    return "norm" in type(module).__name__.lower() and shapes == {(dim,)}
