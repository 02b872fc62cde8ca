"""The benchmark of checkpoints compares with the best peer."""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))  # as for `python benchmarks/X.py`

from checkpoint import CONNECTOR, DCP, S3FS, rows


def figures(seconds: float, memory_mib: int, blocked: float) -> dict[str, Any]:
    """Of a save and a load of 100 MB; a first save takes twice as long."""
    save = {"seconds": seconds, "memory_bytes": memory_mib << 20, "blocked_seconds": blocked, "cpu_seconds": 1.0}
    return {"bytes": 100_000_000, "save": [save | {"seconds": 2 * seconds}, save], "load": save}


def test_the_ratio_is_to_the_best_peer() -> None:
    s3 = {"jumbo": [figures(1, 100, 0.1)], S3FS: [figures(4, 80, 0.4)], CONNECTOR: [figures(2, 200, 0.05)]}
    disk = {"jumbo": [figures(1, 100, 0.1)], DCP: [figures(0.5, 100, 0.5)]}
    by_name = {row.what: row for row in rows(s3, disk)}
    assert by_name["s3 save vs best peer"].jumbo == 100
    assert by_name["s3 save vs best peer"].peers == {S3FS: 25, CONNECTOR: 50}
    assert by_name["s3 save vs best peer"].ratio == 2
    assert by_name["s3 load vs best peer"].ratio == 2
    assert by_name["disk save vs dcp"].ratio == by_name["disk load vs dcp"].ratio == 0.5
    assert by_name["s3 save memory vs best peer"].ratio == 1.25
    assert by_name["blocked by a save to s3"].ratio == 2
    assert by_name["blocked share of synchronous save"].jumbo == 0.1


def test_without_its_peers_there_is_no_ratio() -> None:
    runs = {"jumbo": [figures(1, 100, 0.1)]}
    by_name = {row.what: row for row in rows(runs, runs | {DCP: [figures(1, 1, 1)]})}
    assert by_name["s3 load vs best peer"].ratio is None
    assert by_name["s3 load vs best peer"].peers == {S3FS: None, CONNECTOR: None}
