"""Accuracy tables as Parquet files beside a model: one float16 column per width tuple.

A value is the margin of an item's answer (`core/confidence.py`), negative where the answer is wrong. The sign bit
counts: a wrong answer without margin is -0.

Written by `slim accuracy`, read by everything that needs to know what a width tuple gets right; torch has no part in
it. What a table answers is `core/accuracy.py`'s.
"""

from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from slim_scheduler.core.accuracy import AccuracyTable, tuple_name
from slim_scheduler.core.confidence import Calibration
from slim_scheduler.core.errors import DataError
from slim_scheduler.setup.config import Config

TABLE_FILES = {"test": "accuracy.parquet", "held-out": "accuracy_heldout.parquet"}
PRECISIONS = ("fp32", "fp16", "bf16")  # from the most to the least significant digits
FORMAT = 2  # 1 had right or wrong alone
MOST_TABLE_BYTES = 64 << 20
METADATA = b"slim_scheduler.accuracy"


class _Label(msgspec.Struct, frozen=True, kw_only=True):
    """What a file says of itself, in its metadata."""

    format: int
    split: str
    data: str
    weights_sha256: str
    calibration: Calibration | None
    precision: str = "fp32"


def table_file(split: str, precision: str = "fp32") -> str:
    """`accuracy.parquet`, `accuracy-bf16.parquet`."""
    name = TABLE_FILES[split]
    return name if precision == "fp32" else name.replace(".parquet", f"-{precision}.parquet")


def tables_in(folder: Path) -> list[Path]:
    """Those of every split and precision that are there."""
    paths = [folder / table_file(split, precision) for split in TABLE_FILES for precision in PRECISIONS]
    return [path for path in paths if path.is_file()]


def weights_of(path: Path) -> str | None:
    """SHA-256 of the weights that a table was measured with; None where it does not say so."""
    try:
        return msgspec.json.decode(pq.read_schema(path).metadata[METADATA], type=_Label).weights_sha256
    except (pa.ArrowException, msgspec.DecodeError, KeyError, TypeError):
        return None


def least_precision(config: Config) -> str:
    """The least precision that a configuration's servers have."""
    used = {server.precision for server in config.servers}
    return next((precision for precision in reversed(PRECISIONS) if precision in used), "fp32")


def accuracy_path(config: Config, split: str = "test") -> Path:
    """The table of what a configuration's servers get right: in the least of their precisions, where it was measured,
    else in fp32. It need not exist."""
    folder = Path(config.model.path)
    path = folder / table_file(split, least_precision(config))
    return path if path.is_file() else folder / TABLE_FILES[split]


def read_accuracy(path: str | Path) -> AccuracyTable:
    """Reads a table; a folder means the test table in it. Raises DataError, one line."""
    path = Path(path)
    path = path / TABLE_FILES["test"] if path.is_dir() else path
    renew = f"run `slim accuracy --model {path.parent} --data DIR`"
    if not path.is_file():
        raise DataError(f"accuracy table {path} is missing; {renew}")
    if path.stat().st_size > MOST_TABLE_BYTES:
        raise DataError(f"accuracy table {path} has {path.stat().st_size} bytes, at most {MOST_TABLE_BYTES} are read")
    try:
        table = pq.read_table(path)
        raw = table.schema.metadata[METADATA]
        if raw.startswith(b"split="):
            raise DataError(
                f"accuracy table {path} has format 1, without margins, this version reads {FORMAT}; {renew}"
            )
        label = msgspec.json.decode(raw, type=_Label)
        if label.format != FORMAT:
            raise DataError(f"accuracy table {path} has format {label.format}, this version reads {FORMAT}; {renew}")
        signed = {
            tuple(float(width) for width in name.split(",")): table.column(name).to_numpy().astype(np.float16)
            for name in table.column_names
        }
    except (pa.ArrowException, msgspec.DecodeError, KeyError, ValueError, TypeError) as error:
        raise DataError(f"{path} is no accuracy table ({error}); {renew}") from None
    return AccuracyTable(
        {widths: ~np.signbit(values) for widths, values in signed.items()},
        split=label.split,
        data=label.data,
        weights_sha256=label.weights_sha256,
        margins={widths: np.abs(values) for widths, values in signed.items()},
        calibration=label.calibration,
        precision=label.precision,
    )


def write_accuracy(table: AccuracyTable, path: str | Path) -> None:
    """Writes a table with margins: two bytes per item and tuple, about a tenth less compressed."""
    label = _Label(
        format=FORMAT,
        split=table.split,
        data=table.data,
        weights_sha256=table.weights_sha256,
        calibration=table.calibration,
        precision=table.precision,
    )
    signed = {
        tuple_name(widths): np.copysign(table.margin(widths), np.where(table.correct(widths), 1.0, -1.0))
        for widths in table.tuples
    }
    columns = pa.table({name: values.astype(np.float16) for name, values in signed.items()})
    columns = columns.replace_schema_metadata({METADATA: msgspec.json.encode(label)})
    pq.write_table(columns, path, compression="zstd", use_dictionary=False, write_statistics=False)
