"""Guarantee 27's other way: client certificates instead of a token, over HTTP and gRPC."""

import shutil
import ssl
import subprocess
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from slim_scheduler.core.errors import ConfigError
from slim_scheduler.serve.access import Access
from slim_scheduler.serve.http.listener import tls_context
from tests.serve.conftest import serving

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl to make certificates with")


def openssl(*words: str | Path) -> None:
    subprocess.run(["openssl", *map(str, words)], check=True, capture_output=True)


def signed(folder: Path, name: str, *, by: str) -> None:
    key, request, certificate = (folder / f"{name}.{end}" for end in ("key", "csr", "pem"))
    openssl("req", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", request, "-subj", f"/CN={name}")
    names = folder / "names"
    names.write_text("subjectAltName=DNS:localhost,IP:127.0.0.1")
    authority = ("-CA", folder / f"{by}.pem", "-CAkey", folder / f"{by}.key", "-CAcreateserial")
    openssl("x509", "-req", "-in", request, *authority, "-out", certificate, "-days", "2", "-extfile", names)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    for authority in ("ca", "other"):
        key, certificate = folder / f"{authority}.key", folder / f"{authority}.pem"
        subject = ("-subj", f"/CN={authority}", "-days", "2")
        openssl("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", certificate, *subject)
    signed(folder, "server", by="ca")
    signed(folder, "client", by="ca")
    signed(folder, "stranger", by="other")
    return folder


def test_a_client_authority_that_is_missing_is_named(certificates):
    access = Access(
        certificate=str(certificates / "server.pem"), key=str(certificates / "server.key"), client_ca="absent.pem"
    )
    with pytest.raises(ConfigError, match=r"absent\.pem: .*check --tls-client-ca"):
        tls_context(access)


def test_only_clients_with_a_certificate_of_ours_are_served(certificates, tmp_path, images):
    files = ("--tls-cert", "server.pem", "--tls-key", "server.key", "--tls-client-ca", "ca.pem")
    options = [str(certificates / word) if word.endswith((".pem", ".key")) else word for word in files]
    with serving(tmp_path, "--host", "0.0.0.0", *options) as server:
        url = f"https://127.0.0.1:{server.http}/v2/health/ready"
        for name, served in (("client", True), ("stranger", False), (None, False)):
            context = ssl.create_default_context(cafile=str(certificates / "ca.pem"))
            if name is not None:
                context.load_cert_chain(certificates / f"{name}.pem", certificates / f"{name}.key")
            if served:
                assert urllib.request.urlopen(url, context=context, timeout=10).status == 200
                events = f"https://127.0.0.1:{server.http}/live/events"
                with urllib.request.urlopen(events, context=context, timeout=30) as stream:
                    found = [line for line in (stream.readline() for _ in range(12)) if line.startswith(b"event: ")]
                assert found == [b"event: history\n", b"event: sample\n", b"event: sample\n", b"event: sample\n"]
            else:
                with pytest.raises((urllib.error.URLError, OSError)):
                    urllib.request.urlopen(url, context=context, timeout=10)
        for name, served in (("client", True), ("stranger", False)):
            client = triton.InferenceServerClient(
                f"localhost:{server.grpc}",
                ssl=True,
                root_certificates=str(certificates / "ca.pem"),
                private_key=str(certificates / f"{name}.key"),
                certificate_chain=str(certificates / f"{name}.pem"),
            )
            if served:
                assert client.is_server_ready()
            else:
                with pytest.raises(InferenceServerException):
                    client.is_server_ready(client_timeout=5)
            client.close()
