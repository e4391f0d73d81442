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
        first = next(iter(parts.values()))
        image_column, label_column = _find_columns(first.features, name)
        # The bytes are decoded here, as those of every reader: `datasets` would open any format that Pillow knows.
        stored = type(first.features[image_column])(decode=False)
        self.tables = [
            table.select_columns([image_column]).cast_column(image_column, stored) for table in parts.values()
        ]
        self.ends = list(accumulate(len(table) for table in self.tables))
        self.image_column = image_column
        rows = [(part, first_rows.get(part, 0) + i) for part, table in parts.items() for i in range(len(table))]
        names = [f"{part}/{row}" for part, row in rows]
        if not names:
            raise ValueError(f"hf/{spec} has no images")
        labels, classes = _read_labels(list(parts.values()), label_column)
        owners = [part.lower() if part.lower() in VAL_NAMES else "train" for part, _ in rows]
        keys = [str(row) for _, row in rows]  # of the whole part: a slice does not change what is held out
        super().__init__(f"hf/{spec}", names, labels, classes, owners, keys)

    def read(self, position: int) -> Image.Image:
        table = bisect_right(self.ends, position)
        start = self.ends[table - 1] if table else 0
        value = self.tables[table][position - start][self.image_column]
        return open_image(value["bytes"] or Path(value["path"]).read_bytes())


def _split_spec(spec: str) -> tuple[str, str | None]:
    """`NAME:split` to its two parts; the split may be sliced, as in `train[:10%]`."""
    slice_start = spec.find("[")
    name, colon, split = (spec if slice_start < 0 else spec[:slice_start]).rpartition(":")
    if not colon or "/" in split:
        return spec, None
    return name, split + ("" if slice_start < 0 else spec[slice_start:])


def _load_parts(name: str, split: str | None) -> tuple[dict[str, Any], dict[str, int]]:
    """The training and validation tables of a set by their own names, and the first row of those that are sliced."""
    try:
        import datasets
    except ImportError as error:
        raise ValueError(f"reading hf/{name} needs the datasets package: pip install 'raptor-vit[hf]'") from error
    try:
        if split is not None and "[" in split:
            return _load_slice(datasets, name, split)
        tables = _load(datasets, name, None)
    except Exception as error:  # the hub, the network and the builders each raise their own
        reason = " ".join(str(error).split())
        raise ValueError(f"cannot open hf/{name}: {reason}") from error
    if not isinstance(tables, dict):
        return {split or "train": tables}, {}
    return _choose_parts(tables, name, split), {}


def _load(datasets: Any, name: str, split: str | None) -> Any:
    path = Path(name).expanduser()
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        return datasets.load_from_disk(str(path))
    return datasets.load_dataset(str(path) if path.exists() else name, split=split)


def _load_slice(datasets: Any, name: str, split: str) -> tuple[dict[str, Any], dict[str, int]]:
    part = split.partition("[")[0]
    tables = _load(datasets, name, None)
    if not isinstance(tables, dict):
        raise ValueError("a slice needs a set with named splits")
    chosen = _choose_parts(tables, name, part)
    bounds = split[len(part) :].strip("[]").split(":")
    if len(bounds) != 2:
        raise ValueError(f"cannot read the slice {split}: write it as {part}[:500], {part}[10%:] or {part}[-100:]")
    size = len(chosen[part])
    start, stop = (_bound(bound, size) for bound in bounds)
    sliced = chosen[part].select(range(start or 0, size if stop is None else stop))
    return {**chosen, part: sliced}, {part: start or 0}


def _bound(text: str, size: int) -> int | None:
    if not text:
        return None
    value = round(size * float(text[:-1]) / 100) if text.endswith("%") else int(text)
    return min(size, value if value >= 0 else max(0, size + value))


def _choose_parts(tables: dict[str, Any], name: str, split: str | None) -> dict[str, Any]:
    validation = own_validation(list(tables))
    train = split or next((part for part in tables if part.lower() in TRAIN_NAMES), None)
    if split is not None and split not in tables:
        raise ValueError(f"hf/{name} has no split {split!r}; it has {', '.join(tables)}")
    if train is None and validation is None:
        raise ValueError(f"hf/{name} has splits {', '.join(tables)}; name one as hf/{name}:SPLIT")
    if train is not None and train.lower() in VAL_NAMES:
        return {train: tables[train]}
    columns = set(tables[train].column_names) if train is not None else set()
    others = [part for part in tables if part.lower() in VAL_NAMES and columns <= set(tables[part].column_names)]
    return {part: tables[part] for part in tables if part in (train, *others) or part.lower() == validation}


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
        numbers = _numbers(getattr(table.features[column], "names", None) or [], names or [])
        found = (-1 if value is None else int(value) for value in table[column])
        labels += [numbers.get(value, value) for value in found]
    return labels, list(names) if names else numbered_classes(labels, "the data")


def _numbers(own: list[str], names: list[str]) -> dict[int, int]:
    """The numbers of a table's classes as those of `names`: each split of a set has an order of its own."""
    strange = [name for name in own if name not in names]
    if strange:
        raise ValueError(f"class {strange[0]} of one split is not in the first one: give the splits the same classes")
    return {number: names.index(name) for number, name in enumerate(own)}
