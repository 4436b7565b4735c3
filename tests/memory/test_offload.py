"""Offloaded gradients are bitwise those of plain recompute, whatever the order of forwards and backwards."""

import errno
import gc
import weakref
from collections.abc import Callable
from contextlib import contextmanager
from itertools import count
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from late import LateTransfers
from offloading import IDS, LAYERS, assert_same_bits, deep, loss_of, offloaded, plain, step
from packed import documents, gradients, logits_of, model_of, row_of, with_adapter
from slipstream import InputError, Options, apply
from slipstream.cost.offload import Split
from slipstream.memory import host_buffers
from slipstream.memory.held import Held, Layout
from slipstream.memory.transfers import DeviceMemory, HostTransfers
from slipstream.train.loss import summed_cross_entropy

OTHER = torch.arange(40, 70)[None]


@pytest.mark.parametrize("transfers", [LateTransfers, HostTransfers])
@pytest.mark.parametrize("buffers", [1, 2, 3, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_bitwise_those_of_recompute(dtype: torch.dtype, buffers: int, transfers: Any) -> None:
    expected = step(plain(deep().to(dtype)))
    model = deep().to(dtype)
    with offloaded(model, buffers=buffers, transfers=transfers()) as made:
        assert_same_bits(step(model), expected)
        assert (made.lane.sent, made.lane.reloads) == (LAYERS - 1, LAYERS - 1)
        assert made.offload.pool.held == (LAYERS - 1) * IDS.numel() * 32 * dtype.itemsize  # buffers follow the dtype


def two_in_order(model: Any) -> None:
    first, second = loss_of(model), loss_of(model, OTHER)
    first.backward()
    second.backward()


def two_reversed(model: Any) -> None:
    first, second = loss_of(model), loss_of(model, OTHER)
    second.backward()
    first.backward()


def interleaved(model: Any) -> None:
    """Forward A, forward B, backward B, forward C, backward A, backward C."""
    a, b = loss_of(model), loss_of(model, OTHER)
    b.backward()
    c = loss_of(model, OTHER[:, 3:19])
    a.backward()
    c.backward()


def retained_twice(model: Any) -> None:
    loss = loss_of(model)
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    loss.backward()


def accumulated(model: Any) -> None:
    for ids in (IDS, OTHER, IDS + 1):
        loss_of(model, ids).backward()


def dropped_forward(model: Any) -> None:
    loss_of(model, OTHER)
    loss_of(model).backward()


def evaluation_between(model: Any) -> None:
    loss = loss_of(model)
    model.eval()
    with torch.no_grad():
        loss_of(model, OTHER)
    with torch.inference_mode():
        loss_of(model, OTHER)
    model.train()
    loss.backward()
    loss_of(model, OTHER).backward()


def summed(model: Any) -> None:
    (loss_of(model) + loss_of(model, OTHER)).backward()


def partial_gradient(model: Any) -> None:
    """A backward that stops half-way, whose reloads ahead nobody asks for."""
    loss = loss_of(model)
    (part,) = torch.autograd.grad(loss, [model.model.layers[3].mlp.up_proj.weight], retain_graph=True)
    loss.backward()
    model.model.layers[3].mlp.up_proj.weight.grad.add_(part)


ORDERS = (
    two_in_order,
    two_reversed,
    interleaved,
    retained_twice,
    accumulated,
    dropped_forward,
    evaluation_between,
    summed,
    partial_gradient,
)


@pytest.mark.parametrize("buffers", [1, 2, 4])
@pytest.mark.parametrize("run", ORDERS)
def test_any_order_of_forwards_and_backwards(run: Callable[[Any], None], buffers: int) -> None:
    expected = step(plain(deep()), run)
    model = deep()
    with offloaded(model, buffers=buffers) as made:
        for _ in range(2):  # the second time with buffers used before
            assert_same_bits(step(model, run), expected)
        assert made.lane.reloads > LAYERS - 1
        assert not made.lane.filled
        assert made.offload.pool.idle == made.offload.pool.held


def test_nested_checkpoints() -> None:
    def nested(model: Any) -> None:
        checkpoint(lambda ids: loss_of(model, ids), IDS, use_reentrant=False).backward()

    expected = step(plain(deep()), nested)
    model = deep()
    with offloaded(model) as made:
        assert_same_bits(step(model, nested), expected)
        assert made.lane.sent == 2 * (LAYERS - 1)  # the outer recompute is a forward of its own
        assert made.offload.pool.idle == made.offload.pool.held


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3_text", "gpt_oss", "qwen3_moe"])
def test_packed_rows_of_families(family: str) -> None:
    layers = {"num_hidden_layers": 4}
    if family in ("gemma3_text", "gpt_oss", "qwen2"):
        layers["layer_types"] = ["sliding_attention", "full_attention"] * 2
    row = row_of(documents())

    def run(model: Any) -> None:
        summed_cross_entropy(logits_of(model, row), row["labels"]).backward()

    expected = step(apply(with_adapter(model_of(family, **layers)), Options(activations="recompute")), run)
    model = apply(with_adapter(model_of(family, **layers)), Options(activations="keep"))
    base = model.get_base_model()
    base._slipstream.checkpointing.hooks.pop().remove()  # else what apply chose would be put back
    with offloaded(base) as made:
        assert_same_bits(step(model, run), expected)
        assert made.lane.reloads == 3


def test_dropout_is_drawn_again_as_it_was() -> None:
    def run(model: Any) -> None:
        torch.manual_seed(3)
        loss_of(model).backward()

    expected = step(plain(with_adapter(deep(), dropout=0.5).get_base_model()), run)
    without = step(plain(with_adapter(deep()).get_base_model()), run)
    assert any(not torch.equal(expected[name], without[name]) for name in expected)  # dropout does something
    model = with_adapter(deep(), dropout=0.5).get_base_model()
    with offloaded(model):
        assert_same_bits(step(model, run), expected)


def test_frozen_layers_and_tied_embeddings() -> None:
    def prepared() -> Any:
        model = deep(tie_word_embeddings=True)
        for layer in model.model.layers[:2]:
            layer.requires_grad_(False)
        model.model.layers[3].requires_grad_(False)
        return model

    def frozen_embeddings(model: Any) -> Any:
        model.model.embed_tokens.weight.requires_grad_(False)
        return model

    for change in (lambda model: model, frozen_embeddings):
        expected = step(plain(change(prepared())))
        model = change(prepared())
        with offloaded(model) as made:
            assert_same_bits(step(model), expected)
            assert made.lane.reloads > 0
            assert made.offload.pool.idle == made.offload.pool.held


@pytest.mark.parametrize("split", [Split(2, 1, 2), Split(0, 3, 2), Split(1, 2, 2), Split(3, 1, 1)])
def test_some_kept_some_recomputed_the_rest_offloaded(split: Split) -> None:
    expected = step(plain(deep()))
    model = deep()
    calls = []
    for index, layer in enumerate(model.model.layers):
        layer.mlp.register_forward_pre_hook(lambda *_, index=index: calls.append(index))
    with offloaded(model, split=split) as made:
        assert_same_bits(step(model), expected)
        assert made.lane.sent == made.lane.reloads == split.offloaded
    recomputed = [index for index in range(LAYERS) if calls.count(index) == 2]
    assert recomputed == list(range(split.offloaded + split.recomputed))


# When copies are issued


def test_the_next_reload_is_issued_before_a_layers_recompute() -> None:
    model = deep()
    with offloaded(model) as made:
        log = made.device.log
        loss = loss_of(model)
        for index, layer in enumerate(model.model.layers):
            layer.input_layernorm.register_forward_pre_hook(lambda *_, index=index: log.append(f"layer {index}"))
        del log[:]
        loss.backward()
    expected = ["back", f"layer {LAYERS - 1}"]
    for index in reversed(range(1, LAYERS - 1)):
        expected += ["back", "join", f"layer {index}"]
    assert log == [*expected, "join", "layer 0"]


def test_one_buffer_reloads_when_the_layer_asks() -> None:
    model = deep()
    with offloaded(model, buffers=1) as made:
        loss = loss_of(model)
        del made.device.log[:]
        loss.backward()
        assert made.device.log == ["back", "join"] * (LAYERS - 1)


def test_copies_out_are_joined_a_layer_later() -> None:
    model = deep()
    with offloaded(model) as made:
        log = made.device.log
        for index, layer in enumerate(model.model.layers):
            layer.input_layernorm.register_forward_pre_hook(lambda *_, index=index: log.append(f"layer {index}"))
        loss_of(model)
    assert log[:5] == ["out", "layer 0", "join", "out", "layer 1"]
    assert log[-2:] == ["join", f"layer {LAYERS - 1}"]  # the last layer's input stays


@pytest.mark.parametrize("buffers", [1, 2, 3])
def test_no_more_reloads_are_under_way_than_buffers(buffers: int) -> None:
    model, most = deep(num_hidden_layers=8), []
    with offloaded(model, buffers=buffers) as made:
        loss = loss_of(model)
        for layer in model.model.layers:
            layer.input_layernorm.register_forward_pre_hook(lambda *_: most.append(made.lane.ahead))
        loss.backward()
        assert max(most) == buffers - 1
        assert made.lane.ahead == 0


def test_a_copy_waits_for_the_copies_it_depends_on() -> None:
    """A reload for the copy out before it, a copy out for the reloads of who had the buffer before."""
    model = deep()
    with offloaded(model) as made:
        step(model)
        first = list(made.device.copies)
        step(model)
        second = made.device.copies[len(first) :]
    outs, backs = first[: LAYERS - 1], first[LAYERS - 1 :]
    assert [copy.after for copy in outs] == [[]] * (LAYERS - 1)
    assert [copy.after for copy in backs] == [[out] for out in reversed(outs)]
    assert {tuple(copy.after) for copy in second[: LAYERS - 1]} == set(zip(outs, reversed(backs), strict=True))


def test_a_reload_nobody_wants_is_joined_before_its_buffer_goes() -> None:
    model = deep()
    with offloaded(model) as made:
        loss = loss_of(model)
        torch.autograd.grad(loss, [model.model.layers[3].mlp.up_proj.weight])
        del loss
        ((_, mark),) = made.lane.abandoned
        assert not mark.done
        loss_of(model)
        assert mark.done
        assert not made.lane.abandoned


def test_a_pass_ends_where_the_first_layer_comes_again() -> None:
    model = deep()
    with offloaded(model):
        losses = [loss_of(model), loss_of(model, OTHER)]
        held = [one for one in gc.get_objects() if isinstance(one, Held)]
        assert len(held) == 2 * LAYERS
        assert sum(one.earlier() is None for one in held) == 2
        torch.stack(losses).sum().backward()


# What is given back


def test_nothing_is_left_over_many_steps() -> None:
    model, ids = deep(num_hidden_layers=3), IDS[:, :8]
    with offloaded(model) as made:
        loss_of(model, ids).backward()
        held = made.offload.pool.held
        gc.collect()
        gc.disable()  # reference counts alone must free it
        try:
            for number in range(60):
                loss = loss_of(model, ids)
                if number % 3:
                    loss.backward()
                del loss  # every third is a forward without a backward
            assert not [o for o in gc.get_objects() if isinstance(o, Held)]
        finally:
            gc.enable()
        assert made.lane.sent == 61 * 2
        assert made.offload.pool.held == made.offload.pool.idle == held
        assert not made.lane.leaving
        assert made.lane.ahead == 0
        assert len(made.device.pinned) == 2
    assert made.offload.pool.held == 0
    assert not made.device.pinned


def test_restore_before_the_backward_gives_back_after_it() -> None:
    expected = step(plain(deep()))
    model = deep()
    with offloaded(model) as made:
        loss = loss_of(model)
    assert made.offload.pool.held > 0  # the graph still needs it
    model.zero_grad(set_to_none=True)
    loss.backward()
    assert_same_bits({n: p.grad for n, p in model.named_parameters() if p.grad is not None}, expected)
    assert made.offload.pool.held == 0
    assert not made.device.pinned


def test_inputs_leave_the_device() -> None:
    """Between forward and backward only the last layer's input is alive."""
    model, inputs = deep(), []
    for layer in model.model.layers:
        layer.input_layernorm.register_forward_pre_hook(lambda _, args: inputs.append(weakref.ref(args[0])))
    with offloaded(model) as made:
        loss = loss_of(model)
        held = [one for one in gc.get_objects() if isinstance(one, Held)]
        assert len(held) == LAYERS
        assert sum(one.kept is not None for one in held) == 1
        assert not made.lane.leaving
        assert len(inputs) == LAYERS
        assert sum(one() is not None for one in inputs) <= 1
        loss.backward()


# What can't be copied back exactly


def test_only_dense_aligned_inputs_leave() -> None:
    assert Layout.of(torch.empty(2, 3, 4)).dense
    assert Layout.of(torch.empty(2, 3, 4).transpose(0, 2)).dense
    assert Layout.of(torch.empty(2, 1, 4)[:, :, :]).dense
    assert not Layout.of(torch.empty(2, 3, 4)[:, :, :2]).dense
    assert not Layout.of(torch.empty(4).expand(3, 4)).dense
    assert not Layout.of(torch.empty(0, 4)).dense
    x = torch.randn(2, 3, 4).transpose(0, 1)
    layout = Layout.of(x)
    assert layout.nbytes == 2 * 3 * 4 * 4
    back = layout.restored(layout.flat(x).clone())
    assert torch.equal(back, x)
    assert back.stride() == x.stride()


@pytest.mark.parametrize(
    ("view", "sent"),
    [
        (lambda x: x.transpose(0, 1).contiguous().transpose(0, 1), True),
        (lambda x: torch.cat([x, x], dim=-1)[..., : x.shape[-1]], False),
        (lambda x: torch.cat([x, x], dim=0)[1:], True),
        (lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape), False),
    ],
    ids=["permuted", "gaps", "part", "unaligned"],
)
def test_views_and_strides_come_back_as_they_were(view: Callable[[torch.Tensor], torch.Tensor], sent: bool) -> None:
    ids = torch.cat([IDS, IDS + 3])

    def prepared() -> tuple[Any, list[Any]]:
        model, seen = deep(), []

        def change(layer: Any, args: Any) -> Any:
            return (view(args[0]), *args[1:])

        model.model.layers[2].input_layernorm.register_forward_pre_hook(
            lambda _, args: seen.append((args[0].shape, args[0].stride()))
        )
        forward = model.model.layers[1].forward
        model.model.layers[1].forward = lambda *a, **k: view(forward(*a, **k))
        return model, seen

    def run(model: Any) -> None:
        loss_of(model, ids).backward()

    model, seen = prepared()
    expected = step(plain(model), run)
    assert len(seen) == 2
    model, ours = prepared()
    with offloaded(model) as made:
        assert_same_bits(step(model, run), expected)
        assert made.lane.sent == LAYERS - 1 - (not sent)
    assert ours == seen  # the same strides, in the forward and in the recompute


def test_an_input_changed_in_place_is_an_error_and_never_a_wrong_number() -> None:
    def prepared(index: int) -> Any:
        model = deep()

        def spoil(_: Any, args: tuple[Any, ...], __: Any) -> None:
            args[0].detach().add_(1.0)

        model.model.layers[index].register_forward_hook(spoil)
        return model

    model = prepared(1)
    with offloaded(model), pytest.raises(RuntimeError, match="changed in place while it was being copied"):
        loss_of(model)
    model = prepared(LAYERS - 1)
    with offloaded(model), pytest.raises(RuntimeError, match="changed in place after the layer's forward"):
        loss_of(model).backward()


# Several devices


class Apart(LateTransfers):
    """One of several devices, whose reloads are written down among those of all."""

    def __init__(self, name: str, log: list[str]) -> None:
        super().__init__()
        self.name, self.all = name, log

    def back(self, *args: Any) -> Any:
        self.all.append(f"back {self.name}")
        return super().back(*args)


def test_a_device_reloads_nothing_of_anothers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another device's current stream is not known to the thread at work on this one."""
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    log: list[str] = []
    devices: dict[Any, Any] = {first: Apart("0", log), second: Apart("1", log)}
    model, where = deep(), [first] * 3 + [second] * (LAYERS - 3)
    expected = step(plain(deep()))
    layers = model.model.layers
    with offloaded(model, buffers=3) as made:
        made.offload._transfers = devices.__getitem__
        lane_of, calls = made.offload._lane, iter(where)
        monkeypatch.setattr(made.offload, "_lane", lambda _: lane_of(next(calls)))
        # the described devices have no memory of their own
        monkeypatch.setattr(Held, "_slot", lambda held: torch.empty(held.layout.elements, dtype=held.layout.dtype))
        for index, layer in enumerate(layers):
            layer.input_layernorm.register_forward_pre_hook(lambda *_, index=index: log.append(f"layer {index}"))
        assert_same_bits(step(model), expected)
        assert {lane.device: lane.sent for lane in made.offload.lanes.values()} == {first: 3, second: 1}
    backward = log[LAYERS:]
    assert backward == [
        "back 1",  # input 3, ahead of layer 4; not those of device 0 too, though three buffers may fill
        "layer 4",
        "layer 3",
        "back 0",  # input 2, when layer 2 asks, and 1 and 0 ahead
        "back 0",
        "back 0",
        "layer 2",
        "layer 1",
        "layer 0",
    ]


# Too little memory


class Scarce:
    """Allocations of reload buffers fail on these calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *failing: int) -> None:
        self.calls, real = 0, Held._slot

        def slot(held: Held) -> torch.Tensor:
            self.calls += 1
            if self.calls in failing:
                raise torch.OutOfMemoryError("out of memory")
            return real(held)

        monkeypatch.setattr(Held, "_slot", slot)


@pytest.mark.parametrize(("failing", "left"), [((1,), 3), ((3,), 3), ((1, 3), 2), ((1, 3, 5), 1)])
def test_out_of_memory_ahead_goes_on_with_fewer_buffers(
    monkeypatch: pytest.MonkeyPatch, failing: tuple[int, ...], left: int
) -> None:
    expected = step(plain(deep()))
    model = deep()
    with offloaded(model, buffers=4) as made:
        scarce = Scarce(monkeypatch, *failing)
        assert_same_bits(step(model), expected)
        assert scarce.calls == LAYERS - 1 + len(failing)
        assert made.lane.most == left
        assert [note.name for note in made.notes] == ["reload buffers"] * len(failing)
        assert made.notes[-1].on == (left > 1)
        assert f"{left} left" in made.notes[-1].reason
        assert_same_bits(step(model), expected)
        assert len(made.notes) == len(failing)  # not tried again


def test_out_of_memory_for_the_input_needed_now_frees_what_was_filled_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here what was filled belongs to another graph, whose backward stopped half-way."""

    def run(model: Any) -> None:
        first, second = loss_of(model), loss_of(model, OTHER)
        weight = model.model.layers[3].mlp.up_proj.weight
        torch.autograd.grad(first, [weight], retain_graph=True)
        second.backward()
        first.backward()

    expected = step(plain(deep()), run)
    model = deep()
    with offloaded(model, buffers=2) as made:
        Scarce(monkeypatch, 3)  # layers 3 and 2 of the first graph, then layer 3 of the second
        assert_same_bits(step(model, run), expected)
        assert made.lane.most == 1
        assert len(made.notes) == 1


@pytest.mark.parametrize("buffers", [1, 2, 3])
def test_after_a_recompute_that_ran_out_of_memory_one_buffer_is_used(buffers: int) -> None:
    expected = step(plain(deep()))
    model = deep()
    with offloaded(model, buffers=buffers) as made:
        calls: list[int] = []

        def fail(*_: Any) -> None:
            calls.append(made.lane.ahead)
            if len(calls) == 2:  # the recompute
                raise torch.OutOfMemoryError("out of memory")

        hook = model.model.layers[3].mlp.register_forward_pre_hook(fail)
        with pytest.raises(torch.OutOfMemoryError):
            loss_of(model).backward()
        hook.remove()
        assert calls == [0, buffers - 1]
        assert made.lane.ahead == 0
        assert made.lane.most == made.lane.depth == 1
        assert [note.name for note in made.notes] == ["reload buffers"] * (buffers > 1)
        reloads = made.lane.reloads
        assert_same_bits(step(model), expected)
        assert made.lane.reloads == reloads + LAYERS - 1
        assert made.lane.depth == 1


def test_out_of_memory_with_nothing_to_free_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model = deep()
    with offloaded(model, buffers=1):
        Scarce(monkeypatch, 2)
        with pytest.raises(torch.OutOfMemoryError):
            loss_of(model).backward()


def test_a_second_buffer_only_where_memory_is_free_at_the_highest_demand() -> None:
    size = IDS.numel() * 32 * 4
    model, device = deep(), LateTransfers()
    device.memory_now = DeviceMemory(usable=100 * size, allocated=40 * size, peak=99 * size)
    device.forget_peak = lambda: None  # type: ignore[method-assign]  # the peak is the steps' own
    with offloaded(model, buffers=3, transfers=device) as made:
        step(model)
        assert made.lane.depth == 2  # learned from the first backward, which ran with one
        assert made.device.log.count("back") == LAYERS - 1
        device.memory_now = DeviceMemory(usable=100 * size, allocated=40 * size, peak=98 * size)
        step(model)
        assert made.lane.depth == 3 == made.lane.most
        device.memory_now = DeviceMemory(usable=100 * size, allocated=42 * size, peak=100 * size)
        loss = loss_of(model)
        depths: list[int] = []
        for layer in model.model.layers:
            layer.input_layernorm.register_forward_pre_hook(lambda *_: depths.append(made.lane.depth))
        loss.backward()
        assert set(depths[:-1]) == {2}  # tensors have come since, so that the third buffer no longer fits
        told = [note for note in made.notes if note.name == "reload buffers"]
        assert [note.on for note in told] == [True]  # said once
        assert "2 of 3" in told[0].reason


class Filling(LateTransfers):
    """A device whose memory rises by ``rise`` and the reload buffers in each backward, counted by one peak."""

    offload: Any = None

    def __init__(self, usable: int, allocated: int, peak: int, rise: int) -> None:
        super().__init__()
        self.memory_now = DeviceMemory(usable, allocated, peak)
        self.rise = rise

    def back(self, host: torch.Tensor, slot: torch.Tensor, after: Any) -> Any:
        assert self.memory_now is not None
        buffers = 1 + sum(lane.ahead for lane in self.offload.lanes.values())
        self.reach(self.memory_now.allocated + self.rise + buffers * slot.nbytes)
        return super().back(host, slot, after)

    def reach(self, peak: int) -> None:
        assert self.memory_now is not None
        self.memory_now = self.memory_now._replace(peak=max(peak, self.memory_now.peak))


@pytest.mark.parametrize(("rise", "depth"), [(100, 3), (957, 3), (958, 2), (959, 1)])
def test_a_peak_from_before_the_steps_does_not_keep_buffers_away(rise: int, depth: int) -> None:
    """Loading or an evaluation may have filled the device to the brim."""
    size = IDS.numel() * 32 * 4
    model, device = deep(), Filling(1000 * size, 40 * size, 1000 * size, rise * size)
    with offloaded(model, buffers=3, transfers=device) as made:
        device.offload = made.offload
        for _ in range(3):
            step(model)
            assert made.lane.depth == depth  # the first backward ran with one, and a capture may come next
        assert device.log.count("forget") == 1
        assert [note.name for note in made.notes][:1] == ["peak memory"]
        assert ("reload buffers" in [note.name for note in made.notes]) == (depth < 3)
        device.reach(1000 * size)  # an evaluation
        for _ in range(2):
            step(model)
            assert made.lane.depth == depth  # as the steps have shown before
        assert device.log.count("forget") == 1


def test_a_peak_that_leaves_room_is_not_touched() -> None:
    size = IDS.numel() * 32 * 4
    model, device = deep(), Filling(1000 * size, 40 * size, 998 * size, 100 * size)
    with offloaded(model, buffers=3, transfers=device) as made:
        device.offload = made.offload
        for _ in range(2):
            step(model)
            assert made.lane.depth == 3
        assert made.notes == []
        assert "forget" not in device.log


def test_longer_rows_are_learned_of_anew() -> None:
    """They take more, which a high peak from before would hide."""
    size = IDS.numel() * 32 * 4
    model, device = deep(), Filling(1000 * size, 40 * size, 1000 * size, 100 * size)
    with offloaded(model, buffers=2, transfers=device) as made:
        device.offload = made.offload
        step(model)
        assert made.lane.depth == 2
        device.reach(1000 * size)
        device.rise = 957 * size
        longer = torch.cat([IDS, IDS], dim=1)
        for _ in range(2):
            step(model, lambda model: loss_of(model, longer).backward())
            assert made.lane.depth == 1
        assert device.memory_now.peak <= device.memory_now.usable  # the first of them ran with one buffer, too
        assert device.log.count("forget") == 2


def test_host_memory_too_small_is_told_before_the_first_copy() -> None:
    size = IDS.numel() * 32 * 4
    model = deep()
    with offloaded(model, pool_bytes=(LAYERS - 1) * size - 1) as made:
        with pytest.raises(
            InputError, match=r"needs [0-9.]+ KiB of host memory \(4 layer inputs of .* raise memory.host"
        ):
            loss_of(model)
        assert made.device.log == []


def test_inputs_without_room_stay_where_they_are() -> None:
    expected = step(plain(deep()))
    size = IDS.numel() * 32 * 4
    model = deep()
    with offloaded(model, pool_bytes=2 * size, strict=False) as made:
        for _ in range(2):
            assert_same_bits(step(model), expected)
        assert made.lane.sent == 4
        assert [note.name for note in made.notes] == ["host memory"]
        assert "stay on the device" in made.notes[0].reason


def refused_after(monkeypatch: pytest.MonkeyPatch, buffers: int) -> None:
    """Let the system give no more than so many buffers."""
    given = count()
    own = host_buffers.page_aligned

    def page_aligned(nbytes: int) -> torch.Tensor:
        if next(given) >= buffers:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return own(nbytes)

    monkeypatch.setattr(host_buffers, "page_aligned", page_aligned)


def test_host_memory_that_the_system_refuses_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    refused_after(monkeypatch, 1)
    model = deep()
    told = (
        r"needs 12.0 KiB of host memory \(4 .*; the system gave 3.0 KiB and refused more \(OSError: .*; free host mem"
    )
    with offloaded(model) as made:
        with pytest.raises(InputError, match=told):
            loss_of(model)
        assert made.lane.sent == 1
        assert made.offload.pool.held == 3072
    assert made.offload.pool.held == 0


def test_where_auto_offloads_what_the_system_refuses_stays_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = step(plain(deep()))
    refused_after(monkeypatch, 1)
    model = deep()
    with offloaded(model, strict=False) as made:
        for _ in range(2):
            assert_same_bits(step(model), expected)
        assert made.lane.sent == 2
        assert [note.name for note in made.notes] == ["host memory"]
        assert "refused more (OSError: " in made.notes[0].reason
        assert "stay on the device" in made.notes[0].reason


def test_pinning_that_fails_is_told_once_and_goes_on() -> None:
    expected = step(plain(deep()))
    model, device = deep(), LateTransfers()
    device.pinnable = False
    with offloaded(model, transfers=device) as made:
        for _ in range(2):
            assert_same_bits(step(model), expected)
        assert [note.name for note in made.notes] == ["pinned memory"]
        assert not made.notes[0].on


class Breaking(LateTransfers):
    """A link that is down for these copies of one direction, counted from 1."""

    def __init__(self, direction: str, *failing: int) -> None:
        super().__init__()
        self.calls, self.failing = 0, failing
        real = getattr(self, direction)

        def copy(*args: Any) -> Any:
            self.calls += 1
            if self.calls in self.failing:
                raise RuntimeError("the link is down")
            return real(*args)

        setattr(self, direction, copy)


@pytest.mark.parametrize("failing", [1, 3])
def test_a_copy_out_that_fails_is_that_steps_error_and_keeps_no_memory(failing: int) -> None:
    expected = step(plain(deep()))
    model = deep()
    with offloaded(model, transfers=Breaking("out", failing)) as made:
        with pytest.raises(RuntimeError, match="the link is down") as caught:
            loss_of(model)
        size = IDS.numel() * 32 * 4
        assert made.offload.pool.held == failing * size
        assert made.offload.pool.idle >= size  # although the traceback still holds all of the pass
        del caught
        gc.collect()
        assert made.offload.pool.idle == made.offload.pool.held
        assert_same_bits(step(model), expected)
    assert made.offload.pool.held == 0


@pytest.mark.parametrize("buffers", [1, 2])
@pytest.mark.parametrize("failing", [(1,), (2,), (1, 2), (3,)])
def test_a_copy_back_that_fails_is_that_steps_error_and_the_graphs_next_backward_tries_again(
    failing: tuple[int, ...], buffers: int
) -> None:
    expected = step(plain(deep()))
    model = deep()
    with offloaded(model, transfers=Breaking("back", *failing), buffers=buffers) as made:
        loss = loss_of(model)
        for _ in failing:
            with pytest.raises(RuntimeError, match="the link is down"):
                loss.backward(retain_graph=True)
        model.zero_grad(set_to_none=True)
        loss.backward()
        assert_same_bits(gradients(model), expected)
        del loss
        gc.collect()
        assert made.offload.pool.idle == made.offload.pool.held
    assert made.offload.pool.held == 0


# What is passed in


def test_a_context_is_entered_in_forward_and_recompute() -> None:
    seen: list[str] = []

    @contextmanager
    def context(name: str) -> Any:
        seen.append(name)
        yield

    expected = step(plain(deep()))
    model = deep()
    with offloaded(model, context_fn=lambda: (context("forward"), context("recompute"))):
        assert_same_bits(step(model), expected)
    assert seen == ["forward"] * LAYERS + ["recompute"] * LAYERS


def test_inputs_given_by_keyword_stay_and_that_is_told_once() -> None:
    expected = step(plain(deep()))
    model = deep()
    with offloaded(model) as made:
        for layer in model.model.layers:
            function = layer._gradient_checkpointing_func
            layer._gradient_checkpointing_func = lambda inner, x, function=function: function(
                lambda *, hidden_states: inner(hidden_states), hidden_states=x
            )
        model.model._forward_pre_hooks.clear()  # these functions are the test's own
        for _ in range(2):
            assert_same_bits(step(model), expected)
        assert not made.offload.lanes
        assert [(note.name, note.on) for note in made.notes] == [("offload", False)]
