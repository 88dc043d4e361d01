"""Start, join, show and stop the machines of a Cascade cluster (``hiddenlab cascade up``, ``join``, ``status``)."""

import shlex
from typing import Annotated, Any

from typer import Argument, Option

from hiddenlab import options as o
from hiddenlab import registry
from hiddenlab.cli.console import only_json, print_json, stdout
from hiddenlab.cli.program import Program

FolderOpt = Annotated[
    str | None,
    Option(
        "--folder",
        metavar="DIR",
        help="Files of the cluster; default: $HIDDENLAB_CLUSTER or ~/.config/hiddenlab/cluster.",
    ),
]
PortOpt = Annotated[
    int,
    Option("--port", metavar="N", help="Of the cluster; Ray's other services take the six ports after it."),
]
WorkersOpt = Annotated[str, Option("--worker-ports", metavar="N-M", help="Of Ray's workers.")]
TensorsOpt = Annotated[
    str, Option("--tensor-ports", metavar="N-M", help="Of Cascade's nodes; each takes one.")
]
CpusOpt = Annotated[
    int | None, Option("--cpus", metavar="N", min=0, help="CPUs that Ray may give away; default: all.")
]
GpusOpt = Annotated[
    int | None, Option("--gpus", metavar="N", min=0, help="GPUs that Ray may give away; default: all.")
]
WORKERS, TENSORS = "10000-10999", "11000-11999"


def add_to(app: Program) -> None:
    """Add the commands to ``hiddenlab cascade``."""
    for name, function in (("up", up), ("join", join), ("status", status), ("down", down)):
        app.command(name)(function)


def _machines() -> Any:
    return registry.resolve("cascade", "machines")()


def up(
    host: Annotated[
        str,
        Option("--host", metavar="ADDRESS", help="Of this machine, under which the others reach it."),
    ],
    folder: FolderOpt = None,
    tls: Annotated[
        bool, Option("--tls/--no-tls", help="Encrypt everything between machines, or nothing.")
    ] = True,
    port: PortOpt = 6379,
    worker_ports: WorkersOpt = WORKERS,
    tensor_ports: TensorsOpt = TENSORS,
    cpus: CpusOpt = None,
    gpus: GpusOpt = None,
    json: o.JsonOpt = False,
) -> None:
    """Start the first machine of a cluster in the background, with certificates and a token of its own."""
    with only_json(json):
        machines = _machines()
        result: dict[str, Any] = machines.up(
            host=host, folder=folder, tls=tls, ports=machines.ports(port, worker_ports, tensor_ports),
            cpus=cpus, gpus=gpus,
        )  # fmt: skip
    if json:
        print_json(result)
        return
    screen = stdout()

    def say(line: str) -> None:
        screen.print(line, soft_wrap=True)

    say(f"the cluster runs at {result['address']}{'' if tls else '; nothing is encrypted'}")
    _show_listeners(result)
    where = "" if folder is None else f" --folder {shlex.quote(folder)}"
    joined = shlex.join(["hiddenlab", "cascade", "join", result["address"]])
    ports = shlex.join(
        [
            word
            for option, value, usual in (
                ("--port", str(port), "6379"),
                ("--worker-ports", worker_ports, WORKERS),
                ("--tensor-ports", tensor_ports, TENSORS),
            )
            if value != usual
            for word in (option, value)
        ]
    )
    say("")
    say(f"1. Copy these files into the folder of each other machine ({folder or 'the same one there'}):")
    for path in result["copy"]:
        say(f"   {path}")
    say("   Who has them can join, and can run programs on every machine of the cluster.")
    say("2. On each other machine:")
    say(f"   {joined}{where}{' ' + ports if ports else ''}")
    say("3. Here:")
    say(f"   hiddenlab cascade run TEXT --alpha 2 --c 2 --backend ray --address {result['address']}{where}")
    say(f"   hiddenlab cascade status{where}; hiddenlab cascade down{where}")


def join(
    address: Annotated[str, Argument(metavar="HOST:PORT", help="Of the cluster, as 'up' printed it.")],
    folder: FolderOpt = None,
    host: Annotated[
        str | None,
        Option(
            "--host", metavar="ADDRESS", help="Of this machine; default: the one that reaches the cluster."
        ),
    ] = None,
    port: PortOpt = 6379,
    worker_ports: WorkersOpt = WORKERS,
    tensor_ports: TensorsOpt = TENSORS,
    cpus: CpusOpt = None,
    gpus: GpusOpt = None,
    json: o.JsonOpt = False,
) -> None:
    """Add this machine to a cluster, in the background."""
    with only_json(json):
        machines = _machines()
        result: dict[str, Any] = machines.join(
            address=address, folder=folder, host=host,
            ports=machines.ports(port, worker_ports, tensor_ports), cpus=cpus, gpus=gpus,
        )  # fmt: skip
    if json:
        print_json(result)
        return
    encrypted = "" if result["tls"] else "; nothing is encrypted"
    stdout().print(f"{result['host']} joined the cluster at {address}{encrypted}", soft_wrap=True)
    _show_listeners(result)


def _show_listeners(result: dict[str, Any]) -> None:
    from hiddenlab.cli.show import rows_table

    screen = stdout()
    screen.print(rows_table(result["listeners"], f"{result['host']} listens"))
    screen.print(
        f"open between the machines: TCP {', '.join(result['open'])}; close everything else to others. Ray has no "
        "option for the address of what listens at every interface.",
        soft_wrap=True,
    )


def status(
    folder: FolderOpt = None,
    address: Annotated[
        str | None,
        Option("--address", metavar="HOST:PORT", help="Default: the cluster of this machine's node."),
    ] = None,
    json: o.JsonOpt = False,
) -> None:
    """Show the machines of a cluster: addresses, versions, free CPUs and GPUs."""
    with only_json(json):
        result: dict[str, Any] = _machines().status(address=address, folder=folder)
    if json:
        print_json(result)
        return
    from hiddenlab.cli.show import rows_table

    rows = [
        {
            "host": one["host"], "state": one["state"], "ray": one["ray"], "python": one["python"],
            "hiddenlab": one["hiddenlab"], "CPUs free": f"{one['free_cpus']:g} of {one['cpus']:g}",
            "GPUs free": f"{one['free_gpus']:g} of {one['gpus']:g}",
        }
        for one in result["machines"]
    ]  # fmt: skip
    encrypted = "encrypted" if result["tls"] else "nothing encrypted"
    stdout().print(rows_table(rows, f"cluster at {result['address']}, {encrypted}"))


def down(folder: FolderOpt = None, json: o.JsonOpt = False) -> None:
    """Stop what 'up' or 'join' started on this machine; other Ray processes go on."""
    with only_json(json):
        result: dict[str, Any] = _machines().down(folder=folder)
    if json:
        print_json(result)
        return
    for one in result["stopped"]:
        line = f"stopped {one['host']} of the cluster at {one['address']} ({one['processes']} processes)"
        stdout().print(line, soft_wrap=True)
    if not result["stopped"]:
        stdout().print(f"nothing runs here that was started from {result['folder']}", soft_wrap=True)
