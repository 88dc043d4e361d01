"""Nodes of a cluster talk over mutual TLS and to nobody else; the cluster's folder holds what a machine needs."""

import queue
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cryptography import x509
from torch import Tensor

from hiddenlab.cli import app
from hiddenlab.defenses.cascade import membership
from hiddenlab.defenses.cascade.certificates import make_authority, make_certificate
from hiddenlab.defenses.cascade.load import load_cascade_model
from hiddenlab.defenses.cascade.membership import ClusterFolder, Member, Ports
from hiddenlab.defenses.cascade.remote import WireCascade
from hiddenlab.defenses.cascade.secured import Tls
from hiddenlab.defenses.cascade.wire import Endpoint, Hub, WireError
from hiddenlab.errors import InputError
from hiddenlab.sharding import Plan
from hiddenlab.testing import VOCABULARY

KEY = b"the cluster's key"
PATIENCE = 20.0
TinyPath = Callable[..., str]


class End(Hub):
    """A hub that keeps what comes."""

    def __init__(self, name: str, tls: Tls | None) -> None:
        self.came: queue.Queue[tuple[str, dict[str, Any], list[Tensor]]] = queue.Queue()
        self.losses: queue.Queue[str] = queue.Queue()
        super().__init__(
            name, KEY, lambda *message: self.came.put(message), self.losses.put, endpoint=Endpoint(tls=tls)
        )


def member(folder: Path, host: str = "127.0.0.1") -> Tls:
    """A node's certificate of the cluster in a folder."""
    cluster = ClusterFolder(folder)
    cluster.create(tls=True)
    cluster.certify(host)
    named = cluster.environment(host, tls=True)
    return Tls.of(*(named[f"RAY_TLS_{which}"] for which in ("SERVER_CERT", "SERVER_KEY", "CA_CERT")))


def relay(address: tuple[str, int], heard: bytearray) -> tuple[str, int]:
    """Pass one connection on to an address, and keep what goes by."""
    server = socket.create_server(("127.0.0.1", 0))

    def copy(source: socket.socket, target: socket.socket) -> None:
        while data := source.recv(1 << 16):
            heard.extend(data)
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)

    def run() -> None:
        near, _ = server.accept()
        far = socket.create_connection(address)
        with ThreadPoolExecutor(2) as pool:
            pool.submit(copy, near, far)
            pool.submit(copy, far, near)

    threading.Thread(target=run, daemon=True).start()
    return server.getsockname()[:2]


@pytest.mark.parametrize("encrypted", [True, False])
def test_a_wire_that_is_heard_shows_nothing_under_tls(tmp_path: Path, encrypted: bool) -> None:
    """Large tensors both ways at once; what goes by holds them in clear without TLS, and not with it."""
    tls = member(tmp_path) if encrypted else None
    one, other = End("one", tls), End("other", tls)
    heard = bytearray()
    one.connect({"other": relay(other.address, heard)})
    tensors = [torch.randn(300, 2000), torch.randn(5), torch.empty(0)] + [torch.full((3,), 7.0)] * 600
    with ThreadPoolExecutor(4) as pool:
        sent = [
            pool.submit(a.send, b.name, {"word": "ferry"}, tensors)
            for a, b in ((one, other), (other, one)) * 2
        ]
        for end in (one, other) * 2:
            _, head, found = end.came.get(timeout=PATIENCE)
            assert head == {"word": "ferry"}
            assert all(torch.equal(a, b) for a, b in zip(found, tensors, strict=True))
        for call in sent:
            call.result(PATIENCE)
    assert len(heard) > 4 * 300 * 2000 * 4
    assert (b"ferry" in heard) != encrypted
    assert (tensors[0][7].numpy().tobytes() in heard) != encrypted
    other.close()
    assert one.losses.get(timeout=PATIENCE) == "other"
    with pytest.raises(WireError, match="one has no connection to other"):
        one.send("other", {})
    one.close()


def test_strangers_are_refused_by_cause(tmp_path: Path) -> None:
    """Another cluster's certificate, one for another address, and none at all; the hub serves members as before."""
    ours, theirs = member(tmp_path / "ours"), member(tmp_path / "theirs")
    elsewhere = make_elsewhere(tmp_path / "ours")
    hub = End("hub", ours)
    with socket.create_connection(hub.address, timeout=PATIENCE) as connection, suppress(ConnectionError):
        connection.sendall(b"\0" * 100)
        assert connection.recv(1 << 10)[:1] in (b"", b"\x15")  # nothing, or an alert of TLS
    for tls, cause in (
        (theirs, "its certificate is not of this cluster"),
        (trusting(ours, member(tmp_path / "theirs")), "it refuses our certificate"),
    ):
        stranger = End("stranger", tls)
        with pytest.raises(WireError, match=f"stranger cannot connect to hub at 127.0.0.1:.*: {cause}"):
            stranger.connect({"hub": hub.address})
        stranger.close()
    misplaced = End("misplaced", elsewhere)
    with pytest.raises(WireError, match="its certificate is for another address"):
        hub.connect({"misplaced": misplaced.address})
    clear = End("clear", None)
    with pytest.raises(WireError, match="does not speak TLS"):
        hub.connect({"clear": clear.address})
    friend = End("friend", ours)
    friend.connect({"hub": hub.address})
    friend.send("hub", {"still": "here"})
    assert hub.came.get(timeout=PATIENCE)[:2] == ("friend", {"still": "here"})
    assert hub.came.empty()
    for end in (hub, misplaced, clear, friend):
        end.close()


