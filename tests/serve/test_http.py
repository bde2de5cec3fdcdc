"""The protocol over HTTP, against a real server."""

import gzip
import json
import re
import socket
import time
import zlib
from email.utils import parsedate_to_datetime

import numpy as np
import pytest

from slim_scheduler.client.client import infer_body
from tests.serve.wire import call, exchange, infer, metrics

MODEL = "/v2/models/digits"


def test_server_and_model_say_what_they_are(server):
    assert call(server.http, "GET", "/v2")[2]["extensions"].count("binary_tensor_data") == 1
    assert call(server.http, "GET", "/v2/health/live")[2] == {"live": True}
    assert call(server.http, "GET", "/v2/health/ready")[2] == {"ready": True}
    for path in (MODEL, MODEL + "/versions/1"):
        for end in ("", "/"):
            document = call(server.http, "GET", path + end)[2]
            assert document["inputs"] == [{"name": "image", "datatype": "FP32", "shape": [-1, 1, 8, 8]}]
            assert document["outputs"] == [{"name": "logits", "datatype": "FP32", "shape": [-1, 10]}]
            assert call(server.http, "GET", path + "/ready" + end)[2]["ready"] is True
            assert call(server.http, "GET", path + "/config" + end)[2]["max_batch_size"] == 4096


def test_metadata_says_what_a_client_needs_to_prepare_an_image(server):
    about = call(server.http, "GET", MODEL)[2]["parameters"]
    assert about["classes"] == [str(digit) for digit in range(10)]
    assert about["datatypes"] == ["FP32", "UINT8"]
    assert (len(about["mean"]), len(about["std"])) == (1, 1)
    assert 0 < about["mean"][0] < 1
    configuration = call(server.http, "GET", MODEL + "/config")[2]["parameters"]
    assert configuration["classes"]["string_value"] == "0,1,2,3,4,5,6,7,8,9"
    assert float(configuration["mean"]["string_value"]) == about["mean"][0]


@pytest.mark.parametrize("path", ["/", "/page/page.js", "/v2", "/metrics"])
def test_head_has_the_length_of_get_and_no_body(server, path):
    _, fields, _ = call(server.http, "GET", path)
    status, without, nothing = call(server.http, "HEAD", path)
    assert (status, nothing) == (200, b"")
    assert without["content-type"] == fields["content-type"]
    if path != "/metrics":  # which changes
        assert int(without["content-length"]) == int(fields["content-length"]) > 0


def test_head_of_the_live_stream_is_its_head_and_the_next_request_is_answered(server):
    asked = b"%b HTTP/1.1\r\nHost: localhost\r\n\r\n"
    answers = exchange(server.http, asked % b"HEAD /live/events" + asked % b"GET /v2/health/live")
    assert re.findall(rb"HTTP/1.1 (\d+)|content-type: ([^\r;]+)", answers) == [
        (b"200", b""),
        (b"", b"text/event-stream"),
        (b"200", b""),
        (b"", b"application/json"),
    ]


def test_a_health_probe_in_http_1_0_needs_no_host(server):
    assert exchange(server.http, b"GET /v2/health/live HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.1 200")
    assert exchange(server.http, b"GET /v2/health/live HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 400")


