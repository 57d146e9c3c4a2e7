# SPDX-License-Identifier: Apache-2.0
"""The control process and the pools that it runs through Ray."""

from __future__ import annotations

from pydantic import Field

from twinpool.config.base import Section, Texts


class ControlSection(Section):
    """The control process."""

    host: str = Field(default="127.0.0.1", min_length=1, description="Address to listen on.")
    port: int = Field(default=0, ge=0, le=65535, description="Port of the ControlService; 0: a free one.")
    http_port: int = Field(
        default=-1,
        ge=-1,
        le=65535,
        description="Port of the console page; 0: a free one; -1: there is none. `twinpool up` takes a free one unless told otherwise.",
    )
    http_host: str = Field(
        default="", description="Address on which the console page listens; empty: that of control.host."
    )
    http_hosts: Texts = Field(
        default=(),
        max_length=16,
        description="Names by which browsers may call the console page, beside localhost and addresses: a page of another site that "
        "has its name point here is refused.",
    )
    operator_key_file: str = Field(
        default="",
        max_length=4096,
        description="File with the API key of an operator, which the control process shows routers that have tenants.",
    )
    answer_seconds: float = Field(
        default=2.0,
        ge=0.1,
        le=60,
        description="How long a worker or router may take to answer before an overview shows it as unreachable, in seconds.",
    )


class PoolsSection(Section):
    """How many workers the control process runs, and how Ray runs them."""

    prefill_workers: int = Field(default=1, ge=0, le=4096, description="Prefill workers of the pool.")
    decode_workers: int = Field(default=1, ge=0, le=4096, description="Decode workers of the pool.")
    routers: int = Field(default=1, ge=0, le=64, description="Router processes of a local cluster.")
    start_timeout_seconds: float = Field(
        default=300.0,
        gt=0,
        le=86400,
        description="Longest wait until a worker is ready, in seconds. Covers the load of its weights.",
    )
    ray_address: str = Field(
        default="",
        description="Address of a running Ray cluster; empty: a local one is started for the control process.",
    )
    ray_object_store_bytes: int = Field(
        default=80 << 20,
        ge=78_643_200,
        le=1 << 40,
        description="Object store of the local Ray, in bytes. Ray's least: KV never passes through it.",
    )
    max_restarts: int = Field(
        default=-1, ge=-1, le=1 << 20, description="How often Ray restarts a worker that died; -1: always."
    )
