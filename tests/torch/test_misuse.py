"""What is wrong with a model, an optimizer or a loop is said in all workers, with the parameter and the rank."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import kvd
import kvd.torch as kt
from kvd.errors import KeyExists, KvdError, NodeLost, NotAllowed, NotCopyable
from kvd.testing.cluster import LocalCluster
from kvd.torch import check_version

X = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
MODEL = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


@pytest.fixture
def kv() -> Iterator[kvd.KVStore]:
    with kvd.create() as store:
        yield store


def model() -> nn.Module:
    return copy.deepcopy(MODEL)


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([value for value in module.parameters() if value.requires_grad], 0.1)


def wrapped(module: nn.Module, kv: kvd.KVStore, where: Any = "workers", **options: Any) -> kt.DistributedOptimizer:
    return kt.DistributedOptimizer(
        sgd(module), module.named_parameters(), where=where, store=kv, **{"op": "mean", **options}
    )


def backward(module: nn.Module) -> None:
    loss: Any = module(X).square().mean()
    loss.backward()


def refuses(text: str) -> Any:
    return pytest.raises(NotAllowed, match=text)


# ── arguments ──


def test_arguments(kv: kvd.KVStore) -> None:
    module = model()
    names = list(module.named_parameters())
    with refuses("a torch optimizer is wanted"):
        kt.DistributedOptimizer(module, names, where="workers", op="mean", store=kv)  # type: ignore[arg-type]
    for option in ({"where": "server"}, {"op": "average"}, {"sparse": "yes"}):
        with refuses(f"{next(iter(option))} is '"):
            wrapped(module, kv, **option)
    with refuses(r"pass model.named_parameters\(\)"):
        kt.DistributedOptimizer(sgd(module), module.parameters(), where="workers", op="mean", store=kv)  # type: ignore[arg-type]
    with refuses("the optimizer does not have '2.weight', '2.bias'"):
        kt.DistributedOptimizer(sgd(module[0]), names, where="workers", op="mean", store=kv)  # type: ignore[index]
    with refuses(r"the optimizer has a parameter of shape \(2, 4\) \(group 0\) that named_parameters does not name"):
        kt.DistributedOptimizer(sgd(module), names[:2], where="workers", op="mean", store=kv)
    with refuses("two parameters of the name 'w'"):
        kt.DistributedOptimizer(sgd(module), [("w", value) for _, value in names], where="workers", op="mean", store=kv)
    with refuses("'0.weight' has the dtype complex64"):
        wrapped(nn.Sequential(nn.Linear(3, 4, dtype=torch.complex64)), kv)
    with refuses("'weight' is on the device meta"):
        wrapped(nn.Linear(3, 4, device="meta"), kv)
    with refuses("'weight' is of a lazy module"):
        wrapped(nn.LazyLinear(3), kv)
    with refuses("no parameter needs gradients"):
        optimizer = sgd(module)
        module.requires_grad_(False)
        kt.DistributedOptimizer(optimizer, names, where="workers", op="mean", store=kv)


def test_parameters_are_wrapped_once(kv: kvd.KVStore) -> None:
    module = model()
    optimizer = wrapped(module, kv)
    with refuses("'0.weight' is wrapped already"):
        wrapped(module, kv)
    with refuses("key .0.weight. is in use, by another optimizer.*prefix"):
        wrapped(model(), kv)
    with refuses("a DistributedOptimizer is wrapped already"):
        kt.DistributedOptimizer(optimizer, module.named_parameters(), where="workers", op="mean", store=kv)
    with refuses("parameters cannot be added"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    optimizer._wrapped.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    with refuses("parameters cannot be added"):
        backward(module)


def test_parameters_are_wrapped_again_when_their_keys_are_deleted(kv: kvd.KVStore) -> None:
    module = model()
    first = wrapped(module, kv, "servers")
    backward(module)
    first.step()
    kv.delete(list(dict(module.named_parameters())))
    before = [value.clone() for value in module.parameters()]
    second = wrapped(module, kv, "servers")
    assert all(map(torch.equal, before, module.parameters()))
    backward(module)
    second.step()
    assert not any(map(torch.equal, before, module.parameters()))
    with pytest.raises(KvdError):
        first.step()


def test_a_store_has_one_optimizer_for_all_keys(kv: kvd.KVStore) -> None:
    first, second, third = (nn.ModuleDict({name: model()}) for name in ("first", "second", "third"))
    early = wrapped(first, kv)
    wrapped(second, kv, "servers")
    with refuses("Adam cannot join it"):
        kt.DistributedOptimizer(
            torch.optim.Adam(third.parameters()), third.named_parameters(), where="servers", op="mean", store=kv
        )
    with refuses("the servers only merge gradients"):
        wrapped(third, kv, "workers", bucket_bytes=1)
    with refuses("an optimizer was set on them"):
        backward(first["first"])
    kv.set_optimizer(kvd.optimizer.Adagrad())
    with refuses("which is Adagrad, so a SGD cannot join it"):
        backward(second["second"])
    assert early.state == {}


def test_copies(kv: kvd.KVStore) -> None:
    optimizer = wrapped(model(), kv)
    for copying in (copy.deepcopy, pickle.dumps):
        with pytest.raises(NotCopyable, match=r"kvd\.torch cannot be copied"):
            copying(optimizer)


def test_the_version_of_torch() -> None:
    check_version("2.4.0")
    check_version("3.0.0a1+cu130")
    with pytest.raises(ImportError, match=r"2\.4 or later, not 2\.3\.1"):
        check_version("2.3.1")


# ── steps ──


def test_a_second_backward(kv: kvd.KVStore) -> None:
    for where, op in (("workers", "sum"), ("servers", "mean")):
        module = nn.ModuleDict({where: model()})
        forward = module[where]
        optimizer = wrapped(module, kv, where, op=op)
        backward(forward)
        with refuses(r"gives 'servers.2.\w+' a second gradient.*no_sync" if where == "servers" else "second gradient"):
            backward(forward)
        optimizer.step()
        backward(forward)
    with refuses("were sent already"):
        kt.DistributedOptimizer.zero_grad(_with_sent_gradients(kv))


def _with_sent_gradients(kv: kvd.KVStore) -> kt.DistributedOptimizer:
    module = nn.ModuleDict({"sent": model()})
    optimizer = wrapped(module, kv, "servers")
    backward(module["sent"])
    return optimizer


@pytest.mark.parametrize("where", ["servers", "workers"])
def test_gradients_that_were_not_sent(kv: kvd.KVStore, where: str) -> None:
    module = model()
    optimizer = wrapped(module, kv, where)
    before = [value.clone() for value in module.parameters()]
    optimizer.step()  # without gradients nothing happens
    with optimizer.no_sync():
        backward(module)
    with refuses("no_sync"):
        optimizer.step()
    assert all(map(torch.equal, before, module.parameters()))
    optimizer.zero_grad()
    optimizer.step()
    for step in optimizer.steps(2):
        optimizer.zero_grad()
        backward(module)
        if step or where == "workers":
            optimizer.step()
        elif where == "servers":
            break
    if where == "servers":
        optimizer.step()
        with refuses("did not call optimizer.step"):
            for _ in optimizer.steps(2):
                backward(module)


def test_a_backward_that_fails(kv: kvd.KVStore) -> None:
    module = model()
    optimizer = wrapped(module, kv, "servers")

    def fail(gradient: torch.Tensor) -> None:
        raise RuntimeError("on purpose")

    hidden = module[1](module[0](X))  # type: ignore[index]
    hidden.register_hook(fail)
    with pytest.raises(RuntimeError, match="on purpose"):
        module[2](hidden).sum().backward()  # type: ignore[index]
    with refuses("backward.. did not end: '0.bias' and 1 more|'0.weight' and 1 more"):
        optimizer.step()
    with refuses("second gradient"):
        backward(module)


class _Fails(torch.autograd.Function):
    """The identity, whose backward fails."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor) -> torch.Tensor:
        return given.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("on purpose")


