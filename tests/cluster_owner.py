"""An owner that the tests of clusters can kill: `python -m cluster_owner STATE_DIR NAME LEASE_SECONDS DIRECTORY`.
Holds a cluster, on which ranks sleep when DIRECTORY is given."""

import sys
import time
from pathlib import Path

from infra.cluster import ClusterRequest, Job
from infra.launcher import run_job
from infra.local import LocalProvider

state_dir, name, lease_seconds, *directory = sys.argv[1:]
provider = LocalProvider(Path(state_dir))
cluster = provider.provision(ClusterRequest(name, 1, 2, 1, float(lease_seconds)))
sys.stdout.write("provisioned\n")
sys.stdout.flush()
if directory:
    run_job(
        provider,
        cluster,
        Job("sleep", 0, "cluster_worker", ("sleep", *directory)),
        last_sign=lambda: None,
        on_tick=lambda: None,
        start_timeout_seconds=120,
        stall_timeout_seconds=120,
    )
time.sleep(120)
