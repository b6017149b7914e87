"""Sessions on disk: a cache comes back bit for bit and goes on as if it had never left memory."""

from __future__ import annotations

import copy
import dataclasses
import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, PreTrainedModel

import kvslim
from kvslim.checkpointing.session_info import info
from kvslim.errors import CacheStateError, CheckpointError, ConfigError
from kvslim.jolt import JoltCache

MakeTiny = Callable[..., PreTrainedModel]
GREEDY: dict[str, Any] = {"do_sample": False, "pad_token_id": 0}


def prompt(tokens: int, rows: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randint(2, 128, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def generate(model: Any, ids: torch.Tensor, cache: JoltCache, tokens: int, mask: torch.Tensor | None = None) -> Any:
    mask = torch.ones_like(ids) if mask is None else mask
    return model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=tokens, **GREEDY)


def scores(model: Any, ids: torch.Tensor, cache: JoltCache) -> torch.Tensor:
    """Logits of more tokens, which are then cached."""
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=ids, past_key_values=cache).logits
    return logits


SETTINGS: list[dict[str, Any]] = [
    {"ratio": 3},
    {"ratio": 2, "window": 20, "sinks": 0, "layer_group": 2},
    {"ratio": 4, "pre_rope": False, "levels": "uniform", "seed": 7, "bits": (0, 2, 4, 8)},
    {"budget_bytes": 40_000, "split": 0.4},
    {"ratio": 1.0, "bits": (0, 8, 16)},
    {"ratio": 3, "bits": (0,), "allocation": "greedy"},
    {"ratio": 3, "backbone": False, "weights": (1.0, 2.0, 0.1, 3.0)},
    {"ratio": 5, "slab_share": 0.5, "layer_group": 2},
]


@pytest.mark.parametrize("settings", SETTINGS, ids="-".join)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cache_comes_back_bit_for_bit(
    make_tiny: MakeTiny, sessions: SimpleNamespace, tmp_path: Path, settings: dict[str, Any], dtype: torch.dtype
) -> None:
    model = make_tiny().to(dtype)
    cache = sessions.fill(JoltCache(model, **settings), 400, rows=2, dtype=dtype)
    cache.compress()
    sessions.fill(cache, 5, rows=2, seed=1, dtype=dtype)
    cache.save(tmp_path / "s")
    again = kvslim.load_cache(tmp_path / "s", model)
    sessions.assert_same(cache, again)
    more = prompt(3, rows=2)
    assert torch.equal(scores(model, more, cache), scores(model, more, again))


def test_inherited_bases_are_stored_once_and_shared_again(
    make_tiny: MakeTiny, sessions: SimpleNamespace, tmp_path: Path
) -> None:
    model = make_tiny()
    cache = sessions.fill(JoltCache(model, ratio=3, bits=(0, 2, 4), key_weight=1, seal=None), 600)
    cache.compress()
    for seed in (1, 2):
        sessions.fill(cache, 128, seed=seed)
        cache.seal()
    assert any("inherited" in cell.plan for cell in cache.report().cells)
    cache.save(tmp_path / "s")
    again = kvslim.load_cache(tmp_path / "s", model)
    sessions.assert_same(cache, again)
    assert again.prefix_nbytes == cache.prefix_nbytes == info(tmp_path / "s").arena_bytes
    for one in (cache, again):  # the next stretch is planned on the same bases
        sessions.fill(one, 128, seed=3)
        one.seal()
    sessions.assert_same(cache, again)


def test_a_cropped_cache(make_tiny: MakeTiny, sessions: SimpleNamespace, tmp_path: Path) -> None:
    model = make_tiny()
    cache = sessions.fill(JoltCache(model, ratio=3, bits=(0, 2, 4), seal=None, window=8), 300, rows=2)
    cache.compress()
    sessions.fill(cache, 64, rows=2, seed=1)
    cache.seal()
    for tokens in (20, 44, 100):  # into the sealed stretch, all of it, into the prefill
        cache.crop(-tokens)
        cache.save(tmp_path / "s")
        sessions.assert_same(cache, kvslim.load_cache(tmp_path / "s", model))