def test_past_samples_of_the_live_page_stay_what_they_were(server, images):
    def history() -> list[dict]:
        with socket.create_connection(("127.0.0.1", server.http), timeout=20) as wire:
            wire.sendall(b"GET /live/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
            read = wire.makefile("rb")
            while not (line := read.readline()).startswith(b"data: "):
                assert line
            return json.loads(line.removeprefix(b"data: "))

    time.sleep(1.1)  # a sample a second
    before = history()[-1]
    infer(server.http, images)
    time.sleep(1.1)
    (then,) = [sample for sample in history() if sample["time"] == before["time"]]
    assert then["models"][0]["widths"] == before["models"][0]["widths"]


def test_inference_with_and_without_version_and_slash(server, images):
    answers = [
        infer(server.http, images, path + end)[2]
        for path in (MODEL + "/infer", MODEL + "/versions/1/infer")
        for end in ("", "/")
    ]
    tails = {answer[-120:] for answer in answers}  # 3 x 10 floats; batching changes nothing that shows here
    assert all(np.allclose(np.frombuffer(t, "<f4"), np.frombuffer(min(tails), "<f4"), atol=1e-4) for t in tails)


def test_json_binary_raw_and_compressed_bodies_get_the_same_answer(server, images):
    binary, length = infer_body(images)
    sized = {"inference_header_content_length": str(length)}
    document = {
        "inputs": [{"name": "image", "shape": [3, 1, 8, 8], "datatype": "FP32", "data": images.ravel().tolist()}]
    }
    path = MODEL + "/infer"
    _, _, reply = call(server.http, "POST", path, document)
    expected = np.float32(reply["outputs"][0]["data"])
    for body, headers in (
        (binary, sized),
        (images.tobytes(), {"inference_header_content_length": "0"}),
        (gzip.compress(binary), sized | {"content_encoding": "gzip"}),
        (zlib.compress(binary), sized | {"content_encoding": "deflate"}),
        (zlib.compress(binary)[2:-4], sized | {"content_encoding": "deflate"}),
    ):
        status, fields, raw = call(server.http, "POST", path, body, **headers)
        assert status == 200
        tail = raw[int(fields["inference-header-content-length"]) :]
        assert np.allclose(np.frombuffer(tail, "<f4"), expected, atol=1e-4)


def test_large_answers_are_compressed_where_the_client_takes_it(server):
    images = np.zeros((200, 1, 8, 8), np.float32)
    status, fields, raw = infer(server.http, images, accept_encoding="gzip")
    assert status == 200
    assert fields["content-encoding"] == "gzip"
    assert len(gzip.decompress(raw)) == int(fields["inference-header-content-length"]) + 200 * 40
    for refused in ("identity", "gzip;q=0", "br, gzip; q=0.000"):
        assert "content-encoding" not in infer(server.http, images, accept_encoding=refused)[1]
    assert infer(server.http, images, accept_encoding="gzip;q=0, deflate;q=0.5")[1]["content-encoding"] == "deflate"


@pytest.mark.parametrize("path", ["/", "/page/page.js", "/metrics"])
def test_documents_are_compressed_too(server, path):
    plain, packed = (call(server.http, "GET", path, accept_encoding=coding) for coding in ("identity", "gzip"))
    assert packed[1]["content-encoding"] == "gzip"
    assert len(packed[2]) < len(plain[2]) / 2
    if path != "/metrics":  # which changes
        assert gzip.decompress(packed[2]) == plain[2]
        assert packed[1]["vary"] == "accept-encoding"


@pytest.mark.parametrize("path", ["/", "/v2", "/live/events", MODEL + "/infer"])
def test_every_answer_has_its_date(server, path):
    head = b""
    with socket.create_connection(("127.0.0.1", server.http), timeout=20) as wire:
        wire.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        while b"\r\n\r\n" not in head and (piece := wire.recv(65536)):
            head += piece
    date = parsedate_to_datetime(head.split(b"date: ")[1].split(b"\r\n")[0].decode())
    assert abs(date.timestamp() - time.time()) < 20


def test_labels_come_with_the_classification_extension(server, images):
    document = {
        "inputs": [{"name": "image", "shape": [3, 1, 8, 8], "datatype": "FP32", "data": images.ravel().tolist()}],
        "outputs": [{"name": "logits", "parameters": {"classification": 2}}],
    }
    output = call(server.http, "POST", MODEL + "/infer", document)[2]["outputs"][0]
    assert (output["datatype"], output["shape"]) == ("BYTES", [3, 2])
    value, index, label = output["data"][0].split(":")
    assert float(value)
    assert label == index  # the digits' labels are the digits


@pytest.mark.parametrize(
    ("parameters", "widths"),
    [({"width": 0.25}, "0.25,0.25,0.25,0.25"), ({"widths": "1,0.75,0.5,0.25"}, "1,0.75,0.5,0.25")],
)
def test_fixed_widths_are_what_runs_and_the_answer_says_so(server, images, parameters, widths):
    document = {
        "inputs": [{"name": "image", "shape": [1, 1, 8, 8], "datatype": "FP32", "data": images[0].ravel().tolist()}],
        "parameters": parameters,
    }
    told = call(server.http, "POST", MODEL + "/infer", document)[2]["parameters"]
    assert told["widths"] == widths
    assert set(told["servers"].split(",")) <= {"a", "b"}
    assert told["queue_ms"] >= 0
    assert told["compute_ms"] > 0


def test_a_floor_nothing_reaches_is_refused_or_answered_as_the_request_asks(server, images):
    def ask(unmet: str):
        document = {
            "inputs": [
                {"name": "image", "shape": [1, 1, 8, 8], "datatype": "FP32", "data": images[0].ravel().tolist()}
            ],
            "parameters": {"accuracy_floor": 1.0, "unmet": unmet},
        }
        return call(server.http, "POST", MODEL + "/infer", document)

    def counted() -> list[float]:
        found = metrics(server.http)
        outcomes = ("answered", "rejected")
        counts = [found[f'slim_requests_total{{model="digits",outcome="{outcome}"}}'] for outcome in outcomes]
        return [*counts, found['slim_requests_received_total{model="digits"}']]

    before = counted()
    status, _, refused = ask("refuse")
    assert status == 400
    assert "accuracy" in refused["error"]
    status, _, answered = ask("answer")
    assert status == 200
    assert answered["parameters"]["unmet"] == "accuracy_floor"
    assert answered["parameters"]["widths"] == "1,1,1,1"
    assert [now - then for now, then in zip(counted(), before, strict=True)] == [1, 1, 2], "one refused, one answered"


def test_a_width_that_is_not_served_becomes_the_nearest_where_the_request_asks_for_an_answer(server, images):
    document = {
        "inputs": [{"name": "image", "shape": [1, 1, 8, 8], "datatype": "FP32", "data": images[0].ravel().tolist()}],
        "parameters": {"width": 0.7, "unmet": "answer"},
    }
    told = call(server.http, "POST", MODEL + "/infer", document)[2]["parameters"]
    assert told["widths"] == "0.75,0.75,0.75,0.75"
    assert told["unmet"] == "widths"


def test_a_deadline_that_cannot_be_met_is_503_with_retry_after(server, images):
    body, length = infer_body(images)
    head = json.loads(body[:length])
    head["parameters"]["deadline_ms"] = 0.001
    head = json.dumps(head).encode()
    status, fields, reply = call(
        server.http, "POST", MODEL + "/infer", head + body[length:], inference_header_content_length=str(len(head))
    )
    assert status == 503
    assert int(fields["retry-after"]) >= 1
    assert "deadline" in reply["error"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/v2/models/nothing/infer", 404),
        ("POST", "/v2/models/digits/versions/2/infer", 404),
        ("POST", "/v2/models/..%2F..%2Fetc/infer", 404),
        ("GET", "/v2/models/nothing", 404),
        ("GET", "/v2/models/nothing/ready", 404),
        ("GET", "/v2/nothing", 404),
        ("GET", "/page/..%2F..%2Fservice.py", 404),
        ("GET", MODEL + "/infer", 405),
        ("DELETE", MODEL, 405),
        ("POST", MODEL + "/infer", 400),
        ("POST", "/v2/repository/models/digits/unload", 403),
        ("GET", "/v2/systemsharedmemory/status", 501),
        ("POST", "/v2/cudasharedmemory/region/x/register", 501),
        ("GET", "/v2/logging", 501),
    ],
)
def test_errors_are_mapped_and_say_why(server, method, path, status):
    found, _, reply = call(server.http, method, path)
    assert found == status
    assert reply["error"]


