"""The store of sessions: the longest beginning of a prompt, a size never exceeded, several processes at once."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from kvslim import JoltCache, JoltConfig, SessionStore
from kvslim.errors import CacheStateError, ConfigError

MakeTiny = Callable[..., PreTrainedModel]
LARGE = 1 << 30


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return hybrid("full_attention")


def hybrid(second: str, seed: int = 0) -> PreTrainedModel:
    """Two layers; the second one may be ``sliding_attention`` over 100 tokens."""
    config = Qwen2Config(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=128,
        initializer_range=0.2,
        use_sliding_window=True,
        sliding_window=100,
        layer_types=["full_attention", second],
        pad_token_id=0,
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen2ForCausalLM(config).eval()


def prompt(tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(2, 128, (1, tokens), generator=torch.Generator().manual_seed(seed))


def prefilled(model: Any, ids: torch.Tensor, **settings: Any) -> JoltCache:
    cache = JoltCache(model, **(settings or {"ratio": 2}))
    with torch.no_grad():
        model(input_ids=ids, past_key_values=cache)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        cache.compress()
    return cache


def logits(model: Any, ids: torch.Tensor, cache: Any) -> torch.Tensor:
    """Scores of the next token, with what the cache lacks computed."""
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=ids[:, cache.get_seq_length() :], past_key_values=cache).logits[:, -1]
    return found


def test_the_longest_beginning_is_found(model: PreTrainedModel, tmp_path: Path) -> None:
    store, ids = SessionStore(tmp_path / "deep" / "store", LARGE), prompt(400)
    assert store.find(ids, model) is None
    for tokens in (100, 300, 200):
        store.put(prefilled(model, ids[:, :tokens]), ids)
    store.put(prefilled(model, prompt(390, seed=1)), prompt(390, seed=1))
    for tokens, expected in ((400, 300), (301, 300), (250, 249), (201, 200), (150, 149), (101, 100)):
        found = store.find(ids[:, :tokens], model)
        assert found is not None
        assert found.tokens == expected == found.cache.get_seq_length()
    assert store.find(ids[:, :60], model) is None  # too little to be worth it
    assert store.find(prompt(400, seed=2), model) is None
    exact = store.find(ids[:, :301], model)
    assert exact is not None
    assert torch.equal(logits(model, ids, exact.cache), logits(model, ids, prefilled(model, ids[:, :300])))


def test_a_session_that_goes_on_differently_is_cropped(model: PreTrainedModel, tmp_path: Path) -> None:
    store, ids, other = SessionStore(tmp_path, LARGE), prompt(300), prompt(120, seed=5)
    new = torch.cat((ids[:, :180], other), dim=1)
    store.put(prefilled(model, ids), ids)
    found = store.find(new, model)
    assert found is not None
    same = int((ids[0, :181] == new[0, :181]).long().cumprod(0).sum())
    assert found.tokens == same in (180, 181)
    cropped = prefilled(model, ids)
    cropped.crop(same - 300)
    assert torch.equal(logits(model, new, found.cache), logits(model, new, cropped))
    assert all(cell.start < same for cell in found.cache.report().cells)


@pytest.mark.parametrize("settings", [{"budget_bytes": 400_000, "bits": (16,)}, {"ratio": 2, "sinks": 400}])
def test_without_loss_the_answer_is_that_of_a_whole_prefill(
    model: PreTrainedModel, tmp_path: Path, settings: dict[str, Any]
) -> None:
    store, ids = SessionStore(tmp_path, LARGE), prompt(300)
    store.put(prefilled(model, ids, **settings), ids)  # a lossless copy; and too short to be compressed
    new = torch.cat((ids[:, :200], prompt(20, seed=6)), dim=1)
    found = store.find(new, model)
    assert found is not None
    assert found.tokens >= 200
    torch.testing.assert_close(logits(model, new, found.cache), logits(model, new, DynamicCache()))


def test_sliding_windows_serve_whole_sessions_only(tmp_path: Path) -> None:
    model, store, ids = hybrid("sliding_attention"), SessionStore(tmp_path, LARGE), prompt(300)
    store.put(prefilled(model, ids[:, :250]), ids)
    assert store.find(ids[:, :249], model) is None
    found = store.find(ids, model)
    assert found is not None
    assert torch.equal(logits(model, ids, found.cache), logits(model, ids, prefilled(model, ids[:, :250])))
    store.put(prefilled(model, ids[:, :90]), ids)  # the window is not full yet
    found = store.find(ids[:, :80], model)
    assert found is not None
    assert found.tokens == 79


def test_other_models_and_settings_do_not_count(model: PreTrainedModel, tmp_path: Path) -> None:
    store, ids, stranger = SessionStore(tmp_path, LARGE), prompt(300), hybrid("full_attention", seed=1)
    store.put(prefilled(model, ids, ratio=2), ids)
    assert store.find(ids, stranger) is None
    assert store.find(ids, model, JoltConfig(ratio=3)) is None
    assert store.find(ids, model, JoltConfig(ratio=2)) is not None
    store.put(prefilled(stranger, ids[:, :200], ratio=2), ids)
    found = store.find(ids, stranger)
    assert found is not None
    assert found.tokens == 200
    assert {entry.model.weights for entry in store.entries()} != {store.entries()[0].model.weights}


def test_the_limit_holds_and_what_was_used_last_stays(model: PreTrainedModel, tmp_path: Path) -> None:
    prompts = [prompt(150, seed=seed) for seed in range(5)]
    caches = [prefilled(model, ids) for ids in prompts]
    trial = SessionStore(tmp_path / "trial", LARGE)
    sizes = []
    for cache, ids in zip(caches, prompts, strict=True):
        before = trial.nbytes
        trial.put(cache, ids)
        sizes.append(trial.nbytes - before)
    store = SessionStore(tmp_path / "store", 3 * max(sizes))
    names = [store.put(cache, ids) for cache, ids in zip(caches[:3], prompts[:3], strict=True)]
    assert store.find(prompts[0], model) is not None  # now the second one is the oldest
    names.append(store.put(caches[3], prompts[3]))
    assert store.nbytes <= store.limit_bytes
    assert [entry.name for entry in store.entries()] == [names[3], names[0], names[2]]
    assert store.put(caches[0], prompts[0]) == names[0]  # replaces itself, nothing else has to go
    assert [entry.name for entry in store.entries()] == [names[0], names[3], names[2]]
    assert all((entry.tokens, entry.nbytes) == (150, sizes[0]) for entry in store.entries())
    assert store.remove(names[3])
    assert not store.remove(names[3])
    assert not store.remove("../trial/x")
    small = SessionStore(tmp_path / "store", sizes[0] - 1)
    with pytest.raises(ConfigError, match=r"store is limited to .* Nothing was removed"):
        small.put(caches[1], prompts[1])
    assert len(store.entries()) == 2


def test_damaged_entries_are_removed_with_a_warning(model: PreTrainedModel, tmp_path: Path) -> None:
    store, ids = SessionStore(tmp_path, LARGE), prompt(300)
    names = [store.put(prefilled(model, ids[:, :tokens]), ids) for tokens in (100, 200, 280)]
    paths = [tmp_path / f"{name}.safetensors" for name in names]
    tail, head = bytearray(paths[2].read_bytes()), paths[1].read_bytes()
    tail[-1] ^= 1
    paths[2].write_bytes(tail)  # found when it is loaded
    paths[1].write_bytes(head[:-1])  # found when a process first looks
    (tmp_path / "notes.safetensors").write_bytes(b"no session")
    (tmp_path / "notes.txt").write_text("not looked at")
    with pytest.warns(UserWarning, match=r"is damaged: .* The store has removed it") as caught:
        found = SessionStore(tmp_path, LARGE).find(ids, model)
    assert found is not None
    assert found.tokens == 100
    assert len(caught) == 3
    assert {place.name for place in tmp_path.iterdir()} == {paths[0].name, "notes.txt", ".lock"}
    assert [entry.name for entry in store.entries()] == names[:1]


def test_sessions_of_a_later_format_are_left_alone(model: PreTrainedModel, tmp_path: Path) -> None:
    store, ids = SessionStore(tmp_path, LARGE), prompt(150)
    name = store.put(prefilled(model, ids), ids)
    path = tmp_path / f"{name}.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"kvslim_session":"1"', b'"kvslim_session":"9"'))
    assert SessionStore(tmp_path, LARGE).find(ids, model) is None
    assert path.is_file()
    assert store.nbytes == path.stat().st_size


def test_a_file_that_took_the_place_of_another_is_not_taken_for_it(model: PreTrainedModel, tmp_path: Path) -> None:
    store, ids, other = SessionStore(tmp_path, LARGE), prompt(150), prompt(150, seed=9)
    name, second = store.put(prefilled(model, ids), ids), store.put(prefilled(model, other), other)
    assert store.find(ids, model) is not None
    (tmp_path / f"{second}.safetensors").replace(tmp_path / f"{name}.safetensors")
    assert store.find(ids, model) is None
    assert store.find(other, model) is not None


def test_a_failed_put_loses_nothing(model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, ids = SessionStore(tmp_path, LARGE), prompt(200)
    store.put(prefilled(model, ids[:, :100]), ids)
    (tmp_path / ".kvslim-left").write_bytes(b"by a process that was killed")
    before = store.nbytes

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("kvslim.files.os.fsync", full)
        with pytest.raises(ConfigError, match="No space left"):
            store.put(prefilled(model, ids), ids)
    assert store.nbytes == before
    assert sorted(place.suffix for place in tmp_path.iterdir()) == ["", ".safetensors"]
    store.put(prefilled(model, ids), ids)


def test_what_the_store_refuses(model: PreTrainedModel, tmp_path: Path) -> None:
    for limit in (0, -1, 1.5, True):
        with pytest.raises(ConfigError, match="limit_bytes"):
            SessionStore(tmp_path, limit)  # type: ignore[arg-type]
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="cannot be written"):
        SessionStore(tmp_path / "file" / "store", 10)
    store, ids = SessionStore(tmp_path / "store", LARGE), prompt(150)
    cache = prefilled(model, ids)
    for wrong in (ids[0], ids[:, :149], ids.float()):
        with pytest.raises(ConfigError, match="input_ids are integers"):
            store.put(cache, wrong)
    for wrong in (ids[0], ids.float(), ids.repeat(2, 1)):
        with pytest.raises(ConfigError, match="input_ids are integers"):
            store.find(wrong, model)
    cache.batch_repeat_interleave(2)
    with pytest.raises(CacheStateError, match="single rows without padding"):
        store.put(cache, ids)
    padded = JoltCache(model, ratio=2, attention_mask=(torch.arange(150) > 5)[None])
    logits(model, ids, padded)
    with pytest.raises(CacheStateError, match="single rows without padding"):
        store.put(padded, ids)
    (tmp_path / "store").rename(tmp_path / "gone")
    with pytest.raises(ConfigError, match="cannot be read"):
        store.find(ids, model)


AT_ONCE = """
import sys, random, warnings, torch
from transformers import Qwen2ForCausalLM
from kvslim import JoltCache, SessionStore
warnings.simplefilter("error", UserWarning)  # ours; transformers has FutureWarnings of its own
directory, models, limit, seed = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
model, store, rng = Qwen2ForCausalLM.from_pretrained(models), SessionStore(directory, limit), random.Random(seed)
found = 0
for _ in range(25):
    number = rng.randrange(6)
    ids = torch.randint(2, 128, (1, 120), generator=torch.Generator().manual_seed(number))
    hit = store.find(ids, model)
    if hit is None:
        cache = JoltCache(model, ratio=2, sinks=200)
        with torch.no_grad():
            model(input_ids=ids, past_key_values=cache)
        store.put(cache, ids)
    else:
        assert hit.tokens == hit.cache.get_seq_length() == 119
        found += 1
    assert store.nbytes <= limit
    if rng.random() < 0.1 and (entries := store.entries()):
        store.remove(rng.choice(entries).name)
print(found)
"""


def test_several_processes_at_once(model: PreTrainedModel, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "model")
    trial, ids = SessionStore(tmp_path / "trial", LARGE), prompt(120)
    cache = JoltCache(model, ratio=2, sinks=200)
    logits(model, ids, cache)
    trial.put(cache, ids)
    limit = int(4.5 * trial.nbytes)
    arguments = [str(tmp_path / "store"), str(tmp_path / "model"), str(limit)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    running = [
        subprocess.Popen(
            [sys.executable, "-c", AT_ONCE, *arguments, str(seed)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        )
        for seed in range(3)
    ]  # fmt: skip
    outputs = [process.communicate() for process in running]
    assert [process.returncode for process in running] == [0, 0, 0], outputs
    assert sum(int(out) for out, _ in outputs) > 10  # what one stored the others found
    store = SessionStore(tmp_path / "store", limit)
    assert 0 < store.nbytes <= limit
    assert len(store.entries()) == 4
    names = {place.name for place in (tmp_path / "store").iterdir()}
    assert names == {f"{entry.name}.safetensors" for entry in store.entries()} | {".lock"}
