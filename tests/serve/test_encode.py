"""What goes back: JSON, binary tensors, labels, and what the answer cost."""

import msgspec
import numpy as np
import pytest

from slim_scheduler.core.types import ItemOutcome, Outcome
from slim_scheduler.serve.decode import InferenceCall
from slim_scheduler.serve.encode import Answer, encode_answer
from slim_scheduler.serve.parameters import OutputForm

LOGITS = np.array([[1.0, 3.0, 2.0] + [0.0] * 7, [0.5] * 9 + [9.0]], np.float32)


def item(number, widths, servers, queue_s=0.001, energy_j=0.25):
    return ItemOutcome(number, Outcome.ANSWERED, widths, servers, queue_s, 0.002, energy_j)


ALIKE = (item(0, (0.5, 1.0), ("a", "b")), item(1, (0.5, 1.0), ("a", "b"), queue_s=0.004))


def encoded(card, answer, *outputs, request_id=""):
    body, length = encode_answer(InferenceCall(LOGITS, request_id, outputs=outputs), answer, card)
    return msgspec.json.decode(body[:length]), body[length:] if length is not None else b""


def test_logits_as_json_with_the_cost(card):
    document, tail = encoded(card, Answer(LOGITS, ALIKE, "counter"), OutputForm(), request_id="seven")
    assert tail == b""
    assert document["id"] == "seven"
    assert document["parameters"] == {
        "widths": "0.5,1",
        "servers": "a,b",
        "queue_ms": 4.0,
        "compute_ms": 2.0,
        "energy_source": "counter",
        "precision": "fp32",
        "energy_j": 0.5,
        "passes": 1,
        "item_passes": "1;1",
    }
    assert document["outputs"][0]["shape"] == [2, 10]
    assert np.array_equal(np.float32(document["outputs"][0]["data"]).reshape(2, 10), LOGITS)


def test_items_that_went_different_ways_are_told_apart(card):
    answer = Answer(LOGITS, (ALIKE[0], item(1, (1.0, 1.0), ("b", "b"))), "integrated")
    document, _ = encoded(card, answer, OutputForm())
    assert document["parameters"]["widths"] == "0.5,1;1,1"
    assert document["parameters"]["servers"] == "a,b;b,b"


def test_what_ran_twice_says_how_sure_it_is_and_what_either_pass_cost(card):
    twice = ItemOutcome(
        1, Outcome.ANSWERED, (1.0, 1.0), ("b", "b"), 0.001, 0.003, 0.75, "", 2, 0.5, (0.5, 1.0), 0.002, 0.25
    )
    document, _ = encoded(card, Answer(LOGITS, (ALIKE[0], twice), "counter", confidence=(0.91, 0.875)), OutputForm())
    told = document["parameters"]
    assert (told["passes"], told["confidence"]) == (2, 0.875)
    assert (told["item_passes"], told["item_confidence"]) == ("1;2", "0.9100;0.8750")
    assert (told["widths"], told["other_widths"]) == ("0.5,1;1,1", ";0.5,1")
    assert (told["compute_ms"], told["other_compute_ms"]) == (3.0, 2.0)
    assert (told["energy_j"], told["other_energy_j"]) == (1.0, 0.25)


@pytest.mark.parametrize("energies", [(None, None), (1.0, None)])
def test_energy_that_nobody_measured_or_a_part_of_it_is_left_out(card, energies):
    items = tuple(item(i, (1.0,), ("a",), energy_j=energy) for i, energy in enumerate(energies))
    answer = Answer(LOGITS, items, "counter")
    document, _ = encoded(card, answer, OutputForm())
    assert "energy_j" not in document["parameters"]
    assert document["parameters"]["energy_source"] == "none"


def test_binary_tensors_follow_in_the_order_of_the_outputs(card):
    document, tail = encoded(card, Answer(LOGITS, ALIKE), OutputForm(0, True), OutputForm(1, True), OutputForm(2))
    sizes = [output.get("parameters", {}).get("binary_data_size") for output in document["outputs"]]
    assert sizes == [80, 32, None]
    assert tail[:80] == LOGITS.tobytes()
    assert tail[80:] == b"".join(len(text).to_bytes(4, "little") + text for text in (b"3.000000:1:1", b"9.000000:9:9"))
    assert document["outputs"][2]["data"] == ["3.000000:1:1", "2.000000:2:2", "9.000000:9:9", "0.500000:0:0"]
    assert document["outputs"][2]["datatype"] == "BYTES"


def test_no_more_labels_than_classes(card):
    document, _ = encoded(card, Answer(LOGITS, ALIKE), OutputForm(1000))
    assert document["outputs"][0]["shape"] == [2, 10]
