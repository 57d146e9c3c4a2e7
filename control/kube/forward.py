# SPDX-License-Identifier: Apache-2.0
"""A port of a pod or a service as a port of this machine: ``kubectl port-forward``, ended with the command."""

from __future__ import annotations

import contextlib
import ctypes
import re
import select
import signal
import subprocess
import tempfile
import time
from typing import IO, Final

from twinpool.control.kube.kubectl import Kubectl, said
from twinpool.errors import TwinpoolError

START_SECONDS: Final = 20.0
"""Longest wait for the forwarded port."""

STOP_SECONDS: Final = 3.0
_FORWARDING: Final = re.compile(rb"Forwarding from 127\.0\.0\.1:(\d+) -> \d+")
_PR_SET_PDEATHSIG: Final = 1
_libc: Final = ctypes.CDLL(None, use_errno=True)


class PortForward:
    """One kubectl. ``target``: such as service/NAME or pod/NAME."""

    def __init__(self, kubectl: Kubectl, target: str, port: int) -> None:
        """Returns once the port is forwarded. Raises KUBE_FORWARD_FAILED and what kubectl says."""
        self._kubectl, self._target, self._port = kubectl, target, port
        self._local = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._start()

    @property
    def endpoint(self) -> str:
        """Where to dial: host:port. Stays the same when it starts anew."""
        return f"127.0.0.1:{self._local}"

    def ensure(self) -> None:
        """Starts it anew if it has ended, as it does when the pod leaves. Raises as the constructor."""
        if self._process is None or self._process.poll() is not None:
            self._start()

    def close(self) -> None:
        """Ends it. Idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()

    def _start(self) -> None:
        self.close()
        ports = f"{self._local or ''}:{self._port}"
        command = self._kubectl.command("port-forward", "--address=127.0.0.1", self._target, ports)
        with tempfile.TemporaryFile() as stderr:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                # A signal from the terminal is for the command, which ends it; one that is killed takes it along.
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
            try:
                self._local = self._read_port(stderr)
            except BaseException:
                self.close()
                raise

    def _read_port(self, stderr: IO[bytes]) -> int:
        process = self._process
        assert process is not None
        assert process.stdout is not None
        deadline, heard = time.monotonic() + START_SECONDS, b""
        while (left := deadline - time.monotonic()) > 0:
            if not select.select([process.stdout], [], [], left)[0]:
                break
            # What is there, not a whole buffer: it prints a line and stays.
            piece = process.stdout.read1(4096)  # type: ignore[attr-defined]
            heard += piece
            if found := _FORWARDING.search(heard):
                return int(found[1])
            if not piece:
                process.wait()
                raise self._failure(stderr)
        raise TwinpoolError(
            "KUBE_FORWARD_FAILED", f"kubectl port-forward {self._target} was silent for {START_SECONDS:g} s"
        )

    def _failure(self, stderr: IO[bytes]) -> TwinpoolError:
        stderr.seek(0)
        known = said(stderr.read().decode(errors="replace"), ("port-forward", self._target))
        return (
            TwinpoolError("KUBE_FORWARD_FAILED", known.message) if known.reason == "KUBECTL_FAILED" else known
        )


def _die_with_parent() -> None:
    """In the child, before kubectl runs: a command that is killed leaves no kubectl behind."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
