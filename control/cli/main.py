# SPDX-License-Identifier: Apache-2.0
"""The ``twinpool`` command: one file a verb beside this one."""

import json
import platform
from typing import Annotated

import typer

import twinpool
from twinpool import logs
from twinpool.control.cli import applied, config, core, describe, get, model, serve
from twinpool.control.cli.access import App, reaching
from twinpool.control.cli.cordon import cordon, uncordon
from twinpool.control.cli.demo import demo
from twinpool.control.cli.doctor import doctor
from twinpool.control.cli.drain import drain, restart
from twinpool.control.cli.events import events
from twinpool.control.cli.flip import flip
from twinpool.control.cli.generate import chat, generate
from twinpool.control.cli.health import health
from twinpool.control.cli.kernels import kernels_command
from twinpool.control.cli.key import key_command
from twinpool.control.cli.rebalance import rebalance
from twinpool.control.cli.replay import replay_command
from twinpool.control.cli.scale import scale
from twinpool.control.cli.simulate import simulate_command
from twinpool.control.cli.top import top
from twinpool.control.cli.trace import trace_command
from twinpool.control.cli.up import down, up

app = App(
    help="Serve language models from a prefill pool and a decode pool.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command()(demo)
app.command()(up)
app.command()(down)
app.add_typer(serve.app, name="serve")
app.command()(generate)
app.command()(chat)
app.add_typer(get.app, name="get")
app.add_typer(describe.app, name="describe")
app.command()(scale)
app.command()(cordon)
app.command()(uncordon)
app.command()(drain)
app.command()(restart)
app.command()(flip)
app.command()(events)
app.command()(rebalance)
app.command()(top)
app.command(name="trace")(trace_command)
app.add_typer(model.app, name="model")
config.app.command(name="apply")(reaching(applied.apply))
config.app.command(name="live")(reaching(applied.live))
app.add_typer(config.app, name="config")
app.add_typer(core.app, name="core")
app.command(name="replay")(replay_command)
app.command(name="simulate")(simulate_command)
app.command()(doctor)
app.command()(reaching(health, kube=False))
app.command(name="key")(key_command)
app.command(name="kernels")(kernels_command)


@app.command()
def version(
    output: Annotated[str, typer.Option("--output", "-o", help="text or json.")] = "text",
    as_json: Annotated[bool, typer.Option("--json", help="The same as -o json.")] = False,
) -> None:
    """Print the version."""
    if as_json or output == "json":
        print(json.dumps({"twinpool": twinpool.__version__, "python": platform.python_version()}))
    else:
        print(f"twinpool {twinpool.__version__}")


def main() -> None:
    """Entry point of the ``twinpool`` script."""
    logs.setup("warning")
    app()


if __name__ == "__main__":
    main()
