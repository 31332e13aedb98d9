"""A program for Horovod, with one import changed: a convolutional network for the digits.

It makes the calls of Horovod's documented example for MNIST. The import that is changed says
``import horovod.torch as hvd`` there: ::

    kvd launch -n 2 -s 1 -- python examples/horovod_digits.py
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import kvd.compat.horovod.torch as hvd
from kvd.data import digits


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, kernel_size=3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, kernel_size=3)
        self.dropout = nn.Dropout2d(0.1)
        self.fc1 = nn.Linear(32 * 3 * 3, 50)
        self.fc2 = nn.Linear(50, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = functional.relu(self.conv1(images))
        x = functional.relu(functional.max_pool2d(self.dropout(self.conv2(x)), 2))
        x = functional.relu(self.fc1(x.flatten(1)))
        return functional.log_softmax(self.fc2(x), dim=1)


def loaders(batch_size: int) -> tuple[DataLoader[tuple[torch.Tensor, ...]], DataLoader[tuple[torch.Tensor, ...]]]:
    """This worker's part of the training and of the test images."""
    data = digits.load()
    parts = []
    for images, labels in ((data.train_images, data.train_labels), (data.test_images, data.test_labels)):
        dataset = TensorDataset(torch.from_numpy(images[:, None]), torch.from_numpy(labels))
        sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(
            dataset, num_replicas=hvd.size(), rank=hvd.rank()
        )
        parts.append(DataLoader(dataset, batch_size=batch_size, sampler=sampler))
    return parts[0], parts[1]


def metric_average(value: float, name: str) -> float:
    return hvd.allreduce(torch.tensor(value), name=name).item()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader[tuple[torch.Tensor, ...]]) -> None:
    model.train()
    for images, labels in loader:
        optimizer.zero_grad()
        loss = functional.nll_loss(model(images), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def test(model: nn.Module, loader: DataLoader[tuple[torch.Tensor, ...]]) -> tuple[float, float]:
    """Loss and accuracy on the test images of all workers."""
    model.eval()
    loss = right = 0.0
    count = 0
    with torch.no_grad():
        for images, labels in loader:
            outputs = model(images)
            loss += functional.nll_loss(outputs, labels, reduction="sum").item()
            right += (outputs.argmax(dim=1) == labels).sum().item()
            count += len(labels)
    return metric_average(loss / count, "avg_loss"), metric_average(right / count, "avg_accuracy")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=32, help="images per step and worker")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--lr", type=float, default=0.02, help="per worker")
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients as float16")
    given = parser.parse_args()

    hvd.init()
    torch.manual_seed(42 + hvd.rank())
    torch.set_num_threads(1)
    train_loader, test_loader = loaders(given.batch_size)

    model = Net()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(
        model.parameters(), lr=given.lr * hvd.size(), momentum=given.momentum
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if given.fp16_allreduce else hvd.Compression.none,
        op=hvd.Average,
    )
    for epoch in range(given.epochs):
        assert isinstance(train_loader.sampler, DistributedSampler)
        train_loader.sampler.set_epoch(epoch)
        train(model, optimizer, train_loader)
        loss, accuracy = test(model, test_loader)
        if hvd.rank() == 0:
            print(f"epoch {epoch + 1}: loss {loss:.4f}, accuracy {accuracy:.3f}", flush=True)
    print(f"worker {hvd.rank()} of {hvd.size()}: accuracy {accuracy:.3f}", flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main()
