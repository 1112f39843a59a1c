"""Text by the table is the tokenizer's own, and the table is used for nothing else."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from promptmill.decoding import Decoder, make_decoder


def by_table(tokenizer: Any) -> bool:
    return type(make_decoder(tokenizer)) is not Decoder


def own(tokenizer: Any, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=True))


def small(decoder: Any, cls: type[Any] = PreTrainedTokenizerFast, **more: Any) -> Any:
    """Every byte a token; after them a token of plain text and a special one."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoder
    backend.add_tokens([AddedToken(" two words 🦊"), AddedToken("Ġodd")])
    backend.add_special_tokens([AddedToken("<end>", special=True)])
    return cls(tokenizer_object=backend, **{"clean_up_tokenization_spaces": False, **more})


def test_random_ids_of_the_real_tokenizer_give_the_same_text(tokenizer: Any) -> None:
    assert by_table(tokenizer)
    decode, rng = make_decoder(tokenizer), random.Random(0)
    for _ in range(3000):
        ids = [rng.randrange(len(tokenizer)) for _ in range(rng.randint(0, 60))]
        assert decode(ids) == own(tokenizer, ids), ids


def test_every_id_of_the_real_tokenizer_gives_the_same_text(tokenizer: Any) -> None:
    decode = make_decoder(tokenizer)
    assert [decode([i]) for i in range(len(tokenizer))] == [
        own(tokenizer, [i]) for i in range(len(tokenizer))
    ]


def test_torn_characters_are_replaced_as_the_tokenizer_does() -> None:
    tokenizer = small(decoders.ByteLevel())
    assert by_table(tokenizer)
    decode, rng = make_decoder(tokenizer), random.Random(0)
    text = tokenizer("naïve 🦊 漢字 \x00")["input_ids"]
    for _ in range(3000):
        ids = [i for i in text if rng.random() < 0.8] + [rng.randrange(len(tokenizer)) for _ in range(8)]
        assert decode(ids) == own(tokenizer, ids), ids


def test_an_unknown_id_is_left_out_and_an_impossible_one_is_no_text(tokenizer: Any) -> None:
    ids = [len(tokenizer) + 5, *tokenizer("hi")["input_ids"]]
    assert make_decoder(tokenizer)(ids) == own(tokenizer, ids) == "hi"
    with pytest.raises(OverflowError):
        make_decoder(tokenizer)([-1])


class Louder(PreTrainedTokenizerFast):
    def _decode(self, *args: Any, **kwargs: Any) -> str:
        return str(super()._decode(*args, **kwargs)).upper()


def test_any_other_way_to_decode_is_left_to_the_tokenizer() -> None:
    patched = small(decoders.ByteLevel())
    patched.decode = lambda ids, **_: "patched"
    others = (
        small(decoders.ByteLevel(), Louder),
        small(decoders.ByteLevel(), clean_up_tokenization_spaces=True),
        small(decoders.Sequence([decoders.ByteLevel()])),
        small(decoders.Metaspace()),
        patched,
    )
    for tokenizer in others:
        assert not by_table(tokenizer)
        ids = [60, 61, 62]
        assert make_decoder(tokenizer)(ids) == own(tokenizer, ids)
