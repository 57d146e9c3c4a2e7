# SPDX-License-Identifier: Apache-2.0
"""Tells the world what this worker caches: a tap on the step thread, a publisher thread, a writer of segments.

The step thread only takes the block manager's list of events and hands it over. The publisher thread keeps the set that
can be found here, numbers what changes, publishes it and answers who missed something. The writer keeps etcd up to date at
a rate that does not depend on how much happens.
"""

from twinpool.worker.kv_events.publisher import EventPublisher
from twinpool.worker.kv_events.segment_writer import SegmentWriter
from twinpool.worker.kv_events.tap import CacheTap

__all__ = ["CacheTap", "EventPublisher", "SegmentWriter"]
