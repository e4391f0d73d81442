"""Image sets of the Hugging Face hub, or saved with `save_to_disk`, through the `datasets` package."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import Image

from raptor.data.classes import Labels, number_labels
from raptor.data.image_file import DiskFile, open_image
from raptor.data.images import ImageData
from raptor.data.index import tell_once
from raptor.data.split import TRAIN_NAMES, VAL_NAMES, own_validation

_LABEL_COLUMNS = ("label", "labels", "fine_label", "class", "cls")
_LABEL_KINDS = ("int", "uint", "bool", "string", "large_string")


class TableImages(ImageData):
    """The images of tables of the `datasets` package, by their own names of the parts."""

    def __init__(self, name: str, tables: Mapping[str, Any]) -> None:
        from datasets import concatenate_datasets as concatenate

        features = next(iter(tables.values())).features
        self.image_column, label_column = _find_columns(features, name)
        names = []
        keys = []
        parts = []
        for part, table in tables.items():
            # A part of any other name, such as `extra`, was asked for to train on.
            part_name = part.lower()
            if part_name not in VAL_NAMES:
                part_name = "train"
            for row in range(len(table)):
                names.append(f"{part}/{row}")
                keys.append(str(row))
                parts.append(part_name)
        if not names:
            raise ValueError(f"{name} has no images")
        # The bytes are decoded here, as every reader does: `datasets` would open any format that Pillow knows.
        stored = type(features[self.image_column])(decode=False)
        images = [table.select_columns([self.image_column]) for table in tables.values()]
        self.table = concatenate([table.cast_column(self.image_column, stored) for table in images])
        labels, classes = _read_labels(list(tables.values()), label_column, name)
        super().__init__(name, names, labels, classes, parts, keys)

    def read(self, position: int, side: int | None = None) -> Image.Image:
        value = self.table[position][self.image_column]
        if value is None:
            raise ValueError("its row holds no image")
        # A table holds the bytes of an image, or only where its file is.
        return open_image(value["bytes"] or DiskFile(Path(value["path"])).read())


def open_hub(spec: str) -> TableImages:
    """`NAME` or `NAME:split`: the part to train on, and the validation parts that have its columns."""
    name, colon, split = spec.rpartition(":")
    if not colon or "/" in split:  # as in C:/set
        name = spec
        split = ""
    try:
        import datasets
    except ImportError as error:
        raise ValueError(f"reading hf/{name} needs the datasets package: pip install 'raptor-vit[hf]'") from error
    path = Path(name).expanduser()
    source = str(path) if path.exists() else name
    try:
        if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
            tables = datasets.load_from_disk(source)
        else:
            tables = datasets.load_dataset(source)
    except Exception as error:  # the hub, the network and the builders each raise their own
        raise ValueError(f"cannot open hf/{name}: {' '.join(str(error).split())}") from error
    if not isinstance(tables, dict):
        return TableImages(f"hf/{spec}", {split or "train": tables})
    if split and split not in tables:
        raise ValueError(f"hf/{name} has no split {split!r}; it has {', '.join(tables)}")
    validation = own_validation(list(tables))
    train = split or next((part for part in tables if part.lower() in TRAIN_NAMES), None)
    if train is None and validation is None:
        raise ValueError(f"hf/{name} has splits {', '.join(tables)}; name one as hf/{name}:SPLIT")
    chosen = {}
    for part, table in tables.items():
        is_val = part.lower() in VAL_NAMES
        if train is None:
            is_chosen = is_val
        elif train.lower() in VAL_NAMES:  # asked for by name: it is judged on by itself
            is_chosen = part == train
        else:
            # Test parts are often published without labels: they cannot be judged on.
            has_columns = set(tables[train].column_names) <= set(table.column_names)
            is_chosen = part == train or (is_val and has_columns) or part.lower() == validation
        if is_chosen:
            chosen[part] = table
    return TableImages(f"hf/{spec}", chosen)


def _find_columns(features: Any, name: str) -> tuple[str, str | None]:
    """The image column and, if there is one, the label column."""
    kinds = {column: type(feature).__name__ for column, feature in features.items()}
    if "Image" not in kinds.values():
        raise ValueError(f"{name} has no image column; it has {', '.join(kinds)}")
    image = list(kinds)[list(kinds.values()).index("Image")]
    # Declared classes first, then columns that are called as labels usually are.
    for column in (*_LABEL_COLUMNS, *kinds):
        if kinds.get(column) == "ClassLabel":
            return image, column
    for column in _LABEL_COLUMNS:
        if column in features:
            kind = str(getattr(features[column], "dtype", kinds[column]))
            if kind.startswith(_LABEL_KINDS):
                return image, column
            tell_once(f"the column {column} of {name} is not used: its values ({kind}) are neither numbers nor names")
    return image, None


def _read_labels(tables: list[Any], column: str | None, name: str) -> Labels:
    """Labels of all tables in order, and class names; (None, None) without a label column in each."""
    if column is None or any(column not in table.column_names for table in tables):
        return None, None
    classes = getattr(tables[0].features[column], "names", None)
    if classes is None:
        return number_labels([value for table in tables for value in table[column]], name)
    labels: list[int] = []
    for table in tables:
        # Each split of a set has its own order of classes, so they are matched by name.
        number_of: dict[int | None, int] = {None: -1, -1: -1}
        for number, own in enumerate(table.features[column].names):
            if own not in classes:
                raise ValueError(f"class {own} of one split is not in the first one: give the splits the same classes")
            number_of[number] = classes.index(own)
        labels += map(number_of.__getitem__, table[column])
    return labels, list(classes)
