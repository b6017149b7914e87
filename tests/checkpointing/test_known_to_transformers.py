"""Fresh interpreters: with kvslim imported transformers loads a checkpoint, whatever the order; without it refuses."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvslim import palu
from kvslim.attending.families import FAMILIES
from kvslim.model_types import ORIGINALS

IDS = torch.arange(3, 24)[None]
LOAD = "model = AutoModelForCausalLM.from_pretrained({place!r}{options})\n"
CHECK = """
import torch
with torch.no_grad():
    same = torch.equal(model(torch.arange(3, 24)[None]).logits, torch.load({logits!r}, weights_only=True))
print("SAME" if same else "OTHER", type(model).__name__)
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("known")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=128, initializer_range=0.1, **sizes)).eval()
    palu.compress(model, None, palu.PaluConfig(rate=0.4, decomposition="svd"))
    palu.save(model, folder / "slim")
    with torch.no_grad():
        torch.save(model(IDS).logits, folder / "logits.pt")
    return folder


def fresh(code: str, place: Path, options: str = "") -> subprocess.CompletedProcess[str]:
    code = (code + LOAD + CHECK).format(place=str(place / "slim"), options=options, logits=str(place / "logits.pt"))
    settings = {"HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(place / "modules"), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **settings}, capture_output=True, text=True, check=False,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip


ORDERS = {
    "kvslim first": "import kvslim\nfrom transformers import AutoModelForCausalLM\n",
    "transformers first": "from transformers import AutoModelForCausalLM\nimport kvslim\n",
    "between": "import transformers, kvslim\nfrom transformers import AutoModelForCausalLM\n",
    "models before Auto": "import kvslim, transformers.models.llama.modeling_llama\n"
    "from transformers import AutoModelForCausalLM\n",
    "only a part": "from transformers import AutoConfig\nfrom kvslim import PaluConfig\n"
    "from transformers import AutoModelForCausalLM\n",
}


@pytest.mark.parametrize(
    "order", [pytest.param(name, marks=[] if name == "kvslim first" else pytest.mark.slow) for name in ORDERS]
)
def test_the_order_of_imports_does_not_matter(place: Path, order: str) -> None:
    done = fresh(ORDERS[order], place)
    assert "SAME PaluLlamaForCausalLM" in done.stdout, done.stderr


@pytest.mark.parametrize("options", [pytest.param("", marks=pytest.mark.slow), ", trust_remote_code=True"])
def test_no_code_beside_the_weights_is_run(place: Path, options: str) -> None:
    shim, mark = place / "slim" / "kvslim_palu.py", place / "ran"
    honest = shim.read_text()
    try:
        shim.write_text(f"open({str(mark)!r}, 'w').close()\nraise SystemExit('the shim was run')\n")
        done = fresh(ORDERS["kvslim first"], place, options)
        assert "SAME" in done.stdout, done.stderr
        assert not mark.exists()
        if options:  # and the mark would have shown it
            ran = fresh("from transformers import AutoModelForCausalLM\n", place, options)
            assert mark.exists(), ran.stderr
    finally:
        shim.write_text(honest)


def test_without_kvslim_it_is_an_error(place: Path) -> None:
    absent = "import sys\nsys.modules['kvslim'] = None\nfrom transformers import AutoModelForCausalLM\n"
    done = fresh(absent, place)
    assert done.returncode != 0
    assert "OTHER" not in done.stdout
    assert "SAME" not in done.stdout
    assert "ValueError" in done.stderr
    assert "contains custom code" in done.stderr
    done = fresh(absent, place, ", trust_remote_code=True")
    assert done.returncode != 0
    assert "pip install kvslim" in done.stderr


@pytest.mark.slow
def test_without_the_entry_of_the_shim_the_model_type_is_named(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "slim", tmp_path / "slim")
    path = tmp_path / "slim" / "config.json"
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "auto_map"}))
    done = fresh("from transformers import AutoModelForCausalLM\n", tmp_path)
    assert done.returncode != 0
    assert "ValueError" in done.stderr
    assert "model type `kvslim_palu_llama`" in done.stderr


@pytest.mark.slow
def test_a_trusted_shim_imports_kvslim(place: Path) -> None:
    done = fresh("from transformers import AutoModelForCausalLM\n", place, ", trust_remote_code=True")
    assert "SAME PaluLlamaForCausalLM" in done.stdout, done.stderr


def test_importing_kvslim_stays_light() -> None:
    code = "import sys, kvslim; print([name for name in ('torch', 'transformers', 'numpy') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_family_is_registered() -> None:
    assert set(ORIGINALS) == set(FAMILIES)
