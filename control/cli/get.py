# SPDX-License-Identifier: Apache-2.0
"""``twinpool get``: lists what the cluster has."""

from twinpool.control.cli import drain, events, pools, prefixes, requests
from twinpool.control.cli.access import App
from twinpool.control.cli.calls import CALL_SECONDS, ask
from twinpool.control.cli.output import Format, FormatOption, emit_rows
from twinpool.control.cli.pools import worker_row
from twinpool.control.cli.target import (
    ClusterOption,
    ControlOption,
    EndpointOption,
    client,
    control_endpoint,
    router_endpoint,
    run_command,
)
from twinpool.v1 import control_pb2 as pb

app = App(help="List what the cluster has.", no_args_is_help=True)
app.command()(prefixes.prefixes)
app.command()(prefixes.conditions)
app.command()(drain.operations)
app.command()(pools.pools)
app.command()(events.events)
app.command()(requests.requests)


@app.command()
def workers(
    cluster: ClusterOption = "local", control: ControlOption = "", output: FormatOption = Format.TABLE
) -> None:
    """List the workers that are registered."""
    endpoint, asked = control_endpoint(cluster, control), pb.ListWorkersRequest()
    answer = run_command(ask(endpoint, lambda stub: stub.ListWorkers(asked, timeout=CALL_SECONDS)))
    columns = ["name", "role", "state", "cordoned", "model", "blocks", "endpoint", "incarnation"]
    emit_rows([worker_row(record) for record in answer.workers], columns, output)


@app.command()
def models(
    cluster: ClusterOption = "local", endpoint: EndpointOption = "", output: FormatOption = Format.TABLE
) -> None:
    """List the models that are served."""

    target = router_endpoint(cluster, endpoint)

    async def models_of() -> list[dict[str, object]]:
        async with client(target) as asked:
            return [
                {
                    "name": model.name,
                    "family": model.family,
                    "context": model.max_context_tokens,
                    "vocab": model.vocab_size,
                    "block_tokens": model.block_tokens,
                    "prefill_workers": model.prefill_workers,
                    "decode_workers": model.decode_workers,
                    "ready": model.ready,
                }
                for model in await asked.models()
            ]

    columns = [
        "name",
        "family",
        "context",
        "vocab",
        "block_tokens",
        "prefill_workers",
        "decode_workers",
        "ready",
    ]
    emit_rows(run_command(models_of()), columns, output)
