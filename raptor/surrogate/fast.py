"""The blocks of `raptor.surrogate.block`, computed with fewer passes over the states.

Scales and shifts along the features are folded into the linear layers beside them, and activations and attention run
with fused gradients. `FastBlock` is such a view of a block, and tests compare the two. The view exists for the paper's
block and for copied blocks of the most common make: pre-norm, packed attention, an MLP with GELU, biases everywhere,
with or without LayerScale. Any other copied block runs as it is.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raptor.devices import HAS_TRITON
from raptor.surrogate import block as plain
from raptor.surrogate.adapters import Weights, at_each_depth
from raptor.surrogate.block import UNMODULATED, CopiedBlock, Modulated, Modulation, PaperBlock
from raptor.surrogate.kernels import activations, attention
from raptor.surrogate.teacher_blocks import double_device, first_state, in_double, num_heads_of
from raptor.vit.view import ViT

_PAPER_LAYERS = ("norm1", "qkv", "proj", "norm2", "wi", "wo")
_COPIED_LAYERS = ("norm1", "attn.qkv", "attn.proj", "norm2", "mlp.fc1", "mlp.fc2")
_COPIED_MATRICES = ["attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2"]
_SAME = 1e-6  # how far the view of a copied block may be from it in float64, relative to its update
# Numbers for missing factors: they cost no operation, and on a GPU the many small operations of a depth take longer to
# launch than to run.
_NO_FACTORS = Modulation(1.0, 1.0, 1.0, 1.0, 0.0, 1.0, 0.0, 0.0)  # type: ignore[arg-type]


class Folded(NamedTuple):
    """A block with everything that scales or shifts beside its linear layers moved into them.

    `layers` has weight and bias of qkv, proj, wi and wo, with the norms' gains and biases, LayerScale and the depth's
    factors in them; `t3` and `shift3` are left for the sum.
    """

    layers: tuple[tuple[Tensor, Tensor], ...]
    t3: Any
    shift3: Any


class AtDepth(NamedTuple):
    """What a block takes at one depth where no gradient is needed.

    Gains and offsets are of the two norms; `scale1`, `scale2` and `shift3` act on the ends of the two branches,
    if they are not in the weights already; `t3` scales the state before the second branch is added. `layers` has weight
    and bias of qkv, proj, wi and wo.
    """

    gain1: Tensor
    offset1: Tensor
    gain2: Tensor
    offset2: Tensor
    scale1: Tensor | None
    scale2: Tensor | None
    shift3: Tensor | None
    t3: Tensor | None
    layers: Any


class FastBlock(nn.Module):
    """A view of a paper's or copied block, on that block's own modules.

    `kernel_tokens` are the numbers of tokens at which training takes attention by our kernels; a training step sets
    them.
    """

    kernel_tokens: tuple[int, ...] = ()

    def __init__(self, block: PaperBlock | CopiedBlock):
        super().__init__()
        self.is_copy = isinstance(block, CopiedBlock)
        if isinstance(block, CopiedBlock):
            layers = [_part(block.block, path) for path in _COPIED_LAYERS]
            self.scale1 = _part(block.block, "ls1")
            self.scale2 = _part(block.block, "ls2")
            self.gain_names = ("gamma", "gamma")
            self.num_heads = num_heads_of(block.block, layers[2].out_features)
        else:
            layers = [_part(block, path) for path in _PAPER_LAYERS]
            self.scale1 = block
            self.scale2 = block
            self.gain_names = ("g1", "g2")
            self.num_heads = block.num_heads
        self.norm1, self.qkv, self.proj, self.norm2, self.wi, self.wo = layers
        # The modules themselves and not their names: an exchanged one may have the name of the old one.
        self._seen = [(module, tuple(module._modules.values())) for module in block.modules()]

    def stands_for(self, block: nn.Module) -> bool:
        """Whether `block` is still as it was when this view was made: no module exchanged or hooked into, and the
        weights of the same kind (not quantised).
        """
        if block is not self._seen[0][0]:
            return False
        for module, children in self._seen:  # written for speed: it is asked before every step
            if module._forward_hooks or module._forward_pre_hooks or tuple(module._modules.values()) != children:
                return False
        # Quantised weights are tensors of classes of their own.
        return all(type(layer.weight) in (nn.Parameter, Tensor) for layer in (self.proj, self.wo))

    def forward(
        self, x_btd: Tensor, _modulation: None, *_args: Any, folded: Folded, normed_btd: Tensor | None = None, **_: Any
    ) -> Tensor:
        """The next state, for training. `folded` comes from `layer_calls` and `normed_btd` from `norm_ahead`."""
        qkv, proj, wi, wo = folded.layers
        if normed_btd is None:
            normed_btd = _bare_norm(x_btd, self.norm1)
        y_btd = F.linear(normed_btd, *qkv)
        # Biases are added to the stream on their own: their gradients are then sums of its gradient, which are taken
        # where that gradient is made.
        heads_btd = attend(y_btd, self.num_heads, kernel=y_btd.shape[1] in self.kernel_tokens)
        u_btd = x_btd + proj[1] + F.linear(heads_btd, proj[0])
        activate = fused_swiglu
        if self.is_copy:
            activate = fused_gelu
        h_btf = activate(_bare_norm(u_btd, self.norm2), *wi)
        return folded.t3 * u_btd + (wo[1] + folded.shift3) + F.linear(h_btf, wo[0])

    def norm_ahead(self, x_btd: Tensor) -> Tensor:
        """The first thing that the next block of this kind makes of its input, in the precision of the products.

        Taken together with the loss on that input, neither it nor its gradient costs a further pass over memory.
        """
        normed_btd = _bare_norm(x_btd, self.norm1)
        return normed_btd.to(product_dtype(normed_btd))

    def fold(self, modulation: Modulation | None = None, weights: Weights | None = None) -> Folded:
        """The block's layers at a depth whose factors are vectors (D,).

        Or at n depths, with factors (n, D): whatever differs between depths then has a first axis of n, the rest has
        none. `weights` are the adapted layers'.

        Folding makes the gradients of scales and shifts out of the weights' gradients, without a sum over all tokens
        for each of them. Together with making all depths of a phase at once it took the paper's block of ViT-B from 377
        to 398 TFLOP/s on an H200.
        """
        m = _NO_FACTORS
        if modulation is not None:
            given = {name: factor for name, factor in modulation._asdict().items() if factor is not None}
            m = m._replace(**given)
        qkv, proj, wi, wo = self.weights_with(weights)
        g1, g2 = self._gains()
        if g1 is None:
            g1 = torch.ones_like(self.norm1.weight)
        if g2 is None:
            g2 = torch.ones_like(self.norm2.weight)
        qkv = _folded_norm(self.norm1, qkv, m.scale1, m.shift1)
        proj = _folded_scale(proj, m.t1 * g1)
        wi = _folded_norm(self.norm2, wi, m.scale2, m.shift2)
        wo = _folded_scale(wo, m.t3 * m.t2 * g2)
        return Folded((qkv, proj, wi, wo), m.t3, m.shift3)

    def infer(self, x_btd: Tensor, modulation: Modulation | None, weights: Weights | None = None) -> Tensor:
        """The next state at one depth, for no gradient: as many passes over the states as without any modulation."""
        # Whichever is smaller is scaled: the outputs of the branches for a single image, their weights for many.
        scale_weights = x_btd.shape[:-1].numel() >= x_btd.shape[-1]
        return self.run(x_btd, self.at_depth(modulation, weights, scale_weights))

    def takes(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether `run` may be called where the teacher passes these arguments beside the state.

        The paper's block ignores them; a copied one may use them, and `run` would not.
        """
        return not self.is_copy or all(value is None or value is False for value in (*args, *kwargs.values()))

    def at_depth(self, modulation: Modulation | None, weights: Weights | None, scale_weights: bool) -> AtDepth:
        """What `run` takes at one depth. `weights` are the adapted layers'.

        The norms take the depth's gains and offsets, and only proj and wo are scaled. Scaling all four layers, as
        `fold` does, costs a sixth to a third of the forward pass of a single image on a CPU.
        """
        m = UNMODULATED
        t3 = None  # without modulation nothing multiplies the stream, not even 1, which would cost a pass over it
        if modulation is not None:
            m = modulation.flattened(0)
            t3 = m.t3
        qkv, proj, wi, wo = self.weights_with(weights)
        g1, g2 = self._gains()
        scale1 = _product(m.t1, g1)
        scale2 = _product(_product(m.t3, m.t2), g2)
        shift3 = m.shift3
        if scale_weights:
            proj = _scaled(proj, scale1, None)
            wo = _scaled(wo, scale2, shift3)
            scale1 = scale2 = shift3 = None
        return AtDepth(
            *_modulated_norm(self.norm1, m.scale1, m.shift1),
            *_modulated_norm(self.norm2, m.scale2, m.shift2),
            scale1,
            scale2,
            shift3,
            t3,
            (qkv, proj, wi, wo),
        )

    def run(self, x_btd: Tensor, at: AtDepth, fused: bool = False) -> Tensor:
        """The next state, for no gradient.

        fused: take each product together with the sum that follows it. That rounds once instead of twice, so a copied
        block at its own depth is no longer the teacher's to the last bit.
        """
        qkv, proj, wi, wo = at.layers
        shape = self.norm1.normalized_shape
        y_btd = F.linear(F.layer_norm(x_btd, shape, at.gain1, at.offset1, self.norm1.eps), *qkv)
        z_btd = F.linear(plain.attend(y_btd, self.num_heads), *proj)
        with _without_autocast(x_btd):  # which would first write a bf16 branch in fp32
            if at.scale1 is None:
                u_btd = x_btd + z_btd
            elif fused:
                u_btd = torch.addcmul(x_btd, z_btd, at.scale1)
            else:
                u_btd = x_btd + z_btd * at.scale1
        y_btf = F.linear(F.layer_norm(u_btd, shape, at.gain2, at.offset2, self.norm2.eps), *wi)
        activate: Any = plain.swiglu
        if self.is_copy:
            activate = F.gelu
        z_btd = F.linear(activate(y_btf), *wo)
        with _without_autocast(x_btd):
            if at.scale2 is not None and fused and at.shift3 is not None:
                z_btd = torch.addcmul(at.shift3, z_btd, at.scale2)
            elif at.scale2 is not None:
                z_btd = z_btd * at.scale2
                if at.shift3 is not None:
                    z_btd = at.shift3 + z_btd
            if at.t3 is None:
                return u_btd + z_btd
            return torch.addcmul(z_btd, u_btd, at.t3)

    def weights_with(self, adapted: Weights | None) -> list[Any]:
        """Weight and bias of qkv, proj, wi and wo. `adapted` takes the place of all four, or of the last two."""
        own = [(layer.weight, layer.bias) for layer in (self.qkv, self.proj, self.wi, self.wo)]
        if adapted is None:
            return own
        return [*own[: len(own) - len(adapted)], *adapted]

    def _gains(self) -> tuple[Tensor | None, Tensor | None]:
        """LayerScale of the two branches."""
        first, second = self.gain_names
        return getattr(self.scale1, first, None), getattr(self.scale2, second, None)


