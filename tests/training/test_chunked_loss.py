"""The chunked loss against the whole one: value, gradients, and what it never holds."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    BartConfig,
    BartForCausalLM,
    BertConfig,
    BertForSequenceClassification,
    BertLMHeadModel,
    FalconH1Config,
    FalconH1ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from grass import chunked_loss
from grass.chunked_loss import IGNORED, _compare, chunk_loss, chunked_cross_entropy
from grass.memory.llama import llama_config

VOCABULARY, HIDDEN = 101, 24


def problem(dtype, bias=False):
    head = nn.Linear(HIDDEN, VOCABULARY, bias=bias, dtype=dtype)
    hidden = torch.randn(3, 7, HIDDEN, dtype=dtype, requires_grad=True)
    targets = torch.randint(VOCABULARY, (3, 7))
    targets[0, :3] = IGNORED
    return hidden, targets, head


@pytest.mark.parametrize("chunk_tokens", [1, 4, 21, 100])
@pytest.mark.parametrize(
    ("dtype", "rtol"), [(torch.float64, 1e-6), (torch.bfloat16, 2e-2)], ids=["fp64", "bf16"]
)  # the loss is float32; bf16 head gradients add up in bf16
def test_equals_cross_entropy(chunk_tokens, dtype, rtol):
    hidden, targets, head = problem(dtype, bias=True)
    inputs = [hidden, *head.parameters()]
    whole = F.cross_entropy(head(hidden).float().flatten(0, 1), targets.flatten())
    chunked = chunked_cross_entropy(hidden, targets, head, chunk_tokens=chunk_tokens)
    assert chunked.dtype == torch.float32
    torch.testing.assert_close(chunked, whole, rtol=1e-6, atol=0)
    expected, actual = torch.autograd.grad(3 * whole, inputs), torch.autograd.grad(3 * chunked, inputs)
    for one, other in zip(actual, expected, strict=True):
        assert one.dtype == dtype
        assert torch.linalg.vector_norm(one - other) <= rtol * torch.linalg.vector_norm(other)


class LargestTensor(TorchDispatchMode):
    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        tensors = [out] if isinstance(out, torch.Tensor) else out if isinstance(out, tuple) else []
        self.elements = max([self.elements, *(t.numel() for t in tensors if isinstance(t, torch.Tensor))])
        return out


def test_never_holds_the_logits_of_more_than_a_chunk():
    hidden, targets, head = torch.randn(400, 2, requires_grad=True), torch.randint(101, (400,)), nn.Linear(2, 101)
    with LargestTensor() as largest:
        chunked_cross_entropy(hidden, targets, head, chunk_tokens=16).backward()
    assert largest.elements == 16 * 101
    with LargestTensor() as largest:
        F.cross_entropy(head(hidden), targets).backward()
    assert largest.elements == 400 * 101


def models():
    config = llama_config("1m", vocab_size=VOCABULARY, max_seq_len=16)
    torch.manual_seed(0)
    plain, chunked = LlamaForCausalLM(config), LlamaForCausalLM(config)
    chunked.load_state_dict(plain.state_dict())
    chunk_loss(chunked, 5)
    return plain, chunked


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("shifted", [False, True])
def test_a_models_own_loss(shifted, compiled):
    plain, chunked = models()
    if compiled:
        chunked.compile(backend="aot_eager")
    ids = torch.randint(VOCABULARY, (2, 12))
    arguments = {"labels": ids, "shift_labels": ids.roll(-1, 1)} if shifted else {"labels": ids}
    expected, actual = plain(input_ids=ids, **arguments).loss, chunked(input_ids=ids, **arguments)
    assert actual.logits is None
    torch.testing.assert_close(actual.loss, expected)
    expected.backward()
    actual.loss.backward()
    for one, other in zip(chunked.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.parametrize("items", [7, torch.tensor(7)], ids=["number", "tensor"])
def test_a_sum_over_the_items_of_accumulated_batches(items):
    """Trainer passes how many tokens all micro-batches have, and divides by nothing else."""
    plain, chunked = models()
    ids = torch.randint(VOCABULARY, (2, 12))
    expected, actual = (model(input_ids=ids, labels=ids, num_items_in_batch=items).loss for model in (plain, chunked))
    torch.testing.assert_close(actual, expected)


MIXTURE = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
MIXTURE |= {"num_key_value_heads": 1, "vocab_size": 31, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.5}
MIXTURES = {
    "mixtral": (MixtralForCausalLM, MixtralConfig, {"num_local_experts": 4}),
    "qwen3": (Qwen3MoeForCausalLM, Qwen3MoeConfig, {"num_experts": 4, "moe_intermediate_size": 8}),
}


@pytest.mark.parametrize("asked", [True, False], ids=["argument", "configuration"])
@pytest.mark.parametrize("kind", MIXTURES)
def test_the_balance_of_routers_is_added(kind, asked):
    build, config, sizes = MIXTURES[kind]
    torch.manual_seed(0)
    plain = build(config(**MIXTURE, **sizes, output_router_logits=not asked))
    chunked = copy.deepcopy(plain)
    chunk_loss(chunked, 5)
    ids = torch.randint(31, (2, 12))
    batch = {"input_ids": ids, "labels": ids, "attention_mask": (torch.arange(12) < 9).expand(2, 12).long()}
    batch |= {"output_router_logits": True} if asked else {}
    expected, actual = plain(**batch), chunked(**batch)
    assert expected.aux_loss > 0
    torch.testing.assert_close(actual.aux_loss, expected.aux_loss)
    torch.testing.assert_close(actual.loss, expected.loss)
    expected.loss.backward()
    actual.loss.backward()
    for one, other in zip(chunked.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-6)


def test_another_loss_of_routers_is_refused():
    _, model = models()
    ids = torch.randint(VOCABULARY, (2, 12))
    with pytest.raises(ValueError, match="not transformers' usual loss of its routers"):
        model(input_ids=ids, labels=ids, output_router_logits=True)
    model.config.output_router_logits = True
    with pytest.raises(ValueError, match="not transformers' usual loss of its routers"):
        chunk_loss(model, 4)


@pytest.mark.parametrize(
    "argument",
    [{"logits_to_keep": 1}, {"ignore_index": 3}, {"return_dict": False}, {"output_hidden_states": True}],
    ids=str,
)
def test_arguments_that_would_be_ignored_are_refused(argument):
    _, model = models()
    ids = torch.randint(VOCABULARY, (2, 12))
    with pytest.raises(ValueError, match=f"{next(iter(argument))} with labels"):
        model(input_ids=ids, labels=ids, **argument)


SMALL = {"vocab_size": 31, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
OTHERS = {
    "a transform before the decoder": lambda: BertLMHeadModel(
        BertConfig(**SMALL, intermediate_size=24, is_decoder=True)
    ),
    "labels that are not shifted": lambda: BartForCausalLM(BartConfig(vocab_size=31, d_model=16, decoder_layers=1)),
    "scaled logits": lambda: FalconH1ForCausalLM(
        FalconH1Config(**SMALL, intermediate_size=24, num_key_value_heads=2, lm_head_multiplier=0.1)
    ),
}


@pytest.mark.parametrize("what", OTHERS)
def test_another_loss_is_refused_in_the_first_forward(what):
    torch.manual_seed(0)
    model, ids = OTHERS[what](), torch.randint(31, (2, 12))
    model.config.is_encoder_decoder = False
    chunk_loss(model, 4)
    with pytest.raises(ValueError, match="another loss than the cross-entropy of its head's logits"):
        model(input_ids=ids, labels=ids)


def test_a_loss_function_of_ones_own_is_refused():
    _, model = models()
    model.loss_function = lambda logits, labels, vocab_size, **kwargs: logits.square().mean()
    ids = torch.randint(VOCABULARY, (2, 12))
    with pytest.raises(ValueError, match="another loss than the cross-entropy of its head's logits"):
        model(input_ids=ids, labels=ids)


@pytest.mark.parametrize(
    ("error", "seen"), [(torch.OutOfMemoryError("full"), torch.OutOfMemoryError), (IndexError("none"), ValueError)]
)
def test_errors_while_comparing(error, seen):
    """Memory that is not enough says nothing of the loss."""
    _, model = models()

    def fail(*_):
        raise error

    model.model.layers[0].register_forward_pre_hook(fail)
    ids = torch.randint(VOCABULARY, (2, 12))
    with pytest.raises(seen, match=str(error)):
        model(input_ids=ids, labels=ids)


def test_comparing_draws_nothing_and_is_done_once(monkeypatch):
    _, model = models()
    model.model.config.attention_dropout = 0.5
    ids, calls = torch.randint(VOCABULARY, (2, 12)), []
    monkeypatch.setattr(chunked_loss, "_compare", (lambda own: lambda *a: (calls.append(1), own(*a)))(_compare))
    losses = []
    for _ in range(2):
        torch.manual_seed(0)
        losses.append(model(input_ids=ids, labels=ids).loss.item())
    assert losses[0] == losses[1]
    assert len(calls) == 1


def test_labels_by_position():
    plain, chunked = models()
    ids = torch.randint(VOCABULARY, (2, 12))
    output = chunked(ids, None, None, None, None, ids)
    assert output.logits is None
    torch.testing.assert_close(output.loss, plain(ids, None, None, None, None, ids).loss)


def test_a_head_with_dropout_computes_its_chunks_again_with_the_same_mask():
    head = nn.Sequential(nn.Dropout(0.5), nn.Linear(HIDDEN, VOCABULARY)).double()
    hidden, targets, _ = problem(torch.float64)

    def loss(hidden):
        torch.manual_seed(0)
        return chunked_cross_entropy(hidden, targets, head, chunk_tokens=4)

    step = 1e-3 * torch.randn_like(hidden)
    (grad,) = torch.autograd.grad(loss(hidden), hidden)
    change = (loss(hidden.detach() + step) - loss(hidden.detach() - step)) / 2
    assert change.item() == pytest.approx((grad * step).sum().item(), rel=1e-2)  # the loss is float32


def test_models_without_a_head_are_refused():
    sizes = SMALL | {"intermediate_size": 24}
    with pytest.raises(ValueError, match="BertForSequenceClassification is no decoder with a head"):
        chunk_loss(BertForSequenceClassification(BertConfig(**sizes)), 4)
    with pytest.raises(TypeError, match="takes a model of transformers, got Linear"):
        chunk_loss(nn.Linear(2, 2), 4)


def test_copies_compute_their_own_loss():
    _, model = models()
    copied, ids = copy.deepcopy(model), torch.randint(VOCABULARY, (2, 12))
    torch.nn.init.zeros_(copied.lm_head.weight)
    assert copied(input_ids=ids, labels=ids).loss.item() == pytest.approx(math.log(VOCABULARY))


def test_without_labels_nothing_changes():
    plain, chunked = models()
    ids = torch.randint(VOCABULARY, (2, 12))
    torch.testing.assert_close(chunked(input_ids=ids).logits, plain(input_ids=ids).logits)


def test_errors():
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11))
    with pytest.raises(ValueError, match="chunk_tokens=0: must be >= 1"):
        chunk_loss(model, 0)
    with pytest.raises(ValueError, match="chunk_tokens=0: must be >= 1"):
        chunked_cross_entropy(torch.zeros(1, 2), torch.zeros(1).long(), nn.Linear(2, 3), chunk_tokens=0)


@pytest.mark.parametrize(
    ("field", "value"), [("final_logit_softcapping", 1.0), ("logit_scale", 0.5), ("logits_scaling", 8.0)]
)
def test_changed_logits_are_refused(field, value):
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11))
    setattr(model.config, field, value)
    with pytest.raises(ValueError, match=f"changes its logits \\({field}\\)"):
        chunk_loss(model, 4)


def test_logits_scaled_by_one_are_those_of_the_head():
    torch.manual_seed(0)
    sizes = {"vocab_size": 11, "hidden_size": 8, "intermediate_size": 16}
    sizes |= {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = GraniteForCausalLM(GraniteConfig(**sizes, logits_scaling=1.0))
    ids = torch.randint(11, (2, 6))
    expected = model(input_ids=ids, labels=ids).loss
    chunk_loss(model, 4)
    torch.testing.assert_close(model(input_ids=ids, labels=ids).loss, expected)
