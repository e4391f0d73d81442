"""The claims about single models: depth as a dynamical system, phases, and certificates of surrogates."""

from __future__ import annotations

import json
import re
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
from verdict import SECTIONS, Claim, claim_of, number_of, place_of, read

GROUPS = ("cls", "registers", "patches")
_OF_THE_CUT = ("similarity.within", "speed.jump", "speed.between", "attraction.")
"""Estimates that depend on where depth is cut: there an untrained model with a cut of its own is another comparison."""


def depth_claims(folder: Path) -> tuple[list[Claim], list[Json]]:
    """The claims about the models in `folder`, and the untrained models beside them."""
    claims: list[Claim] = []
    untrained: list[Json] = []
    for path in trained_models(folder):
        model, twins = read(path), _twins(path)
        claims += _claims_of_model(path, model, twins)
        untrained += _described(model, twins)
        # Another run of the same model, for numbers that the first one does not hold.
        further = path.with_name(f"{path.stem}-further.json")
        if further.exists():
            said = {claim.says for claim in claims if claim.source == place_of(path)}
            claims += [claim for claim in _claims_of_model(further, read(further), twins) if claim.says not in said]
        interventions = path.with_name(f"{path.stem}-interventions.json")
        if interventions.exists():
            swaps = read(interventions)["teacher"]["swaps"]
            made = swaps_of_one(quantities.swaps_of_interventions(swaps))
            claims += [
                _filled(replace(claim, figure="interventions-swaps"), interventions, _model_label(model))
                for claim in made
            ]
    if not claims:
        lines = SECTIONS["dynamics"]["claims"]
        claims = [claim_of(line, SECTIONS["dynamics"], line["says"].format_map(_EVERY)) for line in lines]
    witness = folder / "authors-vitb.json"
    if witness.exists():
        run = read(witness)
        for line in SECTIONS["witness"]["claims"]:
            claim = claim_of(line, SECTIONS["witness"], number=number_of(line, run), source=place_of(witness))
            claims.append(replace(claim, on="the authors' ViT-B matrix"))
    return claims, untrained


class _Every(dict[str, str]):
    def __missing__(self, name: str) -> str:
        return "every group" if name == "g" else "each"


_EVERY = _Every()


def trained_models(folder: Path) -> list[Path]:
    """The results of `raptor dynamics` on trained models, where they hold estimates."""
    found = []
    for path in sorted(folder.glob("*.json")):
        saved = json.loads(path.read_text())
        has_estimates = isinstance(saved, dict) and (saved.get("teacher") or {}).get("estimates")
        if has_estimates and "-untrained" not in path.stem and not path.stem.endswith("-further"):
            found.append(path)
    return found


def _twins(path: Path) -> list[tuple[Path, Json]]:
    """The untrained models beside NAME.json, the one with the most images first."""
    files = [*path.parent.glob(f"{path.stem}-untrained.json"), *path.parent.glob(f"{path.stem}-untrained-*.json")]
    found = [(file, read(file)) for file in sorted(files)]
    return sorted(
        found, key=lambda twin: (-twin[1]["teacher"]["num_images"], -twin[1]["teacher"]["num_stability_images"])
    )


def _claims_of_model(path: Path, model: Json, twins: Sequence[tuple[Path, Json]]) -> list[Claim]:
    claims = []
    for line in SECTIONS["dynamics"]["claims"]:
        for names in _expansions(line, model["teacher"]):
            key = line["estimate"].format_map(names)
            number = _estimate(model, key)
            if number is None or not _has_paper_perturbations(key, model):
                continue
            beside = _untrained_beside(key, model, [twin for _, twin in twins])
            figure = line.get("figure", "")
            claim = claim_of(line, SECTIONS["dynamics"], line["says"].format_map(names), number=number, figure=figure)
            claims.append(replace(claim, untrained=tuple(beside)))
    claims += [*_basins(model), *_differences(model, [twin for _, twin in twins])]
    return [_filled(claim, path, _model_label(model)) for claim in claims]


def _expansions(line: Json, teacher: Json) -> Iterator[Json]:
    """The names that a line is filled with: each token group, each phase, or none."""
    if "{g}" in line["estimate"]:
        yield from ({"g": group} for group in GROUPS if group in teacher["direction"]["norm"])
    elif "{first}" in line["estimate"]:
        for number, phase in enumerate(teacher.get("attraction") or [], start=1):
            yield {"number": number, "first": phase["first"], "last": phase["last"]}
    else:
        yield {}


def _has_paper_perturbations(key: str, model: Json) -> bool:
    """The claims about perturbations are judged under the paper's own, whose size does not follow the state's norm."""
    stability = model["teacher"]["stability"]
    is_about_them = key.startswith(("sensitivity", "path", "attraction"))
    return not is_about_them or (stability is not None and stability["kind"] == "paper")


def _estimate(model: Json, key: str) -> Number | None:
    found = model["teacher"]["estimates"].get(key)
    if found is None:
        return None
    return Number(found["value"], found["lower"], found["upper"], "images", found["num_images"])


