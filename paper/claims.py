"""The rows of the paper's claims and their verdicts, from `claims.yaml` and the JSON of our runs."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

import quantities
import yaml
from sweep import Json, column, data_label, where
from verdict import Claim, Verdict

ROOT = Path(__file__).parents[1]
SECTIONS: Json = yaml.safe_load((Path(__file__).parent / "claims.yaml").read_text())
EXPERIMENTS = ("stochastic-depth", "untrained", "partitions", "swaps", "ablation", "table1")
_PLACES = ("Definition", "Figure", "Table", "Section", "Appendix")  # in the order of the rows
Names = dict[str, list[Json]]
"""A placeholder in the text of a claim -> what it stands for, once for each row."""


@dataclass(kw_only=True)
class Claims:
    """Judge the paper's claims by the JSON of our runs, and write results/claims.json, the figures and the pages."""

    results: str = "paper/results"  # folder of the experiments' results; claims.json is written there
    dynamics: str = "docs/results/dynamics"  # folder of the results of raptor dynamics
    # Folder of NAME-certificate.json and NAME-complexity.json of surrogates, and phases-NAME.json of models.
    certificates: str = "docs/results"
    page: str | None = "docs/results/claims.md"  # the page of the claims; none for no page


def evaluate(config: Claims) -> Json:
    """What claims.json holds: every claim, how many have each verdict, and the untrained models beside them."""
    claims: list[Claim] = []
    untrained: list[Json] = []
    for path in trained_models(Path(config.dynamics)):
        claims += claims_of_depth(path)
        untrained += _describe_twins(path)
    claims += claims_of_witness(Path(config.dynamics) / "authors-vitb.json")
    claims += claims_of_phases(Path(config.certificates))
    claims += claims_of_certificates(Path(config.certificates))
    claims += claims_of_experiments(Path(config.results))
    rows = [claim.to_dict() for claim in once_per_model(in_order(without_gaps(claims)))]
    verdicts = column(rows, "verdict")
    counts = {str(verdict): verdicts.count(verdict) for verdict in Verdict}
    return {"claims": rows, "counts": counts, "untrained": untrained}


def rows_of(section: str, run: Json, path: Path, on: str, pictures: Path, figure: str, names: Names) -> list[Claim]:
    """The claims of a section of claims.yaml about one run, with the numbers of that run.

    path: its file. on: what it was made on. pictures: their folder; `figure` is shown where a claim names none.
    """
    file = read(path)
    made = {**file.get("provenance", {}), **file}
    claims = []
    for line in SECTIONS[section]["claims"]:
        picture = pictures / f"{line.get('figure', figure)}.png"
        for filling in _fillings(line["says"], names):
            claim = Claim(
                place=line["place"].format_map({"base": "", **filling}),
                says=line["says"].format(**filling),
                on=on,
                number=number_of(line, run, filling),
                above=line.get("above"),
                below=line.get("below"),
                untrained=untrained_beside(line, run, filling),
                source=place_of(path),
                command=made.get("command") or "",
                machine=made.get("device") or "",
                figure=place_of(picture) if picture.exists() else "",
                recipe=line.get("recipe", SECTIONS[section].get("recipe", "")),
                not_comparable=line.get("not_comparable", ""),
            )
            claims.append(claim)
    return claims


def _fillings(text: str, names: Names) -> list[Json]:
    """What a text is filled with, once for each row that it becomes."""
    for placeholder, fillings in names.items():
        if placeholder in text:
            return fillings
    return [{}]


def number_of(line: Json, run: Json, names: Json) -> quantities.Number | None:
    """The number that a line of claims.yaml names, of a run."""
    if "number" not in line:
        return None
    function, *arguments = _filled_in(line, names)
    found: quantities.Number | None = getattr(quantities, function)(run, *arguments)
    return found


def untrained_beside(line: Json, run: Json, names: Json) -> tuple[tuple[quantities.Number, str], ...]:
    """The same number of untrained models, where a result of `raptor dynamics` has them beside it."""
    if "twins" not in run or line["number"][0] != "estimate":
        return ()
    _, key = _filled_in(line, names)
    return quantities.estimates_of_twins(run, key)


def _filled_in(line: Json, names: Json) -> list[str]:
    return [part.format(**names) if isinstance(part, str) else part for part in line["number"]]


def each(placeholder: str, values: Iterable[str], **common: Any) -> Names:
    """A row for each value of a placeholder; `common` fills in the others."""
    return {f"{{{placeholder}}}": [{**common, placeholder: value} for value in values]}


def measured(claims: Sequence[Claim]) -> list[Claim]:
    return [claim for claim in claims if claim.number is not None]


def read(path: Path) -> Json:
    found: Json = json.loads(path.read_text())
    return found


def place_of(path: Path) -> str:
    """The path as it stands in claims.json: below the repository where it is there."""
    return os.path.relpath(path, ROOT) if path.resolve().is_relative_to(ROOT) else str(path)


# Depth as a dynamical system


