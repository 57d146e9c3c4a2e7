# SPDX-License-Identifier: Apache-2.0
"""Who is there: workers and routers register under a lease, and everyone follows the registrations.

Losing etcd stops nothing. A registration is renewed, and made anew if its lease was lost; a watch keeps its last view.
"""

from twinpool.membership.records import RecordError, parse, problem_of, takes_work
from twinpool.membership.registration import Registration
from twinpool.membership.watch import (
    GRACE_SECONDS,
    REGISTER_SECONDS,
    EventKind,
    MemberEvent,
    RecordWatch,
    RouterWatch,
    WorkerWatch,
)

__all__ = [
    "GRACE_SECONDS",
    "REGISTER_SECONDS",
    "EventKind",
    "MemberEvent",
    "RecordError",
    "RecordWatch",
    "Registration",
    "RouterWatch",
    "WorkerWatch",
    "parse",
    "problem_of",
    "takes_work",
]
