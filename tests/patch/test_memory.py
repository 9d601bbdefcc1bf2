import pytest
import torch

import vit_prune as vp
from tests.helpers import randomise_bias, tiny_vit


def saved_bytes(model, images):
    """Bytes that one forward keeps for its backward; each storage once, parameters left out."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    storages = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage  # held, so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(images)
    return sum(storage.nbytes() for storage in storages.values())


@pytest.mark.parametrize("keep", [0.5, 1.0])
@pytest.mark.filterwarnings("ignore:the token bias is all zero")
def test_what_a_training_step_holds_grows_with_the_tokens_not_with_their_square(keep):
    model = tiny_vit(dynamic_img_size=True, embed_dim=64, num_heads=2)
    randomise_bias(vp.patch(model, vp.TokenBias(keep=keep))).train()
    small, large = (saved_bytes(model, torch.randn(2, 3, side, side)) for side in (128, 256))  # 257 and 1,025 tokens
    assert large <= 4.1 * small
