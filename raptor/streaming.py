"""Statistics of a stream of batches, and results as JSON.

Mean and variance are exact, float64, on the device of the values, and never wait for it. Rows that are needed one by
one (for quantiles and for the bootstrap) come from a uniform reservoir, so memory does not grow with the number of
images.

Rows may be given with their places in the whole stream of images. Then the ranks of a command, each with its share of
the stream, keep the very rows that one process would keep, and `reduce(ranks)` puts them into its order.
"""

from __future__ import annotations

import html
import json
import math
import random
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, wraps
from itertools import chain
from typing import Annotated, Any, Self, TypeVar, get_type_hints

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import (
    BeforeValidator,
    ConfigDict,
    GetCoreSchemaHandler,
    PlainValidator,
    SkipValidation,
    TypeAdapter,
    ValidationError,
)
from pydantic_core import CoreSchema, core_schema, from_json
from torch import Tensor

from raptor.devices import Ranks

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
QUANTILE_KEYS = tuple(f"q{round(100 * q):02d}" for q in QUANTILES)
_QUANTILE_IMAGES = 4096  # quantiles are exact up to this many images, and of a uniform sample beyond


def reduce_all(ranks: Ranks, *accumulators: Any) -> None:
    """`reduce` of each that is not None: rank 0 then holds what one process would hold."""
    for accumulator in accumulators:
        if accumulator is not None:
            accumulator.reduce(ranks)


class Moments:
    """Mean and sum of squared deviations, merged batch by batch with Chan's formula.

    Unlike a sum of squares it does not cancel where a mean is far larger than the deviation.

    Attributes:
        num: how many rows were added (a tensor where the counts differ along an axis).
        mean, squares: float64 and of one shape; `squares` is the sum of (x - mean)^2. Both are 0 before the first row.
    """

    def __init__(self) -> None:
        self.num: int | Tensor = 0
        self.mean = self.squares = torch.zeros((), dtype=torch.float64)

    def add(self, mean: Tensor, squares: Tensor, num: int | Tensor) -> None:
        """Add `num` rows given by their own mean and sum of squared deviations, both float64."""
        if isinstance(self.num, int) and self.num == 0:
            self.num = num
            self.mean = mean
            self.squares = squares
            return
        total = self.num + num
        delta = mean - self.mean
        self.mean = self.mean + delta * (num / total)
        self.squares = self.squares + squares + delta.square() * (self.num * num / total)
        self.num = total

    def add_rows(self, rows: Tensor) -> None:
        """Add rows (N, ...) of any float type, N > 0."""
        # Over many images, sums in float32 lose the digits of late ones.
        rows = rows.detach().double()
        mean = rows.mean(0)
        self.add(mean, (rows - mean).square().sum(0), len(rows))

    def reduce(self, ranks: Ranks) -> None:
        """Merge the moments of all ranks."""
        if ranks.size == 1:
            return
        num = ranks.sum(torch.as_tensor(self.num, dtype=torch.float64, device=self.mean.device))
        # The common mean first: squares about it add up, while sums of raw squares would cancel.
        mean = ranks.sum(self.mean * self.num) / num
        self.squares = ranks.sum(self.squares + (self.mean.to(mean.device) - mean).square() * self.num)
        self.num = num
        self.mean = mean

    @property
    def variance(self) -> Tensor:
        """Population variance: the divisor is the number of rows."""
        return self.squares / self.num


class Rows:
    """Rows of a stream of images, all kept, in the order of their places."""

    def __init__(self) -> None:
        self._rows: list[Tensor] = []
        self.places: list[int] = []
        self._next = 0

    def __len__(self) -> int:
        return len(self.places)

    def add(self, rows: Tensor, places: Sequence[int] | None = None) -> None:
        """Add rows (B, ...) of the images at `places` of the stream, by default those that follow."""
        if places is None:
            places = range(self._next, self._next + len(rows))
        assert len(places) == len(rows), "each row has a place"
        if len(rows):
            self._rows.append(rows)
            self.places += places
            self._next = places[-1] + 1

    def values(self) -> Tensor:
        """All rows, (N, ...)."""
        if len(self._rows) > 1:
            self._rows = [torch.cat(self._rows)]
        return self._rows[0]

    def keep(self, order: Sequence[int]) -> None:
        """Keep only the rows `order`, in this order."""
        if self._rows:
            rows = self.values()
            index = torch.tensor(order, dtype=torch.long).to(rows.device, non_blocking=True)
            self._rows = [rows.index_select(0, index)]
        self.places = list(map(self.places.__getitem__, order))

    def reduce(self, ranks: Ranks) -> None:
        """Collect the rows of all ranks on rank 0."""
        if ranks.size == 1:
            return
        places = list(chain.from_iterable(ranks.gather(self.places)))
        own = None
        if self._rows:
            own = self.values()
        found = ranks.rows(own)
        if ranks.is_first:
            self._rows = found
            self.places = places
            # Each rank had whole batches, so that the rows of two ranks come in turn.
            self.keep(sorted(range(len(places)), key=places.__getitem__))


