"""What a result is about: a model and images. In what two subjects differ, and whether a folder may take a result."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, Self

from raptor.provenance import Images
from raptor.run import RunError
from raptor.streaming import Record

_FILE_START = '{"subject": '  # of every result file that has a subject
_MAX_SUBJECT = 1 << 16  # characters


class Model(Protocol):
    """A model, as far as a subject is concerned."""

    name: str

    @property
    def preprocess(self) -> Any: ...

    def fingerprint(self) -> str | None: ...


@dataclass(frozen=True)
class Subject(Record):
    """The model and the images that a result is about.

    Attributes:
        model: name of the model, of a surrogate where there is a teacher beside it.
        weights: fingerprint of its weights; None where it is not known, as of a module in half precision.
        size: of the images, in pixels.
        data, num_images, images: name of the images, their number and their fingerprint; None of images in memory.
        teacher, teacher_weights: name of the teacher of a surrogate, and fingerprint of its weights.
        left_out: how many files of each kind the data holds that are not read; None if there are none.
    """

    model: str
    weights: str | None
    size: int
    data: str | None = None
    num_images: int | None = None
    images: str | None = None
    teacher: str | None = None
    teacher_weights: str | None = None
    left_out: dict[str, int] | None = None

    @classmethod
    def of(cls, model: Model, images: Images | None = None, surrogate: Model | None = None) -> Self:
        """The subject of a result about `model` on `images`; with a `surrogate`, `model` is its teacher."""
        found = cls(model.name, model.fingerprint(), model.preprocess.size)
        if surrogate is not None:
            found = replace(
                found,
                model=surrogate.name,
                weights=surrogate.fingerprint(),
                teacher=found.model,
                teacher_weights=found.weights,
            )
        if images is not None:
            found = replace(
                found,
                data=images.name,
                num_images=len(images),
                images=images.fingerprint(),
                left_out=getattr(images, "left_out", None) or None,
            )
        return found

    def name_of(self, side: str) -> str:
        """`teacher` as a result calls it: a model without a surrogate is nobody's teacher, and goes by its name."""
        if side == "teacher" and self.teacher is None:
            return self.model
        return side

    def __str__(self) -> str:
        text = self.model
        if self.teacher is not None:
            text += f" against {self.teacher}"
        if self.data is not None:
            text += f" on {self.data}"
        return f"{text} at {self.size} px"


def other_models(own: Subject, other: Subject) -> list[str]:
    """The models of `other` that are not those of `own`, in words; empty where they are the same.

    A result about a single model may stand beside one about a pair that it is the teacher or the surrogate of.
    """
    found = _other_model(own.model, own.weights, other.model, other.weights)
    if own.teacher is None and other.teacher is None:
        return found
    if not found and (own.teacher is None or other.teacher is None):
        return []
    # Of a single model its own name: it may be the teacher of the other's surrogate.
    teachers = []
    for subject in (own, other):
        if subject.teacher is None:
            teachers.append((subject.model, subject.weights))
        else:
            teachers.append((subject.teacher, subject.teacher_weights))
    of_teacher = _other_model(*teachers[0], *teachers[1])
    if own.teacher is None or other.teacher is None:
        return of_teacher
    return of_teacher + found


def _other_model(name: str, weights: str | None, other_name: str, other_weights: str | None) -> list[str]:
    """Weights decide where both are known: one model may have two names, and two models one name."""
    is_same = name == other_name
    if weights is not None and other_weights is not None:
        is_same = weights == other_weights
    if is_same:
        return []
    if name == other_name:
        return [f"other weights of {other_name}"]
    return [f"another model, {other_name}"]


def differences(own: Subject, other: Subject) -> list[str]:
    """In what `other` is another subject than `own`, in words; empty where both are the same.

    More or fewer images of the same data are not another subject, and neither are the same images at another place.
    """
    found = other_models(own, other)
    are_known = None not in (own.images, other.images)
    if own.data is None or other.data is None or (are_known and own.images == other.images):
        pass
    elif own.data != other.data:
        found.append(f"images of {other.data}")
    elif are_known and own.num_images == other.num_images:
        found.append(f"other images of {other.data}")
    if own.size != other.size:
        found.append(f"images of {other.size} px")
    return found


def check_place(folder: str | Path, own: Subject, *files: str) -> None:
    """Raise RunError where a result about `own` may not be written to `folder`: a page shows a folder as one subject.

    A file that would be replaced must be about the same model and images. Every other result file in the folder must
    be about the same model.

    files: names of the files that will be written.
    """
    for path in sorted(Path(folder).glob("*.json")):
        held = _read_subject(path)
        if held is None or path.name == "images.json":  # `raptor report` measures images.json again where it must
            continue
        # Other results of the same model may be about other images: a probe is, of a certificate.
        compared = differences if path.name in files else other_models
        others = compared(own, held)
        if others:
            raise RunError(f"{path} is about {' and '.join(others)}: choose another --out")


def _read_subject(path: Path) -> Subject | None:
    """The subject that a result file begins with; None for other files.

    Only the beginning is read: a folder of the user's may hold JSON files of any size.
    """
    if not path.is_file():
        return None
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            start = file.read(_MAX_SUBJECT)
        if not start.startswith(_FILE_START):
            return None
        # raw_decode ends after the subject: the rest of the file was not read.
        saved, _ = json.JSONDecoder().raw_decode(start, len(_FILE_START))
        return Subject.from_dict(saved)
    except (OSError, ValueError):  # a damaged file; what reads it next says so
        return None
