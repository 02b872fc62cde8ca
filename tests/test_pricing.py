import pytest

from infra.pricing import cost_usd, node_hour_usd


def test_prices_of_us_east_1() -> None:
    assert node_hour_usd("ec2", "p4d.24xlarge") == 21.957642
    assert node_hour_usd("local", "p4d.24xlarge") == 0.0


def test_cost_of_100_nodes_for_a_day() -> None:
    # 100 nodes x 24 h x 21.957642 USD
    assert cost_usd("ec2", "p4d.24xlarge", 100, 86_400) == pytest.approx(52_698.3408)
    assert cost_usd("local", "p4d.24xlarge", 100, 86_400) == 0.0


def test_a_type_without_a_price_names_those_that_have_one() -> None:
    with pytest.raises(ValueError, match=r"'m5\.large' has no known price; known are p4d\.24xlarge, p4de\.24xlarge"):
        node_hour_usd("ec2", "m5.large")
