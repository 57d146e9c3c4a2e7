# SPDX-License-Identifier: Apache-2.0
"""Keeps the core's prefix index what the workers say: segments from etcd to begin with, then their events."""

from twinpool.router.index.follower import Follower
from twinpool.router.index.mirror import Mirror, Need
from twinpool.router.index.segment_view import SegmentView
from twinpool.router.index.status import WorkerLocality

__all__ = ["Follower", "Mirror", "Need", "SegmentView", "WorkerLocality"]
