"""prefect.yaml: the deployments load, their parameters are valid, and the laptop's are the preset."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowFilter, FlowFilterName
from prefect.flows import load_flow_from_entrypoint

from flows.presets import preset
from tasks.config import PipelineConfig

ROOT = Path(__file__).parent.parent
DEPLOYMENTS: list[dict[str, Any]] = yaml.safe_load((ROOT / "prefect.yaml").read_text(encoding="utf-8"))["deployments"]


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=lambda deployment: deployment["entrypoint"])
def test_a_deployment_loads_with_valid_parameters(deployment: dict[str, Any]) -> None:
    flow = load_flow_from_entrypoint(str(ROOT / deployment["entrypoint"]))
    parameters = flow.validate_parameters(deployment.get("parameters", {}))
    laptop = preset("laptop", {"run_uri": "runs/laptop"})
    assert parameters.get("config", laptop) == laptop
    assert flow.description
    assert deployment["description"]


def test_the_form_of_the_configuration_is_complete() -> None:
    """Every field that a person fills in has a description, and unknown fields are refused by the server."""
    schema = PipelineConfig.model_json_schema()
    for section in [schema, *schema["$defs"].values()]:
        assert section["additionalProperties"] is False
        for name, field in section["properties"].items():
            assert field.get("description") or "$ref" in field, name


@pytest.mark.slow
def test_all_deploy_and_a_worker_runs_one(prefect_server: str, tmp_path: Path) -> None:
    """`prefect deploy --all` on a fresh server, and the janitor's deployment run by a process worker."""
    environment = os.environ | {"PREFECT_API_URL": prefect_server}

    def command(*arguments: str) -> str:
        line = [sys.executable, "-m", "prefect", "--no-prompt", *arguments]
        done = subprocess.run(line, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    command("work-pool", "create", "--type", "process", "jumbo")
    deployed = command("deploy", "--all")
    for deployment in DEPLOYMENTS:
        assert f"/{deployment['name']}" in deployed
    command("deployment", "run", "janitor/janitor")
    command("worker", "start", "--pool", "jumbo", "--run-once", "--type", "process")
    with get_client(sync_client=True) as client:
        runs = client.read_flow_runs(flow_filter=FlowFilter(name=FlowFilterName(any_=["janitor"])))
    assert "Completed" in [run.state.name for run in runs if run.state and run.deployment_id]
