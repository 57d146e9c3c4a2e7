# SPDX-License-Identifier: Apache-2.0
"""Moving KV between workers: each worker has one link, which sends and receives one transfer at a time."""

from twinpool.control.simulate.model import WorkerModel


class Links:
    """Transfers in the order in which they were asked for."""

    def __init__(self, model: WorkerModel, block_tokens: int) -> None:
        self._model = model
        self._block_bytes = model.block_bytes(block_tokens)
        self._sends: dict[str, float] = {}
        self._receives: dict[str, float] = {}
        self._slow: dict[str, float] = {}
        self.bytes = 0
        self.transfers = 0

    def seconds(self, blocks: int) -> float:
        """A transfer of so many blocks with nothing in its way."""
        model = self._model
        return (
            model.link_latency
            + blocks * model.link_block
            + blocks * self._block_bytes / model.link_bytes_per_second
        )

    def move(self, now: float, owner: str, reader: str, blocks: int) -> float:
        """When the blocks are with the reader. They wait for both links."""
        if blocks <= 0:
            return now
        start = max(now, self._sends.get(owner, 0.0), self._receives.get(reader, 0.0))
        factor = max(self._slow.get(owner, 1.0), self._slow.get(reader, 1.0))
        end = start + self.seconds(blocks) * factor
        self._sends[owner] = self._receives[reader] = end
        self.bytes += blocks * self._block_bytes
        self.transfers += 1
        return end

    def slow(self, worker: str, factor: float) -> None:
        """From now on transfers of this worker take ``factor`` times as long."""
        self._slow[worker] = factor