def test_left_padding_and_short_rows_that_stay_exact(
    make_tiny: MakeTiny, sessions: SimpleNamespace, tmp_path: Path
) -> None:
    model, ids, mask = make_tiny(), prompt(400, rows=3), torch.ones(3, 400, dtype=torch.int64)
    mask[0, :101], mask[1, :396] = 0, 0
    cache = JoltCache(model, ratio=3, attention_mask=mask)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        out = generate(model, ids, cache, 4, mask)
    assert "row 1 stays exact" in cache.note
    cache.save(tmp_path / "s", out)
    session = kvslim.load_session(tmp_path / "s", model)
    sessions.assert_same(cache, session.cache)
    assert session.input_ids is not None
    assert torch.equal(session.input_ids, out)
    assert torch.equal(session.attention_mask, torch.nn.functional.pad(mask, (0, 3), value=1))
    full = torch.nn.functional.pad(session.attention_mask, (0, 1), value=1)
    ends = [generate(model, out, one, 30, full) for one in (cache, session.cache)]
    assert torch.equal(*ends)


def test_rows_that_share_storage_are_stored_once(
    make_tiny: MakeTiny, sessions: SimpleNamespace, tmp_path: Path
) -> None:
    model = make_tiny()
    cache = sessions.fill(JoltCache(model, ratio=3, seal=None), 400)
    cache.compress()
    alone = cache.serialized_nbytes
    cache.batch_repeat_interleave(5)
    assert cache.serialized_nbytes == alone
    sessions.fill(cache, 64, rows=5, seed=2)  # beams that have parted, on one first stretch
    cache.seal()
    cache.reorder_cache(torch.tensor([3, 3, 1, 0, 1]))
    cache.save(tmp_path / "s")
    again = kvslim.load_cache(tmp_path / "s", model)
    sessions.assert_same(cache, again)
    for one in (cache, again):
        one.crop(-70)  # into what they share
    assert cache.prefix_nbytes <= alone
    sessions.assert_same(cache, again)


@pytest.mark.parametrize("masked", [False, True])
def test_a_prefill_that_is_not_compressed_yet_is_compressed_later(
    make_tiny: MakeTiny, sessions: SimpleNamespace, tmp_path: Path, masked: bool
) -> None:
    model, mask = make_tiny(), torch.ones(2, 300, dtype=torch.int64)
    mask[1, :40] = 0
    cache = sessions.fill(JoltCache(model, ratio=3, attention_mask=mask if masked else None), 300, rows=2)
    cache.save(tmp_path / "s")
    again = kvslim.load_cache(tmp_path / "s", model)
    sessions.assert_same(cache, again)
    for one in (cache, again):
        scores(model, prompt(1, rows=2), one)
        assert one.prefix is not None
    sessions.assert_same(cache, again)


