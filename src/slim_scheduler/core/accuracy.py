"""Which items a network answers right at which width tuple: the table behind reward, simulator and bound.

Read from the Parquet file beside a model, written by `slim accuracy`; torch has no part in it. One boolean per item
and width tuple; a tuple that was not measured is answered by its nearest neighbour.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from slim_scheduler.core.errors import DataError
from slim_scheduler.core.types import WidthTuple

TABLE_FILES = {"test": "accuracy.parquet", "held-out": "accuracy_heldout.parquet"}
MOST_TABLE_BYTES = 64 << 20
METADATA = b"slim_scheduler.accuracy"


def tuple_name(widths: WidthTuple) -> str:
    """A width tuple as files and tables write it: `0.25,0.5,0.75,1`."""
    return ",".join(f"{width:g}" for width in widths)


class AccuracyTable:
    """Right or wrong per item for measured width tuples of one network.

    `split` is `test` (for evaluation) or `held-out` (held-out training images, for training a router).
    """

    def __init__(
        self, columns: Mapping[WidthTuple, npt.NDArray[np.bool_]], *, split: str, data: str, weights_sha256: str = ""
    ) -> None:
        if not columns:
            raise DataError("an accuracy table needs at least one width tuple; run `slim accuracy`")
        self._columns = {tuple(widths): np.asarray(right, dtype=bool) for widths, right in columns.items()}
        self.split, self.data, self.weights_sha256 = split, data, weights_sha256
        self.tuples: tuple[WidthTuple, ...] = tuple(sorted(self._columns))
        self.segments = len(self.tuples[0])
        self.widths = tuple(sorted({width for widths in self.tuples for width in widths}))
        self.items = len(self._columns[self.tuples[0]])
        if self.items < 1 or any(len(t) != self.segments or len(self._columns[t]) != self.items for t in self.tuples):
            raise DataError(
                f"accuracy table of {data}: its columns differ in items or segments; run `slim accuracy` again"
            )
        self._top1 = {widths: float(right.mean()) for widths, right in self._columns.items()}
        self._nearest: dict[WidthTuple, WidthTuple] = {}
        self._priors: dict[WidthTuple, float] = {}

    @classmethod
    def load(cls, path: str | Path) -> AccuracyTable:
        """Reads a table; a folder means the test table in it. Raises DataError, one line."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        path = Path(path)
        path = path / TABLE_FILES["test"] if path.is_dir() else path
        if not path.is_file():
            raise DataError(f"accuracy table {path} is missing; run `slim accuracy --model {path.parent} --data DIR`")
        if path.stat().st_size > MOST_TABLE_BYTES:
            raise DataError(
                f"accuracy table {path} has {path.stat().st_size} bytes, at most {MOST_TABLE_BYTES} are read"
            )
        try:
            table = pq.read_table(path)
            said = dict(pair.split("=", 1) for pair in table.schema.metadata[METADATA].decode().split("\n"))
            columns = {
                tuple(float(width) for width in name.split(",")): table.column(name).to_numpy()
                for name in table.column_names
            }
            split, data, weights = said["split"], said["data"], said["weights_sha256"]
        except (pa.ArrowException, KeyError, ValueError, TypeError) as error:
            raise DataError(f"{path} is no accuracy table ({error}); run `slim accuracy` again") from None
        return cls(columns, split=split, data=data, weights_sha256=weights)

    def write(self, path: str | Path) -> None:
        """Writes the table as Parquet: one bit per item and tuple before compression."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        said = f"split={self.split}\ndata={self.data}\nweights_sha256={self.weights_sha256}"
        table = pa.table({tuple_name(widths): self._columns[widths] for widths in self.tuples})
        table = table.replace_schema_metadata({METADATA: said.encode()})
        pq.write_table(table, path, compression="zstd", use_dictionary=False, write_statistics=False)

    def correct(self, widths: WidthTuple) -> npt.NDArray[np.bool_]:
        """Right or wrong for each item, (items,), at a whole width tuple."""
        return self._columns[self._measured(tuple(widths))]

    def top1(self, widths: WidthTuple) -> float:
        """Share of items answered right, in [0, 1]."""
        return self._top1[self._measured(tuple(widths))]

    def prior(self, prefix: WidthTuple) -> float:
        """Expected top-1 of an item that ran `prefix` so far: the mean over all completions (method, section 4)."""
        prefix = tuple(prefix)
        if prefix not in self._priors:
            rest = self.segments - len(prefix)
            if rest < 0:
                raise DataError(f"width tuple {prefix} is longer than the network's {self.segments} segments")
            completions = itertools.product(self.widths, repeat=rest)
            self._priors[prefix] = float(np.mean([self.top1(prefix + tail) for tail in completions]))
        return self._priors[prefix]

    def percentages(self) -> dict[str, float]:
        """Top-1 in percent by tuple name, as `slim accuracy --json` prints it."""
        return {tuple_name(widths): round(100 * self._top1[widths], 2) for widths in self.tuples}

    def _measured(self, widths: WidthTuple) -> WidthTuple:
        """The tuple itself where measured, else the nearest (sum of absolute differences; ties to the narrower)."""
        if widths in self._columns:
            return widths
        if widths not in self._nearest:
            if len(widths) != self.segments:
                raise DataError(f"width tuple {widths} has {len(widths)} widths, the network {self.segments} segments")
            self._nearest[widths] = min(
                self.tuples, key=lambda t: (sum(abs(a - b) for a, b in zip(t, widths, strict=True)), t)
            )
        return self._nearest[widths]
