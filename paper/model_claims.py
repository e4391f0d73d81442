"""The claims about single models: depth as a dynamical system, phases, and certificates of surrogates."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import hypot
from pathlib import Path

import quantities
from estimates import over_seeds
from quantities import Number
from run_claims import swaps_of_one
from scipy import stats
from sweep import Json, data_label, sum_of
from verdict import SECTIONS, Claim, claim_of, figure_of, number_of, place_of, read

# Estimates that depend on where depth is cut: there an untrained model with a cut of its own is another comparison.
_OF_THE_CUT = ("similarity.within", "speed.jump", "speed.between", "attraction.")
# The paper's perturbations have one size, whatever the norm of the state: only under them are these judged.
_OF_PERTURBATIONS = ("sensitivity", "path", "attraction")
Twin = tuple[Path, Json]
"""The result of `raptor dynamics` on an untrained model, and its file."""


# Depth as a dynamical system


def depth_claims(folder: Path) -> tuple[list[Claim], list[Json]]:
    """The claims about the models in `folder`, and the untrained models beside them."""
    claims: list[Claim] = []
    untrained: list[Json] = []
    for path in trained_models(folder):
        model = read(path)
        twins = _twins(path)
        own = _claims_of_model(path, model, twins)
        claims += own
        untrained += _described(model, twins)
        # Another run of the same model, for numbers that the first one does not hold.
        further = path.with_name(f"{path.stem}-further.json")
        if further.exists():
            said = {claim.says for claim in own}
            for claim in _claims_of_model(further, read(further), twins):
                if claim.says not in said:
                    claims.append(claim)
        interventions = path.with_name(f"{path.stem}-interventions.json")
        if interventions.exists():
            swaps = quantities.swaps_of_interventions(read(interventions)["teacher"]["swaps"])
            for claim in swaps_of_one(swaps):
                claims.append(_filled(replace(claim, figure="interventions-swaps"), interventions, _label_of(model)))
    if not claims:
        section = SECTIONS["dynamics"]
        names = defaultdict(lambda: "each", g="every group")
        for line in section["claims"]:
            claims.append(claim_of(line, section, line["says"].format_map(names)))
    witness = folder / "authors-vitb.json"
    if witness.exists():
        section = SECTIONS["witness"]
        given = {"on": "the authors' ViT-B matrix", "source": place_of(witness)}
        for line in section["claims"]:
            claims.append(claim_of(line, section, number=number_of(line, read(witness)), **given))
    return claims, untrained


def trained_models(folder: Path) -> list[Path]:
    """The results of `raptor dynamics` on trained models, where they hold estimates."""
    found = []
    for path in sorted(folder.glob("*.json")):
        if "-untrained" in path.stem or path.stem.endswith("-further"):
            continue
        saved = read(path)
        if isinstance(saved, dict) and (saved.get("teacher") or {}).get("estimates"):
            found.append(path)
    return found


def _twins(path: Path) -> list[Twin]:
    """The untrained models beside NAME.json, the one with the most images first."""
    files = [*path.parent.glob(f"{path.stem}-untrained.json"), *path.parent.glob(f"{path.stem}-untrained-*.json")]
    found = [(file, read(file)) for file in sorted(files)]

    def num_images(twin: Twin) -> tuple[int, int]:
        teacher = twin[1]["teacher"]
        return teacher["num_images"], teacher["num_stability_images"]

    return sorted(found, key=num_images, reverse=True)


def _claims_of_model(path: Path, model: Json, twins: Sequence[Twin]) -> list[Claim]:
    section = SECTIONS["dynamics"]
    stability = model["teacher"]["stability"]
    has_paper_perturbations = stability is not None and stability["kind"] == "paper"
    claims = []
    for line in section["claims"]:
        for names in _expansions(line, model["teacher"]):
            key = line["estimate"].format_map(names)
            number = _estimate(model, key)
            if number is None or (key.startswith(_OF_PERTURBATIONS) and not has_paper_perturbations):
                continue
            given = {"figure": line.get("figure", ""), "untrained": _untrained_beside(key, model, twins)}
            claims.append(claim_of(line, section, line["says"].format_map(names), number=number, **given))
    claims += _basins(model)
    # As in the paper each model has its own cut: one found on the trained model is not the best of an untrained one.
    section = SECTIONS["differences"]
    for line in section["claims"]:
        number = _difference(model, twins, line["estimate"])
        if number is not None:
            claims.append(claim_of(line, section, number=number))
    return [_filled(claim, path, _label_of(model)) for claim in claims]


def _expansions(line: Json, teacher: Json) -> Iterator[Json]:
    """The names that a line is filled with: each token group, each phase, or none."""
    if "{g}" in line["estimate"]:
        for group in ("cls", "registers", "patches"):
            if group in teacher["direction"]["norm"]:
                yield {"g": group}
    elif "{first}" in line["estimate"]:
        for number, phase in enumerate(teacher.get("attraction") or [], start=1):
            yield {"number": number, "first": phase["first"], "last": phase["last"]}
    else:
        yield {}


def _estimate(model: Json, key: str) -> Number | None:
    found = model["teacher"]["estimates"].get(key)
    if found is None:
        return None
    return Number(found["value"], found["lower"], found["upper"], "images", found["num_images"])


def _untrained_beside(key: str, model: Json, twins: Sequence[Twin]) -> tuple[tuple[Number, str], ...]:
    """The number of the first untrained model; where it depends on the cut, of the first with each kind of cut."""
    by_cut: dict[str, Number] = {}
    for _, twin in twins:
        number = _estimate(twin, key)
        if number is not None and number.value is not None:
            by_cut.setdefault(_cut(model, twin) if key.startswith(_OF_THE_CUT) else "", number)
    return tuple((number, cut) for cut, number in by_cut.items())


def _cut(model: Json, twin: Json) -> str:
    kind = "cut alike" if twin["phases"] == model["phases"] else "its own cut"
    return f"{kind}, {sum_of(twin['phases'] or [])}"


def _basins(model: Json) -> list[Claim]:
    """Whether the nearest class mean at the last layer is more often right than a guess."""
    basins = model["teacher"]["basins"]
    if basins is None:
        return []
    section = SECTIONS["basins"]
    (line,) = section["claims"]
    num = sum(basins["images_per_class"])
    claims = []
    for group, found in basins["groups"].items():
        num_right = found["accuracy"][-1] * num
        ends = stats.binomtest(round(num_right), num).proportion_ci(0.95, method="wilson")
        number = Number(num_right / num, float(ends.low), float(ends.high), "images", num)
        given = {"number": number, "figure": line["figure"], "above": basins["chance"]}
        claims.append(claim_of(line, section, line["says"].format(g=group), **given))
    return claims


def _difference(model: Json, twins: Sequence[Twin], key: str) -> Number | None:
    """What training did to this model: its number minus that of each untrained seed."""
    trained = _estimate(model, key)
    at_own_cut: dict[int, float] = {}
    at_any_cut: dict[int, float] = {}
    for _, twin in twins:
        number = _estimate(twin, key)
        if number is not None and number.value is not None:
            # The same weights measured twice are not two seeds.
            at_any_cut.setdefault(twin["seed"], number.value)
            if twin["phases"] != model["phases"]:
                at_own_cut.setdefault(twin["seed"], number.value)
    values = at_own_cut or at_any_cut
    if trained is None or trained.value is None or not values:
        return None
    value, lower, upper = over_seeds([trained.value - other for other in values.values()])
    if lower is None or upper is None or trained.lower is None or trained.upper is None:
        return Number(value, None, None, "twins", len(values))
    half = hypot(upper - value, 0.5 * (trained.upper - trained.lower))
    return Number(value, value - half, value + half, "twins", len(values))


def _described(model: Json, twins: Sequence[Twin]) -> list[Json]:
    """What the page says of the untrained models: which rows show their numbers."""
    described: list[Json] = []
    cuts: set[bool] = set()
    for path, twin in twins:
        is_alike = twin["phases"] == model["phases"]
        shown = "every row"
        if cuts:
            shown = "differences" if is_alike in cuts else "rows about phases"
        cuts.add(is_alike)
        about = {
            "of": model["teacher"]["model"]["name"],
            "source": place_of(path),
            "command": twin["provenance"]["command"],
            "num_images": twin["teacher"]["num_images"],
            "num_perturbed": twin["teacher"]["num_stability_images"],
            "cut": _cut(model, twin),
            "shown_in": shown,
        }
        described.append(about)
    return described


def _label_of(model: Json) -> str:
    about = model["teacher"]["model"]
    return f"{about['name']} (L = {about['num_layers']}), {data_label(model['data'])}"


def _filled(claim: Claim, path: Path, label: str) -> Claim:
    """A claim with the file, the command, the machine and the figure it comes from."""
    stem = re.sub(r"-(interventions|paper|further)$", "", path.stem)
    image = path.parent / stem / f"{claim.figure}.png"
    made = read(path)["provenance"]
    return replace(
        claim,
        on=label,
        source=place_of(path),
        command=made["command"] or "",
        machine=made["device"] or "",
        figure=figure_of(image),
    )


# Phases and certificates


def phases_claims(folder: Path) -> list[Claim]:
    """The claims about models whose phases-NAME.json, cut by pooled tokens as the paper's, is in `folder`."""
    section = SECTIONS["phases"]
    claims = []
    for path in sorted(folder.glob("phases-*.json")):
        image = path.with_suffix(".png")
        for model in read(path)["models"]:
            if model["tokens"] != "pooled":
                continue
            label = f"{Path(model['model']['name']).name}, {data_label(model['data'])}"
            for line in section["claims"]:
                number = number_of(line, model)
                if number is not None:
                    claim = _filled(claim_of(line, section, number=number), path, label)
                    claims.append(replace(claim, figure=figure_of(image)))
    return claims


def certificate_claims(folder: Path) -> list[Claim]:
    """The claims about surrogates whose NAME-certificate.json and NAME-complexity.json are in `folder`."""
    claims = []
    for path in sorted(folder.glob("*-certificate.json")):
        name = path.stem.removesuffix("-certificate")
        label = f"{name}, {data_label(read(path)['data'])}"
        for kind in ("certificate", "complexity"):
            source = folder / f"{name}-{kind}.json"
            section = SECTIONS[kind]
            if not source.exists():
                continue
            for line in section["claims"]:
                claim = _filled(claim_of(line, section, number=number_of(line, read(source))), source, label)
                image = path.parent / path.stem / f"{line.get('figure')}.png"
                claims.append(replace(claim, figure=figure_of(image)))
    if not claims:
        for kind in ("certificate", "complexity"):
            section = SECTIONS[kind]
            claims += [claim_of(line, section) for line in section["claims"]]
    return claims