@pytest.mark.parametrize("where", ["servers", "workers"])
def test_the_next_backward_sends_nothing_of_one_that_failed(kv: kvd.KVStore, where: str) -> None:
    """The two use different layers, so that no parameter has two gradients."""

    def begin(name: str, **options: Any) -> tuple[Any, kt.DistributedOptimizer]:
        module = nn.ModuleDict({name: model()})
        optimizer = wrapped(module, kv, where, **options)
        layers: Any = module[name]
        fail: Any = _Fails.apply(X.clone().requires_grad_())  # type: ignore[no-untyped-call]
        with pytest.raises(RuntimeError, match="on purpose"):
            layers[0](fail).sum().backward()
        return layers, optimizer

    layers, optimizer = begin("forgotten")
    optimizer.zero_grad()
    before = copy.deepcopy(layers)
    layers[2](torch.ones(2, 4)).sum().backward()
    optimizer.step()
    torch.testing.assert_close(layers[2].bias, before[2].bias - 0.1 * 2)  # the gradient counts the two rows
    assert torch.equal(layers[0].weight, before[0].weight)
    layers, optimizer = begin("kept")
    for parameter in layers.parameters():
        parameter.grad = None
    with refuses("an earlier backward.. has failed"):
        layers[2](torch.ones(2, 4)).sum().backward()
    with refuses("has failed"):
        optimizer.step()
    layers, optimizer = begin("sent", first_bucket_bytes=1, bucket_bytes=1)
    with refuses("did not end: .*sent already"):
        optimizer.zero_grad()


