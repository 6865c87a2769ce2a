"""The manifests of `deploy/kubernetes` fit together, and what they start starts."""

from __future__ import annotations

import http.client
import importlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from spanwire_webhook.settings import ReceiverSettings

FOLDER = Path(__file__).parent.parent / "deploy" / "kubernetes"
SECRET = "whsec_IjCW3yJpnCExt6cBFFiTOw5YeOrObR2GBC/eP8BvzP0="


def documents(name: str) -> list[dict[str, Any]]:
    yaml = importlib.import_module("yaml")  # which has no types
    return list(yaml.safe_load_all((FOLDER / name).read_text("utf-8")))


PARTS = {document["kind"]: document for document in documents("receiver.yaml")}
POD = PARTS["Deployment"]["spec"]["template"]["spec"]
(CONTAINER,) = POD["containers"]


def test_every_kind_is_there_once_and_they_select_the_same_pods() -> None:
    kinds = {"Deployment", "Service", "Ingress", "PodDisruptionBudget", "HorizontalPodAutoscaler", "NetworkPolicy"}
    assert PARTS.keys() == kinds
    assert len(documents("receiver.yaml")) == len(kinds)
    labels = PARTS["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert PARTS["Deployment"]["spec"]["selector"]["matchLabels"] == labels
    assert PARTS["Service"]["spec"]["selector"] == labels
    assert PARTS["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == labels
    assert PARTS["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"] == labels
    (rule,) = PARTS["Ingress"]["spec"]["rules"]
    backend = rule["http"]["paths"][0]["backend"]["service"]
    assert backend["name"] == PARTS["Service"]["metadata"]["name"]
    assert backend["port"]["name"] == PARTS["Service"]["spec"]["ports"][0]["name"]
    assert PARTS["Ingress"]["spec"]["tls"][0]["hosts"] == [rule["host"]]
    assert PARTS["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]["name"] == PARTS["Deployment"]["metadata"]["name"]
    replicas = PARTS["Deployment"]["spec"]["replicas"]
    assert replicas == PARTS["HorizontalPodAutoscaler"]["spec"]["minReplicas"] == 3
    assert PARTS["PodDisruptionBudget"]["spec"]["minAvailable"] < replicas


def test_the_pod_may_do_little_and_ends_in_its_time() -> None:
    assert POD["securityContext"]["runAsNonRoot"] is True
    assert POD["automountServiceAccountToken"] is False
    own = CONTAINER["securityContext"]
    assert (own["allowPrivilegeEscalation"], own["readOnlyRootFilesystem"]) == (False, True)
    assert own["capabilities"] == {"drop": ["ALL"]}
    drain_s = float(CONTAINER["args"][CONTAINER["args"].index("--drain") + 1])
    assert POD["terminationGracePeriodSeconds"] > drain_s + commands_grace_s()
    volumes = {volume["name"] for volume in POD["volumes"]}
    (mount,) = CONTAINER["volumeMounts"]
    assert mount["name"] in volumes
    assert {"name": "TMPDIR", "value": mount["mountPath"]} in CONTAINER["env"]
    port = CONTAINER["ports"][0]["containerPort"]
    assert str(port) == CONTAINER["args"][CONTAINER["args"].index("--port") + 1]
    assert PARTS["NetworkPolicy"]["spec"]["ingress"][0]["ports"] == [{"protocol": "TCP", "port": port}]


def commands_grace_s() -> int:
    from spanwire_webhook import commands

    return commands._GRACE_S


def test_secrets_are_named_as_the_receiver_reads_them() -> None:
    (secret,) = documents("secret.example.yaml")
    referred = [one["valueFrom"]["secretKeyRef"] for one in CONTAINER["env"] if "valueFrom" in one]
    assert {one["name"] for one in referred} == {secret["metadata"]["name"]}
    assert {one["key"] for one in referred} == secret["stringData"].keys()
    environ = {one["name"]: one.get("value", "x" * 16) for one in CONTAINER["env"]}
    settings = ReceiverSettings.from_environment(environ)
    assert settings.secrets.keys() == {"replicate", "baseten", "openai", "gemini", "cog"}
    (rule,) = PARTS["Ingress"]["spec"]["rules"]
    assert settings.public_url == f"https://{rule['host']}"


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_the_containers_command_starts_answers_its_probes_and_stops(tmp_path: Path) -> None:
    command = [*CONTAINER["command"], *CONTAINER["args"]]
    assert re.search(
        rf"^CMD .*{re.escape(', '.join(f'{chr(34)}{word}{chr(34)}' for word in command))}", dockerfile(), re.MULTILINE
    )
    command[0] = str(Path(sys.executable).with_name(command[0]))
    command[command.index("--port") + 1] = "0"  # more than one test may run here
    environ = {one["name"]: one.get("value", SECRET) for one in CONTAINER["env"]}
    environ |= {"SPANWIRE_STORE": f"sqlite:///{tmp_path}/jobs.db", "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(command, env={**os.environ, **environ}, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        line = process.stderr.readline()
        found = re.search(r"http://\S+", line)
        assert found, line + process.stderr.read()
        port = urlsplit(found.group()).port or 0
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            assert get(port, CONTAINER[probe]["httpGet"]["path"]) == 200
        process.send_signal(signal.SIGTERM)
        while get(port, CONTAINER["readinessProbe"]["httpGet"]["path"]) == 200:
            pass
        process.send_signal(signal.SIGTERM)  # without waiting for the drain to end
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.communicate()


def dockerfile() -> str:
    return (FOLDER / "Dockerfile").read_text("utf-8")


def get(port: int, path: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    finally:
        connection.close()
