"""A certified surrogate."""

from __future__ import annotations

import pytest
from tiny_certified import PHASES, image_batches, tiny_vit

from raptor.certificate.certificate import Certificate
from raptor.certificate.heads import resolve_head
from raptor.certificate.measure import certify
from raptor.surrogate.surrogate import make_surrogate
from raptor.vit.view import ViT


@pytest.fixture(scope="session")
def teacher() -> ViT:
    return tiny_vit()


@pytest.fixture(scope="session")
def surrogate(teacher: ViT) -> ViT:
    return make_surrogate(teacher, PHASES, conditioning="none", copy="last")


@pytest.fixture(scope="session")
def certificate(teacher: ViT, surrogate: ViT) -> Certificate:
    train = image_batches(0)
    head, _ = resolve_head(teacher, train)
    return certify(surrogate, teacher, image_batches(1), train_batches=train, head=head, bootstrap=200)
