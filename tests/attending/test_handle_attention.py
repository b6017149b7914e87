"""Handle mode: attention from the compressed form gives what attention to the decompressed tensors gives."""

import copy
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AttentionMaskInterface, DynamicCache, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

import kvslim
from kvslim.attending import handle_attention
from kvslim.attending.handle_attention import attend, attention_forward, attention_mask
from kvslim.baselines import IntegerCache, RotatedCache
from kvslim.caching.compressed import CompressedCache
from kvslim.caching.handles import Handle, LayerView
from kvslim.caching.prefix import CodedStretch, Prefix
from kvslim.errors import UnsupportedModelError
from kvslim.jolt import JoltCache

MakeTiny = Callable[..., PreTrainedModel]


def prompt(rows: int, tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(2, 128, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def padded(lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    ids, mask = prompt(len(lengths), max(lengths)), torch.ones(len(lengths), max(lengths), dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, : max(lengths) - length], mask[row, : max(lengths) - length] = 0, 0
    return ids, mask


def step(model: PreTrainedModel, ids: torch.Tensor, cache: object, **kw: object) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(ids, past_key_values=cache, **kw).logits
    return logits


def compressed(model: PreTrainedModel, ids: torch.Tensor, cache: CompressedCache, **kw: object) -> CompressedCache:
    step(model, ids, cache, **kw)
    cache.compress()
    assert cache.prefix is not None
    return cache


def both_modes(model: PreTrainedModel, run: Callable[[], Any]) -> tuple[Any, Any]:
    """What ``run`` gives in handle mode, and in decompress mode."""
    model.set_attn_implementation("kvslim")
    handles = run()
    model.set_attn_implementation("sdpa")
    return handles, run()


# ---- registration ----------------------------------------------------------------------------------------------------


def test_loading_a_cache_registers_the_implementation() -> None:
    code = """
import sys, kvslim
assert "torch" not in sys.modules
kvslim.JoltCache
from transformers import AttentionInterface, AttentionMaskInterface
assert "kvslim" in AttentionInterface() and "kvslim" in AttentionMaskInterface()
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert kvslim.register is handle_attention.register


# ---- what it computes ------------------------------------------------------------------------------------------------


def reference(view: LayerView, query: torch.Tensor, mask: torch.Tensor, scaling: float) -> torch.Tensor:
    """Softmax attention in float64 over the rebuilt tensors; ``mask`` is boolean ``(batch, heads, n, columns)``."""
    keys, values = (dense.double().repeat_interleave(query.shape[1] // dense.shape[1], 1) for dense in view.rebuild())
    scores = (query.double() @ keys.mT * scaling).masked_fill(~mask, -torch.inf)
    return scores.softmax(-1).nan_to_num(0) @ values


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_attention_equals_a_float64_reference(tiny: PreTrainedModel, data: st.DataObject) -> None:
    draw = data.draw
    queries, tail, seed = draw(st.sampled_from([1, 2, 20])), draw(st.integers(0, 70)), draw(st.integers(0, 99))
    sizes = {name: draw(st.integers(0, 4)) for name in ("sinks", "window")}
    ids, prompt_mask = padded([90, draw(st.integers(40, 90))])
    cache = JoltCache(
        tiny, **sizes, budget_bytes=draw(st.sampled_from([40000, 60000])), pre_rope=draw(st.booleans()),
        layer_group=draw(st.sampled_from([1, 2])), attention_mask=prompt_mask,
    )  # fmt: skip
    compressed(tiny, ids, cache, attention_mask=prompt_mask)
    if draw(st.booleans()):
        step(tiny, prompt(2, 40), cache)
        cache.compress()  # seals them
    generator = torch.Generator().manual_seed(seed)
    layer = cache.compressible[draw(st.integers(0, 1))]
    layer.reader = None
    keys, _ = layer.update(*torch.randn(2, 2, 2, tail + queries, 16, generator=generator))
    assert isinstance(keys, Handle)
    query = torch.randn(2, 4, queries, 16, generator=generator)
    real = torch.nn.functional.pad(prompt_mask, (0, keys.shape[2] - 90), value=1).bool()[:, None, None]
    causal = torch.ones(queries, keys.shape[2], dtype=torch.bool).tril(keys.shape[2] - queries)
    if draw(st.booleans()):
        mask, visible = None, (real & causal).expand(2, 4, -1, -1)
    else:
        heads = draw(st.sampled_from([1, 4]))
        mask = (torch.rand(2, heads, queries, keys.shape[2], generator=generator) < 0.7) & real & causal
        mask[0, 0, 0] = False  # sees nothing
        visible = mask.expand(2, 4, -1, -1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(handle_attention, "TILE_TOKENS", draw(st.sampled_from([7, 64, 1024])))
        got = attend(keys.source, query, mask, scaling=0.3, causal=True)
    expected = reference(keys.source, query, visible, 0.3)
    assert torch.allclose(got.double(), expected, atol=1e-5 * float(expected.abs().max()))
    assert torch.isfinite(got).all()
    if mask is not None:
        assert not got[0, 0, 0].any()


@pytest.fixture(scope="module")
def tiny() -> PreTrainedModel:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=128, initializer_range=0.1,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("layer_group", [1, 2])
@pytest.mark.parametrize("pre_rope", [True, False], ids=["pre", "post"])
@pytest.mark.parametrize("ratio", [2, 3, 6])
@pytest.mark.parametrize("window", [0, 8])
def test_logits_equal_those_of_decompress_mode(
    tiny_llama: PreTrainedModel, ratio: float, pre_rope: bool, layer_group: int, window: int
) -> None:
    """Several tokens behind a prefill, then single ones that seal them, then several behind both stretches."""
    options: dict[str, Any] = {"ratio": ratio, "pre_rope": pre_rope, "layer_group": layer_group}
    cache = compressed(tiny_llama, prompt(2, 300), JoltCache(tiny_llama, window=window, seal=64, **options))

    def run() -> list[torch.Tensor]:
        own = copy.deepcopy(cache)
        logits = [step(tiny_llama, prompt(2, n, seed=n), own) for n in (100, 1, 1, 5)]
        assert own.prefix is not None
        assert sum(isinstance(stretch, CodedStretch) for stretch in own.prefix.rows[0].stretches) == 2
        return logits

    for got, expected in zip(*both_modes(tiny_llama, run), strict=True):
        assert torch.allclose(got, expected, atol=1e-4)
        assert torch.equal(got.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("pre_rope", [True, False], ids=["pre", "post"])
def test_16_bit_models(tiny_llama: PreTrainedModel, dtype: torch.dtype, pre_rope: bool) -> None:
    """Handle mode does not round what it rebuilds to the model's dtype, so it is the closer one to float32."""
    cache = compressed(tiny_llama, prompt(1, 300), JoltCache(tiny_llama, ratio=3, pre_rope=pre_rope))
    exact = step(tiny_llama, prompt(1, 4), copy.deepcopy(cache))
    model = tiny_llama.to(dtype)
    cache = compressed(model, prompt(1, 300), JoltCache(model, ratio=3, pre_rope=pre_rope))
    got, expected = both_modes(model, lambda: step(model, prompt(1, 4), copy.deepcopy(cache)).float())
    assert (got - expected).abs().max() < 0.03 * exact.abs().max()


@pytest.mark.parametrize("make", [IntegerCache, RotatedCache])
def test_plain_codecs(tiny_llama: PreTrainedModel, make: Callable[..., CompressedCache]) -> None:
    cache = compressed(tiny_llama, prompt(2, 60), make(tiny_llama, 4, sinks=2, window=3))
    got, expected = both_modes(tiny_llama, lambda: step(tiny_llama, prompt(2, 3), copy.deepcopy(cache)))
    assert torch.allclose(got, expected, atol=1e-4)


def test_additive_masks(tiny_llama: PreTrainedModel) -> None:
    cache = compressed(tiny_llama, prompt(2, 300), JoltCache(tiny_llama, ratio=3))
    bias = torch.randn(2, 4, 3, 303, generator=torch.Generator().manual_seed(0))
    bias[:, :, :, 10:50] = torch.finfo(torch.float32).min
    more = prompt(2, 3)
    got, expected = both_modes(tiny_llama, lambda: step(tiny_llama, more, copy.deepcopy(cache), attention_mask=bias))
    assert torch.allclose(got, expected, atol=1e-4)


def test_gradients_equal_those_of_decompress_mode(tiny_llama: PreTrainedModel) -> None:
    cache = compressed(tiny_llama, prompt(1, 300), JoltCache(tiny_llama, ratio=3, pre_rope=False))
    embedded = tiny_llama.get_input_embeddings()(prompt(1, 4)).detach()

    def run() -> torch.Tensor:
        leaf = embedded.clone().requires_grad_()
        tiny_llama(inputs_embeds=leaf, past_key_values=copy.deepcopy(cache)).logits.square().sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    got, expected = both_modes(tiny_llama, run)
    assert torch.allclose(got, expected, atol=1e-4 * float(expected.abs().max()))


def test_hybrid_models_attend_to_sliding_layers_as_sdpa_does() -> None:
    config = Qwen2Config(
        vocab_size=128, hidden_size=64, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, use_sliding_window=True, sliding_window=8, max_window_layers=2, initializer_range=0.1,
        bos_token_id=1, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config).eval()
    ids, mask = padded([300, 260])
    got, expected = both_modes(
        model, lambda: generate(model, ids, JoltCache(model, ratio=2, attention_mask=mask), attention_mask=mask)
    )
    assert torch.equal(got, expected)


# ---- generate --------------------------------------------------------------------------------------------------------

GENERATE: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "top_k": 20},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "several samples": {"do_sample": True, "num_return_sequences": 3},
    "chunked prefill": {"prefill_chunk_size": 70},
    "prompt lookup": {"prompt_lookup_num_tokens": 4},
    "assisted": {},
    "left padding": {},
    "left padding, cache without mask": {},
}


def generate(model: PreTrainedModel, ids: torch.Tensor, cache: object, **options: Any) -> torch.Tensor:
    torch.manual_seed(0)
    defaults = {"do_sample": False, "max_new_tokens": 12, "pad_token_id": 0}
    out = model.generate(ids, past_key_values=cache, **{**defaults, **options})
    assert isinstance(out, torch.Tensor)
    return out


def generate_by(name: str, make_tiny: MakeTiny, make: Callable[..., object], implementation: str) -> torch.Tensor:
    """Run one row of the table with the cache that ``make`` builds."""
    model, options, kept = make_tiny(), dict(GENERATE[name]), {}
    model.set_attn_implementation(implementation)
    ids = prompt(1, 300) if name in ("prompt lookup", "assisted") else prompt(2, 300)
    if name == "assisted":
        options["assistant_model"] = make_tiny(layers=1, seed=3)
    if name.startswith("left padding"):
        ids, options["attention_mask"] = padded([300, 261])
        kept = {} if "without" in name else {"attention_mask": options["attention_mask"]}
    cache = make(model, **kept)
    out = generate(model, ids, cache, **options)
    assert not isinstance(cache, CompressedCache) or cache.prefix is not None
    return out


@pytest.mark.parametrize("name", GENERATE)
def test_generate_gives_what_decompress_mode_gives(make_tiny: MakeTiny, name: str) -> None:
    pre_rope = list(GENERATE).index(name) % 2 == 0  # every way to generate in one of the two forms

    def make(model: PreTrainedModel, **kept: Any) -> JoltCache:
        return JoltCache(model, ratio=3, window=8, pre_rope=pre_rope, **kept)

    assert torch.equal(generate_by(name, make_tiny, make, "kvslim"), generate_by(name, make_tiny, make, "sdpa"))


@pytest.mark.parametrize("name", GENERATE)
def test_lossless_generation_equals_dynamic_cache(make_tiny: MakeTiny, name: str) -> None:
    def lossless(model: PreTrainedModel, **kept: Any) -> JoltCache:
        return JoltCache(model, bits=(16,), budget_bytes=10**9, **kept)

    def dynamic(model: PreTrainedModel, **kept: Any) -> DynamicCache:
        return DynamicCache(config=model.config)

    expected = generate_by(name, make_tiny, dynamic, "sdpa")
    for implementation in ("kvslim", "sdpa", "eager"):
        assert torch.equal(generate_by(name, make_tiny, lossless, implementation), expected)


@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static"}], ids=["dynamic", "static"])
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_other_caches_work_as_with_sdpa(make_tiny: MakeTiny, family: str, options: dict[str, Any]) -> None:
    model = make_tiny(family, **({"sliding_window": 8} if family == "mistral" else {}))
    ids, mask = padded([30, 17])
    for kept in ({"attention_mask": mask}, {"attention_mask": torch.ones_like(mask)}):
        got, expected = both_modes(model, lambda kept=kept: generate(model, ids, None, **kept, **options))
        assert torch.equal(got, expected)
    if not options:
        got, expected = both_modes(model, lambda: generate(model, ids, None, prefill_chunk_size=7))
        assert torch.equal(got, expected)


def continue_after(change: Callable[[CompressedCache], CompressedCache]) -> Callable[..., torch.Tensor]:
    def run(model: PreTrainedModel, cache: CompressedCache) -> torch.Tensor:
        own = copy.deepcopy(cache)
        step(model, prompt(2, 20, seed=1), own)
        own = change(own)
        more = prompt(own.compressible[0].batch_size, 6, seed=2)
        return torch.cat([step(model, more[:, :5], own), step(model, more[:, 5:], own)], dim=1)

    return run


def cropped(tokens: int) -> Callable[[CompressedCache], CompressedCache]:
    def change(cache: CompressedCache) -> CompressedCache:
        cache.crop(-tokens)
        return cache

    return change


def reordered(cache: CompressedCache) -> CompressedCache:
    cache.batch_repeat_interleave(2)
    cache.reorder_cache(torch.tensor([3, 0, 0, 1]))
    return cache


CHANGES: dict[str, Callable[[CompressedCache], CompressedCache]] = {
    "deepcopy": copy.deepcopy,
    "crop the tail": cropped(7),
    "crop into the window": cropped(23),
    "crop into what is coded": cropped(100),
    "crop into the sinks": cropped(318),
    "crop everything": cropped(320),
    "offload": lambda cache: cache.offload_prefix(),
    "reorder": reordered,
    "seal": lambda cache: (cache.compress(), cache)[1],
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_cache_continues_alike(tiny_llama: PreTrainedModel, name: str) -> None:
    cache = compressed(tiny_llama, prompt(2, 300), JoltCache(tiny_llama, ratio=2, sinks=4, window=8))
    run = continue_after(CHANGES[name])
    got, expected = both_modes(tiny_llama, lambda: run(tiny_llama, cache))
    assert torch.allclose(got, expected, atol=1e-4)


def test_rows_of_unequal_length_need_no_mask(tiny_llama: PreTrainedModel) -> None:
    """Columns that belong to no token are known to the cache: a padded row gives what it gives alone."""
    ids, mask = padded([300, 260])
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    cache = JoltCache(tiny_llama, ratio=3, attention_mask=mask)
    compressed(tiny_llama, ids, cache, attention_mask=mask, position_ids=positions)
    alone = compressed(tiny_llama, ids[1:, 40:], JoltCache(tiny_llama, ratio=3))
    tiny_llama.set_attn_implementation("kvslim")
    more = prompt(2, 4, seed=1)
    places = torch.arange(4) + torch.tensor([[300], [260]])
    got = step(tiny_llama, more, cache, position_ids=places)
    assert torch.allclose(got[1:], step(tiny_llama, more[1:], alone), atol=2e-3)


# ---- what it costs ---------------------------------------------------------------------------------------------------


def test_beams_of_one_prompt_are_decoded_once(tiny_llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    original = CodedStretch.scores

    def counted(self: CodedStretch, layer: int, *args: Any) -> torch.Tensor:
        calls.append(layer)
        return original(self, layer, *args)

    monkeypatch.setattr(CodedStretch, "scores", counted)
    cache = compressed(tiny_llama, prompt(2, 300), JoltCache(tiny_llama, ratio=3))
    cache.batch_repeat_interleave(4)
    tiny_llama.set_attn_implementation("kvslim")
    step(tiny_llama, prompt(8, 1), cache)
    assert calls == [0, 0, 1, 1]  # two layers, two prompts


class Largest(TorchDispatchMode):
    """Records the elements of the largest tensor that is allocated inside."""

    def __init__(self, known: list[torch.Tensor]) -> None:
        super().__init__()
        self.known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in self.known:
                self.elements = max(self.elements, tensor.numel())
        return out


@pytest.mark.parametrize("pre_rope", [True, False], ids=["pre", "post"])
@pytest.mark.parametrize("queries", [1, 17])
def test_no_more_than_a_tile_is_dense(
    tiny_llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, pre_rope: bool, queries: int
) -> None:
    monkeypatch.setattr(handle_attention, "TILE_TOKENS", 64)
    cache = compressed(tiny_llama, prompt(1, 2000), JoltCache(tiny_llama, ratio=4, pre_rope=pre_rope))
    layer = cache.compressible[0]
    layer.reader = None
    keys, _ = layer.update(*torch.randn(2, 1, 2, queries, 16))
    assert isinstance(keys, Handle)
    query = torch.randn(1, 4, queries, 16)
    stored = [*keys.source.prefix.tensors(), layer.keys, layer.values, query]
    with Largest(stored) as largest:
        attend(keys.source, query, None, scaling=0.25, causal=True)
    tile = 64 * 2 * max(16, 2 * queries)  # of keys or values, or of scores
    core = max((t.numel() for t in stored if t.dim() == 3 and t.dtype == torch.float16), default=0)
    assert largest.elements <= max(tile, 64 * 32, core)  # 64 token factors have at most rank 32
    assert largest.elements < keys.numel() / 10


def test_handle_mode_never_rebuilds_a_layer(tiny_llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Prefix, *args: Any) -> Any:
        raise AssertionError

    cache = compressed(tiny_llama, prompt(2, 300), JoltCache(tiny_llama, ratio=3))
    monkeypatch.setattr(Prefix, "dense", refuse)
    tiny_llama.set_attn_implementation("kvslim")
    step(tiny_llama, prompt(2, 5), cache)
    step(tiny_llama, prompt(2, 1), cache)


# ---- masks and arguments ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "skipped"),
    [
        ({"q_length": 1, "kv_length": 9, "q_offset": 8}, True),
        ({"q_length": 4, "kv_length": 9, "q_offset": 5}, True),
        ({"q_length": 9, "kv_length": 9, "q_offset": 0}, True),
        ({"q_length": 4, "kv_length": 9, "q_offset": 5, "attention_mask": torch.ones(2, 9, dtype=torch.bool)}, True),
        ({"q_length": 4, "kv_length": 9, "q_offset": 5, "attention_mask": torch.ones(2, 8, dtype=torch.bool)}, False),
        ({"q_length": 4, "kv_length": 9, "q_offset": 5, "attention_mask": torch.eye(9)[:2].bool()}, False),
        ({"q_length": 4, "kv_length": 9, "q_offset": 5, "local_size": 10}, True),
        ({"q_length": 4, "kv_length": 9, "q_offset": 5, "local_size": 9}, False),
        ({"q_length": 4, "kv_length": 9, "q_offset": 5, "allow_is_causal_skip": False}, False),
        ({"q_length": 4, "kv_length": 9, "q_offset": 0}, False),  # a static cache that is being filled
        ({"q_length": 4, "kv_length": 9, "q_offset": 8, "kv_offset": 3}, False),  # a sliding window
    ],
)
def test_masks_are_those_of_sdpa_unless_they_say_nothing_new(arguments: dict[str, Any], skipped: bool) -> None:
    got = attention_mask(batch_size=2, **arguments)
    if skipped:
        assert got is None
        arguments = {**arguments, "attention_mask": None, "local_size": None}
        got = (
            torch.ones(arguments["q_length"], 9, dtype=torch.bool).tril(9 - arguments["q_length"]).expand(2, 1, -1, -1)
        )
    expected = AttentionMaskInterface()["sdpa"](batch_size=2, **{**arguments, "allow_is_causal_skip": False})
    assert torch.equal(got, expected)


@pytest.mark.parametrize(("queries", "columns"), [(1, 9), (4, 9), (9, 9)])
@pytest.mark.parametrize("causal", [True, False, None])
def test_a_missing_mask_is_causal_to_the_end(queries: int, columns: int, causal: bool | None) -> None:
    module = torch.nn.Module()
    module.num_key_value_groups = 2  # type: ignore[assignment]
    query, keys, values = torch.randn(1, 4, queries, 8), torch.randn(1, 2, columns, 8), torch.randn(1, 2, columns, 8)
    got, weights = attention_forward(module, query, keys, values, None, scaling=0.5, is_causal=causal)
    scores = query @ keys.repeat_interleave(2, 1).mT * 0.5
    if causal is not False:
        scores = scores.masked_fill(~torch.ones(queries, columns, dtype=torch.bool).tril(columns - queries), -torch.inf)
    assert weights is None
    assert torch.allclose(got, (scores.softmax(-1) @ values.repeat_interleave(2, 1)).transpose(1, 2), atol=1e-5)


@pytest.fixture
def handles(tiny_llama: PreTrainedModel) -> tuple[torch.nn.Module, torch.Tensor, Handle, Handle]:
    """An attention module, a query, and the handles of a layer."""
    layer = compressed(tiny_llama, prompt(1, 300), JoltCache(tiny_llama, ratio=3)).compressible[0]
    layer.reader = None
    keys, values = layer.update(*torch.randn(2, 1, 2, 3, 16))
    assert isinstance(keys, Handle)
    assert isinstance(values, Handle)
    return tiny_llama.model.layers[0].self_attn, torch.randn(1, 4, 3, 16), keys, values


def test_what_sdpa_alone_can_do_is_done_on_decoded_handles(
    handles: tuple[torch.nn.Module, torch.Tensor, Handle, Handle],
) -> None:
    module, query, keys, values = handles
    bias = torch.randn(1, 4, 3, 303)
    got, _ = attention_forward(module, query, keys, values, None, position_bias=bias)
    dense = [dense.repeat_interleave(2, 1) for dense in keys.source.rebuild()]
    scores = query @ dense[0].mT / 4 + bias
    scores = scores.masked_fill(~torch.ones(3, 303, dtype=torch.bool).tril(300), -torch.inf)
    assert torch.allclose(got, (scores.softmax(-1) @ dense[1]).transpose(1, 2), atol=1e-5)
    dropped, _ = attention_forward(module, query, keys, values, None, dropout=0.999)
    assert (dropped == 0).float().mean() > 0.2


def test_handles_that_were_changed_are_attended_to_as_they_are(
    handles: tuple[torch.nn.Module, torch.Tensor, Handle, Handle],
) -> None:
    module, query, keys, values = handles
    values.mul_(0)
    assert not attention_forward(module, query, keys, values, None)[0].any()


@pytest.mark.parametrize("name", ["softcap", "s_aux"])
def test_what_is_not_supported_is_refused_in_words(
    handles: tuple[torch.nn.Module, torch.Tensor, Handle, Handle], name: str
) -> None:
    module, query, keys, values = handles
    for pair in ((keys, values), (keys + 0, values + 0)):
        with pytest.raises(UnsupportedModelError, match=f"{name}.*eager"):
            attention_forward(module, query, *pair, None, **{name: torch.ones(4)})
