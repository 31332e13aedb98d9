"""A small GPT, trained on the texts that come with Python.

It learns to continue Python's help topics and licence, character by character. Each worker draws its batches from the
seed, the number of the step and its rank. ::

    python examples/gpt.py
    kvd launch -n 2 -s 2 --replicas 2 --restart 3 -- python examples/gpt.py --write 300
    kvd launch -n 2 -s 1 --restart 3 -- python examples/gpt.py --where workers
    kvd launch -n 3 -s 1 --restart 3 -- python examples/gpt.py --where local-sgd

With ``--where servers`` the servers make the steps of AdamW. With ``workers`` each worker has an AdamW, which gets the
mean gradients of all. In both, a job whose workers and servers are killed and restarted ends with the bits of an
undisturbed one. With ``local-sgd`` each worker trains alone, and all exchange their weights once in 50 steps (DiLoCo);
a worker that is restarted continues with the weights of the last exchange.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import kvd
import kvd.torch as kt

ALPHABET = 128  # ASCII
HELD_OUT = 0.1  # of the text, at its end
EVALUATED = 64  # pieces of the held-out text
WARM_UP = 20  # steps


def corpus() -> Tensor:
    """The help topics and the licence of this Python as ASCII codes, int64."""
    licence = Path(os.__file__).with_name("LICENSE.txt")  # some distributions leave it out
    texts = [text for _, text in sorted(topics.items())] + ([licence.read_text()] if licence.exists() else [])
    return torch.tensor(list("\n\n".join(texts).encode("ascii", "ignore")))


class Block(nn.Module):
    """Attention to what came before, then two layers, each added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_layers = nn.LayerNorm(width), nn.LayerNorm(width)
        self.inputs, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.layers = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = self.inputs(self.before_attention(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.output(seen.transpose(1, 2).reshape(batch, length, width))
        changed: Tensor = x + self.layers(self.before_layers(x))
        return changed


class GPT(nn.Module):
    """Codes (batch, length) → scores of each next code (batch, length, ALPHABET)."""

    def __init__(self, width: int, layers: int, heads: int, context: int) -> None:
        super().__init__()
        self.context = context
        self.codes, self.places = nn.Embedding(ALPHABET, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(layers)])
        self.last = nn.LayerNorm(width)
        self.head = nn.Linear(width, ALPHABET, bias=False)
        for embedding in (self.codes, self.places):
            nn.init.normal_(embedding.weight, std=0.02)
        self.head.weight = self.codes.weight  # tied: one key of the store

    def forward(self, codes: Tensor) -> Tensor:
        x = self.codes(codes) + self.places.weight[: codes.shape[1]]
        scores: Tensor = self.head(self.last(self.blocks(x)))
        return scores

    @torch.no_grad()
    def write(self, text: str, length: int) -> str:
        """Continue a text with this many likely characters."""
        codes = torch.tensor([list(text.encode("ascii"))])
        chance = torch.Generator().manual_seed(0)
        for _ in range(length):
            scores = self(codes[:, -self.context :])[:, -1] / 0.7
            codes = torch.cat([codes, torch.multinomial(scores.softmax(-1), 1, generator=chance)], 1)
        return bytes(codes[0].tolist()).decode("ascii")


def batch_of(text: Tensor, size: int, length: int, *seed: int) -> Tensor:
    """Pieces of the text, (size, length + 1), drawn by the seed alone."""
    number = int.from_bytes(hashlib.blake2b(repr(seed).encode(), digest_size=7).digest(), "big")
    starts = torch.randint(len(text) - length, (size, 1), generator=torch.Generator().manual_seed(number))
    return text[starts + torch.arange(length + 1)]


def loss_of(model: GPT, pieces: Tensor) -> Tensor:
    """The mean cross entropy of each next code, in nats."""
    return functional.cross_entropy(model(pieces[:, :-1]).flatten(0, 1), pieces[:, 1:].flatten())


def rate_at(step: int, steps: int, highest: float) -> float:
    """A learning rate that rises for a few steps, then falls to a tenth along a cosine."""
    if step < WARM_UP:
        return highest * (step + 1) / WARM_UP
    return highest * (0.55 + 0.45 * math.cos(math.pi * (step - WARM_UP) / max(1, steps - WARM_UP)))


def digest_of(model: nn.Module) -> str:
    """A short digest of all parameters."""
    values = b"".join(value.detach().numpy().tobytes() for value in model.parameters())
    return hashlib.sha256(values).hexdigest()[:12]


def wrap(where: str, model: nn.Module, rate: float, every: int, fragments: int, kv: kvd.KVStore) -> Any:
    """AdamW for this model in a job."""
    inner, named = torch.optim.AdamW(model.parameters(), rate), model.named_parameters()
    if where == "local-sgd":
        outer = kvd.optimizer.SGD(0.9, momentum=0.5, nesterov=True)
        return kt.LocalSGD(inner, named, every=every, outer=outer, store=kv, fragments=fragments)
    return kt.DistributedOptimizer(inner, named, where=where, op="mean", store=kv)  # type: ignore[arg-type]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--where", choices=["servers", "workers", "local-sgd"], default="servers")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--every", type=int, default=50, help="with local-sgd: steps between two exchanges")
    parser.add_argument("--fragments", type=int, default=1, help="with local-sgd: parts that take turns")
    parser.add_argument("--batch", type=int, default=16, help="pieces of text per step and worker")
    parser.add_argument("--context", type=int, default=64, help="characters that the model sees")
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--rate", type=float, default=3e-3, help="the highest learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", type=int, default=0, help="characters that worker 0 writes in the end")
    given = parser.parse_args()

    text = corpus()
    end = int((1 - HELD_OUT) * len(text))
    train, held_out = text[:end], text[end:]
    evaluated = batch_of(held_out, EVALUATED, given.context, given.seed)
    torch.manual_seed(given.seed)
    model = GPT(given.width, given.layers, given.heads, given.context)
    kind = "dist_sync" if "KVD_SCHEDULER" in os.environ or given.where == "workers" else "local"
    with kvd.create(kind) as kv:
        optimizer = wrap(given.where, model, given.rate, given.every, given.fragments, kv)
        for step in optimizer.steps(given.steps):
            for group in optimizer.param_groups:
                group["lr"] = rate_at(step, given.steps, given.rate)
            loss = loss_of(model, batch_of(train, given.batch, given.context, given.seed, step, kv.rank))
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if step % 50 == 0 and kv.rank == 0:
                print(f"step {step}: loss {loss.item():.3f}", flush=True)
        with torch.no_grad():
            last = loss_of(model, evaluated).item()
        if given.write and kv.rank == 0:
            print(model.write("The ", given.write), flush=True)
        print(f"worker {kv.rank} of {kv.num_workers}: loss {last:.3f}, digest {digest_of(model)}", flush=True)


if __name__ == "__main__":
    main()
