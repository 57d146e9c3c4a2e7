# SPDX-License-Identifier: Apache-2.0
"""The rows of the table of errors that are about running a cluster, not about a request."""

from __future__ import annotations

from typing import Final

from twinpool.errors.spec import C, ErrorSpec

OPERATION: Final = (
    ErrorSpec(
        "WORKER_NOT_FOUND",
        C.NOT_FOUND,
        False,
        "there is no such worker",
        "Use a name that `twinpool get workers` shows.",
    ),
    ErrorSpec(
        "OPERATION_NOT_FOUND",
        C.NOT_FOUND,
        False,
        "there is no such operation",
        "Use the id that the command printed; ended operations are forgotten after a while.",
    ),
    ErrorSpec(
        "OPERATION_RUNNING",
        C.FAILED_PRECONDITION,
        True,
        "another operation of the worker is under way",
        "Wait for its end, then try again.",
    ),
    ErrorSpec(
        "OPERATION_SUPERSEDED",
        C.ABORTED,
        False,
        "a later operation took the place of this one",
        "Follow the operation that the message names.",
    ),
    ErrorSpec(
        "POOL_NOT_FOUND",
        C.NOT_FOUND,
        False,
        "there is no such pool",
        "Use a name that `twinpool get pools` shows.",
    ),
    ErrorSpec(
        "POOL_NOT_MANAGED",
        C.FAILED_PRECONDITION,
        False,
        "the control process does not run the workers of the pool",
        "Change their number where they are run, for instance the replicas of a StatefulSet.",
    ),
    ErrorSpec(
        "POOL_BOUNDS",
        C.INVALID_ARGUMENT,
        False,
        "the number of workers is outside the bounds of the pool",
        "Stay within the bounds that the message names, or change pools.prefill_least and its like.",
    ),
    ErrorSpec(
        "REPLICA_PENDING",
        C.RESOURCE_EXHAUSTED,
        True,
        "Ray has no place for a worker",
        "Add a machine with what the message says is missing, or scale down.",
    ),
    ErrorSpec(
        "REPLICA_CRASHING",
        C.FAILED_PRECONDITION,
        False,
        "a worker ends again and again",
        "Read its log: `twinpool describe worker NAME` shows the last lines.",
    ),
    ErrorSpec(
        "NOT_LEADER",
        C.UNAVAILABLE,
        True,
        "another control process leads",
        "Ask the one that the message names; the command line does so by itself.",
    ),
    ErrorSpec(
        "CONFIG_INVALID",
        C.FAILED_PRECONDITION,
        False,
        "the configuration is not valid",
        "Correct the key that the message names; docs/configuration.md lists all.",
    ),
    ErrorSpec(
        "CHECKPOINT_INVALID",
        C.FAILED_PRECONDITION,
        False,
        "the checkpoint cannot be loaded",
        "Fetch the file that the message names again, or point model.path at a complete checkpoint.",
    ),
    ErrorSpec(
        "STORE_UNAVAILABLE",
        C.UNAVAILABLE,
        True,
        "etcd cannot be reached",
        "Running streams go on. Check etcd and cluster.etcd_endpoints.",
    ),
    ErrorSpec(
        "STORE_CORRUPT",
        C.DATA_LOSS,
        False,
        "a value in etcd cannot be read",
        "Remove the key that the message names; its writer puts it again.",
    ),
    ErrorSpec(
        "PORT_UNAVAILABLE",
        C.FAILED_PRECONDITION,
        False,
        "the address cannot be bound",
        "Stop what listens there, or use port 0 for a free one.",
    ),
    ErrorSpec(
        "AUDIT_UNAVAILABLE",
        C.UNAVAILABLE,
        True,
        "the audit log cannot be written, so the call was not made",
        "Make room or mend the file of audit.file on that host, then try again.",
    ),
    ErrorSpec(
        "RECORDING_OFF",
        C.FAILED_PRECONDITION,
        False,
        "the router does not record the calls to its core",
        "Start it with router.record_bytes above 0.",
    ),
    ErrorSpec(
        "SERVER_UNREACHABLE",
        C.UNAVAILABLE,
        True,
        "the server cannot be reached",
        "Check the address, and that the process runs.",
    ),
    ErrorSpec(
        "UNAUTHENTICATED",
        C.UNAUTHENTICATED,
        False,
        "the caller is not authenticated",
        "Give a client certificate that the cluster's CA signed.",
    ),
    ErrorSpec(
        "PERMISSION_DENIED",
        C.PERMISSION_DENIED,
        False,
        "the caller may not do this",
        "Ask the operator of the cluster.",
    ),
    ErrorSpec(
        "UNIMPLEMENTED",
        C.UNIMPLEMENTED,
        False,
        "the server does not know this call",
        "Use a client of the server's version.",
    ),
)
