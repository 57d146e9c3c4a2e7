# SPDX-License-Identifier: Apache-2.0
"""The one table of errors that leave a Twinpool process. docs/errors.md is generated from it."""

from __future__ import annotations

from typing import Final

from twinpool.errors.operation import OPERATION
from twinpool.errors.reach import REACH
from twinpool.errors.spec import C, ErrorSpec


def _invalid(reason: str, message: str, action: str) -> ErrorSpec:
    return ErrorSpec(reason, C.INVALID_ARGUMENT, False, message, action)


_REQUEST = (
    _invalid(
        "INVALID_ARGUMENT", "the request is not valid", "Read the message: it names field, value and limit."
    ),
    _invalid("EMPTY_PROMPT", "the prompt is empty", "Send at least one token, character or message."),
    _invalid(
        "PROMPT_TOO_LONG",
        "the prompt is too long",
        "Shorten the prompt below the limit that the message names.",
    ),
    _invalid(
        "CONTEXT_LIMIT_EXCEEDED",
        "prompt and max_tokens together exceed the context limit",
        "Lower max_tokens or shorten the prompt.",
    ),
    _invalid(
        "TOKEN_OUT_OF_VOCABULARY",
        "a token id is outside the vocabulary",
        "Use ids of this model's tokenizer; ListModels gives the size of its vocabulary.",
    ),
    _invalid("INVALID_TEXT", "the text is not valid", "Send valid UTF-8 without lone surrogates."),
    _invalid(
        "INVALID_SAMPLING", "a sampling parameter is out of range", "Use the range that the message names."
    ),
    _invalid("INVALID_STOP", "a stop condition is not valid", "Use the limits that the message names."),
    _invalid("INVALID_N", "n is out of range", "Ask for a number of choices within the limit."),
    _invalid("INVALID_LOGPROBS", "logprobs is out of range", "Ask for fewer alternatives."),
    _invalid("INVALID_PRIORITY", "priority is out of range", "Use a priority from -100 to 100."),
    _invalid(
        "INVALID_REQUEST_ID",
        "the request id is not valid",
        "Use 1 to 128 characters of A-Z a-z 0-9 . _ : - or leave it empty.",
    ),
    _invalid(
        "INVALID_TENANT",
        "the tenant is not valid",
        "Use a tenant name within the limits that the message names.",
    ),
    _invalid("INVALID_SESSION", "the session id is not valid", "Use at most 128 printable characters."),
    _invalid(
        "INVALID_PIN",
        "the prompt cannot be pinned so",
        "Use a prompt of at least one block, and a time within the limit that the message names.",
    ),
    _invalid(
        "INVALID_CHAT",
        "the conversation cannot be rendered",
        "Use the roles and the order of turns that the model's chat template accepts.",
    ),
    _invalid(
        "INVALID_GRAMMAR",
        "the form of the answer cannot be compiled",
        "Correct or simplify the schema or grammar as the message says.",
    ),
    _invalid(
        "INVALID_TOOLS",
        "the tools cannot be offered to the model",
        "Describe tools as the message says; a model whose chat template does not show tools has none.",
    ),
    _invalid(
        "UNSUPPORTED_FIELD",
        "a field of the request is not supported",
        "Leave the field out; the message names it.",
    ),
    ErrorSpec(
        "MESSAGE_TOO_LARGE",
        C.RESOURCE_EXHAUSTED,
        False,
        "the message exceeds the size limit",
        "Send token ids instead of text, or shorten the prompt; the operator sets rpc.max_message_bytes.",
    ),
    ErrorSpec(
        "MODEL_NOT_FOUND",
        C.NOT_FOUND,
        False,
        "no worker of this cluster serves the model",
        "Use a name that ListModels returns.",
    ),
    ErrorSpec(
        "NO_POOL",
        C.FAILED_PRECONDITION,
        False,
        "no pool of the model takes requests of this length and priority",
        "Use a prompt length and a priority that the message names, or have the operator give the pools other classes.",
    ),
    ErrorSpec(
        "ADAPTER_NOT_FOUND",
        C.NOT_FOUND,
        False,
        "no worker of this cluster serves the adapter",
        "Leave adapter empty or use a loaded one.",
    ),
    ErrorSpec(
        "REQUEST_NOT_FOUND",
        C.NOT_FOUND,
        False,
        "the router knows no request of that id",
        "Ask the router that served it; it keeps the last requests only (router.trace_requests).",
    ),
    ErrorSpec(
        "DUPLICATE_REQUEST",
        C.ALREADY_EXISTS,
        False,
        "a request with this id is in flight",
        "Wait for it to end, or choose another request id.",
    ),
    _invalid(
        "INVALID_RESUME",
        "the resume grace, the idempotency key or the position is not valid",
        "Use the limits that the message names.",
    ),
    _invalid(
        "RESUME_TOKEN_INVALID",
        "the resume token is not one of this cluster",
        "Send the token of GenerateStarted as it came; after the cluster's key was changed, send the request again.",
    ),
    ErrorSpec(
        "RESUME_LOST",
        C.NOT_FOUND,
        False,
        "nobody in the cluster has this answer (any more)",
        "Send the request again, with the seed of GenerateStarted for the same tokens.",
    ),
    ErrorSpec(
        "IDEMPOTENCY_MISMATCH",
        C.ALREADY_EXISTS,
        False,
        "another request was sent with this idempotency key",
        "Use a new key for each request.",
    ),
    ErrorSpec(
        "STREAM_SUPERSEDED",
        C.ABORTED,
        False,
        "another stream has attached to this answer",
        "Nothing: the newest stream has the rest of the answer.",
    ),
)

