"""The Helm chart, rendered by Helm's own engine: what comes out is Kubernetes', and says what it should."""

from __future__ import annotations

import copy
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import helm_python
import kubernetes_validate
import pytest
import yaml

from orchestrator.__main__ import main
from orchestrator.triton.supervisor import ServeOptions

DEPLOY = Path(__file__).parents[2] / "deploy"
CHART = DEPLOY / "helm" / "triton-realtime"
NAME, NAMESPACE = "rt", "prod"
SERVE_LABELS = {
    "app.kubernetes.io/name": "triton-realtime",
    "app.kubernetes.io/instance": NAME,
    "app.kubernetes.io/component": "serve",
}
# The oldest that the chart allows, and a new one.
KUBERNETES = ("1.29", "1.35")

LEAST: dict[str, Any] = {"keys": {"existingSecret": "realtime-keys"}}
REDIS = {"redis": {"urlSecret": {"name": "realtime-redis"}}}
MOST: dict[str, Any] = {
    **LEAST,
    **REDIS,
    "imagePullSecrets": ["registry"],
    "serve": {
        "gatewayWorkers": 2,
        "allowHosts": ["ai.example.com"],
        "allowOrigins": ["https://chat.example.com"],
        "grpc": {"enabled": True, "tlsSecret": "realtime-tls"},
        "extraEnv": [{"name": "CLOUD_KEY", "valueFrom": {"secretKeyRef": {"name": "cloud", "key": "key"}}}],
    },
    "autoscaling": {"enabled": True},
    "persistence": {"storageClass": "shared", "accessModes": ["ReadWriteMany"]},
    "build": {"enabled": True, "tokenSecret": "hugging-face"},
    "networkPolicy": {
        "clients": [{"namespaceSelector": {"matchLabels": {"team": "chat"}}}],
        "metrics": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}],
        "redis": {"to": [{"podSelector": {"matchLabels": {"app": "redis"}}}]},
        "extraEgress": [{"to": [{"ipBlock": {"cidr": "192.0.2.0/24"}}], "ports": [{"port": 443}]}],
    },
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}, "metricsKeySecret": {"name": "metrics"}},
    "serviceAccount": {"name": "realtime"},
    "runtimeClassName": "nvidia",
    "nodeSelector": {"gpu": "l4"},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
    "affinity": {"nodeAffinity": {}},
    "topologySpreadConstraints": [
        {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway"}
    ],
    "podAnnotations": {"example.com/owner": "ml"},
}
CPU: dict[str, Any] = LEAST | yaml.safe_load((DEPLOY / "helm" / "cpu.yaml").read_text())
CASES = {"least": LEAST, "most": MOST, "cpu": CPU}


def render(values: dict[str, Any], release: str = NAME) -> dict[str, dict[str, Any]]:
    """The manifests by kind; the second NetworkPolicy, which is the build's, as `BuildPolicy`."""
    with helm_python.Chart.load(CHART) as chart:
        chart.validate_schema(values)
        files = chart.render(values, name=release, namespace=NAMESPACE)
    texts = [text for name, text in files.items() if not name.endswith("NOTES.txt")]
    manifests = [manifest for text in texts for manifest in yaml.safe_load_all(text) if manifest]
    found: dict[str, dict[str, Any]] = {}
    for manifest in manifests:
        is_builds = manifest["metadata"]["name"].endswith("-build")
        kind = "BuildPolicy" if is_builds else manifest["kind"]
        assert kind not in found
        found[kind] = manifest
    return found


