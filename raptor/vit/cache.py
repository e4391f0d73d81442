"""TransformerLens' names of states and parts, for programs that read a model by them.

TransformerLens counts blocks from 0, so `blocks.5` is block 6 here: `blocks.5.hook_resid_pre` is the state `a_5` and
`blocks.5.hook_resid_post` the state `a_6`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from torch import Tensor

from raptor.vit.parts import Parts

NamesFilter: TypeAlias = str | Sequence[str] | Callable[[str], bool] | None
"""Which names: one, several, those for which a function is true, or all."""

_PART_NAMES = {
    "attn.hook_pattern": "attn",
    "hook_attn_out": "attn_out",
    "hook_resid_mid": "resid_mid",
    "hook_mlp_out": "mlp_out",
}


def choose_names(num_layers: int, names_filter: NamesFilter) -> dict[str, tuple[str, int]]:
    """Chosen names, in the order of the model, each with what it means: a part and the number of its block (1..L).

    States have no part but an empty text, and their own number (0..L).
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
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else "names are like 'blocks.0.hook_resid_post'"
            raise ValueError(f"unknown name {name!r}: {hint}")
    return {name: meaning for name, meaning in known.items() if name in wanted}


def named_tensors(chosen: Mapping[str, tuple[str, int]], states: Sequence[Tensor], parts: Parts) -> dict[str, Tensor]:
    """The states and parts of one forward pass by the chosen names."""
    found = {}
    for name, (part, number) in chosen.items():
        if part:
            found[name] = parts.of(part)[number]
        else:
            found[name] = states[number]
    return found