def test_a_state_that_cannot_travel_is_refused_before_another_worker_needs_it(kv: kvd.KVStore) -> None:
    module = model()
    optimizer = wrapped(module, kv)
    with refuses("object"):
        for _ in optimizer.steps(2):
            backward(module)
            optimizer.step()
            optimizer.state[module[0].weight]["hook"] = object()  # type: ignore[index]


def test_servers_take_no_closure_and_no_state(kv: kvd.KVStore) -> None:
    module = model()
    optimizer = wrapped(module, kv, "servers")
    with refuses("no closure"):
        optimizer.step(lambda: 0.0)
    other = torch.optim.SGD(model().parameters(), 0.05, momentum=0.9)
    optimizer.load_state_dict(other.state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.05
    other = torch.optim.SGD((source := model()).parameters(), 0.05, momentum=0.9)
    backward(source)
    other.step()
    with refuses("on the servers"):
        optimizer.load_state_dict(other.state_dict())
    with refuses("LBFGS"):
        kt.DistributedOptimizer(
            torch.optim.LBFGS(source.parameters()), source.named_parameters(), where="servers", op="mean", store=kv
        )


# ── models that change ──


def test_models_that_change(kv: kvd.KVStore) -> None:
    frozen, thawed, halved = (nn.ModuleDict({name: model()}) for name in ("frozen", "thawed", "halved"))
    wrapped(frozen, kv)
    frozen["frozen"][0].weight.requires_grad_(False)  # type: ignore[index]
    with refuses("'frozen.0.weight' needs no gradients any more"):
        backward(frozen["frozen"])
    thawed["thawed"][0].weight.requires_grad_(False)  # type: ignore[index]
    wrapped(thawed, kv)
    thawed["thawed"][0].weight.requires_grad_(True)  # type: ignore[index]
    with refuses("'thawed.0.weight' needs gradients now"):
        backward(thawed["thawed"])
    wrapped(halved, kv)
    halved.double()
    with refuses("'halved.2.[a-z]+' has become torch.float64"):
        loss: Any = halved["halved"](X.double()).sum()
        loss.backward()


def test_sparse_gradients(kv: kvd.KVStore) -> None:
    for sparse in ("refuse", "dense"):
        module = nn.ModuleDict({sparse: nn.Embedding(5, 2, sparse=True)})
        optimizer = wrapped(module, kv, sparse=sparse)
        loss: Any = module[sparse](torch.tensor([1, 3, 1])).sum()
        if sparse == "refuse":
            with refuses("the gradient of 'refuse.weight' is sparse"):
                loss.backward()
            continue
        loss.backward()
        expected = torch.zeros(5, 2)
        expected[1], expected[3] = 2.0, 1.0
        assert torch.equal(module[sparse].weight.grad, expected)  # type: ignore[arg-type]
        optimizer.step()


def test_a_checkpoint_around_all_parameters_that_leaves_some_without_gradients(kv: kvd.KVStore) -> None:
    module = nn.ModuleDict({"used": model(), "unused": model()})
    optimizer = wrapped(module, kv)
    loss: Any = checkpoint(module["used"], X.clone().requires_grad_(), use_reentrant=True).sum()
    loss.backward()
    with refuses("did not end.*use_reentrant=False"):
        optimizer.step()


# ── workers that differ ──


def test_the_others_learn_that_a_worker_has_failed() -> None:
    errors: dict[int, BaseException] = {}

    def program(kv: kvd.KVStore) -> None:
        module = nn.Embedding(5, 2, sparse=kv.rank == 1)
        optimizer = wrapped(module, kv)
        try:
            loss: Any = module(torch.tensor([1])).sum()
            loss.backward()
        except KvdError as error:
            errors[kv.rank] = error
            if kv.rank == 0:
                optimizer.zero_grad()
                with refuses("has failed when its gradients were merged"):
                    optimizer.step()
            raise

    with LocalCluster(2, 1) as cluster, refuses("'weight' is sparse"):
        cluster.run(program)
    assert isinstance(errors[0], NodeLost)
    assert errors[0].node == "worker 1"


def test_workers_with_other_models_or_options() -> None:
    def program(kv: kvd.KVStore) -> list[str]:
        wide = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 7))
        deep = nn.Sequential(*[nn.Linear(3, 3) for _ in range(80)])
        deeper = nn.Sequential(*[nn.Linear(3, 3) for _ in range(81)])
        texts = []
        for mine, theirs, options in (
            (model(), wide, {}),
            (deep, deeper, {}),
            (model(), model().double(), {}),
            (model(), model(), {"bucket_bytes": 1000 + kv.rank}),
        ):
            with pytest.raises(NotAllowed) as raised:
                wrapped(theirs if kv.rank else mine, kv, **options)
            texts.append(str(raised.value))
        kv.init("taken", X, merge="mean")
        with pytest.raises(KeyExists, match="taken"):
            wrapped(nn.ParameterDict({"taken": nn.Parameter(X.clone())}), kv)
        optimizer = wrapped(model(), kv)  # nothing is left behind
        backward(_module_of(optimizer))
        return texts

    def _module_of(optimizer: kt.DistributedOptimizer) -> nn.Module:
        module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        parameters = optimizer.param_groups[0]["params"]
        module[0].weight, module[0].bias, module[2].weight, module[2].bias = parameters
        return module

    with LocalCluster(2, 1) as cluster:
        first, second = cluster.run(program)
    assert first == second
    assert "worker 1 has '2.weight (7, 4) float32' where worker 0 has '2.weight (2, 4) float32'" in first[0]
    assert "worker 1 has '80.weight (3, 3) float32' where worker 0 has 'no parameter'" in first[1]
    assert "'0.weight (4, 3) float64'" in first[2]
    assert "bucket_bytes=1001" in first[3]


