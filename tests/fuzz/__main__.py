"""``make fuzz``: mutate valid files and requests, and read them; exit code 1 where a reader has a fault."""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from tests.fuzz.campaign import peak_mb, run
from tests.fuzz.readers import targets


def main() -> int:
    """Run the campaign in a process of its own, so that a crash of it is a fault too."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument(
        "--minutes", type=float, help="stop after so long (default: 10, or no limit with --cases)"
    )
    parser.add_argument("--cases", type=int, help="cases a reader")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="readers whose names hold this text")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/fuzz"), help="where faults and figures are written"
    )
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    if asked.inside:
        return inside(asked)
    code = subprocess.call([sys.executable, "-m", "tests.fuzz", *sys.argv[1:], "--inside"])
    if code < 0:
        print(f"the process died of signal {-code}; its input is {asked.out / 'running'}", file=sys.stderr)
        return 1
    return code


def inside(asked: argparse.Namespace) -> int:
    """The campaign itself."""
    torch.set_num_threads(1)
    minutes = 10.0 if asked.minutes is None and asked.cases is None else asked.minutes
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        chosen = [one for one in targets(Path(folder)) if asked.only is None or asked.only in one.name]
        run(
            chosen, seed=asked.seed + 1, cases=20, minutes=None, save=None
        )  # imports and caches take memory once
        before = peak_mb()
        tallies = run(
            chosen,
            seed=asked.seed,
            cases=asked.cases,
            minutes=minutes,
            save=asked.out,
            tell=lambda line: print(line, file=sys.stderr, flush=True),
        )
    found = {
        "seed": asked.seed,
        "seconds": round(time.monotonic() - start, 1),
        "cases": sum(t.cases for t in tallies.values()),
        "faults": {name: dict(t.faults) for name, t in tallies.items() if t.faults},
        "by_reader": {name: t.cases for name, t in tallies.items()},
        "peak_memory_mb": {"warm": round(before), "end": round(peak_mb())},
    }
    (asked.out / "figures.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    (asked.out / "running").unlink(missing_ok=True)
    print(json.dumps(found, indent=1))
    return 1 if found["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
