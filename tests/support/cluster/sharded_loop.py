"""A training loop of a user's own on a model that PyTorch's fully_shard shards."""

from __future__ import annotations

import sm_train
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard


def main() -> None:
    job = sm_train.current_job()
    torch.manual_seed(job.seed)
    # Rows that neither two nor three processes divide evenly.
    model = nn.Sequential(nn.Linear(5, 13), nn.BatchNorm1d(13), nn.ReLU(), nn.Linear(13, 4))
    average = torch.optim.swa_utils.AveragedModel(model)
    if job.world_size > 1:
        for layer in (model[0], model[3]):
            fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
    checkpointer = sm_train.Checkpointer(
        model=model, optimizer=optimizer, schedule=schedule, average=average
    )
    first = checkpointer.restore()
    log = sm_train.EventLog(first_step=first)
    for step in range(first + 1, job.stage.max_steps + 1):
        # The noise of the random state, which a checkpoint holds, for each rank.
        generator = torch.Generator().manual_seed(1000 * step + job.rank)
        inputs = torch.randn(8, 5, generator=generator)
        inputs = inputs + 0.01 * torch.randn(8, 5)
        loss = (model(inputs) - inputs[:, :4].square()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        log.step(step, loss.detach(), learning_rate=schedule.get_last_lr()[0])
        if step % job.checkpoint_every == 0:
            checkpointer.save(step)


main()