def merged(values: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {**copy.deepcopy(values), **more}


def pod(values: dict[str, Any]) -> dict[str, Any]:
    return render(values)["Deployment"]["spec"]["template"]["spec"]


def serve_container(values: dict[str, Any]) -> dict[str, Any]:
    (container,) = pod(values)["containers"]
    return container


# --- it is a chart, and what it renders is Kubernetes' -----------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_helm_lints_it(case: str) -> None:
    report = helm_python.lint(CHART, CASES[case], strict=True, kube_version=f"v{KUBERNETES[0]}.0")
    assert report["errors"] == []
    assert [message["error"] for message in report["messages"]] == ["icon is recommended"]


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("case", CASES)
def test_manifests_are_valid(case: str, version: str) -> None:
    for kind, manifest in render(CASES[case]).items():
        if kind != "ServiceMonitor":  # Prometheus Operator's; no schema here has it
            kubernetes_validate.validate(manifest, version, strict=True)


@pytest.mark.parametrize("word", ["1234", "true", "1e3", "007", "null"])
def test_names_that_yaml_takes_for_something_else(word: str) -> None:
    values = merged(MOST, keys={"existingSecret": word}, imagePullSecrets=[word], runtimeClassName=word)
    values |= {"redis": {"urlSecret": {"name": word}}, "serviceAccount": {"name": word}}
    values |= {"persistence": {"storageClass": word, "accessModes": ["ReadWriteMany"]}}
    values["build"] = {"enabled": True, "tokenSecret": word, "activeDeadlineSeconds": 10_000_000}
    values["serve"]["grpc"] = {"enabled": True, "tlsSecret": word}
    values["serviceMonitor"] = {"enabled": True, "metricsKeySecret": {"name": word}}
    for claim in ({}, {"existingClaim": word}):
        values["persistence"] |= claim
        manifests = render(values, word)
        for kind, manifest in manifests.items():
            if kind != "ServiceMonitor":
                kubernetes_validate.validate(manifest, KUBERNETES[1], strict=True)
            assert manifest["metadata"]["labels"]["app.kubernetes.io/instance"] == word
        assert manifests["ServiceMonitor"]["spec"]["endpoints"][0]["authorization"]["credentials"]["name"] == word
        assert manifests["Job"]["spec"]["activeDeadlineSeconds"] == 10_000_000


def test_a_wrong_manifest_is_found() -> None:
    manifest = render(LEAST)["Deployment"]
    manifest["spec"]["template"]["spec"]["containers"][0]["workingDirectory"] = "/artifacts"
    with pytest.raises(kubernetes_validate.ValidationError, match="workingDirectory"):
        kubernetes_validate.validate(manifest, KUBERNETES[0], strict=True)


def test_what_is_rendered() -> None:
    always = {"Deployment", "Service", "PodDisruptionBudget", "NetworkPolicy"}
    assert set(render(CPU)) == always
    assert set(render(LEAST)) == always | {"PersistentVolumeClaim"}
    assert set(render(MOST)) == always | {
        *("PersistentVolumeClaim", "HorizontalPodAutoscaler", "Job", "BuildPolicy", "ServiceMonitor")
    }


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, r"keys\.existingSecret: required"),
        (merged(LEAST, replicaCount=2), r"redis\.urlSecret\.name: required for 2 replicas"),
        (merged(LEAST, autoscaling={"enabled": True}), r"redis\.urlSecret\.name: required for 4 replicas"),
        (merged(CPU, build={"enabled": True}), r"build\.enabled: needs persistence"),
        (merged(LEAST, serviceMonitor={"enabled": True}), r"metricsKeySecret\.name: required"),
        (merged(LEAST, serve={"grpc": {"tlsSecret": "tls"}}), r"tlsSecret: given, but"),
        (merged(LEAST, **REDIS, autoscaling={"minReplicas": 5}), r"minReplicas: above"),
        (merged(LEAST, updateStrategy={"maxSurge": 0, "maxUnavailable": 0}), r"updateStrategy: .* both 0"),
        (merged(MOST, persistence={"accessModes": ["ReadWriteOncePod"]}), r"accessModes: ReadWriteOncePod is for one"),
        (merged(LEAST, replicas=2), r"(?s)additional properties 'replicas' not allowed"),
        (merged(LEAST, replicaCount="2"), r"(?s)replicaCount.*got string, want integer"),
        (merged(LEAST, artifact={"path": "artifacts/l4"}), r"(?s)artifact.*does not match pattern"),
        (merged(LEAST, sharedMemorySize="2 GB"), r"(?s)sharedMemorySize.*does not match pattern"),
        (merged(LEAST, serve={"drainTimeoutSeconds": 4000}), r"(?s)drainTimeoutSeconds.*maximum"),
    ],
)
def test_what_cannot_be_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(helm_python.HelmError, match=message):
        render(values)


