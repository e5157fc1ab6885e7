"""Trains a classifier of digits: `entry: own_loop.py` in a run file.

Killed at any moment, the next job continues bit for bit: model, optimizer, data and random states.
"""

import sm_train
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

CLASSES = 10


def main() -> None:
    job = sm_train.current_job()
    stage = job.stage
    torch.manual_seed(job.seed)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(8 * stage.resolution**2, CLASSES),
    ).to(job.device)
    network = DistributedDataParallel(model) if job.world_size > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=stage.learning_rate)
    data = sm_train.ShardDataset()
    checkpointer = sm_train.Checkpointer(model=model, optimizer=optimizer, data=data)
    step = checkpointer.restore()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    events = sm_train.EventLog(parameters=parameters, first_step=step)

    for batch in data:
        if step >= stage.max_steps:
            break
        images = batch["pixel_values"].to(job.device).float() / 255
        labels = torch.tensor([int(caption.split()[-1]) % CLASSES for caption in batch["captions"]])
        loss = nn.functional.cross_entropy(network(images), labels.to(job.device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        events.step(step, loss, learning_rate=stage.learning_rate, epoch=data.epoch)
        stopping = job.should_stop(step)
        if stopping or step % job.checkpoint_every == 0 or step == stage.max_steps:
            checkpointer.save(step)
        if stopping:
            return

    if job.rank == 0:
        torch.save(model.state_dict(), job.model / "model.pt")


if __name__ == "__main__":
    main()