def trained_models(folder: Path) -> list[Path]:
    """The results of `raptor dynamics` on trained models, where they hold estimates."""
    found = []
    for path in sorted(folder.glob("*.json")):
        if "-untrained" not in path.stem and not path.stem.endswith("-further"):
            saved = read(path)
            if isinstance(saved, dict) and (saved.get("teacher") or {}).get("estimates"):
                found.append(path)
    return found


def claims_of_depth(path: Path) -> list[Claim]:
    """The claims about one model, from its own file, from NAME-further.json and from NAME-interventions.json."""
    twins = list(map(read, twins_of(path)))
    claims = _claims_of_model(path, twins)
    further = path.with_name(f"{path.stem}-further.json")
    if further.exists():
        # Another run of the same model, for numbers that the first one does not hold.
        said = {claim.says for claim in claims}
        for claim in _claims_of_model(further, twins):
            if claim.says not in said:
                claims.append(claim)
    interventions = path.with_name(f"{path.stem}-interventions.json")
    if interventions.exists():
        swaps = quantities.swaps_of_interventions(read(interventions)["teacher"]["swaps"])
        on = _label_of_model(read(path))
        claims += measured(rows_of("swaps", swaps, interventions, on, _pictures_of(path), "interventions-swaps", {}))
    return claims


def twins_of(path: Path) -> list[Path]:
    """The files of the untrained models beside NAME.json, the one with the most images first."""

    def num_images(file: Path) -> tuple[int, int]:
        teacher = read(file)["teacher"]
        return teacher["num_images"], teacher["num_stability_images"]

    files = [*path.parent.glob(f"{path.stem}-untrained.json"), *path.parent.glob(f"{path.stem}-untrained-*.json")]
    return sorted(sorted(files), key=num_images, reverse=True)


def _claims_of_model(path: Path, twins: list[Json]) -> list[Claim]:
    model = {**read(path), "twins": twins}
    teacher = model["teacher"]
    phases = []
    for number, phase in enumerate(teacher.get("attraction") or [], start=1):
        phases.append({"number": number, "first": phase["first"], "last": phase["last"]})
    groups = list(filter(teacher["direction"]["norm"].get, ("cls", "registers", "patches")))
    names = {**each("g", groups), "{number}": phases}
    about = (model, path, _label_of_model(model), _pictures_of(path), "")
    claims = rows_of("dynamics", *about, names)
    basins = teacher["basins"]
    if basins is not None:
        in_basins = rows_of("basins", *about, each("g", basins["groups"]))
        claims += [replace(claim, above=basins["chance"]) for claim in in_basins]
    return measured(claims + rows_of("differences", *about, {}))


def _pictures_of(path: Path) -> Path:
    return path.parent / re.sub(r"-(paper|further)$", "", path.stem)


def _describe_twins(path: Path) -> list[Json]:
    """What is known of the untrained models beside a trained one, and which rows show their numbers."""
    model = read(path)
    described: list[Json] = []
    cuts: set[bool] = set()
    for file in twins_of(path):
        twin = read(file)
        is_alike = twin["phases"] == model["phases"]
        shown = "every row"
        if cuts:
            shown = "differences" if is_alike in cuts else "rows about phases"
        cuts.add(is_alike)
        about = {
            "of": model["teacher"]["model"]["name"],
            "source": place_of(file),
            "command": twin["provenance"]["command"],
            "num_images": twin["teacher"]["num_images"],
            "num_perturbed": twin["teacher"]["num_stability_images"],
            "cut": quantities.cut_of_twin(model, twin),
            "shown_in": shown,
        }
        described.append(about)
    return described


def _label_of_model(model: Json) -> str:
    about = model["teacher"]["model"]
    return f"{about['name']} (L = {about['num_layers']}), {data_label(model['data'])}"


# Phases and certificates


def claims_of_witness(path: Path) -> list[Claim]:
    if not path.exists():
        return []
    return rows_of("witness", read(path), path, "the authors' ViT-B matrix", path.parent, "", {})


def claims_of_phases(folder: Path) -> list[Claim]:
    """The claims about models whose phases-NAME.json, cut by pooled tokens as the paper's, is in `folder`."""
    claims = []
    for path in sorted(folder.glob("phases-*.json")):
        for model in where(read(path)["models"], tokens="pooled"):
            on = f"{Path(model['model']['name']).name}, {data_label(model['data'])}"
            claims += rows_of("phases", model, path, on, folder, path.stem, {})
    return measured(claims)


def claims_of_certificates(folder: Path) -> list[Claim]:
    """The claims about surrogates whose NAME-certificate.json and NAME-complexity.json are in `folder`."""
    claims = []
    for path in sorted(folder.glob("*-certificate.json")):
        name = path.stem.removesuffix("-certificate")
        on = f"{name}, {data_label(read(path)['data'])}"
        for kind in ("certificate", "complexity"):
            source = folder / f"{name}-{kind}.json"
            if source.exists():
                claims += rows_of(kind, read(source), source, on, folder / path.stem, "", {})
    return claims


# The paper's experiments


