"""A job that loses workers: `healing_program TOTAL FOLDER [DEATHS…]`, each death "RANK:STEP:MOMENT", once; or
`healing_program TOTAL FOLDER random SEED`.

The process forks its workers, which saves them the import of torch, and starts those again that have killed themselves.
Each worker leaves a digest of its training in the folder.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import kvd
import kvd.torch as kt

WORKERS = 3
RESTART_AFTER_S = 0.05
AT_RANDOM = "random"  # in place of deaths, with a seed: a worker, or two, are killed again and again
KILL_EVERY_S = (0.3, 2.5)


class Centred(nn.Module):
    """Subtracts a running mean, a buffer that each forward pass replaces by another tensor."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mean: torch.Tensor
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.8 * self.mean + 0.2 * x.detach().mean(0)
        return x - self.mean


class AdamWithCount(torch.optim.AdamW):
    """Keeps a count for all parameters together, and steps by it."""

    def step(self, closure: Any = None) -> Any:
        count = self.state.setdefault("count", {"steps": 0})  # type: ignore[call-overload]
        count["steps"] += 1
        for group in self.param_groups:
            group["weight_decay"] = 0.01 * count["steps"]
        return super().step(closure)


def make_model() -> Any:
    return nn.Sequential(
        nn.Linear(8, 32, bias=False),  # a bias before BatchNorm has gradients of rounding errors
        nn.BatchNorm1d(32),
        nn.ReLU(),
        Centred(32),
        nn.Dropout(0.2),
        nn.Linear(32, 32, bias=False),
        nn.Tanh(),
        nn.Linear(32, 4),
    )


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    chance = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(16, 8, generator=chance), torch.randint(0, 4, (16,), generator=chance)


def digest_of(things: Any) -> str:
    """Of tensors and plain values, in lists and dicts."""
    found = hashlib.sha256()

    def add(thing: Any) -> None:
        if isinstance(thing, torch.Tensor):
            found.update(f"{thing.dtype} {tuple(thing.shape)}".encode())
            found.update(bytes(thing.detach().contiguous().reshape(-1).view(torch.uint8).numpy()))
        elif isinstance(thing, dict):
            for key in sorted(thing, key=str):
                found.update(str(key).encode())
                add(thing[key])
        elif isinstance(thing, list | tuple):
            for entry in thing:
                add(entry)
        else:
            found.update(repr(thing).encode())

    add(things)
    return found.hexdigest()


def work(number: int, total: int, folder: Path, deaths: list[list[str]]) -> None:
    torch.set_num_threads(1)
    pace_s = 0.02 if total > 100 else 0.0
    kv = kvd.create("dist_sync", node_id=f"worker-{number}", preferred_rank=number)
    at = ""

    def come_to(moment: str, pause_s: float = 0.0) -> None:
        for place, (rank, step, when) in enumerate(deaths):
            mark = folder / f"died-{place}"
            if (rank, when) == (str(kv.rank), moment) and step in ("*", at) and not mark.exists():
                mark.touch()
                time.sleep(pause_s)  # time itself: what was sent arrives
                os.kill(os.getpid(), signal.SIGKILL)

    torch.manual_seed(os.getpid())  # each life begins with other weights
    model = make_model()
    if number == 0:
        torch.manual_seed(7)
        model = make_model()
    optimizer = kt.DistributedOptimizer(
        AdamWithCount(model.parameters(), 1e-2, amsgrad=True),
        model.named_parameters(),
        where="workers",
        op="mean",
        store=kv,
        bucket_bytes=2000,
        first_bucket_bytes=500,
        module=model,
        buffers="mean",
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total)
    scaler = torch.amp.GradScaler("cpu", growth_interval=4)
    average = {"loss": torch.zeros(1)}

    def get() -> Any:
        come_to("serving")
        return average["loss"]

    def put(loss: torch.Tensor) -> None:
        average["loss"] = loss
        come_to("received")

    optimizer.keep("schedule", schedule)
    optimizer.keep("scaler", scaler)
    optimizer.keep("user", (get, put))
    model[0].weight.register_hook(lambda gradient: come_to("bucket", 0.3))
    made = []
    for step in optimizer.steps(total, seed=3):
        at = str(step)
        made.append(step)
        (folder / f"holds-{os.getpid()}").write_text(at)
        time.sleep(pace_s)  # time itself: the pace of the steps
        x, y = batch(step, number)
        come_to("before")
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        if step == 2 and number == 1:
            loss = loss * float("inf")  # the scaler makes no step in any worker
        scaled: Any = scaler.scale(loss)
        scaled.backward()
        come_to("over")
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        average["loss"] = 0.9 * average["loss"] + 0.1 * model[0].weight.detach().mean()
        come_to("updated")
    (folder / f"holds-{os.getpid()}").unlink(missing_ok=True)
    at = str(total)
    come_to("end")
    kept = [schedule.state_dict(), scaler.state_dict(), average["loss"]]
    result = {
        "digest": digest_of([model.state_dict(), optimizer.state_dict(), kept]),
        "made": made,
        "lr": optimizer.param_groups[0]["lr"],
        "scale": scaler.get_scale(),
        "weights": [value.tolist() for value in model.parameters()],
    }
    kv.close()
    (folder / f"result-{number}").write_text(json.dumps(result))


def start(number: int, total: int, folder: Path, deaths: list[list[str]]) -> int:
    """A worker in a child of this process."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        work(number, total, folder, deaths)
        code = 0
    except BaseException as error:  # noqa: BLE001  it is printed
        print(f"worker {number}: {error!r}", flush=True)
    finally:
        sys.stdout.flush()
        os._exit(code)


def main() -> None:
    total, folder = int(sys.argv[1]), Path(sys.argv[2])
    deaths = [death.split(":") for death in sys.argv[3:]]
    chance = random.Random(int(sys.argv[4])) if deaths and deaths[0] == [AT_RANDOM] else None
    deaths = deaths if chance is None else []
    running = {start(number, total, folder, deaths): number for number in range(WORKERS)}
    failed = False
    kill_at = math.inf  # no kill is planned
    try:
        while running:
            pid, status = os.waitpid(-1, 0 if chance is None else os.WNOHANG)
            if not pid:
                holders = [each for each, number in running.items() if (folder / f"holds-{each}").exists()]
                all_hold = len(running) == len(holders) == WORKERS
                if chance is not None and all_hold and kill_at == math.inf:  # so a slow machine makes steps, too
                    kill_at = time.monotonic() + chance.uniform(*KILL_EVERY_S)
                elif chance is not None and all_hold and time.monotonic() > kill_at:
                    for victim in chance.sample(holders, 1 + (chance.random() < 0.2)):
                        os.kill(victim, signal.SIGKILL)
                        (folder / f"killed-{victim}").touch()
                        (folder / f"holds-{victim}").unlink()  # it may be a while until it is reaped
                    kill_at = math.inf
                time.sleep(0.01)  # a turn: the next death, or the next end
                continue
            number = running.pop(pid)
            if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL and not failed:
                time.sleep(RESTART_AFTER_S)  # time itself: as a supervisor does
                running[start(number, total, folder, deaths)] = number
            elif status:
                failed = True
                for other in running:
                    os.kill(other, signal.SIGKILL)
    finally:
        for pid in running:
            os.kill(pid, signal.SIGKILL)
    sys.exit(failed)


if __name__ == "__main__":
    main()
