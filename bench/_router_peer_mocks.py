# SPDX-License-Identifier: Apache-2.0
"""Workers without a model for other routers; runs under the peers' Python, so it imports nothing of Twinpool.

``grpc``: the scheduler service of TokenSpeed, as tokenspeed-smg calls it (needs smg-grpc-proto). ``http``: SGLang's
``/generate``, as sglang-router calls it. The answer comes at once, or one token a step if the client streams and a pace is set.
Prints one line of JSON with the addresses; ends with its standard input.
"""

import argparse
import asyncio
import json
import sys
from typing import Any

OUTPUT_TOKEN = 1000


async def grpc_worker(model: str, step_seconds: float) -> str:
    """Starts a gRPC worker and returns its URL."""
    import grpc.aio
    from smg_grpc_proto.generated import tokenspeed_scheduler_pb2 as pb  # type: ignore[import-not-found]
    from smg_grpc_proto.generated import tokenspeed_scheduler_pb2_grpc as services

    class Worker(services.TokenSpeedSchedulerServicer):  # type: ignore[misc]
        async def Generate(self, request: Any, context: Any) -> Any:
            count = request.sampling_params.max_new_tokens
            prompt = len(request.tokenized.input_ids)
            if request.stream:
                for made in range(count if step_seconds else 1):
                    if step_seconds and made:
                        await asyncio.sleep(step_seconds)
                    ids = [OUTPUT_TOKEN] if step_seconds else [OUTPUT_TOKEN] * count
                    chunk = pb.GenerateStreamChunk(
                        token_ids=ids, prompt_tokens=prompt, completion_tokens=made + len(ids)
                    )
                    yield pb.GenerateResponse(request_id=request.request_id, chunk=chunk)
            complete = pb.GenerateComplete(
                output_ids=[] if request.stream else [OUTPUT_TOKEN] * count,
                finish_reason="length",
                prompt_tokens=prompt,
                completion_tokens=count,
            )
            yield pb.GenerateResponse(request_id=request.request_id, complete=complete)

        async def HealthCheck(self, request: Any, context: Any) -> Any:
            return pb.HealthCheckResponse(healthy=True)

        async def Abort(self, request: Any, context: Any) -> Any:
            return pb.AbortResponse(success=True)

        async def GetModelInfo(self, request: Any, context: Any) -> Any:
            return pb.GetModelInfoResponse(
                model_path=model,
                tokenizer_path=model,
                served_model_name="mock",
                model_type="deepseek_v3",
                architectures=["DeepseekV3ForCausalLM"],
                max_context_length=1 << 20,
                max_req_input_len=1 << 20,
                vocab_size=1 << 17,
                eos_token_ids=[1],
            )

        async def GetServerInfo(self, request: Any, context: Any) -> Any:
            return pb.GetServerInfoResponse(max_total_num_tokens=1 << 30, tokenspeed_version="0.1.42")

        async def GetLoads(self, request: Any, context: Any) -> Any:
            return pb.GetLoadsResponse(dp_rank_count=1, loads=[pb.SchedulerLoad()])

    server = grpc.aio.server(options=[("grpc.max_receive_message_length", 64 << 20)])
    services.add_TokenSpeedSchedulerServicer_to_server(Worker(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    _KEPT.append(server)
    return f"grpc://127.0.0.1:{port}"


_KEPT: list[object] = []
"""Servers live as long as the process."""


async def http_worker(model: str, step_seconds: float) -> str:
    """Starts an HTTP worker and returns its URL."""
    info = {
        "model_path": model,
        "served_model_name": "mock",
        "is_generation": True,
        "max_total_num_tokens": 1 << 30,
    }

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = 0
                for line in head.split(b"\r\n")[1:]:
                    name, _, value = line.partition(b":")
                    if name.lower() == b"content-length":
                        length = int(value)
                body = await reader.readexactly(length)
                if head.startswith(b"POST /generate"):
                    await _generate(writer, json.loads(body), step_seconds)
                else:
                    _answer(writer, info)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, limit=1 << 24)
    _KEPT.append(server)
    return f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def _answer(writer: asyncio.StreamWriter, value: object) -> None:
    body = json.dumps(value).encode()
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)


async def _generate(writer: asyncio.StreamWriter, request: Any, step_seconds: float) -> None:
    count = request["sampling_params"]["max_new_tokens"]
    meta = {"finish_reason": {"type": "length", "length": count}, "completion_tokens": count}
    if not request.get("stream"):
        _answer(writer, {"text": "a" * count, "output_ids": [OUTPUT_TOKEN] * count, "meta_info": meta})
        return
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
    for made in range(count if step_seconds else 1):
        if step_seconds and made:
            await asyncio.sleep(step_seconds)
        event = {"text": "a" * (made + 1), "output_ids": [OUTPUT_TOKEN] * (made + 1), "meta_info": meta}
        _chunk(writer, b"data: " + json.dumps(event).encode() + b"\n\n")
    _chunk(writer, b"data: [DONE]\n\n")
    writer.write(b"0\r\n\r\n")


def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


async def _main(args: argparse.Namespace) -> None:
    start = grpc_worker if args.kind == "grpc" else http_worker
    print(json.dumps([await start(args.model, args.step_seconds) for _ in range(args.workers)]), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=("grpc", "http"))
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--step-seconds", type=float, default=0.0)
    parser.add_argument("--model", required=True, help="directory of the tokenizer")
    asyncio.run(_main(parser.parse_args()))


if __name__ == "__main__":
    main()
