"""Inside the blocks: attention patterns, the outputs of attention and MLP, and the state between the two.

No block is rewritten. The model runs as it is, and torch reports every function that a block calls with the very
arguments that it passes. A pattern is then recomputed from the q, k, mask and scale that the model gave to a fused
kernel, or taken from its own softmax. The state in the middle of a block is the first sum of the residual stream and
something else after its attention. There is no code for any family of models.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from raptor.vit.calls import first_tensor, state_argument
from raptor.vit.origin import Arguments

PARTS = ("attn", "attn_out", "mlp_out", "resid_mid")
_SOFTMAX = (F.softmax, torch.softmax, Tensor.softmax, torch.special.softmax)
_SUMS = ("add", "__add__", "__radd__", "addcmul", "add_", "__iadd__", "addcmul_")
_PLAIN_SUMS = ("add", "__add__", "__radd__")


class NoPart(ValueError):
    """A block has no such part, or not in a form that can be read."""


@dataclass
class Parts:
    """Parts of the blocks of one forward pass, by the number of the block (1..L). What was not asked for is empty.

    `resid_mid` is the state between attention and MLP, and the two outputs are what is added to the stream before and
    after it, with LayerScale: `a_{l-1} + attn_out = resid_mid` and `resid_mid + mlp_out = a_l`.

    Attributes:
        attn: softmax weights (B, heads, T, T), in float32 or better; row i is what token i attends to. A block with
            several attentions has the heads of all, in the order in which it computes them.
        attn_out, mlp_out, resid_mid: (B, T, D).
    """

    attn: dict[int, Tensor] = field(default_factory=dict)
    attn_out: dict[int, Tensor] = field(default_factory=dict)
    mlp_out: dict[int, Tensor] = field(default_factory=dict)
    resid_mid: dict[int, Tensor] = field(default_factory=dict)

    def of(self, part: str) -> dict[int, Tensor]:
        """The part of that name."""
        check_parts((part,))
        found: dict[int, Tensor] = getattr(self, part)
        return found


def check_parts(parts: Iterable[str]) -> None:
    """Raise unless these are names of parts."""
    for part in parts:
        if part not in PARTS:
            raise ValueError(f"unknown part {part!r}: choose from {', '.join(PARTS)}")


@contextmanager
def recording_parts(
    blocks: Iterable[nn.Module], name: str, parts: Iterable[str], layers: Iterable[int] | None = None
) -> Iterator[Parts]:
    """Inside the context, the yielded parts are those of the latest forward pass of `blocks`.

    Args:
        name: of the model, for messages.
        layers: numbers (1..L) of the blocks whose parts are kept; by default all. Attention of many tokens is large.
    """
    blocks = list(blocks)
    if isinstance(parts, str):  # its letters would be taken for names
        raise ValueError(f"parts are several names: write parts=({parts!r},)")
    parts = tuple(parts)
    check_parts(parts)
    kept = set(range(1, len(blocks) + 1))
    if layers is not None:
        kept &= set(layers)
    found = Parts()
    if not parts:
        yield found
        return
    watch = _Watch(keeps_attention="attn" in parts)

    def enter_of(layer: int) -> Callable[..., None]:
        def enter(_module: nn.Module, args: tuple[Any, ...], kwargs: Arguments) -> None:
            watch.block = _Block(state_argument(args, kwargs), f"block {layer} of {name}")

        return enter

    def leave_of(layer: int) -> Callable[..., None]:
        def leave(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
            block = watch.block
            watch.block = None
            assert block is not None
            block.read(first_tensor(output), parts, layer, found)

        return leave

    handles = []
    for layer in kept:
        handles.append(blocks[layer - 1].register_forward_pre_hook(enter_of(layer), with_kwargs=True))
        handles.append(blocks[layer - 1].register_forward_hook(leave_of(layer)))
    try:
        with watch:
            yield found
    finally:
        for handle in handles:
            handle.remove()


@dataclass
class _Sum:
    """A sum with the residual stream as one of its operands: `stream + addend`, or more than that."""

    stream: Tensor
    result: Tensor
    addend: Tensor | None


class _Block:
    """What is seen of a block while it runs.

    Attributes:
        start: the state that it was given.
        stream: that state and every sum with one of these, which are the only places where the stream is written.
        patterns: softmax weights (B, heads, T, T).
        num_attentions: how many of them were computed, whether they are kept or not.
        sums: the sums with the stream after the first attention.
    """

    def __init__(self, start: Tensor, name: str) -> None:
        self.start = start
        self.name = name
        self.stream = [start]
        self.patterns: list[Tensor] = []
        self.num_attentions = 0
        self.sums: list[_Sum] = []

    def is_stream(self, value: Any) -> bool:
        # By identity: another tensor may have equal values.
        return any(value is one for one in self.stream)

    def read(self, output: Tensor, parts: Sequence[str], layer: int, found: Parts) -> None:
        """Write the parts of the block to `found`, once its output is known."""
        if not self.num_attentions:
            raise NoPart(f"{self.name} has no attention that torch computes, by softmax or fused: leave out its parts")
        if "attn" in parts:
            found.attn[layer] = torch.cat(self.patterns, dim=1)
        if not {"resid_mid", "attn_out", "mlp_out"} & set(parts):
            return
        if not self.sums or self.sums[0].result is output:
            raise NoPart(f"{self.name} has no state between its attention and its MLP: only its attn can be recorded")
        first = self.sums[0]
        middle = first.result
        if "resid_mid" in parts:
            found.resid_mid[layer] = middle
        if "attn_out" in parts:
            is_plain = first.stream is self.start and first.addend is not None
            found.attn_out[layer] = first.addend if is_plain else middle - self.start  # type: ignore[assignment]
        if "mlp_out" in parts:
            found.mlp_out[layer] = self._after(middle, output)

    def _after(self, middle: Tensor, output: Tensor) -> Tensor:
        """What makes the block's output of the state in its middle.

        The addend itself where there is one, because a difference of states loses digits. A surrogate also scales
        the stream at its end, so its MLP has no addend.
        """
        for one in self.sums[1:]:
            if one.stream is middle and one.result is output and one.addend is not None:
                return one.addend
        return output - middle


class _Watch(TorchFunctionMode):
    """Sees every function of torch that the current block calls, before its kernel is chosen."""

    def __init__(self, keeps_attention: bool) -> None:
        super().__init__()
        self.keeps_attention = keeps_attention
        self.block: _Block | None = None

    def __torch_function__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Arguments | None = None
    ) -> Any:
        kwargs = kwargs or {}
        block = self.block
        if block is None:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        before = None
        if name in _SUMS:
            before = next((value for value in args if block.is_stream(value)), None)
        result = func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            self._attended(block, softmax_weights, args, kwargs)
        elif func is F.multi_head_attention_forward:
            self._attended(block, _weights_of_torch, args, kwargs)
        elif func in _SOFTMAX and _is_square(result, block.start):
            self._attended(block, lambda *_args, **_kwargs: result, args, kwargs)
        elif before is not None and isinstance(result, Tensor) and result.shape == block.start.shape:
            block.stream.append(result)
            if block.num_attentions:
                block.sums.append(_Sum(before, result, _addend(name, before, args, kwargs)))
        return result

    def _attended(
        self, block: _Block, weights: Callable[..., Tensor], args: tuple[Any, ...], kwargs: Arguments
    ) -> None:
        """Count an attention of the block and keep its pattern if that is asked for."""
        block.num_attentions += 1
        if not self.keeps_attention:
            return
        # The autocast of the caller would take the product in bf16 again.
        with torch.autocast(block.start.device.type, enabled=False):
            pattern = weights(*args, **kwargs)
        num_images, num_tokens = block.start.shape[:2]
        # Eager attention may hold the heads of all images along one axis.
        block.patterns.append(pattern.reshape(num_images, -1, num_tokens, num_tokens))


def softmax_weights(
    query: Tensor,
    key: Tensor,
    _value: Tensor,
    attn_mask: Tensor | None = None,
    _dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    **_others: Any,
) -> Tensor:
    """The weights of `F.scaled_dot_product_attention`, whose arguments these are, in float32 or better."""
    # A row of bf16 weights does not sum to 1.
    dtype = torch.promote_types(query.dtype, torch.float32)
    q = query.to(dtype)
    k = key.to(dtype)
    if enable_gqa:  # a head of k serves several of q
        k = k.repeat_interleave(q.shape[-3] // k.shape[-3], dim=-3)
    if scale is None:
        scale = 1 / math.sqrt(q.shape[-1])
    scores = q @ k.mT * scale
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        # True means that a token is attended to here. In nn.MultiheadAttention it means the opposite.
        scores = scores.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    return scores.softmax(dim=-1)


def _weights_of_torch(*args: Any, **kwargs: Any) -> Tensor:
    """The weights of torch's own `nn.MultiheadAttention`, which computes them when it is asked."""
    kwargs.update(need_weights=True, average_attn_weights=False)
    _, weights = F.multi_head_attention_forward(*args, **kwargs)
    assert weights is not None
    return weights


def _is_square(pattern: Any, start_btd: Tensor) -> bool:
    """Whether a softmax is over the tokens, for each token: there may be others, as of a router."""
    num_tokens = start_btd.shape[1]
    return isinstance(pattern, Tensor) and pattern.ndim >= 3 and pattern.shape[-2:] == (num_tokens, num_tokens)


def _addend(name: str, stream: Tensor, args: tuple[Any, ...], kwargs: Arguments) -> Tensor | None:
    """The other operand of a plain sum of two tensors of one shape."""
    others = [value for value in args if value is not stream]
    if name not in _PLAIN_SUMS or kwargs or len(others) != 1:
        return None
    other = others[0]
    if isinstance(other, Tensor) and other.shape == stream.shape:
        return other
    return None
