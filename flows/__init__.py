"""What Prefect deploys.

Importing it from plain Python gives a temporary Prefect server time to start on a busy machine, and keeps Prefect from
calling home; a setting that the environment has already wins.
"""

import os

os.environ.setdefault("PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS", "180")
os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
os.environ.setdefault("DO_NOT_TRACK", "1")
