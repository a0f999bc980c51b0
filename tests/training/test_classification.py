"""Tasks, labels and metrics of sequence classification."""

from types import SimpleNamespace

import datasets
import numpy as np
import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features, Value

from training.finetune.classification import (
    GLUE,
    Task,
    class_names,
    encode,
    load_task,
    metrics_of,
    with_class_labels,
)
from training.finetune.run import DatasetSource
from training.finetune.tiny import train_tokenizer


def split(*labels):
    return Dataset.from_dict({"text": [f"text {label}" for label in labels], "label": list(labels)})


# Columns, labels and metrics as published with the data set; the hub itself is out of reach of a test.
SCHEMAS = {
    "cola": (["sentence"], 2, {"matthews_correlation", "accuracy"}),
    "mnli": (["premise", "hypothesis"], 3, {"accuracy"}),
    "mrpc": (["sentence1", "sentence2"], 2, {"f1", "accuracy"}),
    "qnli": (["question", "sentence"], 2, {"accuracy"}),
    "qqp": (["question1", "question2"], 2, {"f1", "accuracy"}),
    "rte": (["sentence1", "sentence2"], 2, {"accuracy"}),
    "sst2": (["sentence"], 2, {"accuracy"}),
    "stsb": (["sentence1", "sentence2"], None, {"pearson", "spearman"}),
    "wnli": (["sentence1", "sentence2"], 2, {"accuracy"}),
}


@pytest.mark.parametrize("name", GLUE)
def test_glue_tasks_encode(name, monkeypatch):
    columns, classes, published = SCHEMAS[name]
    label = Value("float32") if classes is None else ClassLabel(num_classes=classes)
    features = Features({**{column: Value("string") for column in columns}, "label": label, "idx": Value("int32")})
    rows = {**{column: [f"{column} a", f"{column} b"] for column in columns}, "label": [0, 1], "idx": [0, 1]}
    names = ["validation_matched", "validation_mismatched"] if name == "mnli" else ["validation"]
    hub = {("nyu-mll/glue", name): DatasetDict({s: Dataset.from_dict(rows, features) for s in ["train", *names]})}
    monkeypatch.setattr(datasets, "load_dataset", lambda path, subset, data_files: hub[path, subset])
    task, dataset = load_task(name)
    tokenizer = train_tokenizer([" ".join(columns)])
    encoded = encode(dataset, task, tokenizer, 40)
    assert set(task.evaluation) == set(names)
    for part in names:
        row = encoded[part][1]
        texts = tokenizer.decode(row["input_ids"], skip_special_tokens=True)
        assert texts == "".join(f"{column} b" for column in columns)
        assert row["labels"] == 1
    predicted = np.array([[0.1], [0.9]]) if classes is None else np.eye(classes)[:2]
    metrics = metrics_of(task)(SimpleNamespace(predictions=predicted, label_ids=np.array([0, 1])))
    assert metrics == pytest.approx(dict.fromkeys(published, 1.0))


def test_metrics_by_hand():
    every = Task(metrics=("accuracy", "f1", "matthews_correlation"))
    predictions = np.eye(2)[[1, 1, 0, 1]]  # against 1, 0, 0, 1: two hits, one false alarm, one rejection
    metrics = metrics_of(every)(SimpleNamespace(predictions=predictions, label_ids=np.array([1, 0, 0, 1])))
    assert metrics == pytest.approx(
        {"accuracy": 3 / 4, "f1": 4 / 5, "matthews_correlation": 2 / np.sqrt(3 * 1 * 2 * 2)}
    )
    scores, labels = np.array([[1.0], [2.0], [4.0]]), np.array([1.0, 2.0, 3.0])
    metrics = metrics_of(Task(metrics=("pearson", "spearman")))(SimpleNamespace(predictions=scores, label_ids=labels))
    assert metrics == pytest.approx({"pearson": 3 / np.sqrt(2 * 42 / 9), "spearman": 1.0})


@pytest.mark.parametrize(("labels", "names"), [(("b", "a", "b"), ["a", "b"]), ((5, 3, 5), ["3", "5"])])
def test_labels_become_classes(labels, names):
    dataset = with_class_labels(DatasetDict(train=split(*labels), validation=split(labels[1])), "label")
    assert class_names(dataset, "label") == names
    assert dataset["train"]["label"][:] == [1, 0, 1]
    assert dataset["validation"]["label"][:] == [0]


def test_numbers_stay_for_regression():
    dataset = with_class_labels(DatasetDict(train=split(0.5, 1.5)), "label")
    assert class_names(dataset, "label") is None
    assert dataset["train"]["label"][:] == [0.5, 1.5]


def test_training_split_is_divided_where_there_is_no_other(tmp_path):
    path = tmp_path / "rows.csv"
    split(*range(40)).to_csv(path)
    source = DatasetSource(dataset="csv", data_files={"train": str(path)}, held_out=0.25)
    dataset = source.load()
    assert sorted(dataset["train"]["label"][:] + dataset["validation"]["label"][:]) == list(range(40))
    assert len(dataset["validation"]) == 10
    assert source.load()["validation"]["label"][:] == dataset["validation"]["label"][:]


def test_misuse(tmp_path):
    with pytest.raises(ValueError, match="Unknown task 'glue'; available: docstrings, cola"):
        load_task("glue")
    with pytest.raises(ValueError, match="one or two text columns"):
        Task(columns=("a", "b", "c"))
    with pytest.raises(ValueError, match=r"No column 'stars' for labels; columns: text, label"):
        with_class_labels(DatasetDict(train=split("a")), "stars")
    with pytest.raises(ValueError, match="Labels that no training example has: 'c'"):
        with_class_labels(DatasetDict(train=split("a", "b"), validation=split("c")), "label")
    with pytest.raises(ValueError, match=r"No column \['body'\]; columns: text, label"):
        encode(DatasetDict(train=split("a")), Task(columns=("text", "body")), None, 8)
    with pytest.raises(ValueError, match=r"held_out=1.5: must be in \(0, 1\)"):
        DatasetSource(dataset="csv", held_out=1.5)
    path = tmp_path / "rows.csv"
    split("a").to_csv(path)
    with pytest.raises(ValueError, match="'csv' has no split 'train'; there are: test"):
        DatasetSource(dataset="csv", data_files={"test": str(path)}).load()
