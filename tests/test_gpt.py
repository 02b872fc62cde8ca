import pytest
import torch

from model.config import ModelConfig
from model.data.tokenization.tokenizer import END_OF_TEXT
from model.gpt import GPT, derive_seed, initialize

TINY = ModelConfig(n_layer=2, n_head=2, d_model=16, seq_len=12)


def built(seed: int = 0, config: ModelConfig = TINY, vocab_size: int = 50) -> GPT:
    model = GPT(config, vocab_size)
    initialize(model, seed)
    return model.eval()


@pytest.mark.parametrize(
    ("config", "billions"),
    [  # the tied counts of the white paper's shapes at 262,144 pieces
        (ModelConfig(n_layer=32, n_head=32, d_model=4096, seq_len=2048), "7.526"),
        (ModelConfig(n_layer=76, n_head=96, d_model=13824, seq_len=2048), "177.95"),
    ],
)
def test_published_shapes_have_the_published_number_of_parameters(config: ModelConfig, billions: str) -> None:
    with torch.device("meta"):
        model = GPT(config, 262_144)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert f"{count / 1e9:.{len(billions.split('.')[1])}f}" == billions


@pytest.mark.parametrize("length", [1, 7, 12])
def test_logits_have_a_row_for_every_token(length: int) -> None:
    assert built()(torch.zeros(3, length, dtype=torch.int64)).shape == (3, length, 50)


def test_a_token_does_not_see_later_ones() -> None:
    model = built()
    tokens = torch.arange(12).unsqueeze(0)
    changed = tokens.clone()
    changed[0, 8:] = 40
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :8], after[:, :8])
    assert not torch.allclose(before[:, 8:], after[:, 8:])


@pytest.mark.parametrize("isolated", [True, False])
def test_a_document_sees_no_other_of_its_sequence(isolated: bool) -> None:  # case B4
    """A, the end of text, B: changing A changes the logits from the end of text on by nothing."""
    model = built(config=TINY.model_copy(update={"isolate_documents": isolated}))
    tokens = torch.tensor([[5, 6, 7, 8, END_OF_TEXT, 9, 10, 11, END_OF_TEXT, 12, 13, 14]])
    changed = tokens.clone()
    changed[0, :4] = torch.tensor([20, 21, 22, 23])
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, 4:], after[:, 4:]) == isolated
    assert not torch.allclose(before[:, :4], after[:, :4])


def test_isolated_documents_see_all_of_themselves() -> None:
    """Within a document, the logits are those of the document alone at the same positions."""
    model = built(config=TINY.model_copy(update={"isolate_documents": True}))
    tokens = torch.tensor([[5, 6, 7, END_OF_TEXT, 9, 10, 11, 12]])
    alone = built()(tokens[:, :3])
    torch.testing.assert_close(model(tokens)[:, :3], alone)
    changed = tokens.clone()
    changed[0, 4] = 30
    assert not torch.allclose(model(tokens)[:, 7], model(changed)[:, 7])


def test_initial_values_follow_gpt2() -> None:
    """0.02, and 0.02 / sqrt(2 x 2 layers) = 0.01 into the residual stream; the bound is 5 standard errors."""
    parameters = dict(built(config=ModelConfig(n_layer=2, n_head=2, d_model=64, seq_len=12)).named_parameters())
    for name, std in [("layers.0.mlp.expand.weight", 0.02), ("layers.1.mlp.output.weight", 0.01)]:
        values = parameters[name]
        assert values.std().item() == pytest.approx(std, rel=5 / (2 * values.numel()) ** 0.5)
        assert abs(values.mean().item()) < 5 * std / values.numel() ** 0.5
    assert parameters["layers.0.attention.output.weight"].std().item() == pytest.approx(0.01, rel=0.06)
    assert torch.equal(parameters["layers.0.mlp_norm.weight"], torch.ones(64))
    assert torch.equal(parameters["layers.0.mlp.expand.bias"], torch.zeros(256))


def test_initial_values_depend_on_seed_and_name_alone() -> None:
    one, same, other = built(0).state_dict(), built(0).state_dict(), built(1).state_dict()
    deeper = built(0, TINY.model_copy(update={"n_layer": 3})).state_dict()
    name = "layers.1.attention.qkv.weight"
    assert torch.equal(one[name], same[name])
    assert torch.equal(one[name], deeper[name])
    assert not torch.equal(one[name], other[name])
    assert not torch.equal(one[name], one["layers.0.attention.qkv.weight"])


def test_the_head_is_the_embedding() -> None:
    model = built()
    with torch.no_grad():
        model.token_embedding.weight[7] = 0.0
    assert torch.equal(model(torch.arange(5).unsqueeze(0))[..., 7], torch.zeros(1, 5))


def test_dropout_acts_in_training_only() -> None:
    model = built(config=TINY.model_copy(update={"dropout": 0.5}))
    tokens = torch.arange(12).unsqueeze(0)
    assert torch.equal(model(tokens), built()(tokens))
    model.train()
    assert not torch.allclose(model(tokens), built()(tokens))


def test_derived_seeds_are_fixed_and_keep_their_parts_apart() -> None:
    assert derive_seed(0, "a") == derive_seed(0, "a")
    assert len({derive_seed(1, 23), derive_seed(12, 3), derive_seed("123"), derive_seed(1, 2, 3)}) == 4
    assert 0 <= derive_seed("x") < 2**63