def test_a_prompt_too_short_to_compress(make_tiny: MakeTiny, sessions: SimpleNamespace, tmp_path: Path) -> None:
    model = make_tiny()
    cache = JoltCache(model, ratio=3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        out = generate(model, prompt(20), cache, 5)
    assert cache.prefix is None
    cache.save(tmp_path / "s", out)
    session = kvslim.load_session(tmp_path / "s", model)
    sessions.assert_same(cache, session.cache)
    assert torch.equal(*(generate(model, out, one, 10) for one in (cache, session.cache)))


@pytest.mark.parametrize("tokens", [12, 300])  # inside the window of 24, and beyond
def test_sliding_window_layers_go_on(sessions: SimpleNamespace, tmp_path: Path, tokens: int) -> None:
    model = sessions.hybrid()
    cache = JoltCache(model, ratio=2, sinks=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        out = generate(model, prompt(tokens), cache, 6)
    cache.save(tmp_path / "s", out)
    session = kvslim.load_session(tmp_path / "s", model)
    sessions.assert_same(cache, session.cache)
    assert info(tmp_path / "s").sliding_bytes > 0
    assert torch.equal(*(generate(model, out, one, 60) for one in (cache, session.cache)))


def test_sliding_window_layers_that_keep_candidates_can_still_be_cropped(
    sessions: SimpleNamespace, tmp_path: Path
) -> None:
    model = sessions.hybrid()
    cache = JoltCache(model, ratio=2)
    scores(model, prompt(300), cache)
    cache.activate_past_recording()
    scores(model, prompt(8, seed=1), cache)
    cache.save(tmp_path / "s")
    again = kvslim.load_cache(tmp_path / "s", model)
    sessions.assert_same(cache, again)
    for one in (cache, again):
        one.crop(-6)
    sessions.assert_same(cache, again)
    assert torch.equal(*(scores(model, prompt(3, seed=2), one) for one in (cache, again)))


CONTINUE = """
import sys, torch, kvslim
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=getattr(torch, sys.argv[3]))
session = kvslim.load_session(sys.argv[2], model)
out = model.generate(session.input_ids, attention_mask=torch.ones_like(session.input_ids),
                     past_key_values=session.cache, max_new_tokens=90, do_sample=False, pad_token_id=0)
print(out.tolist())
"""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_conversation_goes_on_in_another_process(make_tiny: MakeTiny, tmp_path: Path, dtype: str) -> None:
    make_tiny().save_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=getattr(torch, dtype))
    cache = JoltCache(model, ratio=3, seal=32)
    out = generate(model, prompt(300), cache, 90)  # one block is sealed before, another one after the break
    assert {cell.start for cell in cache.cells} == {4, 300}
    cache.save(tmp_path / "s", out)
    command = [sys.executable, "-c", CONTINUE, str(tmp_path / "model"), str(tmp_path / "s"), dtype]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == generate(model, out, cache, 90).tolist()
    assert len({cell.start for cell in cache.cells}) > 2


def test_equal_caches_make_equal_files_and_saving_changes_nothing(
    make_tiny: MakeTiny, sessions: SimpleNamespace, tmp_path: Path
) -> None:
    model = make_tiny()
    cache = sessions.fill(JoltCache(model, ratio=3), 300)
    cache.compress()
    before = copy.deepcopy(cache)
    cache.save(tmp_path / "one")
    sessions.assert_same(before, cache)
    kvslim.load_cache(tmp_path / "one", model).save(tmp_path / "two")
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_info_adds_up_and_safetensors_reads_the_file(
    make_tiny: MakeTiny, sessions: SimpleNamespace, tmp_path: Path
) -> None:
    model = make_tiny(layers=3)
    cache = sessions.fill(JoltCache(model, ratio=3, layer_group=2), 300, rows=2)
    cache.compress()
    sessions.fill(cache, 7, rows=2, seed=1)
    ids = prompt(310, rows=2)
    cache.save(tmp_path / "s", ids)
    about, report = info(tmp_path / "s"), cache.report()
    assert about.total_bytes == (tmp_path / "s").stat().st_size
    apart = about.id_bytes + about.tail_bytes + about.sliding_bytes
    # the entry of the ids in the description, and its padding
    assert 0 < about.total_bytes - apart - cache.serialized_nbytes < 100
    assert (about.rows, about.columns, about.tail_tokens, about.id_tokens) == (2, 307, 7, 310)
    assert (about.prefix_tokens, about.coded_tokens) == (600, 592)
    assert about.dense_bytes == report.dense_nbytes
    assert about.key_error == pytest.approx(report.key_error)
    assert about.value_error == pytest.approx(report.value_error)
    assert sum(count for _, count in about.plans["keys"]) == 4
    assert about.config == cache.config.to_dict() | {"bits": list(cache.config.bits)}
    assert not about.tokenizer
    for words in ("307 tokens", "llama with 3 layers", "x smaller", "310 token ids", "keys:"):
        assert words in str(about)
    with safe_open(tmp_path / "s", "pt") as file:
        assert torch.equal(file.get_tensor("input_ids"), ids.int())
        tail = file.get_tensor("tail")
        assert torch.equal(tail[2, 1], cache.layers[2].values)
        assert file.get_tensor("arena").numel() == about.arena_bytes


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(make_tiny: MakeTiny, sessions: SimpleNamespace, tmp_path: Path) -> tuple[PreTrainedModel, Path]:
    model = make_tiny()
    cache = sessions.fill(JoltCache(model, ratio=3), 300)
    cache.compress()
    cache.save(tmp_path / "s", prompt(300))
    return model, tmp_path / "s"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layers": 3}, "layers: 2"),
        ({"kv_heads": 4}, "KV heads: 2"),
        ({"head_dim": 32}, "head dim 16"),
        ({"vocab": 64}, "vocabulary size 128"),
        ({"seed": 1}, "other weights"),
        ({"family": "mistral"}, "model type 'llama'"),
    ],
)
def test_another_model_is_refused(
    make_tiny: MakeTiny, saved: tuple[PreTrainedModel, Path], change: dict[str, Any], words: str
) -> None:
    with pytest.raises(CacheStateError, match=f"another model: it has {words}"):
        kvslim.load_cache(saved[1], make_tiny(**change))


