# SPDX-License-Identifier: Apache-2.0
"""The workers of a pool as Ray actors. Ray places them, restarts them and reports how they ended."""

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from twinpool.config import TwinpoolConfig, to_yaml
from twinpool.control.actors import Look, Looker, log_tail, look_at, missing, nodes, waiting
from twinpool.control.ray_join import RayJoin, needs_of
from twinpool.control.reconcile.plan import ROLES, first_role
from twinpool.errors import TwinpoolError
from twinpool.logs import get_logger

# What a worker's stop takes beyond the drain of its requests.
ACTOR_STOP_SECONDS = 15.0
HEALTH_SECONDS = 5.0
"""Longest wait for what a worker's process says of it."""
# Between two looks whether the name of an actor that was ended is free.
NAME_SECONDS = 0.05

log = get_logger(__name__)


class RayPools:
    """Runs the workers of one pool that it is told to. All methods on one event loop; Ray's calls run in a thread."""

    def __init__(self, config: TwinpoolConfig, log_dir: Path, ray: RayJoin | None = None) -> None:
        """``config``: as the processes of the pool see it. ``log_dir``: each worker writes ``<name>.log`` there. ``ray``: the Ray
        cluster, where several pools share it."""
        self._config = config
        self._log_dir = log_dir
        self._ray = ray or RayJoin(config)
        self._actors: dict[str, Any] = {}
        self._started: dict[str, asyncio.Future[Any]] = {}
        self._roles: dict[str, str] = {}
        self._looker = Looker()
        # One thread for Ray's blocking calls: they are made one after the other.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ray-calls")
        self._stopping = False
        self._joined = False

    @property
    def managed(self) -> bool:
        """Whether workers are run here at all."""
        return self._config.pools.managed

    @property
    def names(self) -> list[str]:
        """Names of the workers."""
        return sorted(self._actors)

    def role_of(self, name: str) -> str:
        """The role that a worker has or will have again; "" for one that is not run here."""
        return self._roles.get(name, "")

    def note_role(self, name: str, role: str) -> None:
        """Says which role a worker has now: it begins in it again if it ends."""
        if name in self._actors and role in ROLES:
            self._roles[name] = role

    async def start(self) -> None:
        """Joins the configured Ray cluster or starts a local one. Idempotent. Who runs no workers needs no Ray."""
        if self._joined or not self.managed:
            return
        await self._ray.join()
        self._joined = True

    async def adopt(self) -> None:
        """Takes over the workers that run in a Ray cluster that was joined, and forgets those that do not."""
        if self._config.pools.ray_address and self.managed:
            await self._run(self._adopt)
            log.info("workers_adopted", workers=self.names)

    def _adopt(self) -> None:
        import ray

        found: dict[str, Any] = {}
        for name in ray.util.list_named_actors():
            role = first_role(self._config.worker.pool, str(name))
            if role is None:
                continue
            with contextlib.suppress(ValueError):  # it has ended meanwhile
                found[name] = ray.get_actor(name)
                self._roles[name] = role
        for name in set(self._started) - set(found):
            self._started.pop(name).cancel()
        self._actors = found

    async def _run(self, call: Callable[..., None], *arguments: object) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, call, *arguments)

    def _create(self, role: str, name: str) -> None:
        import ray

        if self._stopping:
            return

        from twinpool.worker.actor import WorkerActor

        from_node = self._config.pools.worker_options == "node"
        if from_node:
            own: dict[str, Any] = {"worker": {"name": name, "pool": self._config.worker.pool}}
            text = yaml.safe_dump(own)
        else:
            worker = self._config.worker.model_copy(update={"name": name})
            text = to_yaml(self._config.model_copy(update={"worker": worker}))
        options: dict[str, Any] = {
            "name": name,
            "max_restarts": self._config.pools.max_restarts,
            "max_concurrency": 8,
        } | self._place(role, name)
        if self._config.pools.ray_address:
            # Ray ends what a process owns with that process. Workers of a Ray that outlives this one outlive it too, and the
            # next one finds them by their names.
            options |= {"lifetime": "detached", "get_if_exists": True}
        # On a node with options of its own, its supervisor keeps what a worker writes.
        log_file = "" if from_node else str(self._log_dir / f"{name}.log")
        actor = ray.remote(WorkerActor).options(**options)
        self._actors[name] = actor.remote(text, role, log_file, from_node)
        self._roles[name] = role

    def needs(self, role: str) -> dict[str, float]:
        """What Ray has to find for a worker of a role."""
        return needs_of(self._config.pools, bool(self._config.pools.ray_address), role)

    def _place(self, role: str, name: str) -> dict[str, Any]:
        """Options by which Ray chooses a node."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        needs = self.needs(role)
        known = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
        options: dict[str, Any] = {"num_cpus": 0}
        options |= {known[key]: amount for key, amount in needs.items() if key in known}
        if "memory" in options:
            options["memory"] = int(options["memory"])
        options["resources"] = {key: amount for key, amount in needs.items() if key not in known}
        placement = self._config.pools.placement(role)
        if placement == "spread":
            options["scheduling_strategy"] = "SPREAD"
        elif placement == "group" and any(needs.values()):
            try:
                group = ray.util.get_placement_group(name)
            except ValueError:
                bundle = {key: amount for key, amount in needs.items() if amount}
                lifetime = "detached" if self._config.pools.ray_address else None
                group = ray.util.placement_group([bundle], name=name, lifetime=lifetime)
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(group, 0)
        return options

    async def look(self, names: Iterable[str]) -> dict[str, Look]:
        """What Ray's table says of workers; those that it does not answer for now are left out."""
        ids = {name: self._actors[name]._actor_id.hex() for name in names if name in self._actors}
        found = await self._looker.ask("actors", lambda: {name: look_at(each) for name, each in ids.items()})
        return {name: each for name, each in (found or {}).items() if each is not None}

    @property
    def unseen(self) -> str:
        """Which of Ray's tables could not be read last and why, for people; "": all were."""
        return self._looker.trouble

    async def lacking(self, role: str) -> tuple[int, str]:
        """How many workers that need as much as those of a role wait for a place, and why, for people; (0, ""): none, or Ray does
        not answer."""
        needs = self.needs(role)

        def ask() -> tuple[int, str]:
            count = waiting(needs)
            cause = missing(needs, nodes()) if count else ""
            return (count, cause) if cause else (0, "")

        return await self._looker.ask("demands", ask) or (0, "")

    def started(self, name: str) -> bool:
        """Whether a worker has said that it was ready."""
        future = self._started.get(name)
        return future is not None and future.done() and not future.cancelled() and future.exception() is None

    async def lives(self, name: str) -> bool | None:
        """Whether a worker says that it lives; None: its process does not answer."""
        actor = self._actors.get(name)
        if actor is None:
            return None
        with contextlib.suppress(Exception):
            health = await asyncio.wait_for(_call(actor.health.remote()), HEALTH_SECONDS)
            return bool(health.get("live"))
        return None

    def log_lines(self, name: str) -> list[str]:
        """The last lines of a worker's log; none if it is on another host."""
        return log_tail(self._log_dir / f"{name}.log")

    def failure(self, name: str) -> TwinpoolError | None:
        """Why a worker could not start; None: it has, or is about to."""
        try:
            self.check_one(name)
        except TwinpoolError as error:
            return error
        return None

    def check_one(self, name: str) -> None:
        """The same for one worker; nothing for one that is not run here."""
        actor = self._actors.get(name)
        if actor is None:
            return
        if name not in self._started:
            self._started[name] = asyncio.ensure_future(_call(actor.start.remote()))
        future = self._started[name]
        if future.done() and not future.cancelled() and (error := future.exception()) is not None:
            raise _cause(name, error)

    def manages(self, name: str) -> bool:
        """Whether a worker is run here."""
        return name in self._actors

    async def retire(self, name: str) -> None:
        """Ends a worker's process, without a drain, and does not start it again. Returns once its name is free."""
        import ray

        actor = self._actors.get(name)
        started = self._started.pop(name, None)
        if started is not None:
            started.cancel()
            await asyncio.gather(started, return_exceptions=True)
        if actor is None and (not self._joined or first_role(self._config.worker.pool, name) is None):
            return
        with contextlib.suppress(Exception):  # it may be dead already
            # One that the last control process has run, and had not ended.
            actor = actor or await asyncio.to_thread(ray.get_actor, name)
            await self._run(partial(ray.kill, actor, no_restart=True))
        await self._run(partial(_remove_group, name))
        while True:
            if not await asyncio.to_thread(_is_named, name):
                break
            await asyncio.sleep(NAME_SECONDS)
        self._actors.pop(name, None)
        self._roles.pop(name, None)

    async def add(self, role: str, name: str) -> None:
        """Starts a worker, unless it is run here already. One whose name is not of this pool's is not started."""
        own = self.managed and role in ROLES and first_role(self._config.worker.pool, name) is not None
        if own and name not in self._actors:
            await self._run(self._create, role, name)

    async def disown(self) -> None:
        """Forgets the workers without ending them: another process looks after them."""
        for future in self._started.values():
            future.cancel()
        await asyncio.gather(*self._started.values(), return_exceptions=True)
        self._started.clear()
        self._actors.clear()

    async def stop(self) -> None:
        """Stops every worker in order, unless they are to stay, then the local Ray."""
        self._stopping = True
        if not self._config.pools.stop_workers:
            self._actors.clear()
        for future in self._started.values():
            future.cancel()
        await asyncio.gather(*self._started.values(), return_exceptions=True)
        await asyncio.gather(*(self._stop_actor(name, actor) for name, actor in self._actors.items()))
        self._actors.clear()
        # A call that was cancelled may still run: Ray is left after it.
        await asyncio.to_thread(self._thread.shutdown)
        if self._joined:
            await self._ray.leave()

    async def _stop_actor(self, name: str, actor: Any) -> None:
        import ray

        try:
            drain = self._config.worker.drain_timeout_seconds
            await asyncio.wait_for(_call(actor.stop.remote(drain)), drain + ACTOR_STOP_SECONDS)
        except Exception as error:  # the actor may be dead, restarting or stuck: it is killed either way
            log.warning("worker_stop_failed", worker=name, error=type(error).__name__)
        with contextlib.suppress(Exception):
            await self._run(partial(ray.kill, actor, no_restart=True))


def _remove_group(name: str) -> None:
    """Gives back what a placement group of a worker's own keeps, if it has one."""
    import ray

    with contextlib.suppress(ValueError):
        ray.util.remove_placement_group(ray.util.get_placement_group(name))


def _is_named(name: str) -> bool:
    """Whether Ray still knows an actor of the name."""
    import ray

    try:
        ray.get_actor(name)
    except ValueError:
        return False
    return True


async def _call(reference: Any) -> Any:
    return await reference


def _cause(name: str, error: BaseException) -> TwinpoolError:
    """What a worker's start raised; Ray wraps it."""
    cause: object = getattr(error, "cause", None)
    if isinstance(cause, TwinpoolError):
        return TwinpoolError(cause.reason, f"{name}: {cause.message}", metadata=cause.metadata)
    return TwinpoolError("INTERNAL", f"{name} could not start: {error}")