def trusting(trusted: Tls, own: Tls) -> Tls:
    """A node that accepts the hub, though its own certificate is another cluster's."""
    own.client.load_verify_locations(cadata=trusted.client.get_ca_certs(binary_form=True)[0])
    return own


def make_elsewhere(folder: Path) -> Tls:
    """A certificate of the cluster, for an address that is not this machine's and not loopback."""
    authority = tuple((folder / name).read_bytes() for name in membership.AUTHORITY)
    certificate, key = make_certificate(authority, "10.9.9.9")  # type: ignore[arg-type]
    names = x509.load_pem_x509_certificate(certificate).extensions.get_extension_for_class(
        x509.SubjectAlternativeName
    )
    assert [str(name) for name in names.value.get_values_for_type(x509.IPAddress)] == [
        "10.9.9.9",
        "127.0.0.1",
    ]
    assert names.value.get_values_for_type(x509.DNSName) == ["localhost"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hiddenlab.defenses.cascade.certificates.LOCAL", ())
        certificate, key = make_certificate(authority, "10.9.9.9")  # type: ignore[arg-type]
    (folder / "else.pem").write_bytes(certificate)
    (folder / "else.key").write_bytes(key)
    return Tls.of(folder / "else.pem", folder / "else.key", folder / membership.AUTHORITY[0])


def test_a_model_over_tls_gives_the_same(tiny: TinyPath, tmp_path: Path) -> None:
    model, plan = load_cascade_model(tiny("llama")), Plan.clustered(9, 2, alpha=2)
    ids = torch.randint(0, VOCABULARY, (9,), generator=torch.Generator().manual_seed(0))
    outputs = []
    for tls in (None, member(tmp_path)):
        with WireCascade(model, 2, endpoint=Endpoint(tls=tls), timeout=PATIENCE) as cascade:
            outputs.append(cascade.forward(ids, plan))
    assert torch.equal(*outputs)


# ---- the folder


def test_secrets_are_their_owners_alone(tmp_path: Path) -> None:
    folder = ClusterFolder(tmp_path / "new" / "cluster")
    assert not folder.found()
    folder.create(tls=True)
    folder.certify("10.0.0.1")
    folder.write(Member("10.0.0.1", "10.0.0.1:6379", True, "mark"))
    files = list(folder.path.iterdir())
    assert len(files) == 6
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    assert folder.path.stat().st_mode & 0o777 == 0o700
    before = {path.name: path.read_bytes() for path in files}
    folder.create(tls=True)
    assert {path.name: path.read_bytes() for path in folder.path.iterdir()} == before
    assert folder.members() == []  # 10.0.0.1 is not this machine


def test_damaged_files_are_named(tmp_path: Path) -> None:
    folder = ClusterFolder(tmp_path)
    folder.create(tls=True)
    (tmp_path / "authority.key").write_bytes(make_authority()[1])
    with pytest.raises(InputError, match=r"authority.pem and authority.key do not belong together"):
        folder.certify("127.0.0.1")
    (tmp_path / "authority.pem").write_text("nothing")
    with pytest.raises(InputError, match="authority cannot be read"):
        folder.certify("127.0.0.1")
    (tmp_path / "authority.pem").unlink()
    with pytest.raises(InputError, match=r"lacks authority.pem; copy the files"):
        folder.certify("127.0.0.1")
    (tmp_path / "node-127.0.0.1.json").write_text("[")
    with pytest.raises(InputError, match=r"node-127.0.0.1.json is damaged; delete it"):
        folder.members()


@pytest.mark.parametrize(
    ("ports", "cause"),
    [
        ({"first": 80}, "from 1024 to 65535"),
        ({"workers": (9000, 8000)}, "from 1024 to 65535, the lower one first"),
        ({"workers": (6000, 7000)}, "port 6379 is given twice"),
        ({"tensors": (10999, 12000)}, "port 10999 is given twice"),
        ({"first": 65530}, "ports 65530-65536"),
    ],
    ids=str,
)
def test_ports_that_cannot_be_are_refused(ports: dict[str, Any], cause: str) -> None:
    with pytest.raises(InputError, match=cause):
        replace(Ports(), **ports)


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        (["up", "--host", "127.0.0.1"], "127.0.0.1 is this machine alone"),
        (["up", "--host", "203.0.113.9"], "203.0.113.9 is no address of this machine"),
        (["up", "--host", "elsewhere"], "'elsewhere' is no IP address"),
        (["up", "--host", "127.0.0.1", "--worker-ports", "many"], "'many' is no range of ports"),
        (["join", "somewhere"], "write HOST:PORT"),
        (["status"], "no node of a cluster was started here"),
        (["run", "Go.", "--alpha", "1", "--folder", "."], "go with --backend ray"),
    ],
    ids=" ".join,
)
def test_bad_input_is_one_line(
    arguments: list[str], cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("HIDDENLAB_CLUSTER", str(tmp_path))
    with pytest.raises(SystemExit) as ended:
        app(["cascade", *arguments])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert cause in said and said.count("\n") == 1


def test_down_where_nothing_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        app(["cascade", "down", "--folder", str(tmp_path)])
    assert ended.value.code == 0
    assert "nothing runs here that was started from" in capsys.readouterr().out.replace("\n", " ")
