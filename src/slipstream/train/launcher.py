"""What ``accelerate launch`` asks for and the recipe decides: refused, or the same anyhow.

accelerate hands its configuration file on in environment variables, which transformers' trainer obeys by itself: a file
written for another project would switch on half precision, compilation or another way of dividing weights, and what is
learned would no longer be what the recipe says. Trade-off: who has such a file gives a few flags more. Alternative:
passing over the variables, which would leave a setting that the user wrote down without effect and without a word.
"""

import os
from collections.abc import Iterator

from slipstream.errors import InputError

ENGINES = {
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "a parallelism_config",
}
PRECISION, COMPILER, ON_CPU = "ACCELERATE_MIXED_PRECISION", "ACCELERATE_DYNAMO_BACKEND", "ACCELERATE_USE_CPU"
MPI_COUNTS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")


def check_launcher(computed: str, *, has_card: bool) -> None:
    """Raises one ``InputError`` for all that accelerate's variables ask for and a run doesn't do.

    ``computed``: the dtype that layers compute in; ``has_card``: whether this run is on CUDA.
    """
    asked = list(_asked(computed, has_card=has_card))
    if asked:
        raise InputError(f"accelerate's configuration asks for {'; and for '.join(asked)}")


def check_alone() -> None:
    """Raises ``InputError`` where a process that was told of no others has some: each would train by itself."""
    for name in MPI_COUNTS:
        if os.environ.get(name, "1") not in ("0", "1"):
            raise InputError(
                f"{name} is {os.environ[name]} in the environment, so mpirun or srun started several processes, which "
                f"are not joined that way; start them with torchrun or accelerate launch --multi_gpu"
            )
    if PRECISION in os.environ and "MASTER_ADDR" in os.environ:
        raise InputError(
            f"accelerate launch was asked for several processes (MASTER_ADDR is {os.environ['MASTER_ADDR']}) and "
            f"started one, since it leaves processes on CPUs to mpirun; give --multi_gpu and not --cpu, which starts "
            f"them on a machine without GPUs, too, or --num_processes 1 (and unset MASTER_ADDR)"
        )


def _asked(computed: str, *, has_card: bool) -> Iterator[str]:
    """What is asked for and refused, each with its variable, value and remedy."""
    for name, what in ENGINES.items():
        if _on(name):
            yield (
                f"{what} ({name}={os.environ[name]}), but how weights are divided is the recipe's to say: choose plain "
                f"multi-GPU (accelerate launch --multi_gpu), and train.sharding: fsdp2 to divide them"
            )
    precision = os.environ.get(PRECISION, "no").lower()
    if {"no": computed, "bf16": "bfloat16"}.get(precision) != computed:
        yield (
            f"mixed precision ({PRECISION}={precision}), but layers compute in {computed} here: give --mixed_precision "
            f"no"
        )
    compiler = os.environ.get(COMPILER, "no")
    if compiler.lower() != "no":
        yield (
            f"compilation ({COMPILER}={compiler}), but how a step runs is the recipe's to say: give --dynamo_backend "
            f"no, and choose with train.mode"
        )
    if has_card and _on(ON_CPU):
        yield (
            f"the CPU ({ON_CPU}={os.environ[ON_CPU]}), but this machine's GPUs are visible: leave --cpu out, or hide "
            f"them (CUDA_VISIBLE_DEVICES=)"
        )


def _on(name: str) -> bool:
    return os.environ.get(name, "false").lower() in ("true", "1", "yes")
