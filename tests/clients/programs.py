"""Training programs of other packages, as a user would write them, with a ShardedOptimizer or without.

    $ torchrun --standalone --nproc_per_node=2 tests/clients/programs.py <program> <sharded|plain> <folder> <first step> <steps>

Each continues from its checkpoint in the folder, unless the first step is 0, saves one, and prints the losses of rank 0.
"""

import json
import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from zero import ShardedDataParallel, ShardedOptimizer

STEPS, BATCH = 8, 2


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    zero = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2, **zero))


def tokens(ranks):
    """(steps * ranks * batch, 16): the whole dataset."""
    return torch.randint(64, (STEPS * ranks * BATCH, 16), generator=torch.Generator().manual_seed(1))


def adamw(params, is_sharded):
    return ShardedOptimizer(params, torch.optim.AdamW, lr=1e-2) if is_sharded else torch.optim.AdamW(params, lr=1e-2)


def trainer(is_sharded, folder, first, steps):
    from transformers import Trainer, TrainingArguments

    how = {"use_cpu": True, "max_steps": first + steps, "per_device_train_batch_size": BATCH, "save_steps": first + steps}
    how |= {"logging_steps": 1, "report_to": "none", "disable_tqdm": True}
    how |= {"max_grad_norm": 1.0, "lr_scheduler_type": "constant"}
    settings = TrainingArguments(folder, learning_rate=1e-2, weight_decay=0.1, **how)
    model, data = gpt2(), [{"input_ids": row, "labels": row} for row in tokens(settings.world_size)]

    class Sharded(Trainer):
        def create_optimizer(self, *args):
            self.sharded = self.optimizer = ShardedOptimizer(super().create_optimizer(*args))
            return self.sharded

        def _save_optimizer_and_scheduler(self, output_dir):
            self.sharded.consolidate_state_dict()  # on all ranks
            super()._save_optimizer_and_scheduler(output_dir)

    run = (Sharded if is_sharded else Trainer)(model, settings, train_dataset=data)
    run.train(resume_from_checkpoint=bool(first))
    return [float(entry["loss"]) for entry in run.state.log_history if "loss" in entry][-steps:]


def accelerate(is_sharded, folder, first, steps):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = gpt2()
    optimizer = adamw(model.parameters(), is_sharded)
    data = DataLoader(TensorDataset(tokens(accelerator.num_processes)), batch_size=BATCH)
    model, prepared, data = accelerator.prepare(model, optimizer, data)
    if first:
        accelerator.load_state(folder)
    losses = []
    for step, (x,) in enumerate(data):
        if first <= step < first + steps:
            with accelerator.accumulate(model):
                loss = model(input_ids=x, labels=x).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                prepared.step()
                prepared.zero_grad()
            losses.append(loss.item())
    if is_sharded:
        optimizer.consolidate_state_dict()
    accelerator.save_state(folder)
    return losses


def lightning(is_sharded, folder, first, steps):
    import lightning as L
    from lightning.pytorch.callbacks import ModelCheckpoint

    losses = []

    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = gpt2()

        def configure_optimizers(self):
            return adamw(self.parameters(), is_sharded)

        def training_step(self, batch, _):
            loss = self.model(input_ids=batch[0], labels=batch[0]).loss
            losses.append(loss.item())
            return loss

    ranks = int(os.environ["WORLD_SIZE"])
    run = L.Trainer(
        **{"accelerator": "cpu", "devices": ranks, "strategy": "ddp", "max_epochs": 2 if first else 1},
        **{"gradient_clip_val": 1.0, "use_distributed_sampler": False, "logger": False, "default_root_dir": folder},
        **{"enable_progress_bar": False, "enable_model_summary": False},
        callbacks=[ModelCheckpoint(folder, filename="saved", enable_version_counter=False)],
    )
    own = tokens(ranks)[int(os.environ["RANK"]) :: ranks][first * BATCH : (first + steps) * BATCH]
    data = DataLoader(TensorDataset(own), batch_size=BATCH)
    run.fit(Module(), data, ckpt_path=f"{folder}/saved.ckpt" if first else None, weights_only=False)
    return losses


def by_hand(make, model, is_sharded, folder, first, steps, data_parallel=DistributedDataParallel):
    """A loop of a user's own, which saves as a program for ZeroRedundancyOptimizer does."""
    dist.init_process_group("gloo")
    optimizer, losses = make(model.parameters()), []
    ddp = ShardedDataParallel(model, optimizer) if is_sharded else data_parallel(model)
    if first:
        saved = torch.load(f"{folder}/saved.pt")
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    switch = {name: getattr(optimizer, name, int) for name in ("train", "eval")}  # of schedule-free classes
    switch["train"]()
    data = tokens(dist.get_world_size()).split(BATCH)[dist.get_rank() :: dist.get_world_size()]
    for x in data[first : first + steps]:
        loss = ddp(input_ids=x, labels=x).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    switch["eval"]()
    with torch.no_grad():
        losses.append(model(input_ids=data[0], labels=data[0]).loss.item())
    if is_sharded:
        optimizer.consolidate_state_dict()
    if dist.get_rank() == 0:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, f"{folder}/saved.pt")
    dist.barrier()
    return losses


def elementwise(optimizer_class, is_sharded, **kwargs):
    return lambda params: (
        ShardedOptimizer(params, optimizer_class=optimizer_class, elementwise=True, **kwargs)
        if is_sharded
        else optimizer_class(list(params), **kwargs)
    )


def schedule_free(is_sharded, *how):
    from schedulefree import AdamWScheduleFree

    return by_hand(elementwise(AdamWScheduleFree, is_sharded, lr=1e-2, warmup_steps=2), gpt2(), is_sharded, *how)


def lion(is_sharded, *how):
    from lion_pytorch import Lion

    return by_hand(elementwise(Lion, is_sharded, lr=1e-3, weight_decay=0.1), gpt2(), is_sharded, *how)


def lora(is_sharded, *how):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    model = get_peft_model(gpt2(), LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True))
    return by_hand(lambda params: adamw(params, is_sharded), model, is_sharded, *how)


def ignite(is_sharded, folder, first, steps):
    """Its Checkpoint gathers the state of a ZeroRedundancyOptimizer."""
    from ignite.engine import Engine, Events
    from ignite.handlers import Checkpoint, DiskSaver
    from torch.distributed.optim import ZeroRedundancyOptimizer

    dist.init_process_group("gloo")
    ZeroRedundancyOptimizer.register(ShardedOptimizer)
    model, losses = gpt2(), []
    optimizer = adamw(model.parameters(), is_sharded)
    ddp = DistributedDataParallel(model)

    def update(engine, x):
        loss = ddp(input_ids=x, labels=x).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    engine, saved = Engine(update), {"model": ddp, "optimizer": optimizer}
    saver = DiskSaver(folder, require_empty=False)
    save = Checkpoint(saved, saver, filename_pattern="saved.pt")
    engine.add_event_handler(Events.COMPLETED, save)
    if first:
        Checkpoint.load_objects(saved, torch.load(f"{folder}/saved.pt"))
    data = tokens(dist.get_world_size()).split(BATCH)[dist.get_rank() :: dist.get_world_size()]
    engine.run(data[first : first + steps], max_epochs=1)
    dist.barrier()
    return losses


if __name__ == "__main__":
    name, mode, folder, first, steps = sys.argv[1:]
    losses = globals()[name](mode == "sharded", folder, int(first), int(steps))
    if os.environ["RANK"] == "0":
        print(json.dumps(losses))
