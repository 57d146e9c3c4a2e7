# SPDX-License-Identifier: Apache-2.0
"""etcd's own protocol, as the client library ships it. Untyped: its messages are built when the module is loaded."""

from typing import Any

import etcd3.etcdrpc
from etcd3.etcdrpc import kv_pb2 as _kv_pb2

pb: Any = etcd3.etcdrpc
kv_pb2: Any = _kv_pb2
