"""A headless Chromium, driven over a pipe by its DevTools protocol, to look at pages as a reader's browser does."""

import fcntl
import itertools
import json
import os
import select
import shutil
import subprocess
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
PATIENCE = 60.0  # seconds for one answer of the browser


def found() -> str | None:
    """Return the path of a Chromium, if one is installed."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page of a headless Chromium.

    Attributes:
        messages: what the page wrote to the console, its errors included. requests: addresses that it asked for.
    """

    def __init__(self, program: str, profile: Path) -> None:
        to_read, to_write = os.pipe(), os.pipe()
        options = [
            "--headless=new", "--remote-debugging-pipe", "--disable-gpu", "--no-first-run", "--disable-extensions",
            "--disable-dev-shm-usage", f"--user-data-dir={profile}",
        ]  # fmt: skip
        if os.geteuid() == 0:  # root has no sandbox
            options.append("--no-sandbox")

        def pipes() -> None:  # the browser reads from 3 and writes to 4
            # First out of the way, lest one of them has the number of the other.
            read, write = (fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in (to_read[0], to_write[1]))
            os.dup2(read, 3)
            os.dup2(write, 4)

        self.process = subprocess.Popen(
            [program, *options, "about:blank"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, close_fds=False, preexec_fn=pipes,
        )  # fmt: skip
        os.close(to_read[0])
        os.close(to_write[1])
        self._to, self._from = to_read[1], os.fdopen(to_write[0], "rb", buffering=0)
        self._numbers = itertools.count(1)
        self._rest = b""
        self._session: str | None = None
        self._loaded = False
        self.messages: list[str] = []
        self.requests: list[str] = []
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and return its result."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]  # type: ignore[no-any-return]

    def open(self, path: Path, width: int, scheme: str = "light") -> None:
        """Show a file in a window of some width, to a reader of light or dark pages."""
        self.messages, self.requests, self._loaded = [], [], False
        self.ask(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False
        )
        self.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.ask("Page.navigate", url=path.as_uri())
        while not self._loaded:
            self._read()
        self.run("new Promise(done => setTimeout(done, 50))")  # what starts after the load

    def run(self, script: str) -> Any:
        """Return the value of a JavaScript expression, as a developer's console does, whatever the page's policy."""
        found = self.ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def press(self, key: str, code: int) -> None:
        """Press a key."""
        for kind in ("keyDown", "keyUp"):
            self.ask("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def close(self) -> None:
        """End the browser."""
        self.process.terminate()
        self.process.wait(PATIENCE)
        os.close(self._to)
        self._from.close()

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._from], [], [], PATIENCE)
            assert ready, "the browser does not answer"
            part = self._from.read(1 << 16)
            assert part, "the browser ended"
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\0")
        event: dict[str, Any] = json.loads(line)
        params = event.get("params", {})
        match event.get("method"):
            case "Page.loadEventFired":
                self._loaded = True
            case "Runtime.consoleAPICalled" | "Runtime.exceptionThrown" | "Log.entryAdded":
                self.messages.append(json.dumps(params)[:500])
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
        return event