def attend(qkv_btf: Tensor, num_heads: int, kernel: bool) -> Tensor:
    """Attention over packed queries, keys and values; in bf16 by our kernels where they may be taken."""
    if kernel and qkv_btf.dtype == torch.bfloat16:
        return attention.attention(qkv_btf, num_heads)[0]
    return plain.attend(qkv_btf, num_heads)


def fused_swiglu(x_btd: Tensor, weight_fd: Tensor, bias_f: Tensor) -> Tensor:
    """SwiGLU of a linear layer's output. On a GPU its gradient takes one pass, and is once differentiable."""
    if x_btd.is_cuda and HAS_TRITON and weight_fd.dtype != torch.float64:
        return activations.SwiGLU.apply(F.linear(x_btd, weight_fd), bias_f)
    return plain.swiglu(F.linear(x_btd, weight_fd, bias_f))


def fused_gelu(x_btd: Tensor, weight_fd: Tensor, bias_f: Tensor) -> Tensor:
    """GELU of a linear layer's output. In bf16 on a GPU its gradient takes one pass, and is once differentiable."""
    if x_btd.is_cuda and HAS_TRITON and weight_fd.dtype == torch.bfloat16:
        return activations.GELU.apply(F.linear(x_btd, weight_fd, bias_f.detach()), bias_f)
    return F.gelu(F.linear(x_btd, weight_fd, bias_f))


