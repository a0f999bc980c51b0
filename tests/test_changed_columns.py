"""A finetuned model as a file of columns: small, exact, and refused where it does not fit."""

import copy

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import LlamaForCausalLM

import grass
from grass.memory.llama import llama_config


def tiny(seed=0, **changes):
    torch.manual_seed(seed)
    config = llama_config("1m", vocab_size=64, max_seq_len=16)
    config.num_hidden_layers, config.tie_word_embeddings = 1, changes.get("tied", False)
    return LlamaForCausalLM(config)


def train(model, optimizer, steps=3):
    for step in range(steps):
        ids = torch.randint(64, (2, 8), generator=torch.Generator().manual_seed(step))
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def plain_state(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("into", ["plain", "converted"])
def test_columns_drawn_once_are_all_that_is_saved_and_make_the_trained_model(tmp_path, dim, into):
    model, other = tiny(), tiny()
    base = plain_state(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("proj" in name)
    matched = grass.compact(model, rank=0.125, explore=0, dim=dim)
    train(model, grass.GrassAdamW(model, lr=1e-2, update_interval=1_000_000))
    shares = grass.save_columns(model, tmp_path / "columns.safetensors", base)
    assert shares == {f"{name}.weight": 0.125 for name in matched}
    elements = sum(base[name].numel() for name in shares) / 8
    assert (tmp_path / "columns.safetensors").stat().st_size < 4 * elements * 1.1
    if into == "converted":
        grass.compact(other, rank=0.25)
        other.train()
    assert set(grass.load_columns(other, tmp_path / "columns.safetensors")) == set(shares)
    trained = model.state_dict()
    assert all(torch.equal(tensor, trained[name]) for name, tensor in other.state_dict().items())
    ids = torch.arange(8)[None]
    assert torch.equal(other(input_ids=ids).logits, model(input_ids=ids).logits) or into == "converted"
    torch.testing.assert_close(other(input_ids=ids).logits, model(input_ids=ids).logits)


@pytest.mark.parametrize("sharded", [False, True])
def test_the_base_may_be_what_save_pretrained_wrote(tmp_path, sharded):
    model = tiny(tied=True)  # whose second name for the embedding is not in the file
    model.save_pretrained(tmp_path / "base", max_shard_size="100KB" if sharded else "5GB")
    assert (len(list((tmp_path / "base").glob("*.safetensors"))) > 1) == sharded
    train(model, torch.optim.AdamW(model.parameters()))
    shares = grass.save_columns(model, tmp_path / "columns.safetensors", tmp_path / "base")
    assert set(shares.values()) == {1.0}  # AdamW moves everything
    other = LlamaForCausalLM.from_pretrained(tmp_path / "base")
    grass.load_columns(other, tmp_path / "columns.safetensors")
    assert all(torch.equal(tensor, other.state_dict()[name]) for name, tensor in model.state_dict().items())


def test_tied_tensors_are_saved_once(tmp_path):
    """A state dict as the base has both names."""
    model = tiny(tied=True)
    base = plain_state(model)
    other = copy.deepcopy(model)
    train(model, torch.optim.AdamW(model.parameters()))
    shares = grass.save_columns(model, tmp_path / "columns.safetensors", base)
    assert len(shares) == len(base) - 1
    grass.load_columns(other, tmp_path / "columns.safetensors")
    assert all(torch.equal(tensor, other.state_dict()[name]) for name, tensor in model.state_dict().items())


def test_rows_where_fewer_of_them_changed_and_only_tensors_that_did(tmp_path):
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 6), nn.BatchNorm1d(6))
    base = plain_state(model)
    with torch.no_grad():
        model[0].weight[3] += 1
        model[1].weight[:, 2] = float("nan")
        model[1].bias[0] += 1
    shares = grass.save_columns(model, tmp_path / "file", base)
    assert shares == {"0.weight": 1 / 5, "1.weight": 1 / 5, "1.bias": 1.0}
    assert {name: tuple(tensor.shape) for name, tensor in load_file(tmp_path / "file").items()} == {
        "rows:0.weight": (1,),
        "values:0.weight": (1, 6),
        "kept:0.weight": (6,),
        "columns:1.weight": (1,),
        "values:1.weight": (6, 1),
        "kept:1.weight": (6,),
        "whole:1.bias": (6,),
    }


