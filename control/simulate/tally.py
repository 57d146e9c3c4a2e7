# SPDX-License-Identifier: Apache-2.0
"""What a router counts, for whoever watches the load."""

from dataclasses import dataclass

from twinpool.control.replay.trace import Request
from twinpool.control.simulate.job import Job


@dataclass(slots=True)
class Tally:
    """Counters since the run's start."""

    requests: int = 0
    prompt_tokens: int = 0
    prefilled_tokens: int = 0
    """Prompt tokens of requests whose first token is there."""
    cached_tokens: int = 0
    """Of these, those that were found in a cache, or fetched from one."""
    finished_answers: int = 0
    output_tokens: int = 0
    """Of the finished answers."""
    generated_tokens: int = 0

    def arrived(self, request: Request) -> None:
        """A request has come."""
        self.requests += 1
        self.prompt_tokens += request.input_length

    def prefilled(self, job: Job, block_tokens: int) -> None:
        """A request has its first token."""
        hits = min(job.decode_cached, job.usable) + job.fetched if job.local else job.cached
        self.prefilled_tokens += job.request.input_length
        self.cached_tokens += hits * block_tokens

    def finished(self, job: Job) -> None:
        """An answer is complete."""
        self.finished_answers += 1
        self.output_tokens += job.request.output_length