_ADMISSION = (
    ErrorSpec(
        "QUEUE_FULL",
        C.RESOURCE_EXHAUSTED,
        True,
        "the queue is full",
        "Retry after the delay in RetryInfo; add workers if it stays so.",
    ),
    ErrorSpec(
        "RESUME_FULL",
        C.RESOURCE_EXHAUSTED,
        True,
        "the router keeps as much of resumable answers as it may",
        "Retry, or ask without a resume grace; the operator sets router.resume_bytes.",
    ),
    ErrorSpec(
        "RESUME_UNREACHABLE",
        C.UNAVAILABLE,
        True,
        "who may have this answer cannot be reached now",
        "Resume again after a moment.",
    ),
    ErrorSpec(
        "TENANT_RATE",
        C.RESOURCE_EXHAUSTED,
        True,
        "the tenant's token rate is used up",
        "Retry after the delay in RetryInfo.",
    ),
    ErrorSpec(
        "TENANT_CONCURRENCY",
        C.RESOURCE_EXHAUSTED,
        True,
        "the tenant has too many requests in flight",
        "Wait for one of them to end.",
    ),
    ErrorSpec(
        "PIN_QUOTA",
        C.RESOURCE_EXHAUSTED,
        True,
        "the tenant has as many tokens pinned on the worker as it may",
        "Release pins, pin a shorter prompt, or wait until one expires; the operator sets the tenant's max_pinned_tokens.",
    ),
    ErrorSpec(
        "PIN_CAPACITY",
        C.RESOURCE_EXHAUSTED,
        True,
        "the worker pins as much as it may",
        "Retry after the delay in RetryInfo, or do without the pin; the operator sets sessions.max_pinned_ratio.",
    ),
    ErrorSpec(
        "REQUEST_EXCEEDS_CAPACITY",
        C.FAILED_PRECONDITION,
        False,
        "no worker is large enough for the request even when idle",
        "Lower max_tokens or n, shorten the prompt, or start workers with more KV blocks.",
    ),
    ErrorSpec(
        "DEADLINE_UNREACHABLE",
        C.DEADLINE_EXCEEDED,
        True,
        "the deadline would pass before the first token",
        "Allow more time, or retry when the load is lower.",
    ),
    ErrorSpec(
        "DEADLINE_EXCEEDED",
        C.DEADLINE_EXCEEDED,
        False,
        "the deadline passed",
        "Allow more time or ask for fewer tokens.",
    ),
    ErrorSpec(
        "QUEUE_TIMEOUT",
        C.UNAVAILABLE,
        True,
        "the request waited too long for a worker",
        "Retry; add workers if it stays so.",
    ),
    ErrorSpec(
        "NO_WORKERS",
        C.UNAVAILABLE,
        True,
        "no ready pair of prefill and decode workers",
        "Start workers (`twinpool get workers` shows what is there), then retry.",
    ),
    ErrorSpec(
        "DRAINING", C.UNAVAILABLE, True, "this process is shutting down", "Retry: another one will answer."
    ),
    ErrorSpec(
        "WORKER_HUNG",
        C.UNAVAILABLE,
        True,
        "a loop of the worker stands still",
        "Routers place its requests elsewhere by themselves. If it stays so, see the worker's log and restart it.",
    ),
    ErrorSpec(
        "CANCELLED", C.CANCELLED, False, "the request was cancelled", "Nothing: the caller ended the request."
    ),
)

