"""A card's error in a few words."""

from slipstream.bench.no_memory import out_of_memory


def test_what_was_held_and_what_was_asked_for() -> None:
    message = (
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.80 GiB. "
        " Of the allocated memory 512.00 MiB is allocated by PyTorch, and 28.06 MiB is reserved\nand so on"
    )
    assert out_of_memory(message) == "out of memory at 0.5 GB (2.15 GB more asked for)"
    assert out_of_memory("no memory") == "out of memory"
