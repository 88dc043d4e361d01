"""Write a signed ledger and prove what is in it (``hiddenlab verify record``, ``repair``, ``prove``, ``included``)."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from hiddenlab import options as o
from hiddenlab.cli.verify import REJECTED, RUNS, FileArg
from hiddenlab.cli.verify import app as app
from hiddenlab.cli.verify_run import conduct, explain, show

KeyFileOpt = Annotated[Path, Option("--key", metavar="FILE", help="Private key; made if it does not exist.")]
PublicOpt = Annotated[str, Option("--public-key", metavar="HEX", help="Of who keeps the ledger.")]
PointOpt = Annotated[Path, Option("--checkpoint", metavar="FILE", help="What 'record' wrote.")]
WaitOpt = Annotated[
    float, Option("--wait", metavar="SECONDS", min=0.0, help="For another process that writes to the ledger.")
]


@app.command("record")
def record(
    file: FileArg,
    ledger: Annotated[Path, Option("--ledger", metavar="FILE", help="Made if it does not exist.")],
    key: KeyFileOpt,
    checkpoint: Annotated[
        Path | None,
        Option("--checkpoint", metavar="FILE", help="Go on from the one in it, and write the new one there."),
    ] = None,
    wait: WaitOpt = 60.0,
    runs_dir: o.RunsDirOpt = RUNS,
    no_record: o.NoRecordOpt = False,
    json: o.JsonOpt = False,
) -> None:
    """Append transcripts to a hash-chained, signed ledger; of several processes, one writes at a time."""
    result = conduct(
        "record", json=json, runs_dir=runs_dir, keep=not no_record, path=file, ledger=ledger, key_file=key,
        checkpoint=checkpoint, wait=wait,
    )  # fmt: skip
    show(result, "recorded", json=json)
    if not json:
        explain([("public key", result["public_key"])])


@app.command("prove")
def prove(
    ledger: Annotated[Path, Argument(metavar="LEDGER", help="A ledger that 'record' wrote.")],
    request: Annotated[str, Option("--request", metavar="ID", help="Of a request in it.")],
    checkpoint: PointOpt,
    public_key: PublicOpt,
    out: Annotated[Path, Option("--out", metavar="FILE", help="Where the proof is written.")],
    transcripts: Annotated[
        Path | None,
        Option("--transcripts", metavar="FILE", help="With the request, where its id stands twice."),
    ] = None,
    runs_dir: o.RunsDirOpt = RUNS,
    no_record: o.NoRecordOpt = False,
    json: o.JsonOpt = False,
) -> None:
    """Write a proof that a request stands in a ledger, for somebody who has its checkpoint only."""
    result = conduct(
        "prove", json=json, runs_dir=runs_dir, keep=not no_record, ledger=ledger, request=request,
        checkpoint=checkpoint, public_key=public_key, out=out, transcripts=transcripts,
    )  # fmt: skip
    show(result, "proven", json=json)


@app.command("repair")
def repair(
    ledger: Annotated[Path, Argument(metavar="LEDGER", help="Whose last line is not complete.")],
    public_key: PublicOpt,
    checkpoint: Annotated[
        Path | None,
        Option("--checkpoint", metavar="FILE", help="Of the ledger: shows if whole records are missing too."),
    ] = None,
    dropped: Annotated[
        Path | None,
        Option(
            "--dropped", metavar="FILE", help="A new file for the dropped bytes; default: LEDGER.dropped."
        ),
    ] = None,
    wait: WaitOpt = 60.0,
    runs_dir: o.RunsDirOpt = RUNS,
    no_record: o.NoRecordOpt = False,
    json: o.JsonOpt = False,
) -> None:
    """Drop the torn last line of an interrupted write, and keep a copy of it; whole records are never dropped.

    Exit codes: 0 the ledger is valid now, 2 it is not, or records that the checkpoint counts are missing; then nothing
    was changed.
    """
    result = conduct(
        "repair", json=json, runs_dir=runs_dir, keep=not no_record, ledger=ledger, public_key=public_key,
        checkpoint=checkpoint, dropped=dropped, wait=wait,
    )  # fmt: skip
    show(result, "repaired", json=json, left_out=("reason",))
    if not json:
        explain([(str(ledger), result["reason"])])


@app.command("included")
def included(
    file: Annotated[Path, Argument(metavar="PROOF", help="What 'prove' wrote.")],
    checkpoint: PointOpt,
    public_key: PublicOpt,
    transcripts: Annotated[
        Path | None, Option("--transcripts", metavar="FILE", help="One of which the record has to be of.")
    ] = None,
    runs_dir: o.RunsDirOpt = RUNS,
    no_record: o.NoRecordOpt = False,
    json: o.JsonOpt = False,
) -> None:
    """Check a proof of inclusion against a checkpoint; exit code 1 where it does not hold."""
    result = conduct(
        "included", json=json, runs_dir=runs_dir, keep=not no_record, path=file, checkpoint=checkpoint,
        public_key=public_key, transcripts=transcripts,
    )  # fmt: skip
    show(result, "inclusion", json=json)
    if not result["valid"]:
        raise typer.Exit(REJECTED)
