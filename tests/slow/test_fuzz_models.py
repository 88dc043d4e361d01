"""A fuzz campaign over model files, which take longer to read than others."""

from pathlib import Path

from tests.fuzz.campaign import run
from tests.fuzz.readers import targets
from tests.test_fuzz import MODELS


def test_mutated_models_are_refused_in_one_line(tmp_path: Path) -> None:
    models = [target for target in targets(tmp_path) if target.name.startswith(MODELS)]
    found = run(models, seed=1, cases=200, minutes=None, save=None)
    assert {name: dict(tally.faults) for name, tally in found.items() if tally.faults} == {}
    assert len(found) == len(models) > 0 and all(tally.cases for tally in found.values())
