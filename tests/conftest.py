"""What the whole session shares: a Prefect server, an S3 server, and a state directory of its own."""

import os
import shutil
import tempfile
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
    from infra.chaos.s3_server import s3_server as started

    with started(_SESSION_DIRECTORY / "s3") as endpoint:
        os.environ["AWS_ENDPOINT_URL"] = endpoint
        try:
            yield endpoint
        finally:
            del os.environ["AWS_ENDPOINT_URL"]


@pytest.fixture
def s3_bucket(s3_server: str) -> str:
    """The URI of an empty bucket."""
    from infra.chaos.s3_server import create_bucket

    return create_bucket(s3_server)
