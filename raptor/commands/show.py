"""raptor show: pictures of one image inside a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from raptor.config import ShowConfig
from raptor.devices import pick_device, seeded
from raptor.provenance import command
from raptor.report.inside_image import PICTURES, draw_attention, draw_lens, draw_pca, draw_turn, look_inside
from raptor.report.perturbed_image import read_image
from raptor.report.style import save_figure
from raptor.run import result_folder
from raptor.streaming import Result, folder_of
from raptor.vit.pair import open_studied

_DRAWN: dict[str, Callable[..., Any]] = {
    "attention": draw_attention,
    "pca": draw_pca,
    "lens": draw_lens,
    "turn": draw_turn,
}


@dataclass
class Shown(Result):
    """The pictures that were written.

    Attributes:
        model: its name.
        files: by what they show.
        top: with the lens, the most probable class at every layer 0..L: layer, name, probability.
        note: why a picture was left out.
    """

    model: str
    image: str
    folder: Path
    files: dict[str, Path]
    top: list[tuple[int, str, float]] = field(default_factory=list)
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        files = {name: str(path) for name, path in self.files.items()}
        return {**vars(self), "folder": str(self.folder), "files": files}

    def table_rows(self) -> list[dict[str, Any]]:
        """One row per picture."""
        return [{"what": name, "file": str(path)} for name, path in self.files.items()]

    def text(self) -> str:
        lines = [f"{self.model}, {self.image}:"]
        lines += [f"  {name:<10} {path}" for name, path in self.files.items()]
        if self.top:
            _, name, share = self.top[-1]
            lines.append(f"the head says {name} ({share:.0%})")
        if self.note:
            lines.append(self.note)
        return "\n".join(lines)


@command(ShowConfig)
def show(config: ShowConfig) -> Shown:
    """Write pictures of one image inside a model: attention, PCA of patches, logit lens, which patches still turn."""
    model = folder_of(config.model)
    # Before the model is opened, which takes seconds: a wrong file is told at once.
    image = read_image(config.image)
    device = pick_device(config.device)
    # An untrained model gives the same pictures each time.
    with seeded():
        vit = open_studied(config.model, device=device, **config.opening())
    what = list(config.what or PICTURES)
    note = ""
    # Left out of the default only: who asks for the lens is told that there is no classifier.
    if config.what is None and not vit.num_classes:
        what.remove("lens")
        note = f"no logit lens: {vit.name} has no classifier"
    found = look_inside(vit, image, what, config.layers)
    folder = result_folder(config.out, model, "show", config.weights_name())
    stem = Path(config.image).stem
    files = {}
    for name in what:
        (files[name],) = save_figure(_DRAWN[name](found), folder / f"{stem}-{name}", ("png",))
    return Shown(vit.name, config.image, folder, files, found.top(), note)
