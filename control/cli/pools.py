# SPDX-License-Identifier: Apache-2.0
"""``twinpool get pools``, and rows of pools and workers for the other commands."""

import time

from twinpool.control.cli.calls import CALL_SECONDS, ask
from twinpool.control.cli.output import Format, FormatOption, emit_rows
from twinpool.control.cli.target import ClusterOption, ControlOption, control_endpoint, run_command
from twinpool.v1 import control_pb2 as pb
from twinpool.v1 import worker_pb2

COLUMNS = ["name", "role", "desired", "ready", "starting", "pending", "leaving", "held", "bounds", "note"]
_STARTING = (pb.REPLICA_PHASE_STARTING, pb.REPLICA_PHASE_BACKOFF, pb.REPLICA_PHASE_UNREADY)


def pools(
    cluster: ClusterOption = "local", control: ControlOption = "", output: FormatOption = Format.TABLE
) -> None:
    """List the pools: what they shall be and what they are, a row a role."""
    endpoint, asked = control_endpoint(cluster, control), pb.ListPoolsRequest()
    answer = run_command(ask(endpoint, lambda stub: stub.ListPools(asked, timeout=CALL_SECONDS)))
    if output in (Format.TABLE, Format.NAME):
        rows = [row for status in answer.pools for row in pool_rows(status)]
        emit_rows(rows if output is Format.TABLE else rows[::2], COLUMNS, output)
    else:
        emit_rows([pool_data(status) for status in answer.pools], COLUMNS, output)


def role_name(role: "worker_pb2.Role.ValueType") -> str:
    """As users write it."""
    return worker_pb2.Role.Name(role).removeprefix("ROLE_").lower()


def phase_name(phase: "pb.ReplicaPhase.ValueType") -> str:
    """As users read it."""
    return pb.ReplicaPhase.Name(phase).removeprefix("REPLICA_PHASE_").lower()


def worker_row(record: pb.WorkerRecord) -> dict[str, object]:
    """A registered worker as commands print it."""
    return {
        "name": record.worker.name,
        "pool": record.pool,
        "role": role_name(record.role),
        "state": pb.WorkerState.Name(record.state).removeprefix("WORKER_STATE_").lower(),
        "cordoned": "yes" if record.cordoned else "",
        "model": record.model,
        "blocks": record.num_blocks,
        "block_tokens": record.block_tokens,
        "kv_bytes_per_token": record.kv_bytes_per_token,
        "endpoint": record.endpoint,
        "incarnation": f"{record.worker.incarnation:016x}",
        "fingerprint": record.fingerprint,
        "pid": record.pid,
    }


def replica_row(replica: pb.Replica) -> dict[str, object]:
    """A worker of a pool as commands print it."""
    since = replica.since.ToNanoseconds() / 1e9
    return {
        "name": replica.worker,
        "role": role_name(replica.role),
        "phase": phase_name(replica.phase),
        "seconds": round(time.time() - since, 1) if since else None,
        "cordoned": "yes" if replica.cordoned else "",
        "crashes": replica.crashes,
        "managed": replica.managed,
        "cause": replica.cause,
    }


def pool_data(status: pb.PoolStatus) -> dict[str, object]:
    """A pool as programs read it."""
    spec = status.spec
    roles = {
        name: {
            "desired": part.desired,
            "least": part.least,
            "most": part.most,
            "ready": _count(status, name, (pb.REPLICA_PHASE_READY,)),
        }
        for name, part in (("prefill", spec.prefill), ("decode", spec.decode))
    }
    return {
        "name": spec.pool,
        "managed": status.managed,
        "auto": spec.auto,
        "generation": spec.generation,
        **roles,
        "waiting": status.waiting,
        "replicas": [replica_row(replica) for replica in status.replicas],
    }


def pool_rows(status: pb.PoolStatus) -> list[dict[str, object]]:
    """A pool as people read it: a row a role. The note says the first thing that is wrong."""
    rows: list[dict[str, object]] = []
    spec = status.spec
    for role, part in (("prefill", spec.prefill), ("decode", spec.decode)):
        causes = [
            f"{replica.worker}: {replica.cause}"
            for replica in status.replicas
            if role_name(replica.role) == role
            and replica.cause
            and replica.phase in (pb.REPLICA_PHASE_PENDING, pb.REPLICA_PHASE_BACKOFF)
        ]
        rows.append(
            {
                "name": spec.pool,
                "role": role,
                "desired": part.desired if status.managed else None,
                "ready": _count(status, role, (pb.REPLICA_PHASE_READY,)),
                "starting": _count(status, role, _STARTING),
                "pending": _count(status, role, (pb.REPLICA_PHASE_PENDING,)),
                "leaving": _count(status, role, (pb.REPLICA_PHASE_DRAINING, pb.REPLICA_PHASE_FLIPPING)),
                "held": _count(status, role, (pb.REPLICA_PHASE_HELD,)),
                "bounds": f"{part.least}..{part.most}" if status.managed else "",
                "note": status.waiting or (causes[0] if causes else ""),
            }
        )
    return rows


def _count(status: pb.PoolStatus, role: str, phases: "tuple[pb.ReplicaPhase.ValueType, ...]") -> int:
    return sum(replica.phase in phases and role_name(replica.role) == role for replica in status.replicas)
