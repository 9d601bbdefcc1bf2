import os

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

import vit_prune as vp
from tests.helpers import randomise_bias, tiny_vit

METHODS = {
    "pruned": vp.TokenBias(keep=0.5),
    "merged": [vp.TokenBias(), vp.Columns(keep=0.5, dropped="merge")],
    "tome": [vp.ToMe(r=3), vp.TokenBias(keep=0.5)],
    "heads": [vp.TokenBias(keep=0.5), vp.BudgetFormer(sigma_max=0.0)],
    "query-key-free": vp.TokenBias(keep=0.5, query_key_free=1),
}


def model_and_images(method):
    model = randomise_bias(vp.patch(tiny_vit(qk_norm=method == "query-key-free"), METHODS[method]))
    return model.train(), torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def worker(rank, port, folder):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    for method in METHODS:
        model, images = model_and_images(method)
        wrapped = DistributedDataParallel(model, find_unused_parameters=False)
        for _ in range(2):  # an unused parameter fails the second forward
            model.zero_grad()
            wrapped(images[rank * 2 : rank * 2 + 2]).pow(2).mean().backward()
        try:
            vp.patch(DistributedDataParallel(tiny_vit()), vp.TokenBias())
            refused = ""
        except TypeError as error:
            refused = str(error)
        if rank == 0:
            torch.save(({name: p.grad for name, p in model.named_parameters() if p.grad is not None}, refused), f"{folder}/{method}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ddp")
    port = 29500 + os.getpid() % 2000
    mp.spawn(worker, args=(port, str(folder)), nprocs=2)
    return folder


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.filterwarnings("ignore:the token bias is all zero")
def test_two_processes_see_no_unused_parameter_and_equal_one(results, method):
    gradients, refused = torch.load(results / f"{method}.pt", weights_only=True)
    model, images = model_and_images(method)
    model(images).pow(2).mean().backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert gradients.keys() == expected.keys()
    assert {name for name, p in model.named_parameters() if p.requires_grad} == set(expected)
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-6, msg=name)
    assert "patch the model, then wrap it" in refused
