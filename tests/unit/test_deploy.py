"""What KubeRay is given. No cluster is here to try it on, so each field that was promised is
looked at, and every command is parsed as it will be."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest
import yaml

from skippy_mesh.cli import build_parser

ROOT = Path(__file__).parents[2]
PORTS = {"gcs-server": 6379, "dashboard": 8265, "client": 10001, "metrics": 8080}
PROBES = {"startupProbe": "/health", "readinessProbe": "/ready", "livenessProbe": "/livez"}


def documents(name):
    text = (ROOT / "deploy" / "kuberay" / f"{name}.yaml").read_text()
    return {(each["kind"], each["metadata"]["name"]): each for each in yaml.safe_load_all(text)}


CLUSTER, JOB = documents("raycluster"), documents("rayjob")
RAY_CLUSTER = CLUSTER["RayCluster", "skippy"]["spec"]
RAY_JOB = JOB["RayJob", "skippy-job"]["spec"]
GATEWAY = CLUSTER["Deployment", "skippy-gateway"]["spec"]["template"]


def pins():
    """The version of Ray, and our own."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (ray,) = (each for each in project["dependencies"] if each.startswith("ray["))
    return ray.partition("==")[2], project["version"]


def templates(spec):
    """Of the pods of a Ray cluster: the head's, and those of the workers."""
    return [spec["headGroupSpec"]["template"], *(g["template"] for g in spec["workerGroupSpecs"])]


def containers():
    for template in (*templates(RAY_CLUSTER), *templates(RAY_JOB["rayClusterSpec"]), GATEWAY):
        yield from template["spec"]["containers"]


def ports_of(container):
    return {port["name"]: port["containerPort"] for port in container["ports"]}


def serve_flags(command):
    words = shlex.split(command)
    assert words[0] == "skippy-mesh"
    return build_parser().parse_args(words[1:])


def gateway_command():
    """What the gateway's pod runs after it has joined."""
    (container,) = GATEWAY["spec"]["containers"]
    joins, _, serves = container["args"][0].partition(" && exec ")
    return joins, serves


def test_versions_are_those_that_are_pinned():
    ray, ours = pins()
    dockerfile = (ROOT / "deploy" / "Dockerfile").read_text()
    assert re.search(r"^FROM rayproject/ray:(\S+)-py3\d+$", dockerfile, re.M)[1] == ray
    image = f"skippy-mesh:{ours}-ray{ray}"
    assert f"docker build -f deploy/Dockerfile -t {image} ." in dockerfile
    assert {container["image"] for container in containers()} == {image}
    for spec in (RAY_CLUSTER, RAY_JOB["rayClusterSpec"]):
        assert spec["rayVersion"] == ray
        assert spec["authOptions"] == {"mode": "token"}


@pytest.mark.parametrize("spec", [RAY_CLUSTER, RAY_JOB["rayClusterSpec"]], ids=["cluster", "job"])
def test_the_head_has_no_stage_and_the_ports_that_ray_listens_on(spec):
    head, workers = spec["headGroupSpec"], spec["workerGroupSpecs"]
    assert head["rayStartParams"]["num-cpus"] == "0"
    (container,) = head["template"]["spec"]["containers"]
    assert ports_of(container).items() >= PORTS.items()
    assert not PROBES.keys() & container.keys(), "it would wait for a mesh that waits for it"
    for group in workers:
        assert group["groupName"] and "num-cpus" not in group["rayStartParams"]
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
        (container,) = group["template"]["spec"]["containers"]
        assert container["resources"]["requests"] == container["resources"]["limits"]
        assert set(container["resources"]["limits"]) == {"cpu", "memory"}


def test_the_probes_ask_the_gateway_for_what_each_is_for():
    (container,) = GATEWAY["spec"]["containers"]
    for probe, path in PROBES.items():
        assert container[probe]["httpGet"] == {"path": path, "port": "http"}
    startup = container["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 1800, "a large model loads"


@pytest.mark.parametrize(
    ("command", "address"), [(gateway_command()[1], "auto"), (RAY_JOB["entrypoint"], None)]
)
def test_the_commands_are_ours_and_listen_where_the_service_sends(command, address):
    args, plain = serve_flags(command), serve_flags("skippy-mesh serve demo")
    assert (args.command, args.host, args.port) == ("serve", "0.0.0.0", plain.port)
    assert args.address == address
    assert not args.detach, "the pod, or the job, is what ends it"
    mounts = [mount["mountPath"] for mount in container_of_driver(address)["volumeMounts"]]
    assert any(args.model.startswith(f"{path}/") for path in mounts)
    assert ports_of(container_of_driver(address))["http"] == args.port
    secret = {"secretKeyRef": {"name": "skippy-api-key", "key": "key"}}
    assert {"name": "SKIPPY_API_KEY", "valueFrom": secret} in container_of_driver(address)["env"]


def container_of_driver(address):
    head = RAY_JOB["rayClusterSpec"]["headGroupSpec"]["template"]
    (container,) = (head if address is None else GATEWAY)["spec"]["containers"]
    return container


def test_the_gateway_joins_the_cluster_with_its_token_and_gives_it_no_cpu():
    joins, _ = gateway_command()
    assert joins.startswith(f"ray start --address=skippy-head-svc:{PORTS['gcs-server']} ")
    assert "--num-cpus=0" in joins.split() and "--block" not in joins
    env = {each["name"]: each for each in container_of_driver("auto")["env"]}
    assert env["RAY_AUTH_MODE"]["value"] == "token"
    token = env["RAY_AUTH_TOKEN"]["valueFrom"]["secretKeyRef"]
    assert token == {"name": "skippy", "key": "auth_token"}, "KubeRay's secret for the cluster"


def test_who_is_told_to_end_has_the_time_to():
    drains = serve_flags(gateway_command()[1]).drain_s
    assert GATEWAY["spec"]["terminationGracePeriodSeconds"] >= drains + 15
    env = yaml.safe_load(RAY_JOB["runtimeEnvYAML"])["env_vars"]
    assert int(env["RAY_JOB_STOP_WAIT_TIME_S"]) >= serve_flags(RAY_JOB["entrypoint"]).drain_s + 15


def test_the_job_ends_its_cluster_and_nothing_ends_the_job():
    assert RAY_JOB["submissionMode"] in ("K8sJobMode", "HTTPMode")
    assert RAY_JOB["shutdownAfterJobFinishes"] is True
    assert RAY_JOB["ttlSecondsAfterFinished"] >= 0 and RAY_JOB["backoffLimit"] >= 0
    assert RAY_JOB["preRunningDeadlineSeconds"] >= 1800
    assert "activeDeadlineSeconds" not in RAY_JOB
    for documents in (CLUSTER, JOB):
        versions = {kind: each["apiVersion"] for (kind, _), each in documents.items()}
        assert "RayService" not in versions, "that is for Ray Serve"
        ray = {version for kind, version in versions.items() if kind.startswith("Ray")}
        assert ray == {"ray.io/v1"}


def test_every_stage_finds_the_model_at_one_path_and_has_a_disk_for_its_slice():
    stages = [t for s in (RAY_CLUSTER, RAY_JOB["rayClusterSpec"]) for t in templates(s)[1:]]
    dockerfile = (ROOT / "deploy" / "Dockerfile").read_text()
    cache = re.search(r"^ENV SKIPPY_CACHE_DIR=(\S+)$", dockerfile, re.M)[1]
    for template in (*stages, GATEWAY, RAY_JOB["rayClusterSpec"]["headGroupSpec"]["template"]):
        (container,) = template["spec"]["containers"]
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        volumes = {each["name"]: each for each in template["spec"]["volumes"]}
        assert volumes[mounts["/models"]]["persistentVolumeClaim"]["readOnly"] is True
        assert volumes[mounts[cache]]["emptyDir"] == {}


@pytest.mark.parametrize(
    ("documents", "service", "template"),
    [
        (CLUSTER, "skippy-api", GATEWAY),
        (JOB, "skippy-job-api", RAY_JOB["rayClusterSpec"]["headGroupSpec"]["template"]),
    ],
)
def test_the_service_sends_to_the_gateway_and_its_variables_are_no_flags_of_ours(
    documents, service, template
):
    spec = documents["Service", service]["spec"]
    assert spec["selector"].items() <= template["metadata"]["labels"].items()
    assert spec["ports"] == [{"name": "http", "port": 8000, "targetPort": "http"}]
    # Kubernetes makes SKIPPY_PORT of a service named skippy.
    assert template["spec"]["enableServiceLinks"] is False
    assert ("Service", "skippy") not in documents


def test_only_the_mesh_reaches_its_stages_and_all_reach_the_gateway():
    def ingress(documents, name):
        spec = documents["NetworkPolicy", name]["spec"]
        assert spec["policyTypes"] == ["Ingress"]
        return spec["podSelector"]["matchLabels"], spec["ingress"]

    labels, rules = ingress(CLUSTER, "skippy-stages")
    assert labels == {"ray.io/cluster": "skippy"}, "KubeRay's label of each of its pods"
    assert all(rule["from"] for rule in rules)
    mesh = [peer["podSelector"]["matchLabels"] for peer in rules[0]["from"]]
    assert mesh == [labels, GATEWAY["metadata"]["labels"]]
    for template in templates(RAY_JOB["rayClusterSpec"]):
        labels, rules = ingress(JOB, "skippy-job")
        assert labels.items() <= template["metadata"]["labels"].items()
        assert all(rule["from"] for rule in rules)
    for documents, name in ((CLUSTER, "skippy-gateway"), (JOB, "skippy-job-http")):
        _, rules = ingress(documents, name)
        assert {"ports": [{"protocol": "TCP", "port": "http"}]} in rules