class Reservoir:
    """A uniform sample of at most `size` rows of a stream, kept on the rows' device.

    Which rows is drawn on the host from `seed`, so no batch waits for the device. The draw of a row depends only on its
    place in the stream.
    """

    def __init__(self, size: int, seed: int = 0) -> None:
        self.size = size
        self._random = random.Random(seed)
        self._num_drawn = 0
        self._kept = Rows()
        self._keys: list[float] = []

    def add(self, rows: Tensor, places: Sequence[int] | None = None) -> None:
        """Add rows (B, ...) of the images at `places`, by default those that follow. Places must rise."""
        self._kept.add(rows, places)
        self._keys += map(self._key, self._kept.places[len(self._keys) :])
        # Twice as many are kept for a while, because each trimming sorts them all.
        if len(self._keys) >= 2 * self.size:
            self._trim(self.size)

    def values(self) -> Tensor:
        """The rows kept, (N, ...), in the order of the stream."""
        if len(self._keys) > self.size:
            self._trim(self.size)
        return self._kept.values()

    def places(self) -> list[int]:
        """The places of the rows kept."""
        self.values()
        return self._kept.places

    def reduce(self, ranks: Ranks) -> None:
        """The sample over all ranks, on rank 0; only the rows that stay are sent to it."""
        if ranks.size == 1:
            return
        kept = sorted(chain.from_iterable(ranks.gather(self._keys)))[: self.size]
        self._trim(bisect_right(sorted(self._keys), kept[-1]))
        self._kept.reduce(ranks)
        self._keys = []  # nothing may be added any more

    def _key(self, place: int) -> float:
        """The draw of the row at `place`. Rows before it, which other ranks may hold, have their draws first."""
        if place < self._num_drawn:
            raise ValueError("batches overlap: Batch.start must be the number of images before the batch, or None")
        while self._num_drawn < place:
            self._random.random()
            self._num_drawn += 1
        self._num_drawn += 1
        return self._random.random()

    def _trim(self, num: int) -> None:
        """Keep the `num` rows with the smallest keys: each row is as likely as any other."""
        order = sorted(sorted(range(len(self._keys)), key=self._keys.__getitem__)[:num])
        self._kept.keep(order)
        self._keys = list(map(self._keys.__getitem__, order))


def _float_array(saved: Any) -> NDArray[np.float64]:
    """Nested lists as an array; null becomes NaN."""
    try:
        return np.array(saved, dtype=np.float64)
    except (ValueError, TypeError, OverflowError):
        raise ValueError("Input should be an array of numbers") from None


def _complex_array(saved: Any) -> NDArray[np.complex128]:
    """Nested lists of pairs (real, imaginary) as an array."""
    pairs = _float_array(saved)
    if pairs.size == 0:
        return pairs.astype(np.complex128)
    if pairs.shape[-1:] != (2,):
        raise ValueError("Input should be an array of pairs (real, imaginary)")
    return pairs[..., 0] + 1j * pairs[..., 1]


def _nan_of_null(saved: Any) -> Any:
    if saved is None:
        return math.nan
    return saved


T = TypeVar("T")
_NOT_SAVED = "not saved"
Array = Annotated[NDArray[np.float64], PlainValidator(_float_array)]
ComplexArray = Annotated[NDArray[np.complex128], PlainValidator(_complex_array)]
Number = Annotated[float, BeforeValidator(_nan_of_null)]
"""A float that JSON holds as null where it is not finite."""
NotSaved = Annotated[T, SkipValidation, _NOT_SAVED]
"""A field of a record that is not written."""


class Shown:
    """Base of a dataclass with a repr of one line, at most 400 characters: arrays and lists are shown by their size."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__repr__" not in cls.__dict__:  # else a dataclass writes one that prints every number
            cls.__repr__ = Shown.__repr__  # type: ignore[method-assign]

    def __repr__(self) -> str:
        shown = []
        for field in fields(self):  # type: ignore[arg-type]
            if field.repr:
                shown.append(f"{field.name}={_short(getattr(self, field.name))}")
        return f"{type(self).__name__}({_cut_text(', '.join(shown), 380)})"


class Result(Shown):
    """Base of what commands return: short at a prompt, a table in a notebook, a data frame, a figure.

    `table_rows` gives the rows of the table, one dict per row; `plot` the figure, where there is one.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "plot" in cls.__dict__:
            cls.plot = _drawn_once(cls.plot)  # type: ignore[method-assign]

    def table_rows(self) -> list[dict[str, Any]]:
        """The result as rows of a table."""
        if not is_dataclass(self):
            return []
        return [{f.name: _short(getattr(self, f.name)) for f in fields(self)}]

    def to_dataframe(self) -> Any:
        """The rows of the table as a pandas data frame."""
        try:
            import pandas
        except ImportError:
            raise ValueError("to_dataframe needs pandas: pip install pandas") from None
        return pandas.DataFrame(self.table_rows())

    def plot(self) -> Any:
        """A matplotlib figure of the result."""
        raise ValueError(f"{type(self).__name__} has no figure: use to_dataframe()")

    def _repr_html_(self) -> str:
        return html_table(self.table_rows())


