"""From an answer to the body of an infer response: JSON, with binary tensors after it where the client asked.

The response's parameters say what was decided and what it cost. The gRPC front shares `labels_of` and
`cost_of`.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np

from slim_scheduler.core.types import ItemOutcome, WidthTuple
from slim_scheduler.engine.timeline import Visit
from slim_scheduler.serve.decode import InferenceCall
from slim_scheduler.serve.metadata import OUTPUT, VERSION, ModelCard

_encode = msgspec.json.Encoder().encode
ANSWER_BYTES = 1024  # names, sizes and costs
ITEM_BYTES = 256  # an item's widths and servers, of both passes
VISIT_BYTES = 256  # one segment of an item in a timeline
NUMBER_BYTES = 24  # of a float32 as JSON, at most
LABEL_BYTES = 64  # of `value:index:` and what encloses it, at most; a label's characters take up to 4


class Answer(msgspec.Struct, frozen=True):
    """What the engine gave for a call: logits `(items, classes)` float32, each item's end, where its energy was read,
    which constraint was given up because the client preferred an answer, the way of each item, if asked for, how sure
    each answer is, in [0, 1], where that was calibrated, and what its devices computed in."""

    logits: np.ndarray[Any, Any]
    items: tuple[ItemOutcome, ...]
    energy_source: str = "none"
    unmet: str = ""
    timeline: tuple[Visit, ...] = ()
    confidence: tuple[float, ...] = ()
    precision: str = "fp32"


def encode_answer(call: InferenceCall, answer: Answer, card: ModelCard) -> tuple[bytes, int | None]:
    """The response's body, and the length of its JSON part where binary tensors follow (else None)."""
    outputs: list[dict[str, Any]] = []
    tail: list[bytes] = []
    logits = answer.logits
    for form in call.outputs:
        output: dict[str, Any] = {"name": OUTPUT}
        if form.classification:
            labels = labels_of(logits, form.classification, card)
            output["datatype"] = "BYTES"
            output["shape"] = [len(labels), len(labels[0])]
            if form.binary:
                tail.append(pack_strings(labels))
            else:
                output["data"] = [label for row in labels for label in row]
        else:
            output["datatype"] = "FP32"
            output["shape"] = logits.shape
            if form.binary:
                tail.append(logits.tobytes())
            else:
                output["data"] = logits.ravel().tolist()
        if form.binary:
            output["parameters"] = {"binary_data_size": len(tail[-1])}
        outputs.append(output)
    response: dict[str, Any] = {"model_name": card.name, "model_version": VERSION}
    if call.request_id:
        response["id"] = call.request_id
    response["parameters"] = cost_of(answer)
    response["outputs"] = outputs
    head = _encode(response)
    if not tail:
        return head, None
    return b"".join((head, *tail)), len(head)


def answer_size(call: InferenceCall, card: ModelCard) -> int:
    """The most bytes that the answer to a call may take, before it is there."""
    size = ANSWER_BYTES + len(call.items) * ITEM_BYTES
    if call.asked.timeline:
        size += len(call.items) * 2 * card.segments * VISIT_BYTES  # of two passes
    for form in call.outputs:
        if form.classification:
            label = max(map(len, card.labels), default=0)
            size += len(call.items) * min(form.classification, card.classes) * (LABEL_BYTES + 4 * label)
        else:
            size += len(call.items) * card.classes * (4 if form.binary else NUMBER_BYTES)
    return size


def cost_of(answer: Answer) -> dict[str, str | float]:
    """The response parameters: widths and servers per segment, times in ms, energy, passes and confidence.

    Items that went different ways are separated by `;`. Times are the slowest item's, energy the sum of all, and left
    out where a part of it is unknown; `passes` is the most of any item, `confidence` the least. What begins with
    `other_` is of the passes that did not answer, `compute_ms` and `energy_j` are of all.
    """
    items = answer.items
    if len(items) == 1:  # as in most requests, where looking over the items costs more than all the rest
        (item,) = items
        widths, servers, energy = spelled(item.widths), ",".join(item.servers), item.energy_j
        queue, compute, passes = item.queue_s, item.compute_s, item.passes
    else:
        widths = _either([spelled(item.widths) for item in items])
        servers = _either([",".join(item.servers) for item in items])
        energies = [item.energy_j for item in items if item.energy_j is not None]
        energy = sum(energies) if len(energies) == len(items) else None
        queue, compute = max([item.queue_s for item in items]), max([item.compute_s for item in items])
        passes = max([item.passes for item in items])
    cost: dict[str, str | float] = {
        "widths": widths,
        "servers": servers,
        "queue_ms": round(queue * 1e3, 3),
        "compute_ms": round(compute * 1e3, 3),
        "energy_source": "none" if energy is None else answer.energy_source,
        "precision": answer.precision,
    }
    if energy is not None:
        cost["energy_j"] = energy
    cost["passes"] = passes
    if answer.confidence:
        cost["confidence"] = round(min(answer.confidence), 4)
    if len(items) > 1:
        cost["item_passes"] = ";".join([str(item.passes) for item in items])
        if answer.confidence:
            cost["item_confidence"] = ";".join([f"{confidence:.4f}" for confidence in answer.confidence])
    twice = [item for item in items if item.other_widths]
    if twice:
        cost["other_widths"] = _either([spelled(item.other_widths) for item in items])
        cost["other_compute_ms"] = round(max([item.other_compute_s for item in twice]) * 1e3, 3)
        if energy is not None:  # so is each pass's
            cost["other_energy_j"] = sum([item.other_energy_j or 0.0 for item in twice])
    if answer.unmet:
        cost["unmet"] = answer.unmet
    if answer.timeline:
        cost["timeline"] = _encode(timeline_of(answer.timeline)).decode()
    return cost


def timeline_of(visits: Sequence[Visit]) -> list[dict[str, int | float | str]]:
    """One object per item and segment, in ms; items are numbered within the request."""
    first = min(visit.item for visit in visits)
    return [
        {
            "item": visit.item - first,
            "segment": visit.segment,
            "server": visit.server,
            "width": visit.width,
            "batch": visit.batch,
            "queued_ms": round(visit.queued_s * 1e3, 3),
            "waited_ms": round(visit.waited_s * 1e3, 3),
            "compute_ms": round(visit.compute_s * 1e3, 3),
        }
        for visit in visits
    ]


@lru_cache(4096)
def spelled(widths: WidthTuple) -> str:
    """A width tuple as text, `0.25,0.5,0.75,1`."""
    return ",".join([f"{width:g}" for width in widths])


def labels_of(logits: np.ndarray[Any, Any], count: int, card: ModelCard) -> list[list[str]]:
    """The classification extension: per item the `count` highest logits as `value:index[:label]`."""
    best = np.argsort(-logits, axis=1, kind="stable")[:, : min(count, logits.shape[1])]
    return [
        [f"{row[i]:f}:{i}:{card.labels[i]}" if card.labels else f"{row[i]:f}:{i}" for i in order]
        for row, order in zip(logits, best, strict=True)
    ]


def pack_strings(rows: list[list[str]]) -> bytes:
    """BYTES elements on the wire: each a little-endian length and the text."""
    texts = [text.encode() for row in rows for text in row]
    return b"".join(len(text).to_bytes(4, "little") + text for text in texts)


def _either(per_item: list[str]) -> str:
    return per_item[0] if len(set(per_item)) == 1 else ";".join(per_item)
