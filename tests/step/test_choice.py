"""The mode of a step: what each card, model and option gets, and why."""

from dataclasses import replace

import pytest

from slipstream.cost.hardware import Device
from slipstream.errors import InputError
from slipstream.step.choice import Circumstances, check_mode, choose_mode

H200 = Device("cuda", "NVIDIA H200", 141 * 2**30, (9, 0), True, unified_memory=False)
CPU = Device("cpu", "a processor", 16 * 2**30, None, False, unified_memory=True)
PLAIN = Circumstances(device=H200, packed=True, attention="varlen")


def test_auto_takes_the_captured_step() -> None:
    mode, decision = choose_mode("auto", PLAIN)
    assert mode == "captured"
    assert decision.on


@pytest.mark.parametrize(
    ("change", "mode", "told"),
    [
        ({"attention": "flex"}, "compiled", "attention flex builds its structure on the host"),
        ({"attention": "xformers"}, "compiled", "attention xformers"),
        ({"attention": None}, "compiled", "attention of the model itself"),
        ({"host_positions": True}, "compiled", "rotary positions are scaled"),
        ({"host_experts": True}, "compiled", "experts: loop"),
        ({"processes": 2}, "compiled", "2 processes"),
        ({"devices": 2}, "compiled", "split over 2 devices"),
        ({"whole": True}, "compiled", "gradients twice"),
        ({"scaled_gradients": True}, "compiled", "float16"),
        ({"packed": False}, "eager", "batches are padded"),
        ({"compiler": "Triton is not installed"}, "eager", "Triton is not installed"),
        ({"device": CPU}, "eager", "CUDA graphs need a CUDA device"),
    ],
)
def test_what_stands_against_a_mode_is_told(change: dict, mode: str, told: str) -> None:
    about = replace(PLAIN, **change)
    found, decision = choose_mode("auto", about)
    assert found == mode
    assert told in decision.reason
    with pytest.raises(InputError, match=r"train.mode captured: .*set train.mode to auto or"):
        choose_mode("captured", about)


def test_named_modes_are_taken() -> None:
    assert choose_mode("eager", PLAIN)[0] == "eager"
    assert not choose_mode("eager", PLAIN)[1].on
    assert choose_mode("compiled", replace(PLAIN, device=CPU))[0] == "compiled"
    with pytest.raises(InputError, match=r"train.mode compiled: no C"):
        choose_mode("compiled", replace(PLAIN, compiler="no C++ compiler was found"))


def test_what_no_model_could_have_is_told_before_one_is_loaded() -> None:
    with pytest.raises(InputError, match=r"train.mode captured: CUDA graphs need a CUDA device"):
        check_mode("captured", CPU, packed=True)
    with pytest.raises(InputError, match=r"train.mode compiled: batches are padded"):
        check_mode("compiled", CPU, packed=False)
    check_mode("auto", CPU, packed=False)
    check_mode("eager", CPU, packed=True)