# --- what it says ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_arguments_are_those_of_serve(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[ServeOptions] = []
    monkeypatch.setattr(f"{main.__module__}.serve", seen.append)
    container = serve_container(CASES[case])
    assert main(container["args"]) == 0
    (options,) = seen
    assert str(options.artifact) == CASES[case].get("artifact", {}).get("path", "/artifacts/l4")
    assert options.host == "0.0.0.0" and str(options.keys) == "/keys/keys.json"
    assert options.front.host == ("0.0.0.0" if case == "most" else "127.0.0.1")
    assert {port["containerPort"] for port in container["ports"]} <= {options.ports.gateway, options.ports.grpc_front}
    service = render(CASES[case])["Service"]["metadata"]["name"]
    assert {service, f"{service}.{NAMESPACE}"} <= set(options.allowed_hosts)
    # Beside the grace before the signal, each of the three children may take its drain time and the margin.
    grace_s = pod(CASES[case])["terminationGracePeriodSeconds"]
    (_, pre_stop_s) = container["lifecycle"]["preStop"]["exec"]["command"]
    assert grace_s >= int(pre_stop_s) + 3 * (options.drain_timeout_s + 5)


def test_every_path_that_is_written_is_a_volume() -> None:
    for values in CASES.values():
        for manifest in (render(values)["Deployment"], render(values).get("Job")):
            if manifest is None:
                continue
            spec = manifest["spec"]["template"]["spec"]
            volumes = {volume["name"] for volume in spec["volumes"]}
            for container in (*spec.get("initContainers", ()), *spec["containers"]):
                context = container["securityContext"]
                assert context["readOnlyRootFilesystem"] and not context["allowPrivilegeEscalation"]
                assert context["capabilities"] == {"drop": ["ALL"]}
                assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
            assert spec["securityContext"]["runAsNonRoot"] and spec["automountServiceAccountToken"] is False
    written = {mount["mountPath"] for mount in serve_container(MOST)["volumeMounts"] if not mount.get("readOnly")}
    assert written == {"/dev/shm", "/run/triton-realtime", "/tmp"}


def test_shared_memory_is_memory_and_the_pods_own() -> None:
    (shm,) = [volume for volume in pod(LEAST)["volumes"] if volume["name"] == "shm"]
    assert shm["emptyDir"] == {"medium": "Memory", "sizeLimit": "2Gi"}
    assert not {"hostIPC", "hostNetwork", "hostPID", "shareProcessNamespace"} & set(pod(MOST))


def test_probes_ask_what_needs_no_key() -> None:
    container = serve_container(LEAST)
    asked = {probe: container[f"{probe}Probe"]["httpGet"]["path"] for probe in ("startup", "liveness", "readiness")}
    assert asked == {"startup": "/ready", "liveness": "/health", "readiness": "/ready"}


def test_only_the_gateway_and_redis_pass_the_network_policy() -> None:
    spec = render(LEAST)["NetworkPolicy"]["spec"]
    assert spec["podSelector"]["matchLabels"] == SERVE_LABELS
    assert spec["policyTypes"] == ["Ingress", "Egress"]
    assert [[port["port"] for port in rule["ports"]] for rule in spec["ingress"]] == [[8080]]
    assert [{port["port"] for port in rule["ports"]} for rule in spec["egress"]] == [{53}]
    spec = render(MOST)["NetworkPolicy"]["spec"]
    assert [[port["port"] for port in rule["ports"]] for rule in spec["ingress"]] == [[8080, 9001], [8080]]
    assert [{port["port"] for port in rule["ports"]} for rule in spec["egress"]] == [{53}, {6379}, {443}]


