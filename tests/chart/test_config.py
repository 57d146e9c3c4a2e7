# SPDX-License-Identifier: Apache-2.0
"""What the processes are told is what the product understands, and fits the pods around them."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from scripts.chart import OWNED
from tests.support.chart import EVERYTHING, FILES, Doc, Helm, containers, merged, named, workloads
from twinpool.config import TwinpoolConfig, load_config
from twinpool.control.cli.main import app
from twinpool.control.leaves import LEAVE_SECONDS
from twinpool.ids import is_name
from twinpool.launch import PROCESSES
from twinpool.store import Keys

pytestmark = pytest.mark.chart

CASES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    **{name: ({}, (name,)) for name in FILES},
    "everything": (EVERYTHING, ()),
}
POD_IP = "10.1.2.3"


@pytest.fixture(params=CASES)
def docs(helm: Helm, request: pytest.FixtureRequest) -> list[Doc]:
    values, files = CASES[request.param]
    return helm.docs(values, *files)


def served(docs: list[Doc]) -> list[tuple[Doc, Doc, Doc]]:
    """(document, pod, container) of every process of the product."""
    return [
        (doc, pod, container)
        for doc, pod in workloads(docs)
        for container in pod["spec"]["containers"]
        if container.get("args", [""])[0] == "serve"
    ]


def file_of(docs: list[Doc], pod: Doc) -> str:
    (volume,) = (volume for volume in pod["spec"]["volumes"] if volume["name"] == "config")
    text: str = named(docs, "ConfigMap", volume["configMap"]["name"])["data"]["config.yaml"]
    return text


def environment(container: Doc, pod_name: str) -> dict[str, str]:
    """The variables as Kubernetes makes them."""
    fields = {"metadata.name": pod_name, "status.podIP": POD_IP}
    env: dict[str, str] = {}
    for entry in container["env"]:
        value = entry.get("value")
        if value is None:
            value = fields.get(entry["valueFrom"].get("fieldRef", {}).get("fieldPath"), "secret")
        env[entry["name"]] = re.sub(r"\$\((\w+)\)", lambda found: env[found[1]], value)
    return env


def config_of(docs: list[Doc], pod: Doc, container: Doc, tmp_path: Path, name: str) -> TwinpoolConfig:
    """What the product makes of the file and the environment."""
    file = tmp_path / f"{name}.yaml"
    file.write_text(file_of(docs, pod))
    env = environment(container, name)
    assert Path(env["TWINPOOL_CONFIG"]).parent in {
        Path(mount["mountPath"]) for mount in container["volumeMounts"]
    }
    return load_config(None, env=env | {"TWINPOOL_CONFIG": str(file)})


def test_every_file_is_valid_for_the_command(docs: list[Doc], tmp_path: Path) -> None:
    files = [doc for doc in docs if doc["kind"] == "ConfigMap" and "config.yaml" in doc["data"]]
    assert len(files) >= 4
    for doc in files:
        file = tmp_path / "config.yaml"
        file.write_text(doc["data"]["config.yaml"])
        result = CliRunner().invoke(app, ["config", "validate", str(file)], env={"TWINPOOL_CONFIG": None})
        assert result.exit_code == 0, f"{doc['metadata']['name']}: {result.output}"


def test_every_argument_is_one_of_the_command(docs: list[Doc]) -> None:
    """With --help a command refuses what it does not know, and starts nothing."""
    seen = set()
    for _, _, container in served(docs):
        seen.add(container["args"][1])
        result = CliRunner().invoke(app, [*container["args"], "--help"])
        assert result.exit_code == 0, result.output
        result = CliRunner().invoke(app, [*container["args"], "--nosuchflag", "--help"])
        assert result.exit_code == 2, result.output
    assert seen == PROCESSES.keys()


def test_processes_listen_and_are_known_where_the_pod_says(docs: list[Doc], tmp_path: Path) -> None:
    for doc, pod, container in served(docs):
        name = f"{doc['metadata']['name']}-0"
        config = config_of(docs, pod, container, tmp_path, name)
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        role = container["args"][1]
        if role == "control":
            listens, host = {"grpc": config.control.port, "metrics": config.metrics.port}, config.control.host
        else:
            part = config.router if role == "router" else config.worker
            listens, host = {"grpc": part.port, "metrics": config.metrics.port}, part.host
            # A record with another name would be refused by everybody.
            assert part.name == name
            assert is_name(part.name)
            if role == "router":
                listens["http"] = config.router.http_port
            else:
                events = config.kv_events.port
                listens |= {"events": events, "replay": events + 1}
        assert config.metrics.enabled
        assert host == config.metrics.host == POD_IP
        assert ports == listens, name
        assert len(set(ports.values())) == len(ports)


def test_probes_ask_the_port_that_is_listened_on(helm: Helm) -> None:
    for values in (EVERYTHING, merged(EVERYTHING, {"tls": {"enabled": False}})):
        for _, _, container in served(helm.docs(values)):
            (port,) = (port["containerPort"] for port in container["ports"] if port["name"] == "grpc")
            for probe, service in (
                ("startupProbe", "live"),
                ("livenessProbe", "live"),
                ("readinessProbe", ""),
            ):
                found = container[probe]
                if "grpc" in found:
                    assert found["grpc"] == {"port": port} | ({"service": service} if service else {})
                else:
                    command = found["exec"]["command"][2]
                    assert f'--port {port} --role {role_of(container)} --service "{service}"' in command
            # The kubelet's gRPC probes know no TLS.
            assert ("exec" in container["livenessProbe"]) == values["tls"]["enabled"]


def role_of(container: Doc) -> str:
    role: str = container["args"][1]
    return "worker" if role in ("prefill", "decode") else role


def test_pods_have_the_time_that_a_drain_takes(docs: list[Doc], tmp_path: Path) -> None:
    for doc, pod, container in served(docs):
        config = config_of(docs, pod, container, tmp_path, doc["metadata"]["name"])
        grace = pod["spec"]["terminationGracePeriodSeconds"]
        role = container["args"][1]
        if role == "router":
            sleep = container["lifecycle"]["preStop"]["sleep"]["seconds"]
            assert grace > sleep + config.router.drain_timeout_seconds + config.router.cancel_timeout_seconds
        elif role != "control":
            assert grace >= config.worker.drain_timeout_seconds + LEAVE_SECONDS


def test_a_longer_drain_makes_for_a_longer_grace(helm: Helm) -> None:
    changes = {
        "router": {"config": {"router": {"drain_timeout_seconds": 300.5}}},
        "models": {"tiny": {"decode": {"config": {"worker": {"drain_timeout_seconds": 600}}}}},
    }
    docs = helm.docs(merged(EVERYTHING, changes))
    graces = {doc["metadata"]["name"]: pod["spec"]["terminationGracePeriodSeconds"] for doc, pod in workloads(docs)
              if doc["kind"] != "Pod"}  # fmt: skip
    assert graces["rel-twinpool-router"] == 5 + 301 + 5 + 10
    assert graces["rel-twinpool-tiny-decode"] == 645
    assert graces["rel-twinpool-tiny-prefill"] == 75


def test_a_changed_file_makes_for_new_pods(helm: Helm) -> None:
    """Processes read their file at the start."""

    def sums(values: dict[str, Any]) -> dict[str, str]:
        docs = helm.docs(merged(EVERYTHING, values))
        return {
            doc["metadata"]["name"]: pod["metadata"]["annotations"]["checksum/config"]
            for doc, pod, _ in served(docs)
        }

    before = sums({})
    assert sums({"monitoring": {"rules": {"queueRequests": 7}}}) == before
    after = sums({"config": {"log": {"level": "debug"}}})
    assert len(before) == 8
    assert not [name for name in before if before[name] == after[name]]
    one = sums({"models": {"tiny": {"decode": {"config": {"log": {"level": "debug"}}}}}})
    assert [name for name in before if before[name] != one[name]] == ["rel-twinpool-tiny-decode"]


def test_all_processes_mean_the_same_cluster(docs: list[Doc], tmp_path: Path) -> None:
    found = {
        config_of(docs, pod, container, tmp_path, doc["metadata"]["name"]).cluster.model_dump_json()
        for doc, pod, container in served(docs)
    }
    assert len(found) == 1


def test_two_releases_in_an_etcd_have_keys_of_their_own(helm: Helm, tmp_path: Path) -> None:
    names = set()
    for release, namespace in (("rel", "ns"), ("other", "ns"), ("rel", "other")):
        docs = helm.docs({}, "values-dev.yaml", release=release, namespace=namespace)
        doc, pod, container = served(docs)[0]
        names.add(config_of(docs, pod, container, tmp_path, doc["metadata"]["name"]).cluster.name)
    assert len(names) == 3


def test_the_product_dials_a_service_of_the_chart(everything: list[Doc], tmp_path: Path) -> None:
    doc, pod, container = served(everything)[0]
    cluster = config_of(everything, pod, container, tmp_path, doc["metadata"]["name"]).cluster
    (endpoint,) = cluster.etcd_endpoints
    service = named(everything, "Service", endpoint.partition(".")[0])
    assert endpoint == f"{service['metadata']['name']}.ns.svc:{service['spec']['ports'][0]['port']}"
    etcd = named(everything, "StatefulSet", "rel-twinpool-etcd")["spec"]["template"]
    (auth,) = (found for found in containers(etcd) if found["name"] == "auth")
    env = {entry["name"]: entry.get("value") for entry in auth["env"]}
    assert env["KEY_PREFIX"] == Keys(cluster.name).root
    assert env["USER_NAME"] == cluster.etcd_user


def test_files_that_are_named_are_mounted(everything: list[Doc], tmp_path: Path) -> None:
    for _, pod, container in served(everything):
        told: Any = yaml.safe_load(file_of(everything, pod))
        paths = {
            value
            for section in told.values()
            for key, value in section.items()
            if key.endswith("_file") or (key == "path" and value.startswith("/"))
        }
        mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
        assert len(paths) >= 4
        assert all(path in mounts or str(Path(path).parent) in mounts for path in paths), paths


def test_routers_see_the_models_where_workers_do(everything: list[Doc]) -> None:
    """A router reads the tokenizer from the path that a worker's record names."""
    (router,) = (container for _, _, container in served(everything) if container["args"][1] == "router")
    mounts = {mount["mountPath"]: mount for mount in router["volumeMounts"]}
    for _, pod, container in served(everything):
        if container["args"][1] in ("prefill", "decode"):
            path = yaml.safe_load(file_of(everything, pod))["model"]["path"]
            (own,) = (mount for mount in container["volumeMounts"] if mount["mountPath"] == path)
            assert mounts[path] == own


def test_a_gpu_sets_the_device(everything: list[Doc]) -> None:
    devices = {
        doc["metadata"]["name"]: yaml.safe_load(file_of(everything, pod))["worker"].get("device")
        for doc, pod, container in served(everything)
        if container["args"][1] in ("prefill", "decode")
    }
    assert {name for name, device in devices.items() if device == "cuda"} == {
        "rel-twinpool-chat-prefill",
        "rel-twinpool-chat-long-prefill",
    }


def test_what_the_chart_sets_itself_exists(tmp_path: Path) -> None:
    known = TwinpoolConfig().model_dump()
    for section, keys in OWNED.items():
        assert section in known
        assert (keys or frozenset()) <= known[section].keys()
