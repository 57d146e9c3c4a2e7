# SPDX-License-Identifier: Apache-2.0
"""A command in a real pseudo-terminal: keys go in, and the screen as a person sees it comes out."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
import threading
from collections.abc import Mapping, Sequence

# What a full-screen program of rich sends: moves home, colours, the other screen, the cursor on and off, erasures.
CONTROL = re.compile(r"\x1b\[(\??)([0-9;]*)([A-Za-z])|\x1b[()][A-Z0-9]|\x1b[=>78]")


class Screen:
    """Understands as much of a terminal as these programs use; anything else fails."""

    def __init__(self, columns: int, lines: int) -> None:
        self.columns, self.lines = columns, lines
        self.cells = [[" "] * columns for _ in range(lines)]
        self.row = self.column = 0
        self.alternate = False
        self._rest = ""

    @property
    def text(self) -> str:
        return "\n".join("".join(line).rstrip() for line in self.cells)

    def feed(self, data: str) -> None:
        data = self._rest + data
        # A sequence may be cut anywhere.
        cut = data.rfind("\x1b", max(0, len(data) - 16))
        if cut >= 0 and not CONTROL.match(data, cut):
            data, self._rest = data[:cut], data[cut:]
        else:
            self._rest = ""
        at = 0
        while at < len(data):
            if data[at] == "\x1b":
                found = CONTROL.match(data, at)
                assert found is not None, repr(data[at : at + 12])
                if found[3]:
                    self._control(found[1], found[2], found[3])
                at = found.end()
                continue
            self._put(data[at])
            at += 1

    def _put(self, character: str) -> None:
        if character == "\n":
            self.row += 1
            if self.row == self.lines:
                self.row -= 1
                self.cells = [*self.cells[1:], [" "] * self.columns]
        elif character == "\r":
            self.column = 0
        elif character >= " ":
            if self.column < self.columns:
                self.cells[self.row][self.column] = character
            self.column += 1

    def _control(self, private: str, numbers: str, kind: str) -> None:
        first = int(numbers.split(";")[0] or 0) if not private else int(numbers or 0)
        if private:
            if first == 1049:
                self.alternate = kind == "h"
        elif kind == "H":
            row, _, column = numbers.partition(";")
            self.row, self.column = int(row or 1) - 1, int(column or 1) - 1
        elif kind == "A":
            self.row = max(0, self.row - (first or 1))
        elif kind == "K":
            line = self.cells[self.row]
            line[:] = (
                [" "] * self.columns
                if first == 2
                else line[: self.column] + [" "] * (self.columns - self.column)
            )
        elif kind == "J":
            for row in range(self.lines):
                self.cells[row] = [" "] * self.columns
        else:
            assert kind == "m", (private, numbers, kind)


class Terminal:
    """The command and its screen. Close it."""

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str], columns: int = 180, lines: int = 40
    ) -> None:
        self._master, slave = pty.openpty()
        self.resize(columns, lines)
        self.attributes = termios.tcgetattr(slave)
        self._slave = slave
        self.process = subprocess.Popen(
            command, env=dict(env) | {"TERM": "xterm-256color", "COLUMNS": "", "LINES": ""},
            stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def text(self) -> str:
        """What is on the screen."""
        return self.screen.text

    def press(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def resize(self, columns: int, lines: int) -> None:
        """The window has another size; the command is told as a terminal tells it."""
        self.screen = Screen(columns, lines)
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def restored(self) -> bool:
        """Whether the terminal is as it was before the command."""
        return termios.tcgetattr(self._slave)[3] == self.attributes[3]

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._slave)
        self._reader.join(10)
        os.close(self._master)

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._master, 65536)
            except OSError:
                return
            if not data:
                return
            self.screen.feed(data.decode(errors="replace"))