_SERVING = (
    ErrorSpec(
        "NO_CAPACITY",
        C.UNAVAILABLE,
        True,
        "the worker has no room for the request",
        "Retry; the router places the request anew on its own first.",
    ),
    ErrorSpec(
        "WORKER_LOST",
        C.UNAVAILABLE,
        True,
        "a worker was lost while it served the request",
        "Retry; tokens already received stay valid.",
    ),
    # ABORTED, not DATA_LOSS: the fence caught the reuse of a block before any byte of it was used, so
    # nothing is lost or corrupt. The attempt lost a race, which is what ABORTED means: run it again.
    ErrorSpec(
        "KV_FENCED",
        C.ABORTED,
        True,
        "KV blocks were reused before they could be pulled, so the attempt was abandoned",
        "Retry. If it repeats, raise transfer.lease_seconds or give prefill workers more KV blocks.",
    ),
    # DATA_LOSS: generations agree, yet the bytes differ. Hardware, driver or a fault of ours.
    ErrorSpec(
        "KV_CORRUPT",
        C.DATA_LOSS,
        False,
        "KV bytes differ from their digest although the fence was intact",
        "Check the memory and the network of the two named workers, and report it.",
    ),
    ErrorSpec(
        "TRANSFER_FAILED",
        C.UNAVAILABLE,
        True,
        "KV blocks could not be pulled",
        "Retry. If it repeats, run `twinpool doctor` on both workers' hosts.",
    ),
    ErrorSpec(
        "ATTEMPTS_EXHAUSTED",
        C.UNAVAILABLE,
        True,
        "every placement of the request failed",
        "Retry later; the last cause is in the metadata.",
    ),
    ErrorSpec(
        "RETRY_BUDGET_EXHAUSTED",
        C.UNAVAILABLE,
        True,
        "too many attempts fail to place this one anew",
        "Retry later; the cause is in the metadata. Look for workers that fail what they are given.",
    ),
    ErrorSpec(
        "FINGERPRINT_MISMATCH",
        C.FAILED_PRECONDITION,
        False,
        "two workers differ in model, dtype, block size or layout",
        "Start the workers of a pool with the same model and the same kv settings.",
    ),
    ErrorSpec(
        "INCARNATION_MISMATCH",
        C.FAILED_PRECONDITION,
        True,
        "the worker has restarted since it was looked up",
        "Retry: the new incarnation will be used.",
    ),
    ErrorSpec(
        "DESCRIPTOR_INVALID",
        C.INVALID_ARGUMENT,
        False,
        "a worker's transfer descriptor failed its checks",
        "Start both workers from the same version.",
    ),
    ErrorSpec(
        "DETOKENIZE_FAILED",
        C.INTERNAL,
        False,
        "a generated token has no text",
        "Check that router and workers read the same tokenizer files.",
    ),
    ErrorSpec(
        "CLIENT_TOO_SLOW",
        C.RESOURCE_EXHAUSTED,
        False,
        "the client reads slower than the answer is made",
        "Read the stream faster, or ask for fewer tokens; the operator sets router.max_buffered_tokens.",
    ),
    ErrorSpec("INTERNAL", C.INTERNAL, False, "an internal error", "Report it with the request id."),
)

GROUPS: Final = {
    "The request": _REQUEST,
    "Admission": _ADMISSION,
    "Serving": _SERVING,
    "Operation": OPERATION,
    "Reaching a cluster": REACH,
}
"""The table, in the order of docs/errors.md."""

TABLE: Final[dict[str, ErrorSpec]] = {spec.reason: spec for group in GROUPS.values() for spec in group}
"""Every error by its reason."""
