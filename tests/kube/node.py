# SPDX-License-Identifier: Apache-2.0
"""One node of Kubernetes out of its own binaries, inside namespaces: ``python -m tests.kube.node WORK BINARIES NUMBER ADDRESS...``.

``Cluster`` starts it as the first process of its process, mount and network namespace, so that all of it ends with it. ADDRESS... are
those of all nodes; the first one runs the control plane, too: etcd, the API server, its controllers and scheduler. Each runs containerd,
a kubelet, kube-proxy, and a DNS of the cluster's names, and writes WORK/ready when pods can be placed on it. Pods have addresses of their
own by CNI's ``ptp``, which routes: a bridge would need br_netfilter for Services.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import ssl
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NoReturn

from tests.support.waiting import until_sync

DNS: Final = "10.97.0.10"
SERVICES: Final = "10.96.0.0/16"
PODS: Final = "10.244.0.0/16"
API_PORT: Final = 6443
TOKEN: Final = "of-this-node-alone"
START_SECONDS: Final = 240.0
NAMES_SECONDS: Final = 0.5
"""How old the DNS's names may be."""
CGROUP: Final = "twinpool-kube-"
"""How the control groups begin that the pods of a node are below."""
PAUSE: Final = "localhost/pause:0"

# What the tests themselves run outside of the cluster's own access control, all of it on a network that nothing else reaches.
USERS: Final = f"{TOKEN},admin,admin,system:masters\n"

CONTAINERD: Final = """
version = 3
root = "{work}/containerd"
state = "/run/containerd"
[grpc]
address = "/run/containerd/containerd.sock"
[plugins.'io.containerd.cri.v1.images']
snapshotter = "overlayfs"
[plugins.'io.containerd.cri.v1.images'.pinned_images]
sandbox = "{pause}"
[plugins.'io.containerd.cri.v1.runtime']
# Containers of machines that may not lower it themselves.
restrict_oom_score_adj = true
[plugins.'io.containerd.cri.v1.runtime'.cni]
bin_dirs = ["/usr/lib/cni"]
conf_dir = "{work}/cni"
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
SystemdCgroup = false
"""


def until(what: str, holds: Callable[[], bool], process: subprocess.Popen[bytes] | None = None) -> None:
    """Waits for a condition; ends this node if it does not come true."""

    def over() -> bool:
        return holds() or (process is not None and process.poll() is not None)

    with contextlib.suppress(TimeoutError):
        until_sync(over, START_SECONDS)
    if not holds():
        fail(f"{what} did not become ready")


def fail(message: str) -> NoReturn:
    print(message, file=sys.stderr, flush=True)
    sys.exit(1)


def run(*command: str | Path) -> str:
    """What a command prints. Raises CalledProcessError."""
    return subprocess.run([*map(str, command)], check=True, capture_output=True, text=True).stdout


def answers(url: str) -> bool:
    """Whether a server says that it is well."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {TOKEN}"})
    try:
        with urllib.request.urlopen(
            request, timeout=5, context=context if url.startswith("https") else None
        ) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def hierarchies() -> list[Path]:
    """Where control groups are made: in each hierarchy of version 1, or in the one of version 2."""
    root = Path("/sys/fs/cgroup")
    if (root / "cgroup.controllers").exists():
        return [root]
    return [path for path in root.iterdir() if path.is_dir() and not path.is_symlink()]


def remove_cgroups() -> None:
    """Removes the control groups of nodes, but those that something runs in."""
    for hierarchy in hierarchies():
        for top in hierarchy.glob(f"{CGROUP}*"):
            for path, _directories, _files in os.walk(top, topdown=False):
                with contextlib.suppress(OSError):
                    Path(path).rmdir()


def pods(number: int) -> str:
    """The addresses of a node's pods."""
    return f"10.244.{number}.0/24"


