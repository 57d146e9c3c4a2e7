# SPDX-License-Identifier: Apache-2.0
"""A real browser, driven over its DevTools protocol: headless Chromium, where there is one."""

import asyncio
import base64
import contextlib
import itertools
import os
import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from tests.support.waiting import until, until_told

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--mute-audio",
    "--disable-background-networking", "--disable-component-update", "--hide-scrollbars", "--remote-debugging-port=0",
)  # fmt: skip
LISTENING = re.compile(rb"DevTools listening on (ws://\S+)")


def find_browser() -> str:
    """Its path; "" where there is none."""
    return os.environ.get("TWINPOOL_TEST_BROWSER", "") or next(filter(None, map(shutil.which, NAMES)), "")


class Page:
    """One page. ``complaints``: what the page or the browser had to say against it: errors, violations of the policy."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.complaints: list[str] = []
        self.requested: list[str] = []
        self._reader = asyncio.ensure_future(self._read())

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command of the protocol."""
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        return await asyncio.wait_for(answer, 60)

    async def run(self, script: str) -> Any:
        """The value of an expression in the page. Fails with the page's exception."""
        # Trusted Types forbid what an evaluated string would be to the page, not to the debugger.
        found = await self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    async def until(self, script: str) -> None:
        """Returns once an expression in the page is true."""
        await until_told(lambda: self.run(f"Boolean({script})"))

    async def text(self, selector: str) -> str:
        """What an element shows."""
        return str(await self.run(f"document.querySelector({selector!r}).innerText"))

    async def press(self, key: str) -> None:
        """A key goes down and up, such as Tab or Enter."""
        code = {"Tab": 9, "Enter": 13}[key]
        for kind in ("keyDown", "keyUp"):
            text = {"text": "\r"} if key == "Enter" and kind == "keyDown" else {}
            await self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **text)  # fmt: skip

    async def open(self, url: str) -> None:
        """Goes there and waits until it is loaded."""
        await self.call("Page.navigate", url=url)
        await self.until("document.readyState === 'complete'")

    async def picture(self, path: Path, *, width: int = 1360, height: int = 1700, dark: bool = False) -> None:
        """Writes what it looks like as a PNG."""
        await self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)  # fmt: skip
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        await self.call("Emulation.setEmulatedMedia", features=scheme)
        shot = await self.call("Page.captureScreenshot", format="png")
        await asyncio.to_thread(path.write_bytes, base64.b64decode(shot["data"]))

    async def _read(self) -> None:
        async for message in self._socket:
            event = message.json()
            if "id" in event:
                answer = self._answers.pop(event["id"])
                if not answer.done():
                    answer.set_result(event.get("result", event))
                continue
            told = event["params"]
            if event["method"] == "Runtime.exceptionThrown":
                self.complaints.append(str(told["exceptionDetails"]))
            elif event["method"] == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
                self.complaints.append(f"{told['entry']['text']} {told['entry'].get('url', '')}")
            elif event["method"] == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning"):
                self.complaints.append(str(told["args"]))
            elif event["method"] == "Network.requestWillBeSent":
                self.requested.append(told["request"]["url"])


@asynccontextmanager
async def browser(directory: Path) -> AsyncIterator[Page]:
    """An empty page of a browser whose profile is in ``directory``."""
    process = await asyncio.create_subprocess_exec(
        find_browser(), *FLAGS, f"--user-data-dir={directory}", "about:blank",
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    said = bytearray()

    async def listen() -> None:
        assert process.stderr is not None
        async for line in process.stderr:
            said.extend(line)

    listener = asyncio.ensure_future(listen())
    try:
        await until(lambda: LISTENING.search(said) or process.returncode is not None)
        found = LISTENING.search(said)
        assert found is not None, said.decode(errors="replace")
        port = found[1].decode().split(":")[2].split("/")[0]
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                target = next(one for one in await answer.json() if one["type"] == "page")
            async with session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                page = Page(socket)
                for domain in ("Page", "Runtime", "Log", "Network"):
                    await page.call(f"{domain}.enable")
                yield page
                page._reader.cancel()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()
        listener.cancel()