def test_another_dtype_or_rotation_is_refused(saved: tuple[PreTrainedModel, Path]) -> None:
    model, path = saved
    with pytest.raises(CacheStateError, match="it has dtype 'float32'"):
        kvslim.load_cache(path, copy.deepcopy(model).to(torch.bfloat16))
    turned = copy.deepcopy(model)
    turned.config.rope_parameters = {"rope_type": "default", "rope_theta": 5e5}
    with pytest.raises(CacheStateError, match=r"rope parameters .*10000"):
        kvslim.load_cache(path, turned)
    assert kvslim.load_cache(path, model).get_seq_length() == 300


class Words:
    """A tokenizer as far as a session looks at one."""

    def __init__(self, *words: str) -> None:
        self.words = words

    def get_vocab(self) -> dict[str, int]:
        return {word: index for index, word in enumerate(self.words)}


def test_a_tokenizer_must_match_if_it_is_given(saved: tuple[PreTrainedModel, Path]) -> None:
    model, path = saved
    cache = kvslim.load_cache(path, model)
    with pytest.raises(CacheStateError, match="without a tokenizer"):
        kvslim.load_cache(path, model, Words("a"))  # type: ignore[arg-type]
    cache.save(path, tokenizer=Words("a", "b"))  # type: ignore[arg-type]
    assert info(path).tokenizer
    kvslim.load_cache(path, model)
    kvslim.load_cache(path, model, Words("a", "b"))  # type: ignore[arg-type]
    with pytest.raises(CacheStateError, match="another tokenizer"):
        kvslim.load_cache(path, model, Words("b", "a"))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no tokenizer"):
        cache.save(path, tokenizer="a")  # type: ignore[arg-type]


def test_what_cannot_be_saved(make_tiny: MakeTiny, sessions: SimpleNamespace, tmp_path: Path) -> None:
    model = make_tiny()
    cache = JoltCache(model, ratio=3)
    with pytest.raises(CacheStateError, match="Nothing is cached"):
        cache.save(tmp_path / "s")
    sessions.fill(cache, 300)
    for ids in (prompt(299), prompt(300, rows=2), prompt(300)[0], prompt(300).float(), prompt(300) + 2**31):
        with pytest.raises(ConfigError, match="input_ids are"):
            cache.save(tmp_path / "s", ids)
    cache.update(*torch.randn(2, 1, 2, 1, 16), 0)
    with pytest.raises(CacheStateError, match="different lengths"):
        cache.save(tmp_path / "s")
    cache = sessions.fill(JoltCache(model, ratio=3), 300)
    del model
    with pytest.raises(CacheStateError, match="model of this cache is gone"):
        cache.save(tmp_path / "s")
    assert not list(tmp_path.iterdir())


def test_blocks_that_a_session_does_not_know(make_tiny: MakeTiny, sessions: SimpleNamespace, tmp_path: Path) -> None:
    model = make_tiny()
    cache = sessions.fill(JoltCache(model, ratio=3), 300)
    cache.compress()
    for change in ({"seed": 5}, {"levels": "uniform"}):
        cache.config, before = dataclasses.replace(cache.config, **change), cache.config
        with pytest.raises(CacheStateError, match="not coded as its settings say"):
            cache.save(tmp_path / "s")
        cache.config = before
    cache.cells.pop()
    with pytest.raises(CacheStateError, match="report"):
        cache.save(tmp_path / "s")
    assert not list(tmp_path.iterdir())


def test_a_place_without_a_session(tmp_path: Path, tiny_llama: PreTrainedModel) -> None:
    (tmp_path / "folder").mkdir()
    for name in ("nothing", "folder"):
        with pytest.raises(CheckpointError, match="cannot be read"):
            kvslim.load_cache(tmp_path / name, tiny_llama)
        with pytest.raises(CheckpointError, match="cannot be read"):
            info(tmp_path / name)