class Node:
    """The processes of the node."""

    def __init__(self, work: Path, binaries: Path, number: int, addresses: list[str]) -> None:
        self.work, self.binaries, self.address = work, binaries, addresses[number]
        self.name, self.pods = f"node-{number}", pods(number)
        self.cgroup = f"{CGROUP}{self.address}"
        self.api = f"https://{addresses[0]}:{API_PORT}"

    def start(self, name: str, *arguments: str, ready: Callable[[], bool]) -> None:
        """Starts a binary, its output in a log of its name, and waits until it is ready."""
        log = (self.work / f"{name}.log").open("ab")
        found = self.binaries / name
        process = subprocess.Popen(
            [str(found if found.exists() else name), *arguments],
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=self.work,
        )
        until(name, ready, process)

    def write(self, name: str, text: str | dict[str, Any]) -> str:
        """A file of the node's; its path."""
        path = self.work / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text if isinstance(text, str) else json.dumps(text, indent=1))
        return str(path)

    def kubeconfig(self) -> str:
        """Access for everyone who works on this cluster."""
        cluster = {"server": self.api, "insecure-skip-tls-verify": True}
        return self.write(
            "kubeconfig",
            {
                "apiVersion": "v1",
                "kind": "Config",
                "clusters": [{"name": "here", "cluster": cluster}],
                "users": [{"name": "admin", "user": {"token": TOKEN}}],
                "contexts": [{"name": "here", "context": {"cluster": "here", "user": "admin"}}],
                "current-context": "here",
            },
        )

    def control_plane(self) -> None:
        """etcd, the API server and what acts on its objects."""
        etcd = [
            "--listen-peer-urls=http://127.0.0.1:2380",
            "--listen-metrics-urls=http://127.0.0.1:2381",
            "--unsafe-no-fsync",
        ]
        etcd += [f"--data-dir={self.work}/etcd", "--listen-client-urls=http://127.0.0.1:2379"]
        etcd += ["--advertise-client-urls=http://127.0.0.1:2379"]
        self.start("etcd", *etcd, ready=lambda: answers("http://127.0.0.1:2381/health"))
        key = self.work / "accounts.key"
        run("openssl", "genrsa", "-out", key, "2048")
        self.start(
            "kube-apiserver",
            "--etcd-servers=http://127.0.0.1:2379",
            f"--advertise-address={self.address}",
            f"--secure-port={API_PORT}",
            f"--cert-dir={self.work}/certificates",
            f"--service-cluster-ip-range={SERVICES}",
            f"--token-auth-file={self.write('users.csv', USERS)}",
            "--authorization-mode=RBAC",
            "--kubelet-preferred-address-types=InternalIP",
            "--allow-privileged=true",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={key}",
            f"--service-account-signing-key-file={key}",
            ready=lambda: answers(f"{self.api}/readyz"),
        )
        access = f"--kubeconfig={self.work}/kubeconfig"
        self.start(
            "kube-controller-manager",
            access,
            f"--service-account-private-key-file={key}",
            f"--root-ca-file={self.work}/certificates/apiserver.crt",
            "--leader-elect=false",
            ready=lambda: answers("https://127.0.0.1:10257/healthz"),
        )
        self.start(
            "kube-scheduler",
            access,
            "--leader-elect=false",
            ready=lambda: answers("https://127.0.0.1:10259/healthz"),
        )

    def containers(self, images: Path) -> None:
        """containerd with the images that there are."""
        plugins = [
            {
                "type": "ptp",
                "ipMasq": True,
                "ipam": {"type": "host-local", "subnet": self.pods, "routes": [{"dst": "0.0.0.0/0"}]},
            },
            {"type": "portmap", "capabilities": {"portMappings": True}},
        ]
        self.write("cni/10-pods.conflist", {"cniVersion": "0.4.0", "name": "pods", "plugins": plugins})
        config = self.write("containerd.toml", CONTAINERD.format(work=self.work, pause=PAUSE))
        ctr = ("ctr", "--address", "/run/containerd/containerd.sock", "--namespace", "k8s.io")

        def serves() -> bool:
            return (
                subprocess.run(
                    [self.binaries / "ctr", *ctr[1:], "version"], capture_output=True, check=False
                ).returncode
                == 0
            )

        self.start("containerd", "--config", config, ready=serves)
        for image in sorted(images.glob("*.tar")):
            run(self.binaries / "ctr", *ctr[1:], "images", "import", "--no-unpack=false", image)

    def kubelet(self) -> None:
        """The kubelet, kube-proxy, and the names of the cluster."""
        config: dict[str, Any] = {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
            "authorization": {"mode": "AlwaysAllow"},
            "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{self.cgroup}",
            "failCgroupV1": False,
            "failSwapOn": False,
            "clusterDNS": [DNS],
            "clusterDomain": "cluster.local",
            "resolvConf": self.write("resolv.conf", ""),
            "podLogsDir": str(self.work / "pods"),
            "evictionHard": {
                "memory.available": "200Mi",
                "nodefs.available": "1%",
                "imagefs.available": "1%",
            },
            "imageGCHighThresholdPercent": 100,
            "localStorageCapacityIsolation": False,
        }
        access = f"--kubeconfig={self.work}/kubeconfig"
        self.start(
            "kubelet",
            access,
            f"--config={self.write('kubelet.json', config)}",
            f"--hostname-override={self.name}",
            f"--node-ip={self.address}",
            f"--root-dir={self.work}/kubelet",
            ready=lambda: answers("http://127.0.0.1:10248/healthz"),
        )
        proxy = [
            access,
            f"--hostname-override={self.name}",
            f"--cluster-cidr={PODS}",
            "--proxy-mode=nftables",
        ]
        proxy += ["--conntrack-max-per-core=0", "--conntrack-min=0", "--conntrack-tcp-timeout-established=0"]
        proxy += ["--conntrack-tcp-timeout-close-wait=0"]
        self.start("kube-proxy", *proxy, ready=lambda: answers("http://127.0.0.1:10256/livez"))
        run("ip", "address", "add", f"{DNS}/32", "dev", "lo")
        zone = self.write("zone.json", {})
        subprocess.Popen([sys.executable, "-m", "tests.pods.dns", DNS, zone])
        threading.Thread(target=self.names, daemon=True).start()

    def get(self, what: str) -> list[dict[str, Any]]:
        """Objects of the API."""
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        request = urllib.request.Request(f"{self.api}/{what}", headers={"Authorization": f"Bearer {TOKEN}"})
        with urllib.request.urlopen(request, timeout=10, context=context) as reply:
            found: list[dict[str, Any]] = json.loads(reply.read())["items"]
            return found

    def names(self) -> NoReturn:
        """Keeps the DNS's names like the Services and their endpoints."""
        pause = threading.Event()
        while True:
            try:
                zone = named(self.get("api/v1/services"), self.get("apis/discovery.k8s.io/v1/endpointslices"))
                fresh = self.work / "zone.new"
                fresh.write_text(json.dumps(zone))
                fresh.replace(self.work / "zone.json")
            except OSError as error:
                print(f"names: {error}", flush=True)
            pause.wait(NAMES_SECONDS)

    def ready(self) -> bool:
        """Whether pods can be placed on the node."""
        nodes = [node for node in self.get("api/v1/nodes") if node["metadata"]["name"] == self.name]
        said = [said for node in nodes for said in node["status"].get("conditions", ())]
        return any(one["type"] == "Ready" and one["status"] == "True" for one in said)