def test_a_base_that_is_not_the_models(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(ValueError, match=r"The base has no 0\.weight"):
        grass.save_columns(model, tmp_path / "file", {})
    with pytest.raises(ValueError, match=r"0\.weight is \(4, 4\) in the model and \(2, 4\) in the base"):
        grass.save_columns(model, tmp_path / "file", {"0.weight": torch.ones(2, 4), "0.bias": torch.ones(4)})
    with pytest.raises(FileNotFoundError, match="no safetensors file and no directory"):
        grass.save_columns(model, tmp_path / "file", tmp_path)
    assert not (tmp_path / "file").exists()


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (nn.Sequential(nn.Identity(), nn.Linear(4, 4)), r"changes 0\.weight, which the model does not have"),
        (nn.Sequential(nn.Linear(2, 4)), r"changes column 3 of 0\.weight, which has 2"),
        (nn.Sequential(nn.Linear(4, 8)), r"0\.weight is \(8, 4\), which \(4, 1\) of the file do not fit"),
    ],
)
def test_a_model_that_the_file_does_not_fit_stays_as_it_is(tmp_path, target, message):
    model = nn.Sequential(nn.Linear(4, 4))
    base = plain_state(model)
    model[0].weight.data[:, 3] += 1
    grass.save_columns(model, tmp_path / "file", base)
    before = plain_state(target)
    with pytest.raises(ValueError, match=message):
        grass.load_columns(target, tmp_path / "file")
    assert all(torch.equal(tensor, before[name]) for name, tensor in target.state_dict().items())


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_another_base_is_told_by_what_did_not_change(tmp_path, dtype, dim, caplog):
    """Whatever the type of the model that gets the columns; a file without such values says nothing."""
    model, path = tiny(), tmp_path / "columns.safetensors"
    base = plain_state(model)
    grass.compact(model, rank=0.125, explore=0, dim=dim)
    train(model, grass.GrassAdamW(model, lr=1e-2, update_interval=1_000_000))
    shares = grass.save_columns(model, path, base)
    grass.load_columns(tiny().to(dtype), path)
    assert "not those of the base" not in caplog.text
    grass.load_columns(tiny(seed=1).to(dtype), path)
    count = sum(share < 1 for share in shares.values())
    assert f"{count} tensors of the model are not those of the base" in caplog.text
    caplog.clear()
    save_file(
        {k: v for k, v in load_file(path).items() if not k.startswith("kept:")}, path, grass.changed_columns.FORMAT
    )
    grass.load_columns(tiny(seed=1), path)
    assert "not those of the base" not in caplog.text


@pytest.mark.parametrize(("explore", "seed", "whole"), [(0, 0, False), (1.0, 0, True), (0, 1, True)])
def test_a_file_that_holds_the_whole_model_says_so(tmp_path, explore, seed, whole, caplog):
    model, base = tiny(), plain_state(tiny(seed))
    grass.compact(model, rank=0.125, explore=explore)
    train(model, grass.GrassAdamW(model, lr=1e-2, update_interval=1_000_000))
    grass.save_columns(model, tmp_path / "columns.safetensors", base)
    assert ("is that the base that training began with" in caplog.text) == whole


def test_tensors_that_are_always_saved_whole_are_not_warned_of(tmp_path, caplog):
    model = nn.Conv1d(4, 4, 3)
    base = plain_state(model)
    nn.init.ones_(model.weight)
    assert grass.save_columns(model, tmp_path / "file", base) == {"weight": 1.0}
    assert not caplog.text


def test_other_files_are_refused(tmp_path):
    save_file({"0.weight": torch.ones(4, 4)}, tmp_path / "file")
    with pytest.raises(ValueError, match="is not a file of changed columns"):
        grass.load_columns(nn.Sequential(nn.Linear(4, 4)), tmp_path / "file")
    save_file({"values:0.weight": torch.ones(4, 1)}, tmp_path / "file", metadata={"format": "grass.changed_columns"})
    with pytest.raises(ValueError, match=r"only values of 0\.weight: it is damaged"):
        grass.load_columns(nn.Sequential(nn.Linear(4, 4)), tmp_path / "file")
