import io
from itertools import islice

import pytest
import torch

from training.data.blocks import DataConfig, PackedBatches, packed_blocks
from training.data.loading import load_data
from training.data.tokenization import ByteTokenizer, encode_all, load_tokenizer


def take(batches, count):
    return [next(batches) for _ in range(count)]


def through_disk(state):
    """The state as a checkpoint gives it back."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.fixture
def stream_config(json_files, tokenizer_path):
    return DataConfig(
        dataset="json", data_files=json_files, tokenizer=tokenizer_path, batch_size=3, seq_len=16, eval_blocks=5
    )


@pytest.fixture(params=["files", "stream"])
def config(request, stream_config):
    return stream_config if request.param == "stream" else DataConfig(batch_size=3, seq_len=16, seed=7, eval_blocks=5)


def test_batches_have_inputs_and_targets(config):
    data = load_data(config)
    for batch in take(data.train, 3):
        assert batch.shape == (3, 17)
        assert batch.dtype == torch.int64
        assert batch.max() < data.vocab_size
    assert data.eval_blocks.shape == (5, 17)


@pytest.mark.parametrize("done", [0, 1, 5, 150, 170], ids="after {} batches".format)
def test_resumes_with_the_very_next_batch(config, done):
    """The stream has 160 batches: it is resumed before, across and after its end."""
    alone = load_data(config).train
    take(alone, done)
    state = through_disk(alone.state_dict())
    resumed = load_data(config).train
    resumed.load_state_dict(state)
    for expected, actual in zip(take(alone, 30), take(resumed, 30), strict=True):
        assert torch.equal(actual, expected)


def test_resuming_twice_in_a_row(stream_config):
    alone = load_data(stream_config).train
    expected = take(alone, 90)
    actual = []
    state = None
    for _ in range(3):
        part = load_data(stream_config).train
        if state is not None:
            part.load_state_dict(state)
        actual += take(part, 30)
        state = through_disk(part.state_dict())
    assert torch.equal(torch.stack(actual), torch.stack(expected))


def test_stream_serves_every_token_once_an_epoch(stream_config, documents):
    tokens = encode_all(load_tokenizer(stream_config.tokenizer), documents[:200])
    whole_batches = (len(tokens) - 1) // (3 * 16)
    served = torch.cat([batch[:, :-1].flatten() for batch in take(load_data(stream_config).train, whole_batches)])
    assert torch.equal(served, tokens[: len(served)].long())


def test_stream_starts_over_at_its_end(stream_config, documents):
    tokens = encode_all(load_tokenizer(stream_config.tokenizer), documents[:200]).repeat(3).long()
    batches = 2 * len(tokens) // 3 // (3 * 16)
    served = torch.cat([batch[:, :-1].flatten() for batch in take(load_data(stream_config).train, batches)])
    assert len(served) > len(tokens) // 3 + 48
    assert torch.equal(served, tokens[: len(served)])


def test_stream_without_documents_says_so(stream_config, tmp_path):
    (tmp_path / "empty.jsonl").write_text("")
    files = {**stream_config.data_files, "train": f"{tmp_path}/empty.jsonl"}
    config = DataConfig(dataset="text", data_files=files, tokenizer=stream_config.tokenizer)
    with pytest.raises(ValueError, match="no documents"):
        next(load_data(config).train)


def test_packed_epoch_is_a_permutation_of_all_blocks():
    tokens = torch.arange(101)
    batches = PackedBatches(tokens, batch_size=5, seq_len=10, seed=0)
    first, second = (torch.cat(take(batches, 2)) for _ in range(2))
    assert sorted(first[:, 0].tolist()) == sorted(second[:, 0].tolist()) == list(range(0, 100, 10))
    assert not torch.equal(first, second)
    assert torch.equal(first[:, 1:], first[:, :-1] + 1)


def test_packed_batch_is_a_function_of_seed_and_number():
    tokens = torch.arange(1000)
    make = lambda seed: PackedBatches(tokens, batch_size=4, seq_len=10, seed=seed)  # noqa: E731
    in_order = take(make(3), 60)
    assert torch.equal(make(3).sequences(59 * 4, 4), in_order[59])
    assert not torch.equal(make(4).sequences(59 * 4, 4), in_order[59])


@pytest.mark.parametrize("sizes", [[6], [3, 3], [5, 1], [1, 2, 3], [2, 1]])
def test_any_processes_are_served_the_same_sequences_in_a_step(sizes):
    """Six sequences a step: also in two batches of 2 and 1, and by those who go on after others' third step."""
    alone = take(PackedBatches(torch.arange(501), batch_size=6, seq_len=10, seed=4), 7)
    for start in (0, 3):
        every = []
        for rank in range(len(sizes)):
            batches = PackedBatches(torch.arange(501), batch_size=6, seq_len=10, seed=4, shard=(rank, len(sizes)))
            batches.sizes = tuple(sizes)
            batches.load_state_dict({"position": 6 * start})
            assert batches.batch_size == sizes[rank]
            every.append(take(batches, (7 - start) * (6 // sum(sizes))))
        served = torch.cat([batch for together in zip(*every, strict=True) for batch in together])
        assert torch.equal(served, torch.cat(alone[start:]))


@pytest.mark.parametrize("other", [torch.arange(101), torch.arange(1, 72)], ids=["longer", "of the same length"])
def test_the_position_in_another_text_is_refused(other):
    tokens = torch.arange(71)
    saved = PackedBatches(tokens, batch_size=3, seq_len=10, seed=0).state_dict()
    same, changed = (PackedBatches(text, batch_size=3, seq_len=10, seed=0) for text in (tokens, other))
    same.load_state_dict({**saved, "position": 6})
    with pytest.raises(ValueError, match=r"The training text has changed: the checkpoint was made with \{'blocks': 7,"):
        changed.load_state_dict({**saved, "position": 6})
    assert (same.position, changed.position) == (6, 0)
    changed.load_state_dict({"position": 6})  # of a checkpoint from before texts were told apart
    assert changed.position == 6


def test_batches_run_on_across_epochs():
    batches = take(PackedBatches(torch.arange(71), batch_size=3, seq_len=10, seed=0), 7)
    starts = torch.cat(batches)[:, 0].tolist()
    assert all(sorted(starts[i : i + 7]) == list(range(0, 70, 10)) for i in (0, 7, 14))


def test_too_few_tokens():
    assert packed_blocks(torch.arange(17), 16).tolist() == [list(range(17))]
    with pytest.raises(ValueError, match="16 tokens do not fill one block of seq_len=16"):
        packed_blocks(torch.arange(16), 16)


def test_text_files_with_their_own_eval_files(tmp_path):
    (tmp_path / "train.txt").write_text("a" * 40)
    (tmp_path / "eval.txt").write_text("b" * 40)
    data = load_data(
        DataConfig(text_files=[f"{tmp_path}/train.txt"], eval_files=[f"{tmp_path}/eval.txt"], seq_len=8, batch_size=2)
    )
    assert set(next(data.train).flatten().tolist()) == {ord("a"), 256}
    assert set(data.eval_blocks.flatten().tolist()) <= {ord("b"), 256}
    assert data.vocab_size == ByteTokenizer.vocab_size


def test_text_files_with_a_tokenizer(tmp_path, tokenizer_path, documents):
    for number, text in enumerate(documents[:20]):
        (tmp_path / f"{number}.txt").write_text(text)
    config = DataConfig(text_files=[f"{tmp_path}/*.txt"], tokenizer=tokenizer_path, seq_len=8, batch_size=2)
    data = load_data(config)
    assert data.vocab_size == 300
    assert all(batch.max() < 300 for batch in islice(iter(lambda: next(data.train), None), 10))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 0}, "batch_size=0: must be >= 1"),
        ({"seq_len": -1}, "seq_len=-1: must be >= 1"),
        ({"seed": -1}, "seed=-1: must be >= 0"),
        ({"dataset": "json"}, "needs a tokenizer"),
        ({"dataset": "json", "text_files": ["x"], "tokenizer": "t"}, "Choose one of"),
        ({"eval_files": ["x"]}, "needs text_files"),
        ({"data_files": {"train": "x"}}, "needs a dataset format"),
        ({"subset": "en"}, "subset='en' needs a dataset"),
        ({"text_files": ["x"], "text_column": "body"}, "text_column='body' needs a dataset"),
    ],
    ids=str,
)
def test_invalid_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        DataConfig(**settings)


def test_tokenizer_without_end_token(tmp_path, tokenizer_path):
    from transformers import PreTrainedTokenizerFast

    PreTrainedTokenizerFast(tokenizer_file=f"{tokenizer_path}/tokenizer.json").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no eos_token"):
        load_tokenizer(str(tmp_path))
