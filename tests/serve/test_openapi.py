"""The published document, and a fuzzer that reads it."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.serve.wire import call

SCHEMATHESIS = Path(sys.executable).with_name("schemathesis")


def test_document_names_every_path_of_the_model(server):
    document = call(server.http, "GET", "/openapi.json")[2]
    assert document["openapi"].startswith("3.1")
    assert {"/v2/models/digits/infer", "/v2/models/digits/versions/{version}/infer"} <= set(document["paths"])


@pytest.mark.skipif(not SCHEMATHESIS.exists(), reason="schemathesis is not installed")
def test_schemathesis_finds_nothing(server, tmp_path):
    options = ["--max-examples", "8", "--seed", "1", "--phases", "coverage,fuzzing", "--no-color"]
    done = subprocess.run(
        [SCHEMATHESIS, "run", f"{server.url}/openapi.json", *options],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout[-6000:]
