# SPDX-License-Identifier: Apache-2.0
"""Every key path in etcd. Prefixes end with "/", so that ``/pool/a`` never matches ``/pool/ab``."""

from __future__ import annotations

from dataclasses import dataclass

from twinpool.ids import WorkerKey, from_hex64, is_name, to_hex64

ROOT = "/twinpool/v1"


def check_prefix(prefix: str) -> str:
    """``prefix`` itself. Raises ValueError unless it is absolute and ends at a path boundary."""
    if not prefix.startswith("/") or not prefix.endswith("/"):
        raise ValueError(f"prefix {prefix!r} must start and end with '/'")
    return prefix


def _part(value: str) -> str:
    if not is_name(value):
        raise ValueError(f"{value!r} cannot be a part of a key: it is not a lower-case DNS label")
    return value


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one cluster."""

    cluster: str

    def __post_init__(self) -> None:
        _part(self.cluster)

    @property
    def root(self) -> str:
        """Prefix of all keys of the cluster."""
        return f"{ROOT}/{self.cluster}/"

    def workers(self, pool: str | None = None) -> str:
        """Prefix of the worker records, of one pool or of all."""
        return f"{self.root}workers/" if pool is None else f"{self.root}workers/{_part(pool)}/"

    def worker(self, pool: str, worker: str) -> str:
        """Key of one worker's record."""
        return f"{self.workers(pool)}{_part(worker)}"

    def parse_worker(self, key: str) -> tuple[str, str]:
        """(pool, worker) of a worker's key. Raises ValueError for any other key."""
        prefix = self.workers()
        parts = key.removeprefix(prefix).split("/")
        if not key.startswith(prefix) or len(parts) != 2 or not all(is_name(part) for part in parts):
            raise ValueError(f"{key!r} is not the key of a worker")
        return parts[0], parts[1]

    @property
    def routers(self) -> str:
        """Prefix of the router records."""
        return f"{self.root}routers/"

    def router(self, router: str) -> str:
        """Key of one router's record."""
        return f"{self.routers}{_part(router)}"

    @property
    def resume_key(self) -> str:
        """Key of what seals the resume tokens of all routers."""
        return f"{self.root}secrets/resume"

    @property
    def pools(self) -> str:
        """Prefix of the pool specifications."""
        return f"{self.root}pools/"

    def pool(self, pool: str) -> str:
        """Key of one pool's specification."""
        return f"{self.pools}{_part(pool)}"

    def roles(self, pool: str) -> str:
        """Prefix of the roles that workers of a pool had last."""
        return f"{self.root}roles/{_part(pool)}/"

    def role(self, pool: str, worker: str) -> str:
        """Key of the role that a worker had last."""
        return f"{self.roles(pool)}{_part(worker)}"

    @property
    def cordons(self) -> str:
        """Prefix of the names of workers that new work is kept away from."""
        return f"{self.root}cordons/"

    def cordon(self, worker: str) -> str:
        """Key that says that new work is kept away from a worker."""
        return f"{self.cordons}{_part(worker)}"

    @property
    def config(self) -> str:
        """Prefix of what operators have changed of the configuration."""
        return f"{self.root}config/"

    @property
    def applied_config(self) -> str:
        """Key of all that they have changed."""
        return f"{self.config}applied"

    @property
    def events(self) -> str:
        """Prefix of what has happened."""
        return f"{self.root}events/"

    def event(self, event: str) -> str:
        """Key of one event."""
        return f"{self.events}{_part(event)}"

    @property
    def operations(self) -> str:
        """Prefix of the running operations."""
        return f"{self.root}operations/"

    def operation(self, operation: str) -> str:
        """Key of one operation."""
        return f"{self.operations}{_part(operation)}"

    def locality(self, worker: str | None = None) -> str:
        """Prefix of the locality segments, of one worker or of all."""
        return f"{self.root}locality/" if worker is None else f"{self.root}locality/{_part(worker)}/"

    def locality_generation(self, worker: str, incarnation: int, generation: int) -> str:
        """Prefix of one generation of a worker's locality segments."""
        return f"{self.locality(worker)}{to_hex64(incarnation)}/{generation:08x}/"

    def locality_segment(self, worker: str, incarnation: int, generation: int, segment: str) -> str:
        """Key of one locality segment."""
        return f"{self.locality_generation(worker, incarnation, generation)}{_part(segment)}"

    def parse_locality(self, key: str) -> WorkerKey:
        """Whose segment a key is. Raises ValueError for any other key."""
        prefix = self.locality()
        parts = key.removeprefix(prefix).split("/")
        if not key.startswith(prefix) or len(parts) != 4:
            raise ValueError(f"{key!r} is not the key of a locality segment")
        return WorkerKey(parts[0], from_hex64(parts[1]))

    def leader(self, name: str) -> str:
        """Key that the holder of a leadership owns, for instance "controller"."""
        return f"{self.root}leader/{_part(name)}"
