# SPDX-License-Identifier: Apache-2.0
"""What routers send to workers, as far as the check on arrival."""

from tests.fuzz.shake import message_mutator
from tests.fuzz.target import Target
from tests.support.worker_commands import draw_spec, prompt_spec
from twinpool._core import root_hash
from twinpool.transfer.base import AttemptKey
from twinpool.v1 import worker_pb2 as pb
from twinpool.worker.commands import CancelWork, CommandError, Limits, attempt_of, parse_command

BLOCK = 16
LIMITS = Limits(BLOCK, 64, 512, 8, 300)
KINDS = [pb.SessionRequest]


def run(data: bytes) -> None:
    try:
        message = pb.SessionRequest.FromString(data[1:])
    except Exception:
        return  # gRPC ends the stream
    attempt_of(message)
    try:
        work = parse_command(message, LIMITS)
    except CommandError as refused:
        assert refused.reason in pb.FailureReason.values()
        assert len(refused.detail) < 1000
        return
    assert isinstance(work.key, AttemptKey)
    if not isinstance(work, CancelWork):
        assert 1 <= len(work.prompt) < LIMITS.max_context_tokens
        assert work.prompt.tokens.min() >= 0
        assert work.prompt.tokens.max() < LIMITS.vocab_size
        assert 1 <= work.draw.n <= 16
        assert work.draw.remaining >= 1


def seeds() -> list[bytes]:
    prompt = prompt_spec(list(range(40)), root_hash(b"unit", b"", b""), BLOCK)
    attempt, peer = pb.AttemptId(request_id="r", attempt=1), pb.WorkerId(name="w", incarnation=7)
    source = pb.PrefixSource(owner=peer, endpoint="127.0.0.1:9", blocks=2)
    messages = [
        pb.SessionRequest(hello=pb.Hello(router="r", incarnation=1, worker=peer)),
        pb.SessionRequest(
            prefill=pb.PrefillCommand(id=attempt, prompt=prompt, draw=draw_spec(), reader=peer, prefix=source)
        ),
        pb.SessionRequest(
            decode=pb.DecodeCommand(
                id=attempt, prompt=prompt, draw=draw_spec(n=2), owner=peer, owner_endpoint="127.0.0.1:9"
            )
        ),
        pb.SessionRequest(decode=pb.DecodeCommand(id=attempt, prompt=prompt, draw=draw_spec())),
        pb.SessionRequest(cancel=pb.CancelCommand(id=attempt)),
    ]
    return [b"\0" + message.SerializeToString() for message in messages]


TARGETS = {"session": Target("session", run, seeds, message_mutator(KINDS))}
