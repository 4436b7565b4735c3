"""A whole training step asks the device for nothing: no host sync after warm-up."""

import tempfile
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback, TrainingArguments

from slipstream.data.packing import pack_dataset
from slipstream.device.feed import PackedCollator
from slipstream.model.lora import AdapterOptions, add_adapter
from slipstream.train.records import StepLog, read_records
from slipstream.train.trainer import Trainer
from slipstream.transform import Options, apply

TOKENS = 512
SYNCHRONISING = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
WARM_UP, STEPS = 4, 12


class SyncGuard(TrainerCallback):
    """Makes any host sync an error from the end of warm-up to the end of the last step."""

    def __init__(self) -> None:
        self.guarded = 0

    def on_step_end(self, args, state, control, **_):
        torch.cuda.set_sync_debug_mode("error" if WARM_UP <= state.global_step < STEPS else "default")
        self.guarded += WARM_UP <= state.global_step < STEPS


class ProfiledSteps(TrainerCallback):
    """Profiles steps after warm-up, each inside a ``step`` range that reaches to the next step's begin."""

    def __init__(self) -> None:
        self.profiler = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
        self.range = None

    def on_step_begin(self, args, state, control, **_):
        if state.global_step == WARM_UP:
            self.profiler.__enter__()
        if self.range is not None:
            self.range.__exit__(None, None, None)
            self.range = None
        if WARM_UP < state.global_step < STEPS - 1:
            self.range = record_function("step")
            self.range.__enter__()

    def on_step_end(self, args, state, control, **_):
        if state.global_step == STEPS - 1:
            self.profiler.__exit__(None, None, None)


def train(attention: str, activations: str, dropout: float, callback: TrainerCallback, folder: Path) -> Trainer:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=1000,
    )
    model = add_adapter(LlamaForCausalLM(config).to("cuda", torch.bfloat16), AdapterOptions(dropout=dropout), seed=0)
    apply(model, Options(attention=attention, activations=activations))
    documents = [torch.randint(3, 1000, (int(n),)).tolist() for n in torch.randint(2, 200, (200,))]
    rows = pack_dataset(Dataset.from_dict({"input_ids": documents}), TOKENS)
    args = TrainingArguments(
        str(folder),
        max_steps=STEPS,
        gradient_accumulation_steps=2,
        dataloader_num_workers=2,
        per_device_train_batch_size=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        optim="adamw_torch_fused",
    )
    trainer = Trainer(
        model,
        args,
        train_dataset=rows,
        data_collator=PackedCollator(tokens=TOKENS),
        compute_dtype=torch.bfloat16,
        step_log=StepLog(folder / "steps.jsonl"),
        callbacks=[callback],
    )
    try:
        trainer.train()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return trainer


@pytest.mark.parametrize("attention", ["varlen", "sdpa"])
@pytest.mark.parametrize(
    ("activations", "dropout"), [("keep", 0.0), ("recompute", 0.0), ("recompute", 0.1), ("offload", 0.0)]
)
def test_no_step_syncs(attention: str, activations: str, dropout: float, tmp_path: Path) -> None:
    """transformers#39213: the host never waits for the device in a step."""
    guard = SyncGuard()
    trainer = train(attention, activations, dropout, guard, tmp_path)
    assert guard.guarded == STEPS - WARM_UP
    assert trainer.step_log.waits == 0
    steps = read_records(tmp_path).steps
    assert [step.step for step in steps] == list(range(1, STEPS + 1))
    assert all(step.loss > 0 and step.grad_norm > 0 and step.learned_tokens > 0 for step in steps)


@pytest.mark.parametrize("attention", ["varlen", "sdpa"])
def test_profile_of_a_step_has_no_synchronising_call(attention: str, tmp_path: Path) -> None:
    profiled = ProfiledSteps()
    train(attention, "recompute", 0.0, profiled, tmp_path)
    events = profiled.profiler.events()
    spans = [event.time_range for event in events if event.name == "step"]
    assert len(spans) >= 3
    assert any(event.name == "cudaLaunchKernel" for event in events), "the trace must hold runtime calls"
    first, last = min(span.start for span in spans), max(span.end for span in spans)
    waits = [event.name for event in events if event.name in SYNCHRONISING and first <= event.time_range.start <= last]
    assert waits == []


def test_the_guard_sees_a_sync(tmp_path: Path) -> None:
    class Asks(SyncGuard):
        def on_pre_optimizer_step(self, args, state, control, **_):
            torch.ones((), device="cuda").item()

    with pytest.raises(RuntimeError, match="synchroniz"):
        train("varlen", "keep", 0.0, Asks(), Path(tempfile.mkdtemp()))
