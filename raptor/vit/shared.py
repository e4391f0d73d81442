"""Models on the Hugging Face hub: the usual mixin around a view."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelHubMixin, snapshot_download
from torch import Tensor, nn

from raptor.vit.card import model_card
from raptor.vit.saved import FILES, load_saved, save_vit
from raptor.vit.view import ViT

_DOWNLOAD_OPTIONS = ("revision", "cache_dir", "force_download", "local_files_only", "token")


class SharedViT(
    ModelHubMixin,
    library_name="raptor-vit",
    tags=["vision-transformer", "raptor"],
    paper_url="https://arxiv.org/abs/2512.19941",
):
    """A view with `save_pretrained`, `from_pretrained` and `push_to_hub`, to share it on the Hugging Face hub.

        SharedViT(open_vit("runs/scenes-k3")).push_to_hub("me/scenes-k3")
        vit = SharedViT.from_pretrained("me/scenes-k3").vit

    A folder holds only safetensors, JSON and the card, so loading one never runs code that is in it. The card has the
    certificate and the data of the run that the view was opened from.

    Attributes:
        vit: the view.
    """

    def __init__(self, vit: ViT):
        self.vit = vit

    def __call__(self, images: Tensor) -> Tensor:
        """The model's own output for `images` (B, 3, H, W)."""
        return self.vit(images)

    def __repr__(self) -> str:
        return f"SharedViT({self.vit!r})"

    def generate_model_card(self, *_args: Any, **_kwargs: Any) -> ModelCard:
        """The card that `save_pretrained` and `push_to_hub` write as README.md."""
        name = "FOLDER_OR_REPOSITORY"
        use = f'```python\nfrom raptor import SharedViT\n\nvit = SharedViT.from_pretrained("{name}").vit\n```'
        return ModelCard(model_card(self.vit, use=use))

    def _save_pretrained(self, save_directory: Path) -> None:
        save_vit(self.vit, save_directory)

    @classmethod
    def _from_pretrained(
        cls, *, model_id: str, teacher: nn.Module | ViT | None = None, size: int | None = None, **download: Any
    ) -> SharedViT:
        """`teacher` and `size` as in `open_vit`."""
        folder = Path(model_id)
        if not folder.is_dir():
            options = {name: value for name, value in download.items() if name in _DOWNLOAD_OPTIONS}
            # A repository may hold anything, and only these files are read.
            folder = Path(snapshot_download(model_id, allow_patterns=list(FILES), **options))
        if not (folder / "config.json").is_file():
            raise ValueError(f"{model_id} holds no raptor model: it has no config.json")
        return cls(load_saved(folder, teacher=teacher, size=size))
