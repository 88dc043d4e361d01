"""Measure a served Cascade when clients hang up and when many ask at once: ``hiddenlab bench serving``."""

import http.client
import json
import socket
import statistics
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from hiddenlab.defenses.cascade.command import Backend
from hiddenlab.defenses.cascade.port import reserved
from hiddenlab.errors import HiddenlabError
from hiddenlab.types import Progress, silent

PATH = "/v1/completions"
PATIENCE = 600.0
RETRY_SECONDS = 0.05  # seconds until a refused request is sent again


def bench(
    model: str = "builtin",
    alpha: int = 2,
    running: int = 16,
    requests: int = 100,
    new_tokens: int = 32,
    long: int = 1000,
    repeats: int = 5,
    rounds: int = 3,
    threads: int | None = None,
    timeout: float = 60.0,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Serve a model here and time an idle server, one that all clients just left, and many requests at once.

    Args:
        alpha: number of CompNodes.
        running: places of the server, and number of clients that hang up, half of them streamed.
        requests: sent at once.
        new_tokens: of the request that is timed, and of those at once.
        long: new tokens of the requests whose clients hang up.
        repeats: timed requests on the idle server.
        rounds: times that all clients hang up.

    Returns:
        ``rows``: of the idle server, of the first request after all clients hung up (timed from then, including
        refusals and retries; the slowest round), and of the requests at once: median seconds, the ratio to the idle
        server, answers by status, and how many were refused without ``Retry-After``.
    """
    from hiddenlab.defenses.cascade import serve
    from hiddenlab.defenses.cascade.service import Limits

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = int(listener.getsockname()[1])
    nodes = Backend(kind="ray", model=model, compress=True, threads=threads or 1, timeout=timeout)
    limits = Limits(running=running, new_tokens=max(long, new_tokens), default_new_tokens=new_tokens)
    with reserved("127.0.0.1", port):
        own = serve.start(nodes, alpha=alpha, port=port, limits=limits)
        try:
            client = _Client(port, model)
            client.ask(new_tokens)
            idle = []
            for i in range(repeats):
                idle.append(client.ask(new_tokens).seconds)
                progress("idle server", i + 1, repeats)
            median = statistics.median(idle)
            rows = [_row("idle server", [200] * repeats, median, median)]
            left, sent_away = [], []
            for i in range(rounds):
                seconds, refused = client.after_hang_up(running, long, new_tokens)
                left.append(seconds)
                sent_away += [429] * refused + [200]
                progress("clients hang up", i + 1, rounds)
            rows.append(_row(f"after {running} clients hung up", sent_away, max(left), median))
            with ThreadPoolExecutor(requests) as pool:
                replies = list(pool.map(lambda _: client.once(new_tokens), range(requests)))
            answered = [reply.seconds for reply in replies if reply.status == 200]
            row = _row(
                f"{requests} requests at once",
                [reply.status for reply in replies],
                statistics.median(answered) if answered else None,
                median,
            )
            row["without_retry_after"] = sum(
                reply.status == 429 and "retry-after" not in reply.headers for reply in replies
            )
            rows.append(row)
            return {
                "rows": rows,
                "model": model,
                "alpha": alpha,
                "new_tokens": new_tokens,
                "long": long,
                "rounds": rounds,
            }
        finally:
            serve.stop(own)


def _row(setting: str, statuses: list[int], seconds: float | None, idle: float) -> dict[str, Any]:
    counts = Counter(statuses)
    return {
        "setting": setting,
        "seconds": seconds,
        "over_idle": None if seconds is None else seconds / idle,
        "answered": counts[200],
        "sent_away": counts[429],
        "other_statuses": len(statuses) - counts[200] - counts[429],
    }


@dataclass(frozen=True)
class _Reply:
    status: int
    seconds: float
    headers: Mapping[str, str]


class _Client:
    """A client of a server on this machine."""

    def __init__(self, port: int, model: str) -> None:
        self.port, self.model = port, model

    def _send(self, new_tokens: int, stream: bool = False) -> http.client.HTTPConnection:
        body = {"model": self.model, "prompt": "The ferry leaves at nine, and", "temperature": 0}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        text = json.dumps(body | {"max_tokens": new_tokens, "stream": stream})
        connection.request("POST", PATH, text, {"Content-Type": "application/json"})
        return connection

    def once(self, new_tokens: int) -> _Reply:
        started = time.perf_counter()
        connection = self._send(new_tokens)
        response = connection.getresponse()
        response.read()
        connection.close()
        headers = {name.lower(): value for name, value in response.getheaders()}
        return _Reply(response.status, time.perf_counter() - started, headers)

    def ask(self, new_tokens: int) -> _Reply:
        """Send a request that must be answered (see ``once``).

        Raises:
            HiddenlabError: it is not.
        """
        reply = self.once(new_tokens)
        if reply.status != 200:
            raise HiddenlabError(f"the server answers with {reply.status}")
        return reply

    def after_hang_up(self, clients: int, long: int, new_tokens: int) -> tuple[float, int]:
        """Let so many clients ask and hang up, then ask; return seconds until the answer, and refusals."""
        connections = [self._send(long, stream=i % 2 == 1) for i in range(clients)]
        until = time.monotonic() + PATIENCE
        while self._running() < clients:
            if time.monotonic() > until:
                raise HiddenlabError("the server does not take its clients")
            time.sleep(RETRY_SECONDS)
        time.sleep(1.0)  # they are being answered
        for connection in connections:
            assert connection.sock is not None
            connection.sock.shutdown(socket.SHUT_RDWR)
            connection.close()
        started, refused = time.perf_counter(), 0
        while (reply := self.once(new_tokens)).status == 429:
            refused += 1
            if time.perf_counter() - started > PATIENCE:
                raise HiddenlabError("the server works on for clients that have gone")
            time.sleep(RETRY_SECONDS)
        if reply.status != 200:
            raise HiddenlabError(f"the server answers with {reply.status}")
        return time.perf_counter() - started, refused

    def _running(self) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
        connection.close()
        line = next(line for line in text.splitlines() if line.startswith("cascade_running "))
        return round(float(line.split()[1]))
