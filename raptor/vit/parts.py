"""Inside the blocks: attention patterns, the outputs of attention and MLP, and the state between the two.

No block is rewritten. The model runs as it is, and torch reports every function that a block calls with the very
arguments that it passes. A pattern is then recomputed from the q, k, mask and scale that the model gave to a fused
kernel, or taken from its own softmax. The state in the middle of a block is the first sum of the residual stream and
something else after its attention. There is no code for any family of models.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeAlias, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from raptor.checks import near_miss
from raptor.vit.calls import first_tensor, state_argument
from raptor.vit.origin import Arguments

PARTS = ("attn", "attn_out", "mlp_out", "resid_mid")
_SOFTMAX = (F.softmax, torch.softmax, Tensor.softmax, torch.special.softmax)
_PLAIN_SUMS = ("add", "__add__", "__radd__")
_SUMS = (*_PLAIN_SUMS, "addcmul", "add_", "__iadd__", "addcmul_")

NamesFilter: TypeAlias = str | Sequence[str] | Callable[[str], bool] | None
"""Which names of TransformerLens: one, several, those for which a function is true, or all."""
_PART_NAMES = {
    "attn.hook_pattern": "attn",
    "hook_attn_out": "attn_out",
    "hook_resid_mid": "resid_mid",
    "hook_mlp_out": "mlp_out",
}


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


@contextmanager
def recording_parts(
    blocks: Iterable[nn.Module], name: str, parts: Iterable[str], layers: Collection[int] | None = None
) -> Iterator[Parts]:
    """Inside the context, the yielded parts are those of the latest forward pass of `blocks`.

    Args:
        name: of the model, for messages.
        layers: numbers (1..L) of the blocks whose parts are kept; by default all. Attention of many tokens is large.
    """
    if isinstance(parts, str):  # its letters would be taken for names
        raise ValueError(f"parts are several names: write parts=({parts!r},)")
    wanted = set(parts)
    for part in wanted:
        if part not in PARTS:
            raise ValueError(f"unknown part {part!r}: choose from {', '.join(PARTS)}")
    found = Parts()
    if not wanted:
        yield found
        return
    watch = _Watch(wanted, found, name)
    with ExitStack() as hooks:
        for layer, block in enumerate(blocks, start=1):
            if layers is None or layer in layers:
                hooks.enter_context(block.register_forward_pre_hook(watch.enter, with_kwargs=True))
                hooks.enter_context(block.register_forward_hook(partial(watch.leave, layer)))
        hooks.enter_context(watch)
        yield found


class _Sum(NamedTuple):
    """A sum with the residual stream as one of its operands: `stream + addend`, or more than that."""

    stream: Tensor
    result: Tensor
    addend: Tensor | None


class _Watch(TorchFunctionMode):
    """Sees every function of torch that a block calls, before its kernel is chosen.

    Attributes:
        start: the state that the running block was given; None while no block runs.
        stream: that state and every sum with one of these, which are the only places where the stream is written.
        patterns: softmax weights (B, heads, T, T), if they are kept.
        num_attentions: how many of them were computed.
        sums: the sums with the stream after the first attention.
    """

    def __init__(self, wanted: set[str], found: Parts, name: str) -> None:
        super().__init__()
        self.wanted = wanted
        self.found = found
        self.name = name
        self.start: Tensor | None = None

    def enter(self, _module: nn.Module, args: tuple[Any, ...], kwargs: Arguments) -> None:
        self.start = state_argument(args, kwargs)
        self.stream = [self.start]
        self.patterns: list[Tensor] = []
        self.num_attentions = 0
        self.sums: list[_Sum] = []

    def leave(self, layer: int, _module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        """Keep the parts of the block, now that its output is known."""
        start = self.start
        assert start is not None
        self.start = None
        output = first_tensor(output)
        name = f"block {layer} of {self.name}"
        if not self.num_attentions:
            raise ValueError(f"{name} has no attention that torch computes, by softmax or fused: leave out its parts")
        if "attn" in self.wanted:
            self.found.attn[layer] = torch.cat(self.patterns, dim=1)
        if self.wanted == {"attn"}:
            return
        if not self.sums or self.sums[0].result is output:
            raise ValueError(f"{name} has no state between its attention and its MLP: only its attn can be recorded")
        first = self.sums[0]
        middle = first.result
        # The addend itself where there is one, because a difference of states loses digits. A surrogate also scales
        # the stream at its end, so its MLP has no addend.
        attn_out = None
        mlp_out = None
        if first.stream is start:
            attn_out = first.addend
        for one in self.sums[1:]:
            if one.stream is middle and one.result is output:
                mlp_out = one.addend
        if "resid_mid" in self.wanted:
            self.found.resid_mid[layer] = middle
        if "attn_out" in self.wanted:
            self.found.attn_out[layer] = middle - start if attn_out is None else attn_out
        if "mlp_out" in self.wanted:
            self.found.mlp_out[layer] = output - middle if mlp_out is None else mlp_out

    def __torch_function__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Arguments | None = None
    ) -> Any:
        kwargs = kwargs or {}
        start = self.start
        if start is None:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        before = None
        if name in _SUMS:
            # By identity: another tensor may have equal values.
            before = next((value for value in args if any(value is one for one in self.stream)), None)
        result = func(*args, **kwargs)
        square = (start.shape[1], start.shape[1])
        if func is F.scaled_dot_product_attention:
            self._attended(softmax_weights, args, kwargs)
        elif func is F.multi_head_attention_forward:
            # torch's own nn.MultiheadAttention gives the weights when it is asked.
            asked = {**kwargs, "need_weights": True, "average_attn_weights": False}
            self._attended(lambda *args, **kwargs: cast(Tensor, func(*args, **kwargs)[1]), args, asked)
        # Over the tokens, for each token: there may be others, as of a router.
        elif func in _SOFTMAX and isinstance(result, Tensor) and result.ndim >= 3 and result.shape[-2:] == square:
            self._attended(lambda *_args, **_kwargs: result, args, kwargs)
        elif before is not None and isinstance(result, Tensor) and result.shape == start.shape:
            self.stream.append(result)
            if self.num_attentions:
                others = [value for value in args if value is not before]
                is_plain = name in _PLAIN_SUMS and not kwargs and len(others) == 1
                is_whole = is_plain and isinstance(others[0], Tensor) and others[0].shape == before.shape
                self.sums.append(_Sum(before, result, others[0] if is_whole else None))
        return result

    def _attended(self, weights: Callable[..., Tensor], args: tuple[Any, ...], kwargs: Arguments) -> None:
        """Count an attention of the block and keep its pattern if that is asked for."""
        assert self.start is not None
        self.num_attentions += 1
        if "attn" not in self.wanted:
            return
        # The autocast of the caller would take the product in bf16 again.
        with torch.autocast(self.start.device.type, enabled=False):
            pattern = weights(*args, **kwargs)
        num_images, num_tokens = self.start.shape[:2]
        # Eager attention may hold the heads of all images along one axis.
        self.patterns.append(pattern.reshape(num_images, -1, num_tokens, num_tokens))


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


def choose_names(num_layers: int, names_filter: NamesFilter) -> dict[str, tuple[str, int]]:
    """The chosen names of TransformerLens, each with what it means: a part and the number of its block (1..L).

    TransformerLens counts blocks from 0: `blocks.5.hook_resid_pre` is the state `a_5` and `blocks.5.hook_resid_post`
    the state `a_6`. States have no part but an empty text, and their own number (0..L).
    """
    known: dict[str, tuple[str, int]] = {}
    for block in range(num_layers):
        known[f"blocks.{block}.hook_resid_pre"] = ("", block)
        for name, part in _PART_NAMES.items():
            known[f"blocks.{block}.{name}"] = (part, block + 1)
        known[f"blocks.{block}.hook_resid_post"] = ("", block + 1)
    if names_filter is None:
        return known
    if callable(names_filter):
        return {name: meaning for name, meaning in known.items() if names_filter(name)}
    wanted = [names_filter] if isinstance(names_filter, str) else list(names_filter)
    for name in wanted:
        if name not in known:
            # A misspelt name would otherwise be missing from the result without a word.
            hint = near_miss(name, known, otherwise="names such as blocks.0.hook_resid_post")
            raise ValueError(f"unknown name {name!r}{hint}")
    return {name: meaning for name, meaning in known.items() if name in wanted}
