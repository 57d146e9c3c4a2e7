# SPDX-License-Identifier: Apache-2.0
"""The steps of operations, as the tests that kill a control process at each of them know them."""

from tests.support.controls import TTL_SECONDS, Control
from tests.support.kill_points import STEPS, kind_name
from tests.support.thread_pools import Site
from twinpool.config import TwinpoolConfig
from twinpool.store import StoreServer, connect_store
from twinpool.v1 import control_pb2 as pb


async def test_each_kind_has_its_cases_and_each_step_too(server: StoreServer) -> None:
    config = TwinpoolConfig.model_validate({"cluster": {"etcd_endpoints": [server.endpoint]}})
    store = connect_store(config.cluster)
    made = Control(server, Site(store, "steps", TTL_SECONDS))
    try:
        steps = {kind_name(kind): names for kind, names in made.controller.operations.steps.items()}
        assert steps == STEPS
        kinds = {kind_name(kind) for kind in pb.OperationKind.values()}
        assert kinds - {"unspecified"} == set(STEPS)
    finally:
        await made.stop()
        store.close()