def product_dtype(tensor: Tensor) -> torch.dtype:
    """The precision in which a matrix product takes `tensor`: autocast's, or its own."""
    kind = tensor.device.type
    if torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return tensor.dtype


def _bare_norm(x: Tensor, norm: nn.LayerNorm) -> Tensor:
    """LayerNorm without gain and bias."""
    return F.layer_norm(x, norm.normalized_shape, eps=norm.eps)


def _folded_norm(norm: nn.LayerNorm, linear: Any, scale: Any, shift: Any) -> tuple[Tensor, Tensor]:
    """Weight and bias that make `linear(scale * norm(x) + shift)` of `_bare_norm(x, norm)`."""
    weight, bias = linear
    gain = (scale * norm.weight)[..., None, :]
    offset = (scale * norm.bias + shift)[..., None, :]
    return weight * gain, bias + (weight * offset).sum(dim=-1)


def _folded_scale(linear: Any, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Weight and bias that make `scale * linear(x)`."""
    weight, bias = linear
    return scale[..., None] * weight, scale * bias


def _modulated_norm(norm: nn.LayerNorm, scale: Tensor | None, shift: Tensor | None) -> tuple[Tensor, Tensor]:
    """Gain and offset that make `scale * norm(x) + shift`, or `norm(x)` for factors that leave the norms alone."""
    if scale is None or shift is None:
        return norm.weight, norm.bias
    return scale * norm.weight, torch.addcmul(shift, scale, norm.bias)


def _product(factor: Any, gain: Tensor | None) -> Tensor | None:
    """Two factors as one; None for no factor. A factor that is a number is 1."""
    if not isinstance(factor, Tensor):
        return gain
    if gain is None:
        return factor
    return factor * gain


def _scaled(linear: Any, scale: Tensor | None, shift: Tensor | None) -> tuple[Tensor, Tensor]:
    """Weight and bias that make `scale * linear(x) + shift`; without a scale there is no shift."""
    weight, bias = linear
    if scale is None:
        return weight, bias
    if shift is None:
        return scale[:, None] * weight, scale * bias
    return scale[:, None] * weight, torch.addcmul(shift, scale, bias)


def _without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    if torch.is_autocast_enabled(x.device.type):
        return torch.autocast(x.device.type, enabled=False)
    return nullcontext()  # a graph that is exported should hold no trace of it


# A phase's layers, made at once for all of its depths. Each depth on its own would scale and round the tied weights
# again, and its gradients would be taken apart and added to the others' one by one.


class LayerCall(NamedTuple):
    """What a phase's block takes at one of its layers, beside the state and the teacher's own arguments.

    Attributes:
        modulation: its factors as vectors (D,); None for a fast block, whose folded layers have them.
        kwargs: the folded layers, or the weights of that depth where it has its own.
    """

    modulation: Modulation | None
    kwargs: dict[str, Any]


def fold_depths(block: FastBlock, modulation: Modulation | None, weights: Weights | None, dtype: torch.dtype) -> Folded:
    """All depths' layers, where `modulation` has factors (n, D) and `weights` are of n depths.

    Tensors that differ between depths are rounded to `dtype` here, where a compiler fuses it. `RoundedCopies` rounds
    the shared ones.
    """
    layers, t3, shift3 = block.fold(modulation, weights)
    rounded = []
    for weight, bias in layers:
        if weight.ndim == 3:
            weight = weight.to(dtype)
        if bias.ndim == 2:
            bias = bias.to(dtype)
        rounded.append((weight, bias))
    return Folded(tuple(rounded), t3, shift3)


def layer_calls(
    tied: Any, block: nn.Module, depth_n: Tensor, fold: Callable[..., Folded] = fold_depths
) -> list[LayerCall]:
    """How the tied block of a phase is called at each of the depths (n,) of its layers.

    Everything is made for the whole phase here, because a compiled block that read a table would be compiled again for
    each phase.

    Args:
        block: what runs: the block's fast view, or the block itself.
        fold: `fold_depths`, or its compiled form, which scales and rounds in fused kernels.
    """
    num_depths = len(depth_n)
    modulation = tied.modulation(depth_n)
    if modulation is not None:
        modulation = modulation.flattened(1)
    weights = tied.weights(depth_n)
    if isinstance(block, FastBlock):
        dtype = product_dtype(block.norm1.weight)
        folded = fold(block, modulation, weights, dtype)
        return [LayerCall(None, {"folded": one}) for one in _each_depth(folded, num_depths, dtype)]
    factors: Sequence[Modulation | None] = [None] * num_depths
    if modulation is not None:
        factors = modulation.unbind()
    if weights is None:
        return [LayerCall(one, {}) for one in factors]
    return [LayerCall(one, {"weights": own}) for one, own in zip(factors, at_each_depth(weights))]


def _each_depth(folded: Folded, num_depths: int, dtype: torch.dtype) -> list[Folded]:
    """The layers of n depths as one `Folded` for each."""
    own: list[bool] = []  # whether weight and bias of each layer differ between depths
    tensors: list[Tensor] = []
    for weight, bias in folded.layers:
        own += [weight.ndim == 3, bias.ndim == 2]
        tensors += [weight, bias]
    shared = [tensor for tensor, differs in zip(tensors, own) if not differs]
    # All in one call, because each call of the function is a node of the graph.
    copies = RoundedCopies.apply(num_depths, dtype, *shared)
    by_depth: list[Sequence[Tensor]] = []
    num_taken = 0
    for tensor, differs in zip(tensors, own):
        if differs:
            by_depth.append(tensor.unbind())
        else:
            by_depth.append(copies[num_taken : num_taken + num_depths])
            num_taken += num_depths
    t3_n: Sequence[Any] = [folded.t3] * num_depths
    if isinstance(folded.t3, Tensor):
        t3_n = folded.t3.unbind()
    shift3_n: Sequence[Any] = [folded.shift3] * num_depths
    if isinstance(folded.shift3, Tensor):
        shift3_n = folded.shift3.unbind()
    each = []
    for n in range(num_depths):
        here = [depths[n] for depths in by_depth]
        layers = tuple(zip(here[0::2], here[1::2]))
        each.append(Folded(layers, t3_n[n], shift3_n[n]))
    return each


class RoundedCopies(torch.autograd.Function):
    """`num` copies of each tensor in another precision; their gradients are added up at once in the tensor's own.

    Autograd would add them one by one, in bf16, where a gradient of 1/512 beside 1 is lost.
    """

    @staticmethod
    def forward(ctx: Any, num: int, dtype: torch.dtype, *tensors: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        ctx.num = num
        ctx.dtypes = [tensor.dtype for tensor in tensors]
        copies = []
        for tensor in tensors:
            rounded = tensor.to(dtype)
            # Own tensors over one memory: autograd tells the outputs apart by the tensor, and nothing is copied.
            copies += [rounded.detach() for _ in range(num)]
        return tuple(copies)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        sums = []
        for n, dtype in enumerate(ctx.dtypes):
            part = grads[n * ctx.num : (n + 1) * ctx.num]
            sums.append(torch.stack(part).sum(0, dtype=dtype))
        return None, None, *sums


# Whether a copied block is of the common make.


@torch.no_grad()
def view_of_copy(copied: CopiedBlock, teacher: ViT) -> FastBlock | None:
    """The view of a copied block, or None where the block computes something else.

    Both are compared on an image with the arguments of all the teacher's blocks, because a tied block runs at several
    depths. Random weights stand in for its own, which may not be loaded yet and may hide a difference: a position bias
    of zeros, inputs of an activation near 0. The adapted layers must be the view's four, or its wi and wo.
    """
    if copied.adapted not in ([], _COPIED_MATRICES, _COPIED_MATRICES[2:]):
        return None
    for path in _COPIED_LAYERS:
        layer = _part(copied.block, path)
        kind: type[nn.Module] = nn.LayerNorm
        if path in _COPIED_MATRICES:
            kind = nn.Linear
        if not isinstance(layer, kind):
            return None
        if layer.weight is None or layer.bias is None:
            return None
    x_btd, context = first_state(teacher)
    wide = double_device(x_btd.device)
    x_btd = x_btd.to(wide, torch.float64)
    # A copy, because its weights are overwritten below.
    exact = copy.deepcopy(copied).to(wide, torch.float64)
    generator = torch.Generator().manual_seed(0)
    for parameter in exact.parameters():
        # Matrices of this size keep states at the size of 1, where attention and GELU are far from linear.
        scale = 1.0
        if parameter.ndim > 1:
            scale = parameter.shape[-1] ** -0.5
        parameter.copy_(scale * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    modulation = None
    if copied.points:
        # All of them differ, so that one in a wrong place shows.
        factors = torch.linspace(0.5, 1.5, 8 * x_btd.shape[-1], dtype=torch.float64, device=wide)
        modulation = Modulation(*factors.view(8, -1))
    try:
        ours = FastBlock(exact).infer(x_btd, modulation) - x_btd
        for n in context.distinct():
            args, kwargs = in_double(context.calls[n], wide)
            update = exact(x_btd, modulation, *args, **kwargs) - x_btd
            if not (ours - update).norm() <= _SAME * update.norm():  # also if they are NaN
                return None
    except (RuntimeError, TypeError):  # its layers or arguments do not fit together
        return None
    return FastBlock(copied)


def _part(module: Any, path: str) -> Any:
    """The module at `path`, without the wrapper of modulated ones; None if there is no such module."""
    for name in path.split("."):
        module = getattr(module, name, None)
        if isinstance(module, Modulated):
            module = module.inner
    return module
