"""Scheduled: ends every cluster that has outlived its lease, whoever started it."""

from prefect import flow

from tasks.cluster import end_expired_clusters


@flow(name="janitor")
def janitor() -> list[str]:
    """End clusters whose lease has expired; returns their names."""
    return end_expired_clusters()
