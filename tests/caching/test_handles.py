"""Handles: tensors to everyone, decoded only when touched, and gone afterwards."""

import copy
import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import repeat_kv

from kvslim.caching.handles import Handle, LayerView
from kvslim.caching.prefix import Prefix
from kvslim.jolt import JoltCache

MakeTiny = Callable[..., PreTrainedModel]


def prompt(rows: int, tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(2, 128, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def compressed(model: PreTrainedModel, rows: int = 2) -> JoltCache:
    cache = JoltCache(model, ratio=3, window=4)
    with torch.no_grad():
        model(prompt(rows, 150), past_key_values=cache)
    cache.compress()
    assert cache.prefix is not None
    return cache


def hand_out(cache: JoltCache) -> JoltCache:
    """Let the cache give handles to every attention implementation, as if it did not know its model."""
    for layer in cache.compressible:
        layer.reader = None
    return cache


@pytest.fixture
def pair(tiny_llama: PreTrainedModel) -> tuple[Handle, Handle, torch.Tensor, torch.Tensor]:
    """The handles of one layer, and the dense tensors that they stand for."""
    layer = hand_out(compressed(tiny_llama)).compressible[0]
    keys, values = layer.update(*torch.randn(2, 2, 2, 3, 16, generator=torch.Generator().manual_seed(1)))
    assert isinstance(keys, Handle)
    assert isinstance(values, Handle)
    return keys, values, *layer.dense()


def test_metadata_is_there_without_decoding(pair: tuple[Handle, Handle, torch.Tensor, torch.Tensor]) -> None:
    for handle, dense in zip(pair[:2], pair[2:], strict=True):
        assert isinstance(handle, torch.Tensor)
        assert handle.shape == dense.shape == (2, 2, 153, 16)
        assert (handle.dtype, handle.device, handle.layout) == (dense.dtype, dense.device, dense.layout)
        assert (handle.ndim, handle.dim(), len(handle), handle.numel()) == (4, 4, 2, dense.numel())
        assert (handle.size(-2), handle.size(), handle.stride()) == (153, dense.size(), dense.stride())
        assert (handle.is_cuda, handle.requires_grad, handle.is_contiguous()) == (False, False, True)
        assert torch.is_floating_point(handle)
        assert (handle.element_size(), handle.nbytes, handle.get_device()) == (4, dense.nbytes, -1)
        assert not handle.source.decoded


OPERATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "method": lambda x: x.transpose(1, 2),
    "view": lambda x: x.view(4, 153, 16),
    "operator": lambda x: 2 * x,
    "slice": lambda x: x[:, :, 5:9],
    "function": lambda x: torch.cat((x, x), dim=2),
    "matmul": lambda x: torch.ones(2, 2, 1, 16) @ x.mT,
    "repeat_kv": lambda x: repeat_kv(x, 3),
    "expand": lambda x: x[:, :, None].expand(2, 2, 3, 153, 16).reshape(2, 6, 153, 16),
    "sdpa": lambda x: torch.nn.functional.scaled_dot_product_attention(torch.ones(2, 2, 1, 16), x, x),
    "to": lambda x: x.to(torch.float64),
    "detach": lambda x: x.detach(),
    "data": lambda x: x.data,
    "deepcopy": copy.deepcopy,
    "numpy": lambda x: torch.from_numpy(x.numpy()),
    "in place": lambda x: x.clone().mul_(x),
    "out": lambda x: torch.add(x, x, out=torch.empty(2, 2, 153, 16)),
    "list": lambda x: torch.stack(list(x)),
    "T": lambda x: x.mT,
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_sees_the_dense_tensor(
    pair: tuple[Handle, Handle, torch.Tensor, torch.Tensor], name: str
) -> None:
    for handle, dense in zip(pair[:2], pair[2:], strict=True):
        got = OPERATIONS[name](handle)
        assert type(got) is torch.Tensor
        assert torch.equal(got, OPERATIONS[name](dense))


def test_calls_below_python_see_it_too(pair: tuple[Handle, Handle, torch.Tensor, torch.Tensor]) -> None:
    keys, _, dense, _ = pair
    with torch._C.DisableTorchFunctionSubclass():
        got = torch.mul(keys, 2.0)
    assert type(got) is torch.Tensor
    assert torch.equal(got, 2 * dense)
    assert torch.equal(torch.ops.aten.neg(keys), -dense)


def test_changes_in_place_stay_with_the_handle(pair: tuple[Handle, Handle, torch.Tensor, torch.Tensor]) -> None:
    keys, _, dense, _ = pair
    keys[:, :, 0] = 7
    keys.mul_(2)
    dense[:, :, 0] = 7
    assert torch.equal(keys + 0, 2 * dense)


def test_keys_and_values_are_decoded_together_once(
    tiny_llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    original = Prefix.dense

    def counted(self: Prefix, layer: int, extra: int) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(layer)
        return original(self, layer, extra)

    monkeypatch.setattr(Prefix, "dense", counted)
    cache = hand_out(compressed(tiny_llama))
    for implementation in ("sdpa", "eager"):
        calls.clear()
        tiny_llama.set_attn_implementation(implementation)
        with torch.no_grad():
            tiny_llama(prompt(2, 1), past_key_values=cache)
        assert calls == [0, 1]


@pytest.mark.parametrize("implementation", ["sdpa", "eager", "kvslim"])
def test_nothing_keeps_the_dense_tensors(
    tiny_llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, implementation: str
) -> None:
    alive: list[weakref.ref[torch.Tensor]] = []
    views: list[weakref.ref[LayerView]] = []
    rebuild, handles = LayerView.rebuild, LayerView.handles

    def watched(self: LayerView) -> tuple[torch.Tensor, torch.Tensor]:
        assert not any(ref() is not None for ref in alive)  # the layer before is gone already
        pair = rebuild(self)
        alive.extend(weakref.ref(dense) for dense in pair)
        return pair

    def seen(self: LayerView) -> tuple[Handle, Handle]:
        views.append(weakref.ref(self))
        return handles(self)

    monkeypatch.setattr(LayerView, "rebuild", watched)
    monkeypatch.setattr(LayerView, "handles", seen)
    cache = hand_out(compressed(tiny_llama))
    tiny_llama.set_attn_implementation(implementation)
    gc.disable()  # no cycle may be needed to find them
    try:
        with torch.no_grad():
            tiny_llama(prompt(2, 1), past_key_values=cache)
        assert len(views) == 2
        assert len(alive) == (0 if implementation == "kvslim" else 4)
        assert not any(ref() is not None for ref in (*views, *alive))
    finally:
        gc.enable()


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_logits_are_those_of_dense_tensors(
    tiny_llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, implementation: str
) -> None:
    tiny_llama.set_attn_implementation(implementation)
    cache = hand_out(compressed(tiny_llama))
    more = prompt(2, 5, seed=3)
    with torch.no_grad():
        got = [tiny_llama(ids, past_key_values=cache).logits for ids in (more, more[:, :1])]
        cache.crop(-6)
        monkeypatch.setattr(LayerView, "handles", LayerView.rebuild)  # what layers returned before there were handles
        expected = [tiny_llama(ids, past_key_values=cache).logits for ids in (more, more[:, :1])]
    for one, two in zip(got, expected, strict=True):
        assert torch.equal(one, two)


def test_only_attention_that_reads_handles_gets_them(tiny_llama: PreTrainedModel) -> None:
    """The cache follows the model's implementation from step to step, and so does its copy."""
    cache = compressed(tiny_llama)
    for one in (cache, copy.deepcopy(cache)):
        for implementation in ("sdpa", "kvslim", "eager"):
            tiny_llama.set_attn_implementation(implementation)
            keys, values = one.compressible[0].update(torch.zeros(2, 2, 1, 16), torch.zeros(2, 2, 1, 16))
            assert isinstance(keys, Handle) == isinstance(values, Handle) == (implementation == "kvslim")


@pytest.mark.parametrize("implementation", ["sdpa", "kvslim"])
def test_a_compiled_model_works(tiny_llama: PreTrainedModel, implementation: str) -> None:
    cache = compressed(tiny_llama, rows=1)
    more = prompt(1, 3, seed=3)
    with torch.no_grad():
        expected = tiny_llama(more, past_key_values=copy.deepcopy(cache)).logits
        tiny_llama.set_attn_implementation(implementation)
        got = torch.compile(tiny_llama, backend="eager")(more, past_key_values=cache).logits
    assert torch.allclose(got, expected, atol=1e-4)


def test_gradients_reach_the_tail(tiny_llama: PreTrainedModel) -> None:
    layer = hand_out(compressed(tiny_llama)).compressible[0]
    new = torch.randn(2, 2, 3, 16, requires_grad=True)
    keys, values = layer.update(new, new)
    (keys.sum() + 2 * values.sum()).backward()
    assert new.grad is not None
    assert torch.equal(new.grad, torch.full_like(new, 3.0))
