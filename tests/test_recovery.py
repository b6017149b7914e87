"""LoRA recovery on tiny compressed models: what is trained, what is not, and that a break changes nothing."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from kvslim import palu
from kvslim.errors import (
    CheckpointError,
    ConfigError,
    MissingDependencyError,
    NonFiniteError,
    TrainingDataError,
    UnsupportedModelError,
)
from kvslim.palu_config import PaluReport
from kvslim.recovering.adapters import adapted, target_layers
from kvslim.recovering.training import batch_at, rate_at, seed_all
from kvslim.recovery import RecoveryConfig, recover

WINDOWS = torch.randint(3, 128, (4, 48), generator=torch.Generator().manual_seed(7))
IDS = torch.randint(3, 128, (2, 21), generator=torch.Generator().manual_seed(8))
ROWS = [{"instruction": f"count to {n}", "input": "", "output": " ".join(map(str, range(n)))} for n in range(2, 22)]
QUICK = RecoveryConfig(rank=4, alpha=8.0, learning_rate=3e-3, steps=9, batch_size=3, max_length=48)


class Letters:
    """One token per character of ASCII, 2 at the end."""

    bos_token_id, eos_token_id, chat_template = 1, 2, None

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) for letter in text]}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small take longer with more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def slim(make_tiny: Callable[..., PreTrainedModel]) -> PreTrainedModel:
    return palu.compress(make_tiny(head_dim=8), None, palu.PaluConfig(rate=0.5, group_size=1), WINDOWS)


def trained(model: PreTrainedModel, config: RecoveryConfig = QUICK, **options: Any) -> PreTrainedModel:
    """A trained copy."""
    model = copy.deepcopy(model)
    recover(model, Letters(), ROWS, config, **options)
    return model


def weights(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def changed(before: PreTrainedModel, after: PreTrainedModel) -> set[str]:
    old, new = weights(before), weights(after)
    assert old.keys() == new.keys()
    return {name for name, value in new.items() if not torch.equal(value, old[name])}


class Untouched:
    """Modules, weights, flags and global random state are at the end what they are now."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model, self.palu = model, model.palu
        self.before = self._look()
        self.random = torch.get_rng_state()

    def _look(self) -> tuple[Any, ...]:
        return (
            {name: (id(module), type(module), module.training) for name, module in self.model.named_modules()},
            {name: (id(part), part.requires_grad, part.grad) for name, part in self.model.named_parameters()},
        )

    def check(self, values: dict[str, Tensor] | None) -> None:
        assert self._look() == self.before
        assert not hasattr(self.model, "peft_config")
        assert torch.equal(torch.get_rng_state(), self.random)
        if values is not None:
            assert same(weights(self.model), values)
            assert self.model.palu is self.palu


# --- what is trained --------------------------------------------------------------------------------------------------


