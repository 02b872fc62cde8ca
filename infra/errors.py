"""What can go wrong with machines; and S3's errors, told as those of files.

InfraError
├── ClusterBusy        the cluster is held by another owner that lives
├── Preempted          the ranks were asked to stop, and did
├── WorkerFailed       a rank raised: carries that rank's own traceback
└── TransientError     trying again makes sense; nothing else is retried
    ├── WorkersKilled  ranks or nodes ended without a reason of their own: a signal, a lost machine, a lapsed lease
    └── Stalled        a rank was waited for, or gave no sign of life, for longer than is allowed

OSError
└── ConnectionError
    └── StorageUnavailable   a storage cannot be reached or is too busy, after all retries: it may be there again soon
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class InfraError(Exception):
    """Base of all errors about machines."""


class ClusterBusy(InfraError):
    """The cluster is held by another owner that lives."""


class Preempted(InfraError):
    """The ranks were asked to stop from outside, and have left in order; run again, the job goes on.

    Attributes:
        step: of the newest complete checkpoint then; None where a rank left before one was known to be.
        restartable: whether their nodes are still there to run on.
    """

    def __init__(self, step: int | None, restartable: bool) -> None:
        super().__init__(step, restartable)
        self.step = step
        self.restartable = restartable

    def __str__(self) -> str:
        if self.step is None:
            return "the job was stopped from outside, before its ranks had saved; run again, it continues"
        return f"the job was preempted at step {self.step}, which is saved; run again, it continues from there"


class WorkerFailed(InfraError):
    """A rank ended with an error of its own; `str()` tells who and why in one line, then the rank's own traceback.

    Attributes:
        rank: global rank.
        node: id of the node that the rank ran on.
        exit_code: of the rank's process.
        traceback: the rank's traceback as Python printed it, or the last lines of its stderr.
        log: the rank's stderr on its node.
    """

    def __init__(self, rank: int, node: str, exit_code: int, traceback: str, log: Path) -> None:
        # All of them as positional arguments, since that is what pickle rebuilds an exception from.
        super().__init__(rank, node, exit_code, traceback, log)
        self.rank = rank
        self.node = node
        self.exit_code = exit_code
        self.traceback = traceback
        self.log = log

    def __str__(self) -> str:
        lines = self.traceback.strip().splitlines()
        why = lines[-1].strip() if lines else "no output"
        return f"rank {self.rank} on {self.node} failed (exit code {self.exit_code}): {why}\n{self.traceback.strip()}"


class TransientError(InfraError):
    """A failure that another attempt may not meet; the only class that is retried."""


class WorkersKilled(TransientError):
    """Ranks or nodes ended without a traceback: to start again from a checkpoint makes sense.

    Attributes:
        lost_nodes: ids of the nodes that are gone.
    """

    def __init__(self, message: str, lost_nodes: tuple[str, ...] = ()) -> None:
        super().__init__(message, lost_nodes)
        self.lost_nodes = lost_nodes

    def __str__(self) -> str:
        return str(self.args[0])


class Stalled(TransientError):
    """A rank was waited for, or all ranks gave no sign of life, for longer than is allowed."""


class StorageUnavailable(ConnectionError):
    """A storage cannot be reached, or is too busy to answer; the retries of its client are over."""


@contextmanager
def s3_errors(uri: str, name: str = "") -> Iterator[None]:
    """Turns boto3's errors about an object, or all of a storage, into OSError's subclasses and ValueError, in one line
    that names the URI."""
    from boto3.exceptions import Boto3Error, RetriesExceededError  # nodes import this module and have no boto3
    from botocore import exceptions as aws

    no_credentials = (aws.NoCredentialsError, aws.PartialCredentialsError, aws.CredentialRetrievalError)
    no_login = (aws.ProfileNotFound, aws.NoAuthTokenError, aws.TokenRetrievalError, aws.SSOError, aws.LoginError)
    uri = f"{uri}/{name}" if name else uri
    try:
        yield
    except ValueError as invalid:  # an endpoint that is no URL
        raise ValueError(f"{uri}: {invalid}") from None
    except (aws.BotoCoreError, aws.ClientError, Boto3Error) as caught:
        # boto3 wraps what the service said to an upload.
        error = caught.__context__ if isinstance(caught.__context__, aws.ClientError) else caught
        message = " ".join(str(error).split())
        if isinstance(error, aws.ClientError):
            said, status = error.response["Error"], error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            raise s3_refusal(uri, said["Code"], said.get("Message", ""), status) from None
        if isinstance(error, (*no_credentials, *no_login)):
            raise PermissionError(f"access to {uri} is denied: {message}") from None
        if isinstance(error, (aws.HTTPClientError, aws.ConnectionError, aws.IncompleteReadError, RetriesExceededError)):
            raise StorageUnavailable(f"{uri} cannot be reached: {message}") from None
        if isinstance(error, aws.ParamValidationError):
            raise ValueError(f"{uri} cannot be: {message.partition('failed: ')[2]}") from None
        raise OSError(f"{uri}: {message}") from None


def s3_refusal(uri: str, code: str, message: str, status: int = 0) -> OSError | ValueError:
    """The exception for an error that the service answered, perhaps with an HTTP status."""
    if code == "NoSuchBucket":
        return FileNotFoundError(f"{uri} does not exist: there is no such bucket")
    if code == "NoSuchKey" or status == 404:
        return FileNotFoundError(f"{uri} does not exist")
    if code in ("AccessDenied", "ExpiredToken", "InvalidToken") or status in (401, 403):
        return PermissionError(f"access to {uri} is denied: {code}: {message}")
    if code == "InvalidBucketName":
        return ValueError(f"{uri} cannot be: {code}: {message}")
    if status >= 500 or code in ("SlowDown", "ServiceUnavailable", "InternalError", "RequestTimeout"):
        return StorageUnavailable(f"{uri}: {code}: {message}")
    return OSError(f"{uri}: {code}: {message}")