def _drawn_once(plot: Callable[..., Any]) -> Callable[..., Any]:
    """`plot` for notebooks, which show the value of a cell's last line and then every figure that is still open."""

    @wraps(plot)
    def draw(result: Result) -> Any:
        figure = plot(result)
        import matplotlib.pyplot as plt

        if "inline" in plt.get_backend():
            plt.close(figure)
        return figure

    return draw


def folder_of(run: Any) -> Any:
    """The folder of a result that has one; anything else as it is."""
    if isinstance(run, Result):
        return getattr(run, "folder", run)
    return run


_SHOWN_ROWS = 20


def html_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The first rows as an HTML table; every cell is escaped."""
    columns = list(dict.fromkeys(chain.from_iterable(rows)))
    lines = ["<table><thead><tr>", *[f"<th>{html.escape(str(name))}</th>" for name in columns], "</tr></thead><tbody>"]
    for row in rows[:_SHOWN_ROWS]:
        lines.append("<tr>")
        for name in columns:
            value = row.get(name)
            text = str(value)
            if value is None:
                text = ""
            elif isinstance(value, float):
                text = f"{value:.4g}"
            lines.append(f"<td>{html.escape(text)}</td>")
        lines.append("</tr>")
    lines.append("</tbody></table>")
    if len(rows) > _SHOWN_ROWS:
        lines.append(f"<p>{len(rows) - _SHOWN_ROWS} more rows: to_dataframe() has all</p>")
    return "".join(lines)


def _cut_text(text: str, length: int) -> str:
    if len(text) <= length:
        return text
    return text[: length - 3] + "..."


def _short(value: Any) -> str:
    if isinstance(value, np.ndarray | Tensor):
        return f"<{type(value).__name__} {tuple(value.shape)}>"
    if is_dataclass(value) or isinstance(value, torch.nn.Module):
        return f"<{type(value).__name__}>"
    if isinstance(value, dict | list | tuple | set) and len(repr(value)) > 60:
        return f"<{type(value).__name__} of {len(value)}>"
    return _cut_text(repr(value), 80)


class Record(Shown):
    """Base of a dataclass that is written as JSON and read back: its fields are the keys.

    Reading checks the annotated types, ignores unknown keys and uses the default of a field that is missing. An array
    is annotated as `Array` or `ComplexArray`. A field that is annotated as `NotSaved` is not written.
    """

    # A number is not read from text, nor an integer from a fraction or a truth value.
    __pydantic_config__ = ConfigDict(strict=True, arbitrary_types_allowed=True)

    def to_dict(self) -> dict[str, Any]:
        return {name: jsonable(getattr(self, name)) for name in _saved_names(type(self))}  # type: ignore[arg-type]

    @classmethod
    def from_dict(cls, saved: Any) -> Self:
        """The record of parsed JSON; ValueError that names the key where a type is wrong."""
        return decode(cls, saved)  # type: ignore[no-any-return]

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The record of JSON text."""
        return decode_text(cls, text)  # type: ignore[no-any-return]

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        if cls.from_dict.__func__ is Record.from_dict.__func__:  # type: ignore[attr-defined]
            return handler(source)
        # The JSON of such a record has another shape than the record: it is read by its own method.
        return core_schema.no_info_plain_validator_function(cls.from_dict)


@cache
def _saved_names(kind: Any) -> list[str]:
    """The fields of a record that are written."""
    # Resolving annotations is slow, and a page reads thousands of records.
    hints = get_type_hints(kind, include_extras=True)
    names = []
    for field in fields(kind):
        if _NOT_SAVED not in getattr(hints[field.name], "__metadata__", ()):
            names.append(field.name)
    return names


def _quantile_rows(saved: Any) -> Array:
    """Quantiles by key, as JSON holds them, in the order of `QUANTILES`."""
    rows: dict[str, Array] = decode(dict[str, Array], saved)
    if rows.keys() != set(QUANTILE_KEYS):
        raise ValueError(f"expected {', '.join(QUANTILE_KEYS)}, got {', '.join(rows)}")
    return np.stack([rows[key] for key in QUANTILE_KEYS])