def test_one_optimizer_of_a_store_passes_its_state_on() -> None:
    kv = kvd.create("local")
    generator, critic = nn.Linear(2, 2), nn.Linear(2, 1)
    wrapped = [
        kt.DistributedOptimizer(
            kind(module.parameters(), 0.1), module.named_parameters(prefix=name), where="workers", op="mean", store=kv
        )
        for kind, module, name in ((torch.optim.Adam, generator, "generator"), (torch.optim.SGD, critic, "critic"))
    ]
    with pytest.raises(NotAllowed, match=r"one optimizer of a store passes its state on"):
        wrapped[0].keep("critic", wrapped[1])
    next(wrapped[0].steps(1))
    text = r"Adam with the parameter 'generator.weight', and SGD with the parameter 'critic.weight' asks for it"
    with pytest.raises(NotAllowed, match=text):
        next(wrapped[1].steps(1))
    kv.close()


def test_a_second_optimizer_of_the_servers_is_refused() -> None:
    sgd, adagrad = kvd.optimizer.SGD(0.1), kvd.optimizer.Adagrad(0.1)
    kv = kvd.create("local")
    kt.Embedding(4, 2, name="one", store=kv, optimizer=adagrad)
    kt.Embedding(4, 2, name="two", store=kv, optimizer=adagrad)
    with pytest.raises(NotAllowed, match=r"Adagrad\(.*Embedding\(name='three', optimizer=…\) asks for SGD\("):
        kt.Embedding(4, 2, name="three", store=kv, optimizer=sgd)
    model = nn.Linear(2, 1)
    with pytest.raises(NotAllowed, match=r"Adagrad\(.*LocalSGD\(outer=…\) asks for SGD\("):
        kt.LocalSGD(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters(), every=2, outer=sgd, store=kv)
    kv.close()


def test_a_loop_of_the_store_before_one_that_passes_states_on(kv: kvd.KVStore) -> None:
    kv.init("warm", torch.zeros(1))
    for _ in kv.steps(2):
        kv.push("warm", torch.ones(1))
    module = model()
    optimizer = wrapped(module, kv)
    with refuses(r"a loop over store.steps came before this loop over optimizer.steps"):
        next(optimizer.steps(2))
    assert module(X).shape == (4, 2)


@pytest.mark.parametrize("where", ["servers", "workers"])
def test_a_second_backward_in_a_step_of_a_loop(kv: kvd.KVStore, where: str) -> None:
    """It is refused before anything is sent, and the step ends as if it had not been made."""
    module = model()
    optimizer = wrapped(module, kv, where)
    alone = model()
    torch_alone = sgd(alone)
    for step in optimizer.steps(3):
        optimizer.zero_grad()
        backward(module)
        optimizer.step()
        if step == 1:
            with refuses(r"a second gradient in this step.*no_sync"):
                backward(module)
        torch_alone.zero_grad()
        backward(alone)
        torch_alone.step()
    for each, stepped in ((module, optimizer), (alone, torch_alone)):  # after the loop
        stepped.zero_grad()
        backward(each)
        stepped.step()
    for mine, expected in zip(module.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine, expected)
