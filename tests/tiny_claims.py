"""Looking into lists of claims."""

from __future__ import annotations

from evidence import Claim, Verdict


def verdicts(claims: list[Claim]) -> list[Verdict]:
    return [claim.verdict for claim in claims]


def of(claims: list[Claim], words: str) -> Claim:
    """The one claim that says `words`."""
    (found,) = [claim for claim in claims if words in claim.says]
    return found
