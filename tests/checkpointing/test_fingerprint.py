"""The identity of a model: the same wherever it lies, another one for every other model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from kvslim.checkpointing.fingerprint import ModelIdentity, identity_of, tokenizer_hash, weights_hash
from kvslim.errors import ConfigError, UnsupportedModelError

MakeTiny = Callable[..., PreTrainedModel]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_survives_saving_and_compiling(make_tiny: MakeTiny, tmp_path: Path, dtype: torch.dtype) -> None:
    model = make_tiny().to(dtype)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    assert identity_of(again) == identity_of(model) == identity_of(model.base_model)
    compiled = copy.deepcopy(model)
    compiled.model.layers[0] = torch.compile(compiled.model.layers[0])
    assert weights_hash(compiled) == weights_hash(model)
    assert ModelIdentity.from_dict(identity_of(model).to_dict()) == identity_of(model)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_it_is_the_same_on_the_gpu(make_tiny: MakeTiny) -> None:
    assert identity_of(make_tiny().to("cuda")) == identity_of(make_tiny())


def test_every_other_set_of_weights_has_another_hash(make_tiny: MakeTiny) -> None:
    model = make_tiny()
    before = weights_hash(model)
    for name, weight in model.base_model.named_parameters():
        with torch.no_grad():
            weight.mul_(1.001)
        changed = weights_hash(model)
        assert changed != before, name
        before = changed
    assert weights_hash(make_tiny(seed=1)) != weights_hash(make_tiny())
    with torch.no_grad():
        model.lm_head.weight.mul_(2)  # it has no part in keys and values
    assert weights_hash(model) == before


def test_the_first_difference_is_named(make_tiny: MakeTiny) -> None:
    one = identity_of(make_tiny())
    assert one.difference(one) is None
    assert one.difference(identity_of(make_tiny(layers=3))) == "layers: 3"
    assert str(one.difference(identity_of(make_tiny(seed=2)))).startswith("other weights than it has (hash ")
    assert one.difference(identity_of(make_tiny("mistral", sliding_window=8, layers=3))) == "model type 'mistral'"
    assert "llama with 2 layers, 2 KV heads × 16, float32" in one.summary()


def test_long_rope_parameters_are_kept_short(make_tiny: MakeTiny) -> None:
    model = make_tiny()
    model.config.rope_parameters = {"rope_type": "longrope", "short_factor": [1.0] * 64, "long_factor": [2.0] * 64}
    rope = identity_of(model).rope
    assert rope["rope_type"] == "longrope"
    assert len(rope["short_factor"]) == 16
    assert rope["short_factor"] != rope["long_factor"]


def test_what_has_no_identity(make_tiny: MakeTiny) -> None:
    with torch.device("meta"):
        model = copy.deepcopy(make_tiny()).to("meta")
    with pytest.raises(UnsupportedModelError, match="not in memory"):
        identity_of(model)
    with pytest.raises(ConfigError, match="no tokenizer"):
        tokenizer_hash(None)  # type: ignore[arg-type]


def test_a_tokenizer_is_known_by_its_vocabulary() -> None:
    class Words:
        def __init__(self, **words: int) -> None:
            self.words = words

        def get_vocab(self) -> dict[str, int]:
            return self.words

    assert tokenizer_hash(Words(a=0, b=1)) == tokenizer_hash(Words(b=1, a=0))  # type: ignore[arg-type]
    assert tokenizer_hash(Words(a=0, b=1)) != tokenizer_hash(Words(a=1, b=0))  # type: ignore[arg-type]
