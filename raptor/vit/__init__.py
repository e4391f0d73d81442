"""The view over any Vision Transformer, and its token states through depth."""

from raptor.vit.groups import GROUP_NAMES, TokenGroups
from raptor.vit.parts import Parts
from raptor.vit.structure import inspect_vit
from raptor.vit.trajectory import Trajectories, perturb, replace_block, swap_blocks
from raptor.vit.view import Context, NotAViT, ViT, recording, replaced_blocks

__all__ = [
    "GROUP_NAMES",
    "Context",
    "NotAViT",
    "Parts",
    "TokenGroups",
    "Trajectories",
    "ViT",
    "inspect_vit",
    "perturb",
    "recording",
    "replace_block",
    "replaced_blocks",
    "swap_blocks",
]