def test_the_loss_falls_and_only_the_projections_to_latents_change(slim: PreTrainedModel) -> None:
    slim.lm_head.requires_grad_(False)
    slim.model.layers[1].train()
    before, untouched = copy.deepcopy(slim), Untouched(slim)
    calls: list[tuple[str, int, int]] = []
    config = RecoveryConfig(**{**QUICK.to_dict(), "steps": 40, "dropout": 0.0, "learning_rate": 2e-2})
    report = recover(slim, Letters(), ROWS, config, progress=lambda *call: calls.append(call))
    untouched.check(None)
    assert report.last_loss < report.first_loss - 0.3
    assert calls == [("recovery", step, 40) for step in range(1, 41)]
    expected = {f"model.layers.{n}.self_attn.{kind}_latent.down.weight" for n in (0, 1) for kind in "kv"}
    assert changed(before, slim) == expected
    assert report.steps == len(report.losses) == 40
    shapes = [tuple(value.shape) for name, value in weights(slim).items() if name in expected]
    assert report.parameters == sum(4 * (rows + columns) for rows, columns in shapes)
    assert slim.palu.recoveries == (report,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merged_weights_are_the_product_of_the_adapters(slim: PreTrainedModel, dtype: torch.dtype) -> None:
    slim.to(dtype)
    layers, start = target_layers(slim, ("latents",)), weights(slim)
    with torch.random.fork_rng(devices=[]), adapted(slim, QUICK) as parameters:
        assert {name for name, part in slim.named_parameters() if part.requires_grad} == {
            f"{name}.{part}.recovery.weight" for name in layers for part in ("lora_A", "lora_B")
        }
        assert {part.dtype for part in parameters.values()} == {torch.float32}
        with torch.no_grad():
            for number, part in enumerate(parameters.values()):
                part.normal_(generator=torch.Generator().manual_seed(number))
        product = {
            name: QUICK.alpha / QUICK.rank * parameters[f"{name}.lora_B"] @ parameters[f"{name}.lora_A"]
            for name in layers
        }
        during = slim.eval()(IDS, use_cache=False).logits  # the adapters' dropout was on
    for name, layer in layers.items():
        torch.testing.assert_close(layer.weight, start[f"{name}.weight"] + product[name].to(dtype))
        assert slim.get_submodule(name) is layer
    if dtype is torch.float32:
        torch.testing.assert_close(slim(IDS, use_cache=False).logits, during, atol=1e-3, rtol=1e-3)


def test_the_first_step_is_adamw_on_the_gradient_by_hand(slim: PreTrainedModel) -> None:
    config = RecoveryConfig(rank=2, steps=1, batch_size=2, max_length=32, pack=False, dropout=0.0, warmup=0.0)
    rows, expected = ["abcdef", "ghi"], copy.deepcopy(slim)
    report = recover(slim, Letters(), rows, config)
    total = torch.zeros(())
    for row in rows:
        ids = torch.tensor([[*map(ord, row), 2]])
        total = total + torch.nn.functional.cross_entropy(
            expected(ids, use_cache=False).logits[0, :-1], ids[0, 1:], reduction="sum"
        )
    loss = total / (6 + 3)
    assert report.losses[0] == pytest.approx(loss.item(), rel=1e-5)
    # B' starts at zero, so only it moves. Adam's first step is the sign of its gradient: that of W times A' transposed.
    down = expected.model.layers[0].self_attn.k_latent.down
    (gradient,) = torch.autograd.grad(loss, down.weight)
    with torch.random.fork_rng(devices=[]):
        seed_all(config.seed, torch.device("cpu"))
        other = copy.deepcopy(expected)
        with adapted(other, config) as parameters:
            start = parameters["model.layers.0.self_attn.k_latent.down.lora_A"].detach().clone()
    scale = config.alpha / config.rank
    step = -config.learning_rate * torch.sign(gradient @ start.T) @ start * scale
    moved = slim.model.layers[0].self_attn.k_latent.down.weight - down.weight
    torch.testing.assert_close(moved, step, atol=1e-6, rtol=2e-3)


@pytest.mark.parametrize(
    ("targets", "parts"),
    [
        (("attention",), {"q_proj", "o_proj"}),
        (("mlp", "latents"), {"down", "gate_proj", "up_proj", "down_proj"}),
        (("latents", "attention", "mlp"), {"down", "q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}),
    ],
)
def test_other_layers_can_be_trained(slim: PreTrainedModel, targets: tuple[str, ...], parts: set[str]) -> None:
    after = trained(slim, RecoveryConfig(**{**QUICK.to_dict(), "targets": targets, "steps": 2}))
    names = changed(slim, after)
    assert {name.split(".")[-2] for name in names} == parts
    assert len(names) == 2 * (len(parts) + ("down" in parts))  # two layers; keys and values each have a ``down``


def test_micro_batches_only_save_memory(slim: PreTrainedModel) -> None:
    config = {**QUICK.to_dict(), "dropout": 0.0, "steps": 3}
    whole = trained(slim, RecoveryConfig(**config))
    parts = trained(slim, RecoveryConfig(**{**config, "micro_batch": 2}))
    for one, other in zip(whole.palu.recoveries[0].losses, parts.palu.recoveries[0].losses, strict=True):
        assert one == pytest.approx(other, rel=1e-4)


def test_saved_and_loaded_with_the_record(slim: PreTrainedModel, tmp_path: Path) -> None:
    recover(slim, Letters(), ROWS, QUICK)
    recover(slim, Letters(), ROWS[:4], QUICK)
    palu.save(slim, tmp_path / "slim")
    loaded = palu.load(tmp_path / "slim")
    assert torch.equal(loaded(IDS, use_cache=False).logits, slim(IDS, use_cache=False).logits)
    assert loaded.palu == slim.palu
    assert len(loaded.palu.recoveries) == 2
    assert PaluReport.from_dict(json.loads(json.dumps(slim.palu.to_dict()))) == slim.palu


# --- the same again ---------------------------------------------------------------------------------------------------


def test_a_seed_gives_the_same_weights_again(slim: PreTrainedModel) -> None:
    torch.manual_seed(1)
    one = trained(slim)
    torch.manual_seed(2)
    random = torch.get_rng_state()
    other = trained(slim)
    assert torch.equal(torch.get_rng_state(), random)
    assert same(weights(one), weights(other))
    assert one.palu == other.palu
    assert changed(one, trained(slim, RecoveryConfig(**{**QUICK.to_dict(), "seed": 1})))


@pytest.mark.parametrize("stop", [1, 4, 5, 8, 9])
@pytest.mark.parametrize("every", [1, 3, 4])
def test_a_break_changes_nothing(slim: PreTrainedModel, tmp_path: Path, stop: int, every: int) -> None:
    place, whole = tmp_path / "state", trained(slim)
    values, untouched, done = weights(slim), Untouched(slim), list[int]()

    def interrupt(_: str, step: int, __: int) -> None:
        done.append(step)
        if step == stop:
            torch.rand(3)  # what a caller draws has no influence
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        recover(slim, Letters(), ROWS, QUICK, checkpoint=place, checkpoint_every=every, progress=interrupt)
    untouched.check(values)
    again: list[int] = []
    after = trained(slim, checkpoint=place, checkpoint_every=every, progress=lambda _, step, __: again.append(step))
    first = stop if stop == QUICK.steps else stop // every * every
    assert again == list(range(first + 1, 10))
    assert same(weights(after), weights(whole))
    assert after.palu == whole.palu


def test_killed_again_and_again(slim: PreTrainedModel, tmp_path: Path) -> None:
    place, whole = tmp_path / "state", trained(slim)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    for _ in range(9):
        with pytest.raises(KeyboardInterrupt):
            recover(slim, Letters(), ROWS, QUICK, checkpoint=place, checkpoint_every=1, progress=interrupt)
    after = trained(slim, checkpoint=place)  # all steps are done: only the merge is left
    assert same(weights(after), weights(whole))
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


# --- the state on disk ------------------------------------------------------------------------------------------------


def test_a_state_for_something_else_is_refused(slim: PreTrainedModel, tmp_path: Path) -> None:
    place = tmp_path / "state"
    after = trained(slim, checkpoint=place)
    values, untouched = weights(slim), Untouched(slim)
    with pytest.raises(CheckpointError, match=r"other settings \(rank, seed\)"):
        recover(slim, Letters(), ROWS, RecoveryConfig(**{**QUICK.to_dict(), "rank": 8, "seed": 3}), checkpoint=place)
    with pytest.raises(CheckpointError, match="other data"):
        recover(slim, Letters(), ROWS[1:], QUICK, checkpoint=place)
    with pytest.raises(CheckpointError, match="another model"):
        recover(after, Letters(), ROWS, QUICK, checkpoint=place)
    untouched.check(values)


def test_a_damaged_state_is_refused(slim: PreTrainedModel, tmp_path: Path) -> None:
    place = tmp_path / "state"
    trained(slim, checkpoint=place)
    data, values, untouched = place.read_bytes(), weights(slim), Untouched(slim)
    broken = [b"", data[:100], data[:-4], bytes(200), data[:-1] + bytes([data[-1] ^ 1])]
    at = data.index(b"losses") + 12
    broken.append(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    for content in broken:
        place.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"is damaged.*Remove it"):
            recover(slim, Letters(), ROWS, QUICK, checkpoint=place)
    place.write_bytes(data.replace(b'"kvslim_recovery":"1"', b'"kvslim_recovery":"9"'))
    with pytest.raises(CheckpointError, match="format version 9"):
        recover(slim, Letters(), ROWS, QUICK, checkpoint=place)
    save_file({"other": torch.zeros(1)}, place)
    with pytest.raises(CheckpointError, match="no such file"):
        recover(slim, Letters(), ROWS, QUICK, checkpoint=place)
    untouched.check(values)


def test_the_state_is_float32_in_safetensors(slim: PreTrainedModel, tmp_path: Path) -> None:
    slim.bfloat16()
    trained(slim, checkpoint=tmp_path / "state")
    tensors = load_file(tmp_path / "state")
    assert {value.dtype for value in tensors.values()} == {torch.float32}
    assert len(tensors) == 4 * 2 * 3  # four projections, two factors, and the moments of each


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rank": 0}, "rank"),
        ({"alpha": 0}, "alpha"),
        ({"learning_rate": float("nan")}, "learning_rate"),
        ({"epochs": 1.5}, "epochs"),
        ({"steps": 0}, "steps"),
        ({"batch_size": True}, "batch_size"),
        ({"micro_batch": 0}, "micro_batch"),
        ({"max_length": 1}, "max_length"),
        ({"seed": -1}, "seed"),
        ({"warmup": 1.0}, "warmup"),
        ({"dropout": -0.1}, "dropout"),
        ({"weight_decay": -1}, "weight_decay"),
        ({"pack": 1}, "pack"),
        ({"template": "vicuna"}, "alpaca, chat"),
        ({"schedule": "step"}, "cosine, linear, constant"),
        ({"targets": []}, "latents, attention, mlp"),
        ({"targets": "latents"}, "latents, attention, mlp"),
        ({"targets": ["keys"]}, "latents, attention, mlp"),
        ({"lr": 1e-3}, "no field 'lr'"),
    ],
)
def test_bad_settings(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RecoveryConfig.from_dict(fields)


def test_settings_round_trip() -> None:
    config = RecoveryConfig(targets=("mlp", "latents"), steps=5, schedule="linear")
    assert RecoveryConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert config.targets == ("latents", "mlp")


def test_failing_calls_leave_the_model_untouched(slim: PreTrainedModel, tmp_path: Path) -> None:
    values, untouched = weights(slim), Untouched(slim)
    with pytest.raises(TrainingDataError, match="no rows"):
        recover(slim, Letters(), [], QUICK)
    with pytest.raises(ConfigError, match="4096 positions"):
        recover(slim, Letters(), ROWS, RecoveryConfig(max_length=5000))
    with pytest.raises(ConfigError, match="checkpoint_every"):
        recover(slim, Letters(), ROWS, QUICK, checkpoint_every=0)
    with pytest.raises(ConfigError, match="is a directory"):
        recover(slim, Letters(), ROWS, QUICK, checkpoint=tmp_path)

    def fail(*_: Any) -> None:
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        recover(slim, Letters(), ROWS, QUICK, progress=fail)
    untouched.check(values)


def test_losses_that_are_not_finite(slim: PreTrainedModel) -> None:
    with torch.no_grad():
        slim.model.norm.weight[0] = float("nan")
    untouched = Untouched(slim)
    down = slim.model.layers[0].self_attn.k_latent.down.weight.clone()
    with pytest.raises(NonFiniteError, match="step 1 of the recovery"):
        recover(slim, Letters(), ROWS, QUICK)
    untouched.check(None)
    assert torch.equal(slim.model.layers[0].self_attn.k_latent.down.weight, down)


def test_a_merge_that_fails_midway_is_undone(slim: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    values, untouched = weights(slim), Untouched(slim)
    merge, calls = peft.tuners.lora.Linear.merge, list[int]()

    def failing(self: Any, *args: Any, **kwargs: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        merge(self, *args, **kwargs)

    monkeypatch.setattr(peft.tuners.lora.Linear, "merge", failing)
    with pytest.raises(KeyboardInterrupt):
        recover(slim, Letters(), ROWS, QUICK)
    untouched.check(values)


def test_adapters_that_are_not_finite_are_not_merged(slim: PreTrainedModel) -> None:
    values = weights(slim)
    with pytest.raises(NonFiniteError, match="do not fit"), adapted(slim, QUICK) as parameters, torch.no_grad():
        list(parameters.values())[-1].fill_(float("nan"))
    assert same(weights(slim), values)


def test_models_that_cannot_be_recovered(make_tiny: Callable[..., PreTrainedModel], slim: PreTrainedModel) -> None:
    with pytest.raises(UnsupportedModelError, match="not compressed"):
        recover(make_tiny(), Letters(), ROWS, QUICK)
    slim.model.layers[0].self_attn.q_proj.to("meta")
    with pytest.raises(UnsupportedModelError, match="on meta"):
        recover(slim, Letters(), ROWS, RecoveryConfig(targets=("attention",)))
    with pytest.raises(UnsupportedModelError, match="several devices"):
        recover(slim, Letters(), ROWS, QUICK)


def test_without_peft_the_message_says_how_to_install_it(
    slim: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'kvslim\[recovery\]'"):
        recover(slim, Letters(), ROWS, QUICK)


# --- schedule and order -----------------------------------------------------------------------------------------------


def test_the_learning_rate_rises_and_falls_as_a_cosine() -> None:
    config = RecoveryConfig(learning_rate=1.0, warmup=0.2)
    rates = [rate_at(step, 10, config) for step in range(10)]
    assert rates[:3] == pytest.approx([1 / 3, 2 / 3, 1.0])
    assert rates[6] == pytest.approx(0.5)
    assert sorted(rates[2:], reverse=True) == rates[2:]
    assert 0 < rates[9] < 0.05
    linear = RecoveryConfig(learning_rate=1.0, warmup=0.0, schedule="linear")
    assert [rate_at(step, 4, linear) for step in range(4)] == [1.0, 0.75, 0.5, 0.25]
    assert rate_at(3, 4, RecoveryConfig(learning_rate=1.0, warmup=0.0, schedule="constant")) == 1.0


@pytest.mark.parametrize(("sequences", "size"), [(7, 3), (6, 3), (2, 5)])
def test_every_epoch_has_every_sequence_once_in_its_own_order(sequences: int, size: int) -> None:
    config = RecoveryConfig(batch_size=size)
    per_epoch = -(-sequences // size)
    epochs = [
        [index for step in range(per_epoch) for index in batch_at(epoch * per_epoch + step, sequences, config)]
        for epoch in range(8)
    ]
    assert all(sorted(epoch) == list(range(sequences)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1
