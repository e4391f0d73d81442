"""The rows of the paper's claims and their verdicts, from `claims.yaml` and the JSON of our runs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path

from model_claims import certificate_claims, depth_claims, phases_claims
from run_claims import experiment_claims, find_runs
from sweep import Json, column
from verdict import Claim, Verdict

_PLACES = ("Definition", "Figure", "Table", "Section", "Appendix")  # in the order of the rows


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
    claims, untrained = depth_claims(Path(config.dynamics))
    claims += phases_claims(Path(config.certificates))
    claims += certificate_claims(Path(config.certificates))
    claims += experiment_claims(find_runs(Path(config.results)))
    rows = [claim.to_dict() for claim in once_per_model(in_order(claims))]
    verdicts = column(rows, "verdict")
    counts = {str(verdict): verdicts.count(verdict) for verdict in Verdict}
    return {"claims": rows, "counts": counts, "untrained": untrained}


def once_per_model(claims: Sequence[Claim]) -> list[Claim]:
    """The claims, without a second measurement of the same model and data: the narrowest interval decides.

    What depends on training stays: two runs of it are two experiments.
    """
    best: dict[tuple[str, str, str], tuple[float, Claim]] = {}
    dropped = []
    for claim in claims:
        number = claim.number
        if number is None or number.basis != "images":
            continue
        width = inf
        if number.lower is not None and number.upper is not None:
            width = number.upper - number.lower
        without_depth_and_folder = re.sub(r" \(L = \d+\)| \([\w.-]+\)$", "", claim.on)
        key = (claim.place, claim.says, without_depth_and_folder)
        if key in best and width >= best[key][0]:
            dropped.append(claim)
            continue
        if key in best:
            dropped.append(best[key][1])
        best[key] = (width, claim)
    # Equal claims are not one: two runs may give the same row.
    left_out = set(map(id, dropped))
    return [claim for claim in claims if id(claim) not in left_out]


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
