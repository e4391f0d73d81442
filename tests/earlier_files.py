"""Result files of earlier versions: every key they have must be read and written again; newer keys may be added."""

from __future__ import annotations

from typing import Any


def kept(value: Any, like: Any) -> Any:
    """`value` without the keys that `like`, saved by an earlier version, does not have."""
    if isinstance(like, dict):
        return {key: kept(value[key], like[key]) for key in like}
    return [kept(v, old) for v, old in zip(value, like, strict=True)] if isinstance(like, list) else value