def _untrained_beside(key: str, model: Json, twins: Sequence[Json]) -> list[tuple[Number, str]]:
    """The number of the first untrained model; where it depends on the cut, of the first with each kind of cut."""
    found: list[tuple[Number, str]] = []
    for twin in twins:
        number = _estimate(twin, key)
        if number is None or number.value is None:
            continue
        cut = _cut(model, twin) if key.startswith(_OF_THE_CUT) else ""
        if not any(cut == other for _, other in found):
            found.append((number, cut))
    return found


def _cut(model: Json, twin: Json) -> str:
    alike = twin["phases"] == model["phases"]
    return f"{'cut alike' if alike else 'its own cut'}, {sum_of(twin['phases'] or [])}"


def _basins(model: Json) -> list[Claim]:
    basins, section = model["teacher"]["basins"], SECTIONS["basins"]
    if basins is None:
        return []
    (line,), num = section["claims"], sum(basins["images_per_class"])
    claims = []
    for group, found in basins["groups"].items():
        num_right = found["accuracy"][-1] * num
        ends = stats.binomtest(round(num_right), num).proportion_ci(0.95, method="wilson")
        number = Number(num_right / num, float(ends.low), float(ends.high), "images", num)
        claim = claim_of(line, section, line["says"].format(g=group), number=number, figure=line["figure"])
        claims.append(replace(claim, above=basins["chance"]))
    return claims


def _differences(model: Json, twins: Sequence[Json]) -> list[Claim]:
    """What training did to this model: its number minus that of each untrained seed.

    As in the paper each model has its own cut: one found on the trained model is not the best of an untrained one.
    """
    claims = []
    for line in SECTIONS["differences"]["claims"]:
        number = _difference(model, twins, line["estimate"])
        if number is not None:
            claims.append(claim_of(line, SECTIONS["differences"], number=number))
    return claims


def _difference(model: Json, twins: Sequence[Json], key: str) -> Number | None:
    trained = _estimate(model, key)
    known = [twin for twin in twins if key in twin["teacher"]["estimates"]]
    own_cut = [twin for twin in known if twin["phases"] != model["phases"]]
    by_seed: dict[int, Json] = {}
    for twin in own_cut or known:
        by_seed.setdefault(twin["seed"], twin)  # the same weights measured twice are not two seeds
    numbers = [_estimate(twin, key) for twin in by_seed.values()]
    values = [number.value for number in numbers if number is not None and number.value is not None]
    if trained is None or trained.value is None or not values:
        return None
    value, lower, upper = over_seeds([trained.value - other for other in values])
    if lower is None or upper is None or trained.lower is None or trained.upper is None:
        return Number(value, None, None, "twins", len(values))
    half = hypot(upper - value, 0.5 * (trained.upper - trained.lower))
    return Number(value, value - half, value + half, "twins", len(values))


def _described(model: Json, twins: Sequence[tuple[Path, Json]]) -> list[Json]:
    """What the page says of the untrained models: which rows show their numbers."""
    described: list[Json] = []
    cuts: set[bool] = set()
    for path, twin in twins:
        alike = twin["phases"] == model["phases"]
        shown = "every row" if not cuts else "differences" if alike in cuts else "rows about phases"
        cuts.add(alike)
        num, num_perturbed = twin["teacher"]["num_images"], twin["teacher"]["num_stability_images"]
        about = {"num_images": num, "num_perturbed": num_perturbed, "cut": _cut(model, twin), "shown_in": shown}
        name = model["teacher"]["model"]["name"]
        described.append({"of": name, "source": place_of(path), "command": twin["provenance"]["command"], **about})
    return described


def _model_label(model: Json) -> str:
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
        figure=place_of(image) if claim.figure and image.exists() else "",
    )


# Phases and certificates


def phases_claims(folder: Path) -> list[Claim]:
    """The claims about models whose phases-NAME.json, cut by pooled tokens as the paper's, is in `folder`."""
    claims = []
    for path in sorted(folder.glob("phases-*.json")):
        image = path.with_suffix(".png")
        for model in read(path)["models"]:
            if model["tokens"] != "pooled":
                continue
            label = f"{Path(model['model']['name']).name}, {data_label(model['data'])}"
            for line in SECTIONS["phases"]["claims"]:
                number = number_of(line, model)
                if number is not None:
                    claim = _filled(claim_of(line, SECTIONS["phases"], number=number), path, label)
                    claims.append(replace(claim, figure=place_of(image) if image.exists() else ""))
    return claims


def certificate_claims(folder: Path) -> list[Claim]:
    """The claims about surrogates whose NAME-certificate.json and NAME-complexity.json are in `folder`."""
    claims = []
    for path in sorted(folder.glob("*-certificate.json")):
        name = path.stem.removesuffix("-certificate")
        label = f"{name}, {data_label(read(path)['data'])}"
        complexity = path.with_name(f"{name}-complexity.json")
        for kind, source in (("certificates", path), ("complexity", complexity)):
            for line in SECTIONS[kind]["claims"] if source.exists() else ():
                image = path.parent / path.stem / f"{line.get('figure')}.png"
                claim = _filled(claim_of(line, SECTIONS[kind], number=number_of(line, read(source))), source, label)
                claims.append(replace(claim, figure=place_of(image) if image.exists() else ""))
    if not claims:
        claims = [
            claim_of(line, SECTIONS[kind])
            for kind in ("certificates", "complexity")
            for line in SECTIONS[kind]["claims"]
        ]
    return claims
