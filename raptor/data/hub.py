"""Image sets of the Hugging Face hub, or saved with `save_to_disk`, through the `datasets` package."""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from pathlib import Path
from typing import Any

from PIL import Image

from raptor.data.images import ImageData, numbered_classes, open_image
from raptor.data.split import TRAIN_NAMES, VAL_NAMES, own_validation

_LABEL_COLUMNS = ("label", "labels", "fine_label", "class", "cls")


class HubImages(ImageData):
    """`NAME` or `NAME:split`. A named training split keeps the set's own validation split beside it."""

    def __init__(self, spec: str) -> None:
        name, colon, split = spec.rpartition(":")
        if not colon or "/" in split:  # as in C:/set
            name, split = spec, ""
        parts = _load_parts(name, split or None)
        features = next(iter(parts.values())).features
        self.image_column, label_column = _find_columns(features, name)
        # The bytes are decoded here, as every reader does: `datasets` would open any format that Pillow knows.
        stored = type(features[self.image_column])(decode=False)
        self.tables = []
        names = []
        keys = []
        owners = []
        for part, table in parts.items():
            self.tables.append(table.select_columns([self.image_column]).cast_column(self.image_column, stored))
            for row in range(len(table)):
                names.append(f"{part}/{row}")
                keys.append(str(row))
                owners.append(part.lower() if part.lower() in VAL_NAMES else "train")
        if not names:
            raise ValueError(f"hf/{spec} has no images")
        self.ends = list(accumulate(map(len, self.tables)))
        labels, classes = _read_labels(list(parts.values()), label_column)
        super().__init__(f"hf/{spec}", names, labels, classes, owners, keys)

    def read(self, position: int) -> Image.Image:
        number = bisect_right(self.ends, position)
        table = self.tables[number]
        start = self.ends[number] - len(table)
        value = table[position - start][self.image_column]
        return open_image(value["bytes"] or Path(value["path"]).read_bytes())


def _load_parts(name: str, split: str | None) -> dict[str, Any]:
    """The part to train on, and the validation parts that have its columns, by their own names."""
    try:
        import datasets
    except ImportError as error:
        raise ValueError(f"reading hf/{name} needs the datasets package: pip install 'raptor-vit[hf]'") from error
    path = Path(name).expanduser()
    try:
        if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
            tables = datasets.load_from_disk(str(path))
        else:
            tables = datasets.load_dataset(str(path) if path.exists() else name)
    except Exception as error:  # the hub, the network and the builders each raise their own
        raise ValueError(f"cannot open hf/{name}: {' '.join(str(error).split())}") from error
    if not isinstance(tables, dict):
        return {split or "train": tables}
    if split is not None and split not in tables:
        raise ValueError(f"hf/{name} has no split {split!r}; it has {', '.join(tables)}")
    validation = own_validation(list(tables))
    train = split or next((part for part in tables if part.lower() in TRAIN_NAMES), None)
    if train is None and validation is None:
        raise ValueError(f"hf/{name} has splits {', '.join(tables)}; name one as hf/{name}:SPLIT")
    if train is None:
        return {part: table for part, table in tables.items() if part.lower() in VAL_NAMES}
    if train.lower() in VAL_NAMES:
        return {train: tables[train]}
    columns = set(tables[train].column_names)
    chosen = {}
    for part, table in tables.items():
        # Test parts are often published without labels: they cannot be judged on.
        has_columns = part.lower() in VAL_NAMES and columns <= set(table.column_names)
        if part == train or has_columns or part.lower() == validation:
            chosen[part] = table
    return chosen


def _find_columns(features: Any, name: str) -> tuple[str, str | None]:
    """The image column and, if there is one, the label column."""
    kinds = {column: type(feature).__name__ for column, feature in features.items()}
    images = [column for column, kind in kinds.items() if kind == "Image"]
    if not images:
        raise ValueError(f"hf/{name} has no image column; it has {', '.join(kinds)}")
    for column in (*_LABEL_COLUMNS, *kinds):
        if kinds.get(column) == "ClassLabel":
            return images[0], column
    for column in _LABEL_COLUMNS:
        if getattr(features.get(column), "dtype", "").startswith(("int", "uint")):
            return images[0], column
    return images[0], None


def _read_labels(tables: list[Any], column: str | None) -> tuple[list[int] | None, list[str] | None]:
    """Labels of all tables in order, and class names; (None, None) without a label column in each."""
    if column is None or any(column not in table.column_names for table in tables):
        return None, None
    names = list(getattr(tables[0].features[column], "names", None) or [])
    labels: list[int] = []
    for table in tables:
        # Each split of a set has its own order of classes, so they are matched by name.
        number_of: dict[int | None, int] = {None: -1}
        for number, own in enumerate(getattr(table.features[column], "names", None) or []):
            if own not in names:
                raise ValueError(f"class {own} of one split is not in the first one: give the splits the same classes")
            number_of[number] = names.index(own)
        labels += [number_of[value] if value in number_of else int(value) for value in table[column]]
    return labels, names or numbered_classes(labels, "the data")
