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
        name, split = _split_spec(spec)
        parts, first_rows = _load_parts(name, split)
        features = next(iter(parts.values())).features
        self.image_column, label_column = _find_columns(features, name)
        # The bytes are decoded here, as those of every reader: `datasets` would open any format that Pillow knows.
        stored = type(features[self.image_column])(decode=False)
        self.tables = []
        names = []
        keys = []
        owners = []
        for part, table in parts.items():
            self.tables.append(table.select_columns([self.image_column]).cast_column(self.image_column, stored))
            first = first_rows.get(part, 0)
            for row in range(first, first + len(table)):
                names.append(f"{part}/{row}")
                keys.append(str(row))  # in the whole part: a slice does not change what is held out
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


def _split_spec(spec: str) -> tuple[str, str | None]:
    """`NAME:split` to its two parts; the split may be sliced, as in `train[:10%]`."""
    head, bracket, bounds = spec.partition("[")
    name, colon, split = head.rpartition(":")
    if not colon or "/" in split:
        return spec, None
    return name, split + bracket + bounds


def _load_parts(name: str, split: str | None) -> tuple[dict[str, Any], dict[str, int]]:
    """The training and validation tables of a set by their own names, and the first row of the sliced one."""
    try:
        import datasets
    except ImportError as error:
        raise ValueError(f"reading hf/{name} needs the datasets package: pip install 'raptor-vit[hf]'") from error
    try:
        path = Path(name).expanduser()
        if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
            tables = datasets.load_from_disk(str(path))
        else:
            tables = datasets.load_dataset(str(path) if path.exists() else name)
        part, bracket, bounds = (split or "").partition("[")
        if not isinstance(tables, dict):
            if bracket:
                raise ValueError("a slice needs a set with named splits")
            return {split or "train": tables}, {}
        chosen = _choose_parts(tables, name, part or None)
        if not bracket:
            return chosen, {}
        start, stop = _slice_rows(part, bounds, len(chosen[part]))
        return {**chosen, part: chosen[part].select(range(start, stop))}, {part: start}
    except Exception as error:  # the hub, the network and the builders each raise their own
        reason = " ".join(str(error).split())
        raise ValueError(f"cannot open hf/{name}: {reason}") from error


def _slice_rows(part: str, bounds: str, size: int) -> tuple[int, int]:
    """First and end row of a slice such as `:500]`, `10%:]` or `-100:]`."""
    pieces = bounds.strip("]").split(":")
    if len(pieces) != 2:
        example = f"{part}[:500], {part}[10%:] or {part}[-100:]"
        raise ValueError(f"cannot read the slice {part}[{bounds}: write it as {example}")
    rows = [0, size]
    for place, text in enumerate(pieces):
        if text:
            row = round(size * float(text[:-1]) / 100) if text.endswith("%") else int(text)
            rows[place] = min(size, row if row >= 0 else max(0, size + row))
    return rows[0], rows[1]


def _choose_parts(tables: dict[str, Any], name: str, split: str | None) -> dict[str, Any]:
    """The part to train on with the validation parts that have its columns."""
    if split is not None and split not in tables:
        raise ValueError(f"hf/{name} has no split {split!r}; it has {', '.join(tables)}")
    validation = own_validation(list(tables))
    train = split or next((part for part in tables if part.lower() in TRAIN_NAMES), None)
    if train is None:
        if validation is None:
            raise ValueError(f"hf/{name} has splits {', '.join(tables)}; name one as hf/{name}:SPLIT")
        return {part: tables[part] for part in tables if part.lower() in VAL_NAMES}
    if train.lower() in VAL_NAMES:
        return {train: tables[train]}
    columns = set(tables[train].column_names)
    chosen = {}
    for part, table in tables.items():
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
    named = [column for column in _LABEL_COLUMNS if column in kinds]
    labels = [column for column in named if kinds[column] == "ClassLabel"]
    labels += [column for column, kind in kinds.items() if kind == "ClassLabel"]
    labels += [column for column in named if getattr(features[column], "dtype", "").startswith(("int", "uint"))]
    return images[0], labels[0] if labels else None


def _read_labels(tables: list[Any], column: str | None) -> tuple[list[int] | None, list[str] | None]:
    """Labels of all tables in order, and class names; (None, None) without a label column in each."""
    if column is None or any(column not in table.column_names for table in tables):
        return None, None
    names = getattr(tables[0].features[column], "names", None)
    labels: list[int] = []
    for table in tables:
        own_names = getattr(table.features[column], "names", None) or []
        number_of = _numbers(own_names, names or [])
        for value in table[column]:
            label = -1 if value is None else int(value)
            labels.append(number_of.get(label, label))
    return labels, list(names) if names else numbered_classes(labels, "the data")


def _numbers(own: list[str], names: list[str]) -> dict[int, int]:
    """The numbers of a table's classes as those of `names`: each split of a set has an order of its own."""
    strange = [name for name in own if name not in names]
    if strange:
        raise ValueError(f"class {strange[0]} of one split is not in the first one: give the splits the same classes")
    return {number: names.index(name) for number, name in enumerate(own)}
