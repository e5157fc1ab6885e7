"""A training script in the style of diffusers' examples; it knows nothing of sm-train.

It fits a small network to numbers in files, with gradient accumulation, clipping, a schedule, and
checkpoints that only the main process saves, unless --save_on_all.
"""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration, set_seed


def parse_args():  # type: ignore[no-untyped-def]
    parser = argparse.ArgumentParser()
    parser.add_argument("--train_data_dir", required=True)
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--logging_dir", default="logs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train_batch_size", type=int, default=4)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--max_train_steps", type=int, default=20)
    parser.add_argument("--learning_rate", type=float, default=1e-2)
    parser.add_argument("--mixed_precision", default="no")
    parser.add_argument("--checkpointing_steps", type=int, default=5)
    parser.add_argument("--checkpoints_total_limit", type=int)
    parser.add_argument("--resume_from_checkpoint")
    parser.add_argument("--save_on_all", action="store_true")
    parser.add_argument("--checkpoint_name", default="checkpoint-%(step)d")
    return parser.parse_args()


def main() -> None:
    args = parse_args()  # type: ignore[no-untyped-call]
    accelerator = Accelerator(
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        mixed_precision=args.mixed_precision,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
        project_config=ProjectConfiguration(
            project_dir=args.output_dir,
            logging_dir=str(Path(args.output_dir, args.logging_dir)),
            automatic_checkpoint_naming=args.checkpoint_name == "automatic",
            total_limit=args.checkpoints_total_limit,
        ),
    )
    set_seed(args.seed)
    files = sorted(Path(args.train_data_dir).glob("*.txt"))
    rows = [[float(number) for number in file.read_text().split()] for file in files]
    inputs = torch.tensor(rows)
    dataset = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
    network = torch.nn.Sequential(
        torch.nn.Linear(inputs.shape[1], 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1)
    )
    optimizer = torch.optim.AdamW(network.parameters(), lr=args.learning_rate)
    loader = torch.utils.data.DataLoader(dataset, shuffle=True, batch_size=args.train_batch_size)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.01 * step))
    network, optimizer, loader, scheduler = accelerator.prepare(
        network, optimizer, loader, scheduler
    )
    global_step, first_epoch, skipped = 0, 0, 0
    updates_per_epoch = -(-len(loader) // args.gradient_accumulation_steps)
    if args.resume_from_checkpoint:
        if args.resume_from_checkpoint != "latest":
            path = os.path.basename(args.resume_from_checkpoint)  # noqa: PTH119
        else:
            names = [name for name in os.listdir(args.output_dir) if name.startswith("checkpoint")]  # noqa: PTH208
            names.sort(key=lambda name: int(name.split("-")[1]))
            path = names[-1] if names else ""
        if path:
            accelerator.print(f"Resuming from checkpoint {path}")
            accelerator.load_state(str(Path(args.output_dir, path)))
            global_step = int(path.split("-")[1])
            first_epoch = global_step // updates_per_epoch
            skipped = global_step % updates_per_epoch * args.gradient_accumulation_steps
    epoch = first_epoch
    while global_step < args.max_train_steps:
        loader.set_epoch(epoch)
        batches = loader
        if skipped:
            batches = accelerator.skip_first_batches(loader, skipped)
            skipped = 0
        for inputs, targets in batches:
            with accelerator.accumulate(network):
                loss = torch.nn.functional.mse_loss(network(inputs).float(), targets)
                accelerator.gather(loss.detach().reshape(1)).mean()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(network.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                global_step += 1
                if global_step % args.checkpointing_steps == 0 and (
                    accelerator.is_main_process or args.save_on_all
                ):
                    if args.checkpoints_total_limit is not None and accelerator.is_main_process:
                        found = os.listdir(args.output_dir)  # noqa: PTH208
                        names = [entry for entry in found if "checkpoint-" in entry]
                        names.sort(key=lambda name: int(name.split("-")[1]))
                        for name in names[: len(names) - args.checkpoints_total_limit + 1]:
                            shutil.rmtree(Path(args.output_dir, name))
                    if args.checkpoint_name == "automatic":
                        accelerator.save_state()
                    else:
                        name = args.checkpoint_name % {"step": global_step, "epoch": epoch}
                        accelerator.save_state(str(Path(args.output_dir, name)))
            if global_step >= args.max_train_steps:
                break
        epoch += 1
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        weights = accelerator.unwrap_model(network).state_dict()
        torch.save(weights, Path(args.output_dir, "weights.pt"))
        print("final", [round(float(weight.sum()), 9) for weight in weights.values()], flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
