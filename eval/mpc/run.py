"""Run the parties of an MPC library as separate processes on loopback, in the library's own environment."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hiddenlab.errors import HiddenlabError, InputError

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent.parent
ENVIRONMENTS = {"crypten": ".venv-crypten", "spu": ".venv-spu"}
_SENT = re.compile(r"Link details: total send bytes (\d+), recv bytes \d+, send actions (\d+)")
_RESULT = "RESULT "


def interpreter(library: str) -> Path:
    """Return the Python interpreter of a library's environment.

    Raises:
        InputError: it is not there.
    """
    for place in (Path.cwd(), ROOT):
        path = place / ENVIRONMENTS[library] / "bin" / "python"
        if path.is_file():
            return path
    raise InputError(f"{library} has no environment yet: run 'make mpc' in the repository")


def crypten(job: Mapping[str, Any], timeout: float) -> dict[str, Any]:
    """Run CrypTen's two parties; return seconds, bytes and rounds of each repeat, and the largest error against plain.

    Bytes are CrypTen's own count, sent and received, over both parties and halved, so that each byte counts once.

    Args:
        job: see ``crypten_party``.
        timeout: seconds.

    Raises:
        InputError: there is no environment.
        HiddenlabError: a party failed or did not answer in time.
    """
    (port,) = _free_ports(1)
    command = [str(interpreter("crypten")), str(FOLDER / "crypten_party.py"), json.dumps(job)]
    own = [
        {"RANK": str(rank), "WORLD_SIZE": "2", "RENDEZVOUS": f"tcp://127.0.0.1:{port}"} for rank in range(2)
    ]
    texts = run_parties([command] * 2, own, timeout)
    results = [_result(text) for text in texts]
    result = {**results[0], "parties": len(results)}
    result["seconds"] = [max(pair) for pair in zip(*(r["seconds"] for r in results), strict=True)]
    result["bytes"] = [sum(pair) / 2 for pair in zip(*(r["bytes"] for r in results), strict=True)]
    return result


def crypten_decoder(
    weights: Mapping[str, Any], job: Mapping[str, Any], timeout: float
) -> tuple[list[Any], dict[str, Any]]:
    """Run a decoder's first layers under CrypTen; return each party's share of the states, and the cost.

    Shares are in fixed point.

    Args:
        weights: arrays by name, see ``crypten_party.decoder``.
        job: see ``crypten_party``.
        timeout: seconds.

    Raises:
        InputError: there is no environment.
        HiddenlabError: a party failed or did not answer in time.
    """
    with tempfile.TemporaryDirectory(prefix="hiddenlab-") as folder:
        path = Path(folder)
        np.savez(path / "decoder.npz", **weights)
        cost = crypten({**job, "decoder": str(path / "decoder.npz"), "out": str(path / "share")}, timeout)
        return [np.load(path / f"share{rank}.npy", allow_pickle=False) for rank in range(2)], cost


def spu(job: Mapping[str, Any], timeout: float) -> dict[str, Any]:
    """Run SPU's two or three parties (``protocol``: ``semi2k`` or ``aby3``); return figures as ``crypten`` does.

    Bytes are those sent by all parties. SPU counts no rounds; here they are the messages of the party that sent most,
    where messages sent at once count separately.

    Raises:
        InputError: there is no environment.
        HiddenlabError: a party failed or did not answer in time.
    """
    count = {"semi2k": 2, "aby3": 3}[job["protocol"]]
    whole = json.dumps({**job, "ports": _free_ports(count)})
    python = str(interpreter("spu"))
    commands = [[python, str(FOLDER / "spu_party.py"), whole, str(rank)] for rank in range(count)]
    texts = run_parties(commands, [{} for _ in commands], timeout)
    results = [_result(text) for text in texts]
    result = {**results[0], "parties": count}
    result["seconds"] = [max(pair) for pair in zip(*(r["seconds"] for r in results), strict=True)]
    sent = [[(int(n), int(messages)) for n, messages in _SENT.findall(text)] for text in texts]
    if any(len(entries) != len(result["seconds"]) for entries in sent):
        raise HiddenlabError("SPU did not report the bytes that it sent")
    result["bytes"] = [float(sum(n for n, _ in each)) for each in zip(*sent, strict=True)]
    result["rounds"] = [max(messages for _, messages in each) for each in zip(*sent, strict=True)]
    return result


def run_parties(
    commands: Sequence[Sequence[str]], environments: Sequence[Mapping[str, str]], timeout: float
) -> list[str]:
    """Start all parties, wait for all, and return what each printed; stop all of them on any error.

    Parties end by themselves when this process is killed.

    Raises:
        HiddenlabError: a party failed, or did not end in time.
    """
    with tempfile.TemporaryDirectory(prefix="hiddenlab-") as folder, contextlib.ExitStack() as files:
        logs = [Path(folder) / f"party{i}" for i in range(len(commands))]
        parties: list[subprocess.Popen[bytes]] = []
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        inherited |= {"GLOO_SOCKET_IFNAME": "lo"}
        try:
            for command, environment, log in zip(commands, environments, logs, strict=True):
                output = files.enter_context(log.open("w", encoding="utf-8"))
                parties.append(
                    subprocess.Popen(
                        command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.PIPE,
                        env={**inherited, **environment}, start_new_session=True, cwd=folder,
                    )
                )  # fmt: skip
            _wait(parties, logs, timeout)
        finally:
            for party in parties:
                if party.poll() is None:
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.killpg(party.pid, signal.SIGKILL)
                party.wait()
                if party.stdin is not None:
                    party.stdin.close()
        return [log.read_text(encoding="utf-8", errors="replace") for log in logs]


def _wait(parties: Sequence[subprocess.Popen[bytes]], logs: Sequence[Path], timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while True:
        codes = [party.poll() for party in parties]
        # The first party to fail is the cause; the others fail because it is gone.
        failed = next((i for i, code in enumerate(codes) if code not in (None, 0)), None)
        if failed is not None:
            lines = logs[failed].read_text(encoding="utf-8", errors="replace").strip().splitlines()
            what = lines[-1] if lines else "it printed nothing"
            raise HiddenlabError(f"party {failed} failed: {what} (exit status {codes[failed]})")
        if all(code == 0 for code in codes):
            return
        if time.monotonic() > deadline:
            silent = codes.index(None)
            raise HiddenlabError(
                f"party {silent} did not answer within {timeout:g} s; all parties were stopped"
            )
        time.sleep(0.05)


def _result(text: str) -> dict[str, Any]:
    lines = [line for line in text.splitlines() if line.startswith(_RESULT)]
    if not lines:
        raise HiddenlabError("a party ended without a result")
    return dict(json.loads(lines[-1].removeprefix(_RESULT)))


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for listener in sockets:
            listener.bind(("127.0.0.1", 0))
        return [server.getsockname()[1] for server in sockets]
