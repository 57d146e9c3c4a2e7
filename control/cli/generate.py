# SPDX-License-Identifier: Apache-2.0
"""``twinpool generate`` and ``twinpool chat``: a person asks the cluster."""

import sys
from collections.abc import Sequence
from typing import Annotated

import typer
from google.protobuf.json_format import MessageToDict

from twinpool.client import Completion, Turn, request
from twinpool.control.cli.output import Format, FormatOption, emit_data, err, out
from twinpool.control.cli.target import (
    ClusterOption,
    EndpointOption,
    cluster_client,
    router_endpoints,
    run_command,
)
from twinpool.v1 import inference_pb2 as pb

MaxTokens = Annotated[int | None, typer.Option("--max-tokens", help="Most tokens to generate.", min=1)]
Temperature = Annotated[float, typer.Option("--temperature", "-t", help="0 is greedy.")]
Seed = Annotated[int | None, typer.Option("--seed", help="Seed of the sampler.")]


def generate(
    prompt: Annotated[str, typer.Argument(help="Text to continue; '-' reads standard input.")],
    model: Annotated[str, typer.Option(help="Served name; default: the only one.")] = "",
    max_tokens: MaxTokens = 64,
    temperature: Temperature = 0.0,
    seed: Seed = None,
    n: Annotated[int, typer.Option(help="Number of choices.", min=1, max=16)] = 1,
    stop: Annotated[list[str] | None, typer.Option(help="Stop string (repeatable).")] = None,
    chat_template: Annotated[
        bool, typer.Option("--chat", help="Send the text as a user's chat turn.")
    ] = False,
    cluster: ClusterOption = "local",
    endpoint: EndpointOption = "",
    request_id: Annotated[
        str, typer.Option("--request-id", help="What to call the request, in logs and for `twinpool trace`.")
    ] = "",
    output: FormatOption = Format.TABLE,
) -> None:
    """Send one prompt and print the answer as it comes. A router that is lost meanwhile is replaced by another one."""
    text = sys.stdin.read() if prompt == "-" else prompt
    message = request(
        None if chat_template else text,
        chat=[("user", text)] if chat_template else None,
        model=model,
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        n=n,
        stop=stop or (),
        request_id=request_id,
    )
    target = router_endpoints(cluster, endpoint)
    live = output is Format.TABLE and n == 1
    answer = run_command(stream_answer(target, message, live=live))
    if output is not Format.TABLE:
        emit_data(answer_data(answer), output)
    elif not live:
        for index, choice in enumerate(answer.texts):
            out.print(f"[bold]choice {index}[/]")
            out.print(choice, markup=False)
    if output is Format.TABLE:
        err.print(f"[dim]{summary(answer)}[/]")


def chat(
    model: Annotated[str, typer.Option(help="Served name; default: the only one.")] = "",
    system: Annotated[str, typer.Option(help="System turn.")] = "",
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 0.0,
    cluster: ClusterOption = "local",
    endpoint: EndpointOption = "",
) -> None:
    """Talk with the model; an empty line or Ctrl-D ends it."""
    target = router_endpoints(cluster, endpoint)
    turns: list[Turn] = [("system", system)] if system else []
    while True:
        try:
            line = input("you> ") if sys.stdin.isatty() else sys.stdin.readline().rstrip("\n")
        except EOFError:
            return
        if not line:
            return
        turns.append(("user", line))
        message = request(chat=turns, model=model, max_tokens=max_tokens, temperature=temperature)
        answer = run_command(stream_answer(target, message, live=True))
        err.print(f"[dim]{summary(answer)}[/]")
        turns.append(("assistant", answer.texts[0]))


async def stream_answer(endpoints: Sequence[str], message: pb.GenerateRequest, *, live: bool) -> Completion:
    """Collects an answer, printing the text of a single choice as it comes if ``live``."""
    answer = Completion()
    async with cluster_client(endpoints) as client:
        async for event in client.stream(message):
            answer.take(event)
            if live and event.HasField("tokens"):
                out.print(event.tokens.text, end="", markup=False, soft_wrap=True)
    if live:
        out.print()
    return answer


def answer_data(answer: Completion) -> dict[str, object]:
    """A whole answer for JSON and YAML."""
    started = MessageToDict(answer.started, preserving_proto_field_name=True)
    # Who has it can read the answer.
    started.pop("resume_token", None)
    return {
        "started": started,
        "choices": [
            {"index": i, "text": text, "token_ids": answer.token_ids[i]}
            for i, text in enumerate(answer.texts)
        ],
        "finished": MessageToDict(answer.finished, preserving_proto_field_name=True),
    }


def figures(answer: Completion) -> dict[str, float]:
    """What an answer cost: seconds, tokens a second after the first token, cached tokens, bytes moved and their rate."""
    done = answer.finished
    timings = done.timings
    ttft = timings.time_to_first_token.ToTimedelta().total_seconds()
    total = timings.total.ToTimedelta().total_seconds()
    later = done.usage.completion_tokens - len(done.choices)
    read = done.handoff.read_time.ToTimedelta().total_seconds()
    return {
        "prompt_tokens": done.usage.prompt_tokens,
        "cached_tokens": max(done.usage.cached_tokens, done.usage.decode_cached_tokens),
        "output_tokens": done.usage.completion_tokens,
        "ttft_ms": ttft * 1e3,
        "tokens_per_s": later / (total - ttft) if total > ttft else 0.0,
        "kv_mb": done.handoff.bytes / 1e6,
        "kv_gb_per_s": done.handoff.bytes / read / 1e9 if read > 0 else 0.0,
    }


def summary(answer: Completion) -> str:
    """One line of figures."""
    f = figures(answer)
    return (
        f"{f['prompt_tokens']} prompt tokens ({f['cached_tokens']} cached), {f['output_tokens']} generated, "
        f"first after {f['ttft_ms']:.0f} ms, then {f['tokens_per_s']:.1f}/s; "
        f"{f['kv_mb']:.2f} MB of KV pulled at {f['kv_gb_per_s']:.2f} GB/s; {answer.started.request_id}"
    )
