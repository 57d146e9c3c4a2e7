# SPDX-License-Identifier: Apache-2.0
"""What a fake decode worker keeps of resumable answers, by the rules of a real one, but for time and memory."""

import numpy as np

from tests.support.fake_job import Job
from twinpool.v1 import worker_pb2 as pb
from twinpool.v1.resume_pb2 import PortableChoice, PortableState


class FakeKept:
    """``states`` by stream. ``asked``: what routers asked for."""

    def __init__(self, worker: str) -> None:
        self.worker = worker
        self.states: dict[str, PortableState] = {}
        self.asked: list[pb.TakeOverRequest] = []

    def keep(self, job: Job, *, forget: bool = False) -> None:
        """A job has ended, however."""
        if job.portable is None:
            return
        stream = job.portable.stream_id
        if forget:
            self.states.pop(stream, None)
            return
        asked = len(job.prompt) - job.draw.drawn
        earlier = job.prompt[asked:].tolist()
        rows = [job.rows.get(choice, earlier) for choice in range(job.draw.n)]
        self.states[stream] = PortableState(
            request=job.portable,
            prompt=job.prompt[:asked].astype("<i4").tobytes(),
            choices=[PortableChoice(token_ids=np.array(row, "<i4").tobytes()) for row in rows],
            worker=self.worker,
        )

    def means(self, request: pb.TakeOverRequest, job: Job) -> bool:
        """Whether a job is what a router asks for."""
        portable = job.portable
        if portable is None:
            return False
        return portable.stream_id == request.stream_id if request.stream_id else portable.key == request.key

    def differs(self, request: pb.TakeOverRequest, job: Job) -> bool:
        """Whether it is another request with the same key."""
        portable = job.portable
        asked = not request.stream_id and not request.forget
        return asked and portable is not None and portable.digest != request.digest

    def answer(self, request: pb.TakeOverRequest) -> pb.TakeOverResponse:
        self.asked.append(request)
        for stream, state in list(self.states.items()):
            if stream == request.stream_id or (not request.stream_id and state.request.key == request.key):
                if request.forget:
                    del self.states[stream]
                elif not request.stream_id and state.request.digest != request.digest:
                    return pb.TakeOverResponse(state=PortableState(request=state.request))
                return pb.TakeOverResponse(state=state)
        return pb.TakeOverResponse()
