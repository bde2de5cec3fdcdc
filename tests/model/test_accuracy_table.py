"""The accuracy table answers for every tuple and every prefix, and refuses what is no table."""

import itertools

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slim_scheduler.core.accuracy import AccuracyTable, tuple_name
from slim_scheduler.core.confidence import Calibration, Logistic
from slim_scheduler.core.errors import DataError
from slim_scheduler.setup.accuracy_files import METADATA, read_accuracy, write_accuracy


def table(tuples=None):
    tuples = tuples or list(itertools.product((0.5, 1.0), repeat=2))
    columns = {widths: np.arange(10) < 10 * sum(widths) / 2 for widths in tuples}
    margins = {widths: np.linspace(0, 1, 10) * sum(widths) / 2 for widths in tuples}
    calibration = Calibration({0.5: Logistic(1.0, -0.5), 1.0: Logistic(2.0, 0.0)}, "held-out")
    return AccuracyTable(
        columns, split="test", data="made up", weights_sha256="ab", margins=margins, calibration=calibration
    )


def test_top1_is_the_share_of_right_items():
    assert table().top1((0.5, 0.5)) == 0.5
    assert table().correct((0.5, 1.0)).sum() == 8
    assert table().items == 10


def test_the_prior_of_a_prefix_is_the_mean_over_its_completions():
    assert table().prior((0.5,)) == pytest.approx((0.5 + 0.8) / 2)
    assert table().prior((1.0, 1.0)) == 1.0
    assert table().prior(()) == pytest.approx((0.5 + 0.8 + 0.8 + 1.0) / 4)


def test_a_missing_tuple_is_answered_by_its_nearest_neighbour():
    some = table([(0.5, 0.5), (1.0, 1.0)])
    assert some.top1((0.5, 0.75)) == some.top1((0.5, 0.5))
    assert some.top1((1.0, 0.8)) == some.top1((1.0, 1.0))
    assert some.prior((1.0,)) == pytest.approx((0.5 + 1.0) / 2)  # (1, 0.5) is as near to both: the narrower


def test_a_written_table_comes_back(tmp_path):
    write_accuracy(table(), tmp_path / "accuracy.parquet")
    again = read_accuracy(tmp_path)
    assert (again.split, again.data, again.weights_sha256) == ("test", "made up", "ab")
    assert again.tuples == table().tuples
    assert all(np.array_equal(again.correct(t), table().correct(t)) for t in again.tuples)
    assert all(np.array_equal(again.margin(t), table().margin(t)) for t in again.tuples)
    assert again.calibration == table().calibration
    assert again.percentages()[tuple_name((0.5, 1.0))] == 80.0


def test_a_wrong_answer_without_margin_stays_wrong_in_the_file(tmp_path):
    right, margins = np.array([True, False]), np.zeros(2)
    made = AccuracyTable({(1.0,): right}, split="test", data="made up", margins={(1.0,): margins})
    write_accuracy(made, tmp_path / "accuracy.parquet")
    again = read_accuracy(tmp_path)
    assert again.correct((1.0,)).tolist() == [True, False]
    assert not np.signbit(again.margin((1.0,))).any()


def test_margins_belong_to_the_same_tuples_and_items():
    right = {(1.0,): np.ones(2, bool)}
    with pytest.raises(DataError, match="differ in tuples"):
        AccuracyTable(right, split="test", data="made up", margins={(0.5,): np.ones(2)})
    with pytest.raises(DataError, match="differ in items"):
        AccuracyTable(right, split="test", data="made up", margins={(1.0,): np.ones(3)})
    with pytest.raises(DataError, match="has no margins"):
        AccuracyTable(right, split="test", data="made up").margin((1.0,))


def test_a_file_of_an_older_format_is_refused_with_the_command_that_renews_it(tmp_path):
    older = pa.table({"0.5,1": [True, False]})
    older = older.replace_schema_metadata({METADATA: b"split=test\ndata=digits\nweights_sha256=ab"})
    pq.write_table(older, tmp_path / "accuracy.parquet")
    with pytest.raises(DataError, match=r"format 1, without margins.*run `slim accuracy --model .* --data DIR`"):
        read_accuracy(tmp_path)


def test_five_thousand_items_of_256_tuples_stay_small(tmp_path):
    generator = np.random.default_rng(0)
    columns = {t: generator.random(5000) < 0.7 for t in itertools.product((0.25, 0.5, 0.75, 1.0), repeat=4)}
    margins = {t: generator.random(5000) for t in columns}
    write_accuracy(AccuracyTable(columns, split="test", data="random", margins=margins), tmp_path / "t.parquet")
    assert (tmp_path / "t.parquet").stat().st_size < 2 * 5000 * 256


def test_what_is_no_table_is_refused(tmp_path):
    with pytest.raises(DataError, match="is missing; run `slim accuracy"):
        read_accuracy(tmp_path)
    (tmp_path / "accuracy.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(DataError, match="is no accuracy table"):
        read_accuracy(tmp_path)
    with pytest.raises(DataError, match="3 widths, the network 2 segments"):
        table().top1((0.5, 0.5, 0.5))
