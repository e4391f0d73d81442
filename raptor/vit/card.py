"""The model card: what a surrogate is, how faithful it was measured to be, on which images it was trained, and whose
licence holds."""

from __future__ import annotations

from pathlib import Path

from raptor.files import read_json
from raptor.run import read_config, run_folder
from raptor.vit.origin import Opened
from raptor.vit.view import ViT

_UNKNOWN = "not known to the program that wrote this card; the teacher's holds for these weights too"
_BLOCKS = {"teacher": "a copy of a block of each phase", "paper": "the paper's own block"}
_DEPTHS = {
    "table": "a learned table of scales and shifts per layer",
    "mlp": "the paper's depth scaling",
    "none": "nothing (autonomous)",
}


def model_card(vit: ViT, run: str | Path | None = None, use: str = "") -> str:
    """The card of a model as Markdown, with the metadata that the Hugging Face hub reads.

    Args:
        run: the run folder with the model's certificate and data; by default the folder it was opened from.
        use: how it is opened, as Markdown; by default in Python from its folder.
    """
    licence = licence_of(vit)
    head = ["---", "library_name: raptor-vit", "tags:", "- vision-transformer", "- raptor"]
    facts: list[tuple[str, object]] = []
    told = []
    if licence is not None:
        head.insert(1, f"license: {licence}")
    if vit.phases:
        spec = vit.origin.surrogates[-1]
        teacher = vit.origin.teacher or Opened()
        teacher_name = teacher.name or teacher.model or "a module of its user's own"
        if teacher.weights:
            teacher_name += f" with the weights of {Path(teacher.weights).name}"
        facts = [
            ("phases", " | ".join(str(length) for length in vit.phases)),
            ("block", _BLOCKS[spec.block]),
            ("depths differ by", _DEPTHS[spec.conditioning]),
            ("rank of the adapters", spec.adapters),
            ("teacher", teacher_name),
            ("fingerprint of its weights", teacher.fingerprint or "not known"),
        ]
        told = [
            f"A surrogate by [Raptor](https://arxiv.org/abs/2512.19941): {len(vit.phases)} tied blocks, repeated, "
            f"stand for the {vit.num_layers} blocks of a Vision Transformer. Everything else is the teacher's.",
            "",
        ]
    facts += [
        ("images", f"{vit.preprocess.size} px, mean {vit.preprocess.mean}, deviation {vit.preprocess.std}"),
        ("parameters", f"{sum(p.numel() for p in vit.model.parameters()):,}"),
    ]
    certificate = ["None was measured: `raptor evaluate RUN` writes one."]
    place = run or vit.opened.model
    if place is not None:
        own_run = run_folder(place)
        folder = own_run or Path(place).expanduser()
        if own_run is not None:
            facts += _training_facts(own_run)
        if (folder / "certificate.json").is_file():
            certificate = ["It is in certificate.json of the run."]
            words = read_json(folder / "certificate.json").get("lines")
            if isinstance(words, list):
                certificate = [f"- {_cell(line)}" for line in words]
    facts.append(("licence", _UNKNOWN if licence is None else f"{licence}, as of the weights it was made from"))
    table = ["| | |", "|---|---|", *(f"| {name} | {_cell(value)} |" for name, value in facts), ""]
    use = use or '```python\nfrom raptor import open_vit\n\nvit = open_vit("FOLDER")\n```'
    lines = [*head, "---", f"# {vit.name}", "", *told, *table]
    return "\n".join([*lines, "## Certificate", "", *certificate, "", "## Use", "", use, ""])


def licence_of(vit: ViT) -> str | None:
    """The licence of the weights that a model was made from, as timm states it of published ones; None for others."""
    opened = vit.origin.teacher or vit.opened
    name = opened.model or ""
    # timm states the licence of the published weights. A file may hold others.
    if not name.startswith("timm/") or opened.weights is not None or not opened.pretrained:
        return None
    import timm

    stated = timm.get_pretrained_cfg(name.removeprefix("timm/").partition("@")[0])
    return getattr(stated, "license", None)


def _training_facts(folder: Path) -> list[tuple[str, object]]:
    """The data and the budget of a run."""
    config = read_config(folder)
    data = config.get("data")
    trained = ", ".join(data) if isinstance(data, list) else str(data)
    images = config.get("images")
    if isinstance(images, dict) and isinstance(images.get("train"), dict):
        trained = f"{images['train'].get('num_images')} images of {trained}"
    found: list[tuple[str, object]] = [("trained on", trained)]
    recipe = config.get("recipe")
    # A config.yaml may be of a trained teacher, which has no recipe.
    if isinstance(recipe, dict) and "budget" in recipe:
        found.append(("budget", recipe["budget"]))
    return found


def _cell(value: object) -> str:
    """Text for one line of a table."""
    # A line break or a bar would end the cell.
    return " ".join(str(value).split()).replace("|", "\\|")