def find_runs(folder: Path) -> dict[str, list[Path]]:
    """Experiment -> the JSON files of its runs, in `folder` and in the folders inside it."""
    found: dict[str, list[Path]] = {name: [] for name in EXPERIMENTS}
    for path in sorted([*folder.glob("*.json"), *folder.glob("*/*.json")]):
        saved = read(path)
        if isinstance(saved, dict) and saved.get("experiment") in found:
            found[saved["experiment"]].append(path)
    return found


def claims_of_experiments(folder: Path) -> list[Claim]:
    claims = []
    for name, paths in find_runs(folder).items():
        for path in paths:
            for run in _parts_of(name, read(path)):
                on = label_among(path, paths)
                claims += rows_of(name, run, path, on, path.parent, SECTIONS[name]["figure"], _names_of(name, run))
    return claims


def _parts_of(name: str, run: Json) -> list[Json]:
    """The run, or what of it is judged by itself."""
    if name == "stochastic-depth" and len(set(column(run["rows"], "p"))) == 1:
        return []  # seeds at one p say nothing about a trend
    if name != "swaps":
        return [run]
    # A teacher of a sweep over p counts with the others; any other model is judged by itself, over images.
    alone = where(run["rows"], p=None)
    parts = [] if alone and len(alone) == len(run["rows"]) else [run]
    return parts + list(map(quantities.swaps_of_model, alone))


def _names_of(name: str, run: Json) -> Names:
    if name == "partitions":
        return each("k", run["statistics"])
    if name == "untrained":
        settings = run["settings"]
        trained = where(run["rows"], kind="trained")
        groups = trained[0]["similarity"]["means"] if trained else ["all"]
        common = {"p": settings.get("p", 0.3), "k": settings.get("k", 3)}
        return each("group", groups, **common)
    if name == "ablation":
        # The recipe whose ingredients are added: the paper's own, or another.
        base = run["settings"].get("base", "paper")
        with_base = "" if base == "paper" else f", with the {base} recipe"
        return {"": [{"base": with_base}]}  # in every row: it stands in the place, not in the text
    return {}


def label_among(path: Path, paths: Sequence[Path]) -> str:
    """The label of a run and, where another run of the experiment has the same, the folder that it is in."""
    label = run_label(read(path))
    labels = list(map(run_label, map(read, paths)))
    return label if labels.count(label) == 1 else f"{label} ({path.parent.name})"


def run_label(run: Json) -> str:
    """What a run was made on, in a few words: its teacher or weight file if it names one, and its data."""
    settings = run["settings"]
    names = []
    if settings.get("weights"):
        names.append(Path(settings["weights"]).stem)
    elif (settings.get("model") or "").startswith("timm/"):
        names.append(Path(settings["model"]).name)
    names.append(data_label(settings.get("data", "")))
    if run["experiment"] == "table1":  # there are several, which differ in it
        names.append(str(settings.get("budget", "")).replace("steps", " steps"))
    return ", ".join(filter(None, names))


# All rows


def without_gaps(claims: Sequence[Claim]) -> list[Claim]:
    """The claims, without a run's empty rows for what another run has measured; what none has is kept once."""
    shown = {claim.says for claim in measured(claims)}
    kept = []
    for claim in claims:
        if claim.number is not None or claim.says not in shown:
            kept.append(claim)
            shown.add(claim.says)
    return kept


def once_per_model(claims: Sequence[Claim]) -> list[Claim]:
    """The claims, without a second measurement of the same model and data: the narrowest interval decides.

    What depends on training stays: two runs of it are two experiments.
    """
    # Where the best row of each claim and model stands, and how wide its interval is.
    best: dict[tuple[str, str, str], tuple[float, int]] = {}
    left_out = set()
    for index, claim in enumerate(claims):
        number = claim.number
        if number is None or number.basis != "images":
            continue
        width = inf
        if number.lower is not None and number.upper is not None:
            width = number.upper - number.lower
        without_depth_and_folder = re.sub(r" \(L = \d+\)| \([\w.-]+\)$", "", claim.on)
        key = (claim.place, claim.says, without_depth_and_folder)
        least, place = best.get(key, (inf, -1))
        if key in best and width >= least:
            left_out.add(index)
            continue
        left_out.add(place)
        best[key] = (width, index)
    return [claim for index, claim in enumerate(claims) if index not in left_out]


def in_order(claims: Sequence[Claim]) -> list[Claim]:
    """Claims by figure, table and section of the paper; rows of the same claim together."""
    first: dict[tuple[str, str], int] = {}  # place and text -> where the claim first stands
    for claim in claims:
        first.setdefault((claim.place, claim.says), len(first))

    def key(claim: Claim) -> tuple[int, int, str, int]:
        row = first[claim.place, claim.says]
        found = re.match(rf"({'|'.join(_PLACES)}) (\d+|[A-Z])", claim.place)
        if found is None:
            return -1, 0, claim.place, row
        kind, number = found.groups()
        return _PLACES.index(kind), int(number) if number.isdigit() else 0, number, row

    return sorted(claims, key=key)
