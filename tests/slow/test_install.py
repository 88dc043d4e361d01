"""What is installed: the wheel, and a plugin beside it."""

import subprocess
import sys
import zipfile
from pathlib import Path

from tests.test_registry import PLUGIN, install, python
from tests.test_rooms import ROOT

USE_PLUGIN = """
import torch
torch.set_num_threads(1)
from transformers import LlamaConfig, LlamaForCausalLM
from hiddenlab import registry
from hiddenlab.channels import Channel
from hiddenlab.base import Attack
from hiddenlab.models import load_model

assert registry.names("defenses")[-1] == "decimal" and "seq-perm" in registry.names("defenses")
assert registry.names("attacks")[-1] == "nearest-embedding"
assert registry.resolve("defenses", "decimal").__module__ == "hiddenlab_example.rounding"
assert {line.name: line.parameters for line in registry.describe("defenses")}["decimal"] == "decimals: int"

folder = FOLDER
torch.manual_seed(0)
size = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
config = LlamaConfig(vocab_size=50, **size)
LlamaForCausalLM(config).save_pretrained(folder)
model = load_model(folder, 1, device="cpu")
tokens = [7, 3, 3, 40, 12, 9]
channel = Channel.parse(["decimal:2", "seq-perm"])
observation, secret = channel.release(model, tokens, torch.Generator().manual_seed(1))
plain = model.encode(torch.tensor(tokens))
assert observation.info.channel == ("decimal:decimals=2", "seq-perm")
assert observation.info.rows_permuted and observation.info.facts == {"decimals": 2}
expected = plain[list(secret.row_order)].round(decimals=2)
assert not torch.equal(expected, plain) and torch.allclose(observation.states, expected, atol=1e-6)

attack = registry.build("attacks", "nearest-embedding", budget=None)
assert isinstance(attack, Attack)
recovery = attack.fit(observation.info, model).recover(observation)
assert recovery.ids == [tokens[r] for r in secret.row_order], recovery.ids
print("used")
"""


def test_the_wheel_holds_hiddenlab_alone(tmp_path: Path) -> None:
    """Somebody's own eval.py and attacks/ lie beside a notebook that imports hiddenlab."""
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(tmp_path / "clone")], check=True)
    command = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path)]
    subprocess.run([sys.executable, "-m", "pip", *command, str(tmp_path / "clone")], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    packages = {name.partition("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {name for name in packages if not name.endswith(".dist-info")} == {"hiddenlab"}
    site, desk = tmp_path / "site", tmp_path / "desk"
    zipfile.ZipFile(wheel).extractall(site)
    (desk / "attacks").mkdir(parents=True)
    (desk / "attacks" / "__init__.py").write_text("mine = True")
    (desk / "eval.py").write_text("mine = True")
    code = f"""
import sys
sys.path.insert(1, {str(site)!r})
import attacks, eval, hiddenlab
assert attacks.mine and eval.mine and hiddenlab.__file__.startswith({str(site)!r})
from hiddenlab import registry
for kind in registry.BUILTINS:
    for name in registry.BUILTINS[kind]:
        assert registry.resolve(kind, name).__module__.startswith("hiddenlab."), name
"""
    subprocess.run([sys.executable, "-c", code], cwd=desk, check=True)


def test_an_installed_plugin_is_seen_and_composes_with_a_builtin(tmp_path: Path) -> None:
    install(PLUGIN, tmp_path / "site")
    done = python(USE_PLUGIN.replace("FOLDER", repr(str(tmp_path / "model"))), tmp_path / "site")
    assert done.stdout.strip() == "used", done.stderr
