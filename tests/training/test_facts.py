"""Facts that no model has seen: questions differ between the splits, answers do not."""

from training.data.facts import facts, services


def test_the_same_facts_are_asked_for_in_other_words():
    data = facts(20, seed=1)
    train, held_out = (data[split].to_list() for split in ("train", "validation"))
    assert (len(train), len(held_out)) == (40, 20)
    assert not {row["instruction"] for row in train} & {row["instruction"] for row in held_out}
    known = services(20, seed=1)
    for rows, ways in ((train, 2), (held_out, 1)):
        for name, answer in known.items():
            assert [row["output"] for row in rows if name in row["instruction"]] == [answer] * ways


def test_one_seed_one_set_of_facts():
    assert services(50) == services(50) != services(50, seed=1)
    assert len(services(300)) == 300