def named(services: list[dict[str, Any]], slices: list[dict[str, Any]]) -> dict[str, list[str]]:
    """{name: addresses} of a cluster's Services, and of the pods behind those without an address."""
    zone: dict[str, list[str]] = {}
    headless: dict[tuple[str, str], bool] = {}
    for service in services:
        meta, spec = service["metadata"], service["spec"]
        full = f"{meta['name']}.{meta['namespace']}.svc.cluster.local"
        if spec.get("clusterIP") == "None":
            headless[meta["namespace"], meta["name"]] = bool(spec.get("publishNotReadyAddresses"))
            zone[full] = []
        elif spec.get("clusterIP"):
            zone[full] = [spec["clusterIP"]]
    for part in slices:
        meta = part["metadata"]
        owner = meta["namespace"], meta.get("labels", {}).get("kubernetes.io/service-name", "")
        if owner not in headless:
            continue
        full = f"{owner[1]}.{owner[0]}.svc.cluster.local"
        for endpoint in part.get("endpoints") or ():
            if headless[owner] or endpoint.get("conditions", {}).get("ready", True):
                zone[full] += endpoint["addresses"]
                if endpoint.get("hostname"):
                    zone.setdefault(f"{endpoint['hostname']}.{full}", []).extend(endpoint["addresses"])
    return zone


def main(work: Path, binaries: Path, number: int, addresses: list[str]) -> None:
    """Runs until it is killed."""
    os.environ["PATH"] = f"{binaries}:/usr/sbin:{os.environ['PATH']}"
    # The runtime's sockets and network namespaces are this node's alone, and what it mounts is seen in its pods.
    run("mount", "-t", "tmpfs", "tmpfs", "/run")
    run("mount", "--make-rshared", "/")
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
    for other, address in enumerate(addresses):
        if other != number:
            run("ip", "route", "add", pods(other), "via", address)
    # A route is looked for before kube-proxy says where a connection of the node's own goes.
    run("ip", "route", "add", SERVICES, "dev", "eth0")
    node = Node(work, binaries, number, addresses)
    for hierarchy in hierarchies():
        (hierarchy / node.cgroup).mkdir(exist_ok=True)
    node.kubeconfig()
    if number == 0:
        node.control_plane()
    node.containers(work.parent / "images")
    node.kubelet()
    until("the node", node.ready)
    (work / "ready").touch()
    signal.pause()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