def test_repository_index_and_statistics(server, images):
    infer(server.http, images)
    index = call(server.http, "POST", "/v2/repository/index", {})[2]
    assert {"name": "digits", "version": "1", "state": "READY", "reason": ""} in index
    for path in (MODEL + "/stats", MODEL + "/versions/1/stats", "/v2/models/stats"):
        stats = call(server.http, "GET", path)[2]["model_stats"][0]
        assert stats["inference_count"] >= 3
        assert stats["inference_stats"]["success"]["count"] >= 1
        assert stats["inference_stats"]["compute_infer"]["ns"] > 0
        for part in ("queue", "compute_infer"):
            assert stats["inference_stats"][part]["count"] == stats["inference_stats"]["success"]["count"]
        executions = {row["batch_size"]: row["compute_infer"]["count"] for row in stats["batch_stats"]}
        assert sum(executions.values()) == stats["execution_count"]
        segments = 4
        passes = stats["inference_count"] + metrics(server.http)['slim_second_passes_total{model="digits"}']
        assert sum(size * count for size, count in executions.items()) == segments * passes


def test_traceparent_is_carried_through(server, images):
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    assert infer(server.http, images, traceparent=trace)[1]["traceparent"] == trace
    assert "traceparent" not in infer(server.http, images, traceparent="00-evil")[1]


