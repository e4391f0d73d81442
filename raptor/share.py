"""Share a surrogate or a teacher on the Hugging Face hub: the usual mixin around a view.

    SharedViT(open_vit("runs/scenes-k3")).push_to_hub("me/scenes-k3")
    vit = SharedViT.from_pretrained("me/scenes-k3").vit

A folder holds safetensors and JSON alone, so loading one never runs what is in it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from huggingface_hub import ModelHubMixin, snapshot_download
from torch import Tensor, nn

from raptor.open import load_saved, save_vit
from raptor.vit.view import ViT

FILES = ("config.json", "model.safetensors")


class SharedViT(ModelHubMixin, library_name="raptor-vit", tags=["vision-transformer", "raptor"]):
    """A view that `save_pretrained`, `from_pretrained` and `push_to_hub` understand.

    Attributes:
        vit: the view itself.
    """

    def __init__(self, vit: ViT):
        self.vit = vit

    def __call__(self, images: Tensor) -> Tensor:
        """The model's own output for `images` (B, 3, H, W)."""
        return self.vit(images)

    def _save_pretrained(self, save_directory: Path) -> None:
        save_vit(self.vit, save_directory)

    @classmethod
    def _from_pretrained(
        cls, *, model_id: str, revision: str | None, cache_dir: str | Path | None, force_download: bool,
        local_files_only: bool, token: str | bool | None, teacher: nn.Module | ViT | None = None,
        size: int | None = None, **_further: Any,
    ) -> SharedViT:  # fmt: skip
        """`teacher` and `size` as in `open_vit`."""
        folder = Path(model_id)
        if not folder.is_dir():
            found = snapshot_download(
                model_id, revision=revision, cache_dir=cache_dir, force_download=force_download,
                local_files_only=local_files_only, token=token, allow_patterns=list(FILES),
            )  # fmt: skip
            folder = Path(found)
        if not (folder / "config.json").is_file():
            raise ValueError(f"{model_id} holds no raptor model: it has no config.json")
        return cls(load_saved(folder, teacher=teacher, size=size))