@dataclass
class Spread(Record):
    """How a quantity is spread over images.

    `mean` and `std` (population) have the quantity's shape; `quantiles` has one more leading axis, in the order of
    `QUANTILES`. A quantity that is one number for the whole set has no `std` and no `quantiles`.
    """

    mean: Array
    std: Array | None = None
    quantiles: Annotated[NDArray[np.float64], PlainValidator(_quantile_rows)] | None = None
    num_images: int = 0

    def __getitem__(self, index: Any) -> Spread:
        """The spread of a part of the quantity."""
        part = Spread(self.mean[index], num_images=self.num_images)
        if self.std is not None:
            part.std = self.std[index]
        if self.quantiles is not None:
            part.quantiles = np.stack([quantile[index] for quantile in self.quantiles])
        return part

    def quantile(self, q: float) -> Array | None:
        """The quantile `q` of `QUANTILES`, of the quantity's shape; None when there are none."""
        if self.quantiles is None:
            return None
        return self.quantiles[QUANTILES.index(q)]

    def to_dict(self) -> dict[str, Any]:
        saved = super().to_dict()
        if self.quantiles is not None:
            saved["quantiles"] = dict(zip(QUANTILE_KEYS, jsonable(self.quantiles)))
        return saved


class ImageMoments:
    """Mean, deviation and quantiles of one array of values per image, on the values' device.

    `reservoir` images are kept for the quantiles (0: no quantiles).
    """

    def __init__(self, reservoir: int = _QUANTILE_IMAGES, seed: int = 0) -> None:
        self.num_images = 0
        self._moments = Moments()
        self._reservoir: Reservoir | None = None
        if reservoir:
            self._reservoir = Reservoir(reservoir, seed)

    def update(self, values: Tensor, places: Sequence[int] | None = None) -> None:
        """Add a batch of values, `(B, ...)`, of the images at `places` of the stream (by default those that follow)."""
        if len(values) == 0:
            return
        self._moments.add_rows(values)
        if self._reservoir is not None:
            # A copy, because a view would keep the whole batch that it is a part of.
            self._reservoir.add(values.detach().to(torch.float32, copy=True), places)
        self.num_images += len(values)

    def kept(self) -> np.ndarray:
        """The values of the images kept for the quantiles, `(N, ...)` in float64: what a bootstrap resamples."""
        assert self._reservoir is not None, "no images were kept"
        return self._reservoir.values().cpu().numpy().astype(np.float64)

    def reduce(self, ranks: Ranks) -> None:
        """Merge the values of all ranks; quantiles are then on rank 0 only."""
        self._moments.reduce(ranks)
        if self._reservoir is not None:
            self._reservoir.reduce(ranks)
        self.num_images = sum(ranks.gather(self.num_images))

    def result(self) -> Spread:
        """Mean, deviation and quantiles so far."""
        if self.num_images == 0:
            raise ValueError("no images were measured: call update with at least one batch first")
        std = self._moments.variance.sqrt().cpu().numpy()
        quantiles = None
        if self._reservoir is not None:
            with np.errstate(invalid="ignore"):  # between two infinite values a quantile is not a number
                quantiles = np.quantile(self.kept(), QUANTILES, axis=0)
        return Spread(self._moments.mean.cpu().numpy(), std, quantiles, self.num_images)


def jsonable(value: Any, digits: int | None = None) -> Any:
    """`value` as JSON can hold it.

    Arrays become nested lists, dataclasses dicts, complex numbers [real, imaginary], and numbers that are
    not finite None. `digits` rounds floats to that many significant digits.
    """
    # tolist gives Python's own numbers. The json module knows no others.
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, float):
        return _json_float(value, digits)
    if isinstance(value, complex):
        return [_json_float(value.real, digits), _json_float(value.imag, digits)]
    if isinstance(value, Record):
        value = value.to_dict()
    elif is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, dict):
        return {str(key): jsonable(item, digits) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item, digits) for item in value]
    return value


def _json_float(value: float, digits: int | None) -> float | None:
    if not math.isfinite(value):
        return None
    if digits is None:
        return value
    return float(f"{value:.{digits}g}")


def decode(kind: Any, saved: Any) -> Any:
    """Parsed JSON as an object of type `kind`; ValueError with the path and the fault of the first wrong entry."""
    try:
        return decode_text(kind, json.dumps(saved, default=str))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def decode_text(kind: Any, text: str) -> Any:
    """JSON text as an object of type `kind`; ValueError as by `decode`."""
    try:
        # We write null where a number is not finite; NaN would pass for a number here, and no browser reads it.
        from_json(text, allow_inf_nan=False)
        return _adapter(kind).validate_json(text)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_context=False, include_input=False)[0]
    path = ".".join(map(str, fault["loc"]))
    words = fault["msg"].removeprefix("Value error, ")
    if path:
        words = f"{path}: {words}"
    raise ValueError(words)


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)