def test_host_and_origin_are_checked_on_every_method(server):
    for method, path in (("GET", "/v2"), ("POST", MODEL + "/infer"), ("GET", "/metrics"), ("OPTIONS", "/v2")):
        assert call(server.http, method, path, host="evil.example")[0] == 403
        assert call(server.http, method, path, origin="http://evil.example")[0] == 403
    assert call(server.http, "GET", "/v2", origin=server.url)[0] == 200


def test_two_lengths_are_no_length(server):
    request = (
        b"POST /v2/models/digits/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\n"
        b"Inference-Header-Content-Length: 0\r\nInference-Header-Content-Length: 1\r\n\r\nabcd"
    )
    assert exchange(server.http, request).startswith(b"HTTP/1.1 400 ")


def test_metrics_have_our_names_and_tritons(server, images):
    infer(server.http, images)
    found = metrics(server.http)
    for name in (
        'slim_items_total{model="digits",outcome="answered"}',
        'slim_server_up{model="digits",server="a"}',
        'slim_decisions_total{choice="0.5",head="width",model="digits"}',
        'nv_inference_count{model="digits",version="1"}',
        "process_resident_memory_bytes",
    ):
        assert found[name] > 0, name
    assert any(name.startswith("slim_block_seconds_bucket{") and 'segment="3"' in name for name in found)


def test_waiting_and_computing_are_counted_once_per_request(server, images):
    """Who divides a sum of microseconds by the number of requests must get no more than a request took."""
    names = ("request_success", "request_duration_us", "queue_duration_us", "compute_infer_duration_us")
    before = metrics(server.http)
    infer(server.http, np.zeros((200, 1, 8, 8), np.float32))
    after = metrics(server.http)
    series = [f'nv_inference_{name}{{model="digits",version="1"}}' for name in names]
    requests, whole, queue, compute = (after[name] - before[name] for name in series)
    assert requests == 1
    assert 0 < compute <= queue + compute <= whole


def test_a_timeline_says_where_the_time_of_every_item_went(server, images):
    document = {
        "inputs": [{"name": "image", "shape": [3, 1, 8, 8], "datatype": "FP32", "data": images.ravel().tolist()}],
        "parameters": {"timeline": True, "width": 0.5},
    }
    status, _, reply = call(server.http, "POST", MODEL + "/infer", document)
    assert status == 200
    visits = json.loads(reply["parameters"]["timeline"])
    assert [(visit["item"], visit["segment"]) for visit in visits] == [(i, s) for i in range(3) for s in range(4)]
    for item in range(3):
        mine = [visit for visit in visits if visit["item"] == item]
        assert all(visit["width"] >= 0.5 and visit["batch"] >= 1 for visit in mine)
        spent = sum(visit["queued_ms"] + visit["waited_ms"] + visit["compute_ms"] for visit in mine)
        assert spent <= reply["parameters"]["queue_ms"] + reply["parameters"]["compute_ms"] + 0.1
    plain = call(server.http, "POST", MODEL + "/infer", {**document, "parameters": {}})[2]
    assert "timeline" not in plain["parameters"]
    document["parameters"]["timeline"] = "yes"
    status, _, refused = call(server.http, "POST", MODEL + "/infer", document)
    assert status == 400
    assert refused["error"] == "timeline is yes; it must be true or false"