def test_selectors_find_the_pods_and_nothing_else() -> None:
    found = render(MOST)
    labels = found["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert found["Deployment"]["spec"]["selector"]["matchLabels"] == SERVE_LABELS
    assert found["Service"]["spec"]["selector"] == SERVE_LABELS
    assert found["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == SERVE_LABELS
    assert labels.items() >= SERVE_LABELS.items()
    assert found["Job"]["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/component"] == "build"
    assert (
        found["ServiceMonitor"]["spec"]["selector"]["matchLabels"].items()
        <= found["Service"]["metadata"]["labels"].items()
    )


def test_the_autoscaler_looks_at_the_time_in_the_queue() -> None:
    found = render(MOST)
    assert "replicas" not in found["Deployment"]["spec"]
    (metric,) = found["HorizontalPodAutoscaler"]["spec"]["metrics"]
    assert metric["pods"]["metric"]["name"] == "rt_queue_wait_seconds"
    assert metric["pods"]["target"] == {"type": "AverageValue", "averageValue": "250m"}
    # At most twice as many in the time that a new one takes to load.
    behavior = found["HorizontalPodAutoscaler"]["spec"]["behavior"]
    assert behavior["scaleUp"]["policies"] == [{"type": "Percent", "value": 100, "periodSeconds": 300}]


def test_the_build_writes_what_is_served() -> None:
    found = render(MOST)
    (build,) = found["Job"]["spec"]["template"]["spec"]["containers"]
    served = serve_container(MOST)["args"][1]
    assert build["args"] == ["--target", "l4", "--output", served]
    (claim,) = [volume for volume in pod(MOST)["volumes"] if volume["name"] == "artifacts"]
    assert claim["persistentVolumeClaim"]["claimName"] == found["PersistentVolumeClaim"]["metadata"]["name"]
    waits, _ = pod(MOST)["initContainers"]
    assert waits["command"][-1] == served
    # A job cannot be changed: what is built differently has another name.
    other = render(merged(MOST, artifact={"path": "/artifacts/l4-2"}))
    assert other["Job"]["metadata"]["name"] != found["Job"]["metadata"]["name"]
    assert other["Job"]["metadata"]["name"].startswith("rt-triton-realtime-build-")


def test_waiting_for_the_artifact_ends_by_a_signal(tmp_path: Path) -> None:
    waits, _ = pod(MOST)["initContainers"]
    (tmp_path / "sleep").write_text(f"#!/bin/sh\ntouch {tmp_path}/waits\nexec /bin/sleep 5\n")
    (tmp_path / "sleep").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    process = subprocess.Popen([*waits["command"][:-1], str(tmp_path)], env=environment, stdin=subprocess.DEVNULL)
    try:
        give_up_s = time.monotonic() + 20
        while not (tmp_path / "waits").exists():
            assert process.poll() is None and time.monotonic() < give_up_s
            time.sleep(0.02)
        process.terminate()
        # By a handler of its own: process 1 of a container ends by no other.
        assert process.wait(timeout=4) == 143
    finally:
        process.kill()
        process.wait()


def test_no_secret_is_in_a_manifest() -> None:
    container = serve_container(MOST)
    assert all("valueFrom" in entry for entry in container["env"])
    assert "Secret" not in render(MOST)


def test_no_gpu_is_asked_for_where_there_is_none() -> None:
    assert serve_container(CPU)["resources"] == {"requests": {"cpu": "2", "memory": "4Gi"}, "limits": {"memory": "4Gi"}}
    assert "nvidia.com/gpu" in serve_container(LEAST)["resources"]["limits"]
