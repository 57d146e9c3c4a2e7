# SPDX-License-Identifier: Apache-2.0
"""etcd as Twinpool uses it: a client that survives, watches, leases, leadership, and an embedded server."""

from twinpool.store.aio import AsyncStore
from twinpool.store.election import Election
from twinpool.store.etcd import EtcdStore, connect_store
from twinpool.store.keys import Keys
from twinpool.store.lease import LeaseKeeper
from twinpool.store.server import StoreServer, find_etcd, start_store
from twinpool.store.types import Item, Lease, LeaseLostError, Snapshot, Store
from twinpool.store.watch import Batch, Change, Origin, PrefixWatch

__all__ = [
    "AsyncStore",
    "Batch",
    "Change",
    "Election",
    "EtcdStore",
    "Item",
    "Keys",
    "Lease",
    "LeaseKeeper",
    "LeaseLostError",
    "Origin",
    "PrefixWatch",
    "Snapshot",
    "Store",
    "StoreServer",
    "connect_store",
    "find_etcd",
    "start_store",
]
