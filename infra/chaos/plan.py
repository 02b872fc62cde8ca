"""Which fault comes when: drawn from a seed before the run, so that a run that fails can be repeated."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

DISTURBED_RECOVERY = 0.25
"""Share of the faults, once every kind has come, that do not wait for the recovery from the one before."""
RECOVERY_SECONDS = 8.0  # in which such a fault comes


class Kind(StrEnum):
    """A fault, by its name on the command line; `DESCRIPTIONS` says what it does."""

    RANK = "rank"
    TORCHRUN = "torchrun"
    NODE = "node"
    FLOW = "flow"
    POWER = "power"
    PAUSE = "pause"
    STUCK = "stuck"
    NOTICE = "notice"
    CANCEL = "cancel"
    FLIP = "flip"
    TRUNCATE = "truncate"
    DELETE = "delete"
    DISK_SHORT = "disk-short"
    DISK_FULL = "disk-full"
    S3_ERRORS = "s3-errors"
    S3_RESETS = "s3-resets"
    S3_STALLS = "s3-stalls"
    S3_SLOW = "s3-slow"


DESCRIPTIONS = {
    Kind.RANK: "SIGKILL of one rank",
    Kind.TORCHRUN: "SIGKILL of a node's torchrun",
    Kind.NODE: "SIGKILL of a node's supervisor and all its processes",
    Kind.FLOW: "SIGKILL of the flow; its cluster lives on",
    Kind.POWER: "SIGKILL of the flow and its whole cluster",
    Kind.PAUSE: "SIGSTOP of one rank for some seconds",
    Kind.STUCK: "SIGSTOP of one rank for good",
    Kind.NOTICE: "SIGTERM to one node, as a spot notice",
    Kind.CANCEL: "SIGTERM to the flow",
    Kind.FLIP: "one bit flipped in the newest checkpoint",
    Kind.TRUNCATE: "a file of the newest checkpoint cut short",
    Kind.DELETE: "a file of the newest checkpoint deleted",
    Kind.DISK_SHORT: "disk full: a checkpoint does not fit",
    Kind.DISK_FULL: "disk full: nothing fits",
    Kind.S3_ERRORS: "S3 answers 500 and 503",
    Kind.S3_RESETS: "S3 resets connections",
    Kind.S3_STALLS: "S3 answers seconds late",
    Kind.S3_SLOW: "S3 sends slowly",
}
S3_KINDS = (Kind.S3_ERRORS, Kind.S3_RESETS, Kind.S3_STALLS, Kind.S3_SLOW)
LOCAL_KINDS = tuple(kind for kind in Kind if kind not in S3_KINDS)
DAMAGES = (Kind.FLIP, Kind.TRUNCATE, Kind.DELETE)
DISK_KINDS = (Kind.DISK_SHORT, Kind.DISK_FULL)


@dataclass(frozen=True)
class Injection:
    """A fault to come.

    Attributes:
        at_step: the training step that it waits for; None where it comes while the run recovers from the one before.
        delay_seconds: from that step, or from the fault before.
        seed: of what else is random about it: which rank, which byte.
    """

    kind: Kind
    at_step: int | None
    delay_seconds: float
    seed: int


def make_plan(kinds: Sequence[Kind], count: int, first_step: int, last_step: int, seed: int) -> list[Injection]:
    """At least `count` faults over these steps: every kind once, in any order, then at random."""
    chance = random.Random(seed)
    drawn = chance.sample(kinds, len(kinds))
    drawn += [chance.choice(kinds) for _ in range(count - len(kinds))]
    slot = (last_step - first_step) / len(drawn)
    assert slot >= 2, "more faults than steps"
    plan = []
    for number, kind in enumerate(drawn):
        step = first_step + int(slot * (number + chance.uniform(0, 0.8)))
        waits = number < len(kinds) or chance.random() > DISTURBED_RECOVERY
        delay = chance.uniform(0, 0.3 if waits else RECOVERY_SECONDS)
        plan.append(Injection(kind, step if waits else None, delay, chance.randrange(2**31)))
    return plan
