"""The certificate as JSON and as tables."""

from __future__ import annotations

import json

import pytest

from raptor.certificate.certificate import Certificate
from raptor.vit.view import ViT


def test_json_and_table(teacher: ViT, surrogate: ViT, certificate: Certificate) -> None:
    text = json.loads(json.dumps(certificate.to_dict(), allow_nan=False))
    assert Certificate.from_dict(text).to_dict() == text
    subject = {name: text["subject"][name] for name in ("model", "weights", "teacher", "teacher_weights")}
    assert list(subject.values()) == [surrogate.name, surrogate.fingerprint(), teacher.name, teacher.fingerprint()]
    assert text["curves"]["cls"]["r2"] == pytest.approx(certificate.curves.r2["cls"].tolist())
    assert set(text["nulls"]) == {"identity", "mean", "tied", "linear"}
    assert [row["phase"] for row in certificate.rows()] == [1, 1, 2, 2, 2]
    _, rows = certificate.layer_table("patches")
    assert f"{certificate.curves.r2['patches'][4]:.3f}" in rows[4]
    assert all(len(row) == len(head) for head, rows in certificate.tables() for row in rows)
