"""What machines cost."""

# On-demand Linux in us-east-1, USD per hour of one instance, after the price cut of June 2025. Source: the AWS price
# list as quoted by repositories of 2026-03-04, 2026-07-28 and 2026-09-25; not read from AWS itself.
ON_DEMAND_HOUR_USD = {
    "p4d.24xlarge": 21.957642,
    "p4de.24xlarge": 27.44705,
    "p5.48xlarge": 55.04,
    "p5en.48xlarge": 63.296,
}


def node_hour_usd(provider: str, instance_type: str) -> float:
    """USD that one node costs in an hour; 0 for nodes on this machine.

    Raises:
        ValueError: the instance type has no price here.
    """
    if provider == "local":
        return 0.0
    if instance_type not in ON_DEMAND_HOUR_USD:
        known = ", ".join(ON_DEMAND_HOUR_USD)
        raise ValueError(f"cluster.instance_type {instance_type!r} has no known price; known are {known}")
    return ON_DEMAND_HOUR_USD[instance_type]


def cost_usd(provider: str, instance_type: str, nodes: int, seconds: float) -> float:
    """USD that `nodes` nodes cost in `seconds`; EC2 bills by the second."""
    return node_hour_usd(provider, instance_type) * nodes * seconds / 3600
