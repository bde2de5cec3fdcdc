"""Accuracy tables as Parquet files beside a model: one boolean column per width tuple.

Written by `slim accuracy`, read by everything that needs to know what a width tuple gets right; torch has no part in
it. What a table answers is `core/accuracy.py`'s.
"""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from slim_scheduler.core.accuracy import AccuracyTable, tuple_name
from slim_scheduler.core.errors import DataError

TABLE_FILES = {"test": "accuracy.parquet", "held-out": "accuracy_heldout.parquet"}
MOST_TABLE_BYTES = 64 << 20
METADATA = b"slim_scheduler.accuracy"


def read_accuracy(path: str | Path) -> AccuracyTable:
    """Reads a table; a folder means the test table in it. Raises DataError, one line."""
    path = Path(path)
    path = path / TABLE_FILES["test"] if path.is_dir() else path
    if not path.is_file():
        raise DataError(f"accuracy table {path} is missing; run `slim accuracy --model {path.parent} --data DIR`")
    if path.stat().st_size > MOST_TABLE_BYTES:
        raise DataError(f"accuracy table {path} has {path.stat().st_size} bytes, at most {MOST_TABLE_BYTES} are read")
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
    return AccuracyTable(columns, split=split, data=data, weights_sha256=weights)


def write_accuracy(table: AccuracyTable, path: str | Path) -> None:
    """Writes a table: one bit per item and tuple before compression."""
    said = f"split={table.split}\ndata={table.data}\nweights_sha256={table.weights_sha256}"
    columns = pa.table({tuple_name(widths): table.correct(widths) for widths in table.tuples})
    columns = columns.replace_schema_metadata({METADATA: said.encode()})
    pq.write_table(columns, path, compression="zstd", use_dictionary=False, write_statistics=False)
